//! The text of a configuration as tokens (`ConfigTokenizer` in `c10/core/AllocatorConfig.h`).
//!
//! `key:[a,b]` becomes `key`, `:`, `[`, `a`, `,`, `b`, `]`; white space is dropped wherever it stands.

use super::SettingsError;

pub(super) struct Tokens {
    tokens: Vec<String>,
}

impl Tokens {
    pub(super) fn new(text: &str) -> Self {
        let mut tokens = Vec::new();
        let mut word = String::new();
        for character in text.chars() {
            // C's `isspace` in the default locale.
            if matches!(character, ' ' | '\t'..='\r') {
                continue;
            }
            if matches!(character, ',' | ':' | '[' | ']') {
                if !word.is_empty() {
                    tokens.push(std::mem::take(&mut word));
                }
                tokens.push(character.into());
            } else {
                word.push(character);
            }
        }
        if !word.is_empty() {
            tokens.push(word);
        }
        Self { tokens }
    }

    /// The token at an index, if the text reaches so far.
    pub(super) fn key(&self, index: usize) -> Option<&str> {
        self.tokens.get(index).map(String::as_str)
    }

    /// The token at an index that must be there.
    pub(super) fn get(&self, index: usize) -> Result<&str, SettingsError> {
        self.key(index).ok_or(SettingsError::EndsEarly {
            expected: "a value",
        })
    }

    pub(super) fn boolean(&self, index: usize) -> Result<bool, SettingsError> {
        match self.get(index)? {
            "True" => Ok(true),
            "False" => Ok(false),
            token => Err(SettingsError::NotABool {
                index,
                token: token.into(),
            }),
        }
    }

    /// As `std::stoull`: the digits in front count, a sign negates modulo 2^64.
    pub(super) fn whole(&self, index: usize) -> Result<u64, SettingsError> {
        let token = self.get(index)?;
        let (is_negative, digits) = sign(token);
        let end = digits
            .find(|character: char| !character.is_ascii_digit())
            .unwrap_or(digits.len());
        match digits[..end].parse::<u64>() {
            Ok(number) if is_negative => Ok(number.wrapping_neg()),
            Ok(number) => Ok(number),
            Err(_) => Err(SettingsError::NotAWholeNumber {
                token: token.into(),
            }),
        }
    }

    /// As `std::stod`: the longest prefix that is a number counts. Hexadecimal floats are not read.
    pub(super) fn number(&self, index: usize) -> Result<f64, SettingsError> {
        let token = self.get(index)?;
        let (is_negative, rest) = sign(token);
        let number = positive_number(rest).ok_or_else(|| SettingsError::NotANumber {
            token: token.into(),
        })?;
        Ok(if is_negative { -number } else { number })
    }

    /// The index of the last token of the value of the key at `index`.
    pub(super) fn skip_value(&self, index: usize) -> Result<usize, SettingsError> {
        let value = index + 2;
        if self.get(value)? != "[" {
            return Ok(value);
        }
        let length = self.tokens[value..].iter().position(|token| token == "]");
        length
            .map(|length| value + length)
            .ok_or(SettingsError::NotClosed)
    }
}

fn sign(token: &str) -> (bool, &str) {
    match token.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, token.strip_prefix('+').unwrap_or(token)),
    }
}

fn positive_number(text: &str) -> Option<f64> {
    let starts_with = |word: &str| {
        text.get(..word.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(word))
    };
    if starts_with("inf") {
        return Some(f64::INFINITY);
    }
    if starts_with("nan") {
        return Some(f64::NAN);
    }
    let digits = |from: usize| {
        let rest = &text.as_bytes()[from..];
        rest.iter().take_while(|byte| byte.is_ascii_digit()).count()
    };
    let mut end = digits(0);
    let mut digit_count = end;
    if text[end..].starts_with('.') {
        let fraction = digits(end + 1);
        digit_count += fraction;
        end += 1 + fraction;
    }
    if digit_count == 0 {
        return None;
    }
    let mantissa = &text[..end];
    if text[end..].starts_with(['e', 'E']) {
        let signed = usize::from(text[end + 1..].starts_with(['+', '-']));
        let exponent = digits(end + 1 + signed);
        if exponent > 0 {
            end += 1 + signed + exponent;
        }
    }
    let number = text[..end].parse::<f64>().ok()?;
    // Out of range, both ways, is an error of `std::stod`.
    let is_zero = !mantissa.bytes().any(|byte| matches!(byte, b'1'..=b'9'));
    (number.is_normal() || is_zero).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Tokens {
        Tokens::new(text)
    }

    #[test]
    fn numbers_are_read_as_by_the_standard_library_of_c() {
        for (text, number) in [
            ("20xyz", 20),
            ("1e3", 1),
            ("+7", 7),
            ("-1", u64::MAX),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(tokens(text).whole(0), Ok(number), "{text}");
        }
        for text in ["abc", "-", "18446744073709551616", ".5"] {
            assert!(tokens(text).whole(0).is_err(), "{text}");
        }
        for (text, number) in [
            (".5x", 0.5),
            ("1G", 1.0),
            ("5.", 5.0),
            ("1e-3", 1e-3),
            ("2e", 2.0),
            ("0", 0.0),
        ] {
            assert_eq!(tokens(text).number(0), Ok(number), "{text}");
        }
        for text in ["x", ".", "e5", "1e999", "1e-400", "-"] {
            assert!(tokens(text).number(0).is_err(), "{text}");
        }
    }

    #[test]
    fn values_are_skipped_with_their_brackets() {
        let tokens = tokens("a:[1:2,3:4],b:5,c:[");
        assert_eq!(tokens.skip_value(0), Ok(10));
        assert_eq!(tokens.skip_value(12), Ok(14));
        assert_eq!(tokens.skip_value(16), Err(SettingsError::NotClosed));
        assert!(matches!(
            tokens.skip_value(18),
            Err(SettingsError::EndsEarly { .. })
        ));
    }
}

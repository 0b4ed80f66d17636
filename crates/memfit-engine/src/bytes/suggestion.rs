//! What somebody meant who wrote a budget that cannot be one.
//!
//! Responsible for the question at the end of the error. Not responsible for what is refused
//! (`bytes.rs`).

/// Above it a bare number is no percentage.
const LARGEST_PERCENT: f64 = 100.0;

/// What to write instead of `3G`, `1e9` or `6,5GiB`, which `is_budget` says can be one; none where that is anyone's guess.
pub(super) fn instead_of(text: &str, is_budget: impl Fn(&str) -> bool) -> Option<String> {
    of_other_unit(text)
        .or_else(|| of_exponent(text))
        .or_else(|| of_comma(text, is_budget))
}

/// What to write instead of a number that as bytes is less than a step takes: `50`, `0.6`.
pub(super) fn instead_of_few(number: f64) -> String {
    if number <= 1.0 {
        question(&format!("{}%", shown(number * 100.0)))
    } else if number <= LARGEST_PERCENT {
        question(&format!("{}%", shown(number)))
    } else {
        question(&format!("{}MiB", shown(number)))
    }
}

fn question(what: &str) -> String {
    format!("did you mean `{what}`?")
}

/// A number without the noise of binary fractions.
fn shown(number: f64) -> String {
    let rounded = (number * 1e6).round() / 1e6;
    format!("{rounded}")
}

/// `3G`, `3 Gi`, `6 gigs`, `50 percent`.
fn of_other_unit(text: &str) -> Option<String> {
    let (number, unit) = number_and_word(text)?;
    let unit = match unit.to_ascii_lowercase().as_str() {
        "percent" | "per cent" | "pct" => "%",
        "byte" | "bytes" => "",
        "k" | "ki" | "kilobyte" | "kilobytes" | "kibibyte" | "kibibytes" => "KiB",
        "m" | "mi" | "meg" | "megs" | "megabyte" | "megabytes" | "mebibyte" | "mebibytes" => "MiB",
        "g" | "gi" | "gig" | "gigs" | "gigabyte" | "gigabytes" | "gibibyte" | "gibibytes" => "GiB",
        "t" | "ti" | "tera" | "terabyte" | "terabytes" | "tebibyte" | "tebibytes" => "TiB",
        _ => return None,
    };
    Some(question(&format!("{number}{unit}")))
}

/// A number and the word behind it.
fn number_and_word(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
    let (number, word) = text.split_at(end);
    let value: f64 = number.parse().ok()?;
    (value > 0.0).then_some((number, word.trim()))
}

/// `1e9`, `2.5E9`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "the range is checked before the cast"
)]
fn of_exponent(text: &str) -> Option<String> {
    let value: f64 = text.parse().ok()?;
    let is_number = text.starts_with(|c: char| c.is_ascii_digit());
    (is_number && value >= 1024.0 && value < u64::MAX as f64)
        .then(|| question(&format!("{}", value as u64)))
}

/// `6,5GiB` and `3,221,225,472`.
fn of_comma(text: &str, is_budget: impl Fn(&str) -> bool) -> Option<String> {
    let (whole, behind) = text.split_once(',')?;
    let has_digits = |part: &str| part.starts_with(|c: char| c.is_ascii_digit());
    if !has_digits(whole) || !has_digits(behind) {
        return None;
    }
    let thousands = behind.split(',').all(|part| part.len() == 3);
    let meant = if thousands {
        text.replace(',', "")
    } else {
        text.replacen(',', ".", 1)
    };
    is_budget(&meant).then(|| question(&meant))
}

//! Byte counts as a type, and budgets as people write them.
//!
//! Responsible for arithmetic that cannot wrap silently, for parsing `3GiB` and `60%`, and for the one
//! way bytes are shown. Not responsible for what a budget is compared with.

mod suggestion;

use std::fmt;
use std::iter::Sum;
use std::num::IntErrorKind;
use std::ops::{Add, AddAssign, Sub, SubAssign};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A number of bytes.
///
/// Addition saturates at `u64::MAX` and subtraction at zero: a sum of sizes read from a hostile file
/// must not panic, and a saturated peak still compares as "does not fit".
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    JsonSchema,
    Serialize,
    Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// The count as a float, for ratios only.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "ratios need no more than 53 bits"
    )]
    pub fn as_f64(self) -> f64 {
        self.0 as f64
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl SubAssign for Bytes {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    /// Shows `1.5 GiB`, `800.0 MiB`, `12.0 KiB` or `17 B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 4] = [
            ("TiB", 1 << 40),
            ("GiB", 1 << 30),
            ("MiB", 1 << 20),
            ("KiB", 1 << 10),
        ];
        for (unit, size) in UNITS {
            if self.0 >= size {
                #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
                let amount = self.0 as f64 / size as f64;
                let digits = if size >= 1 << 30 { 2 } else { 1 };
                return f.pad(&format!("{amount:.digits$} {unit}"));
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

/// A budget: absolute, or a fraction of the unplanned peak. In JSON, the text that people write.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Budget {
    /// So many bytes.
    Absolute(Bytes),
    /// This fraction of the unplanned predicted peak, in `(0, 1000]` percent.
    Percent(f64),
}

/// Why a budget could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot read `{text}` as a budget: {reason}; {advice}")]
pub struct BudgetError {
    /// What was written.
    pub text: String,
    /// What is wrong with it.
    pub reason: &'static str,
    /// What to write instead.
    pub advice: String,
}

impl BudgetError {
    fn new(text: &str, reason: &'static str, meant: Option<String>) -> Self {
        Self {
            text: text.to_owned(),
            reason,
            advice: meant.unwrap_or_else(|| FORMS.to_owned()),
        }
    }
}

/// How budgets are written.
const FORMS: &str = "write bytes (3221225472), 3GiB, 800MiB, 2GB or 60%";

/// A bare number below is no budget of a step: another unit was meant.
const FEWEST_BARE_BYTES: u64 = 1024;

impl Budget {
    /// Reads the budget of a step: as [`Budget::parse`], but for numbers without a unit that no step
    /// is small enough for.
    ///
    /// # Errors
    ///
    /// As for [`Budget::parse`]; `50`, which may mean `50%`.
    pub fn of_step(text: &str) -> Result<Self, BudgetError> {
        let budget = Self::parse(text)?;
        match text.trim().replace('_', "").parse::<f64>() {
            Ok(bare) if budget.resolve(Bytes::ZERO).0 < FEWEST_BARE_BYTES => {
                let meant = Some(suggestion::instead_of_few(bare));
                Err(BudgetError::new(text, "no step takes so few bytes", meant))
            }
            _ => Ok(budget),
        }
    }

    /// Reads `3GiB`, `800MiB`, `2GB` (decimal), plain bytes or `60%`.
    ///
    /// # Errors
    ///
    /// An empty text, an unknown unit, a number that is negative, not finite, zero or above `u64`, a
    /// part of a byte.
    pub fn parse(text: &str) -> Result<Self, BudgetError> {
        let trimmed = text.trim();
        let is_budget = |text: &str| Self::parse(text).is_ok();
        let fail =
            |reason| BudgetError::new(text, reason, suggestion::instead_of(trimmed, is_budget));
        if trimmed.starts_with('-') {
            return Err(fail("a budget must be above 0"));
        }
        let split = trimmed
            .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_'))
            .unwrap_or(trimmed.len());
        let (digits, unit) = trimmed.split_at(split);
        let digits = digits.replace('_', "");
        if digits.is_empty() {
            return Err(fail("no number"));
        }
        let unit = unit.trim();
        let factor: u64 = match unit.to_ascii_lowercase().as_str() {
            "%" => {
                let percent: f64 = digits.parse().map_err(|_| fail("not a number"))?;
                return if percent > 0.0 && percent <= 1000.0 {
                    Ok(Self::Percent(percent))
                } else {
                    Err(fail("a percentage must be above 0 and at most 1000"))
                };
            }
            "" if is_part_of_a_byte(&digits) => {
                let meant = digits.parse().ok().map(suggestion::instead_of_few);
                return Err(BudgetError::new(text, "bytes are whole", meant));
            }
            "" | "b" => 1,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(fail("unknown unit")),
        };
        let bytes = match digits.parse::<u64>() {
            Ok(whole) => whole.checked_mul(factor).ok_or_else(|| fail("too large"))?,
            Err(error) if *error.kind() == IntErrorKind::PosOverflow => {
                return Err(fail("too large"));
            }
            Err(_) => fractional_bytes(&digits, factor).ok_or_else(|| fail("not a number"))?,
        };
        if bytes == 0 {
            Err(fail("a budget must be above 0"))
        } else {
            Ok(Self::Absolute(Bytes(bytes)))
        }
    }

    /// The budget in bytes, given the unplanned peak that a percentage refers to.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float-to-integer cast saturates and the value is positive"
    )]
    pub fn resolve(self, unplanned_peak: Bytes) -> Bytes {
        match self {
            Self::Absolute(bytes) => bytes,
            Self::Percent(percent) => Bytes((unplanned_peak.as_f64() * percent / 100.0) as u64),
        }
    }
}

impl fmt::Display for Budget {
    /// Shows `3221225472` or `60%`: what [`Budget::parse`] reads as the same budget.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absolute(bytes) => write!(f, "{}", bytes.0),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl From<Budget> for String {
    fn from(budget: Budget) -> Self {
        budget.to_string()
    }
}

impl TryFrom<String> for Budget {
    type Error = BudgetError;
    fn try_from(text: String) -> Result<Self, BudgetError> {
        Self::parse(&text)
    }
}

fn is_part_of_a_byte(digits: &str) -> bool {
    digits
        .parse::<f64>()
        .is_ok_and(|bytes| bytes.fract() != 0.0)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "the range is checked before the cast"
)]
fn fractional_bytes(digits: &str, factor: u64) -> Option<u64> {
    let value = digits.parse::<f64>().ok()? * factor as f64;
    (value.is_finite() && value < u64::MAX as f64).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_as_people_write_them() {
        let absolute = |text: &str| match Budget::parse(text) {
            Ok(Budget::Absolute(bytes)) => bytes.0,
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(absolute("3GiB"), 3 << 30);
        assert_eq!(absolute(" 800 MiB "), 800 << 20);
        assert_eq!(absolute("2GB"), 2_000_000_000);
        assert_eq!(absolute("1.5gib"), 3 << 29);
        assert_eq!(absolute("3_000"), 3000);
        assert_eq!(Budget::parse("60%"), Ok(Budget::Percent(60.0)));
        for bad in [
            "",
            "GiB",
            "-3GiB",
            "3 apples",
            "0",
            "0%",
            "nan",
            "1e3",
            "99999999999999999999",
            "1.2.3",
            "20000000TiB",
        ] {
            assert!(Budget::parse(bad).is_err(), "{bad}");
        }
        for large in [
            "99999999999999999999",
            "99999999999999999999GiB",
            "20000000TiB",
        ] {
            let error = Budget::parse(large).unwrap_err();
            assert_eq!(error.reason, "too large", "{large}");
        }
    }

    #[test]
    fn what_cannot_be_a_budget_asks_for_what_was_meant() {
        for (text, advice) in [
            ("50", "did you mean `50%`?"),
            ("100", "did you mean `100%`?"),
            ("62.5", "did you mean `62.5%`?"),
            ("0.6", "did you mean `60%`?"),
            ("0.55", "did you mean `55%`?"),
            (".5", "did you mean `50%`?"),
            ("1.0", "did you mean `100%`?"),
            ("800", "did you mean `800MiB`?"),
            ("3G", "did you mean `3GiB`?"),
            ("512m", "did you mean `512MiB`?"),
            ("1.5 Gi", "did you mean `1.5GiB`?"),
            ("6 gigs", "did you mean `6GiB`?"),
            ("50 percent", "did you mean `50%`?"),
            ("1e9", "did you mean `1000000000`?"),
            ("2.5E9", "did you mean `2500000000`?"),
            ("6,5GiB", "did you mean `6.5GiB`?"),
            ("3,221,225,472", "did you mean `3221225472`?"),
            ("-5", FORMS),
            ("-3GiB", FORMS),
            ("1e-3", FORMS),
            ("1e999", FORMS),
            ("0", FORMS),
            ("nan", FORMS),
            ("inf", FORMS),
            ("lots", FORMS),
            ("3 apples", FORMS),
            ("0G", FORMS),
            (",", FORMS),
            ("1,", FORMS),
        ] {
            assert_eq!(Budget::of_step(text).unwrap_err().advice, advice, "{text}");
        }
        for (text, bytes) in [("50B", 50), ("1024", 1024), ("1000000000.0", 1_000_000_000)] {
            assert_eq!(Budget::of_step(text), Ok(Budget::Absolute(Bytes(bytes))));
        }
        let negative = Budget::of_step("-5").unwrap_err();
        assert_eq!(negative.reason, "a budget must be above 0");
        assert_eq!(Budget::parse("50"), Ok(Budget::Absolute(Bytes(50))));
    }

    #[test]
    fn percent_is_of_the_unplanned_peak() {
        assert_eq!(Budget::Percent(50.0).resolve(Bytes(1000)), Bytes(500));
        assert_eq!(Budget::Absolute(Bytes(7)).resolve(Bytes(1000)), Bytes(7));
    }

    #[test]
    fn a_budget_reads_as_itself_from_what_it_shows() {
        for (text, shown) in [("3GiB", "3221225472"), ("60 %", "60%"), ("0.10%", "0.1%")] {
            let budget = Budget::parse(text).unwrap();
            assert_eq!(budget.to_string(), shown);
            let json = serde_json::to_string(&budget).unwrap();
            assert_eq!(json, format!("\"{shown}\""));
            assert_eq!(serde_json::from_str::<Budget>(&json).unwrap(), budget);
        }
        let refused = serde_json::from_str::<Budget>("\"lots\"").unwrap_err();
        assert!(refused.to_string().contains("cannot read `lots`"));
    }

    #[test]
    fn shown_in_binary_units() {
        assert_eq!(Bytes(17).to_string(), "17 B");
        assert_eq!(Bytes(800 << 20).to_string(), "800.0 MiB");
        assert_eq!(Bytes(3 << 29).to_string(), "1.50 GiB");
    }
}

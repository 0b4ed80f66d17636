//! Bytes as a message prints them: rounded, so a range.
//!
//! Responsible for reading `7.79 GiB` without losing what rounding hides, and for comparisons that say "cannot tell".
//! Not responsible for where in a message a number stands.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;

/// More digits behind the point are not read: torch prints two.
const MAX_DECIMALS: u32 = 9;

/// A number of bytes between two bounds, both included.
///
/// Sums and differences are those of the bounds, so what is compared holds for every number that the message may
/// have meant. They saturate as [`Bytes`] do.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
pub struct Amount {
    /// It is no less.
    pub low_bytes: Bytes,
    /// It is no more.
    pub high_bytes: Bytes,
}

impl Amount {
    /// Nothing is known of it.
    pub(super) const UNKNOWN: Self = Self {
        low_bytes: Bytes::ZERO,
        high_bytes: Bytes(u64::MAX),
    };
    /// No bytes.
    pub(super) const ZERO: Self = Self::exact(Bytes::ZERO);

    /// A number that is known to the byte.
    #[must_use]
    pub const fn exact(bytes: Bytes) -> Self {
        Self {
            low_bytes: bytes,
            high_bytes: bytes,
        }
    }

    /// A printed number of a unit, `7.79` and `1 << 30`; `None` where it is no number or more than a `u64` holds, as
    /// what drivers that cannot tell make torch print (`17179869184.00 GiB`).
    pub(super) fn parse(number: &str, unit: u64) -> Option<Self> {
        let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
        let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || !are_digits(whole) || !are_digits(decimals) {
            return None;
        }
        let count = u32::try_from(decimals.len()).ok()?;
        if count > MAX_DECIMALS {
            return None;
        }
        let scale = 10_u128.pow(count);
        let digits = whole.parse::<u64>().map(u128::from).ok()?;
        let fraction = if decimals.is_empty() {
            0
        } else {
            u128::from(decimals.parse::<u64>().ok()?)
        };
        // Below 2^64 * 10^9 * 2; times a TiB it may exceed a `u128`, and then a `u64` by far.
        let twice = (digits * scale + fraction) * 2;
        let unit = u128::from(unit);
        // A whole number of bytes is exact; every other is rounded to its last digit.
        let slack = u128::from(unit > 1);
        let low = twice.saturating_sub(slack).checked_mul(unit)?;
        let high = (twice + slack).checked_mul(unit)? / (2 * scale);
        let low = low.div_ceil(2 * scale);
        // So many decimals may lie between two whole numbers: then it is one of both.
        let (low, high) = (low.min(high), high.max(low));
        Some(Self {
            low_bytes: Bytes(u64::try_from(low).ok()?),
            high_bytes: Bytes(u64::try_from(high).ok()?),
        })
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            low_bytes: self.low_bytes + other.low_bytes,
            high_bytes: self.high_bytes + other.high_bytes,
        }
    }

    /// What is left without the other; never below nothing.
    pub(super) fn minus(self, other: Self) -> Self {
        Self {
            low_bytes: self.low_bytes - other.high_bytes,
            high_bytes: self.high_bytes - other.low_bytes,
        }
    }

    pub(super) fn least(self, other: Self) -> Self {
        Self {
            low_bytes: self.low_bytes.min(other.low_bytes),
            high_bytes: self.high_bytes.min(other.high_bytes),
        }
    }

    /// Whether it is at least the other; `None` where rounding hides it.
    pub(super) fn at_least(self, other: Self) -> Option<bool> {
        if self.low_bytes >= other.high_bytes {
            Some(true)
        } else if self.high_bytes < other.low_bytes {
            Some(false)
        } else {
            None
        }
    }

    /// Whether it is more than the other; `None` where rounding hides it.
    pub(super) fn exceeds(self, other: Self) -> Option<bool> {
        other.at_least(self).map(|is_enough| !is_enough)
    }

    /// Whether any of it is known.
    pub(super) fn is_known(self) -> bool {
        self.high_bytes < Bytes(u64::MAX)
    }
}

impl fmt::Display for Amount {
    /// One number where the bounds are within 5 %, as in `7.79 GiB`; else both: `71.7 MiB to 92.2 MiB`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = (self.low_bytes, self.high_bytes);
        let width = high - low;
        let middle = Bytes(low.0 + width.0 / 2);
        if !self.is_known() {
            write!(formatter, "at least {low}")
        } else if width.0 <= middle.0 / 20 {
            write!(formatter, "{middle}")
        } else if low == Bytes::ZERO {
            write!(formatter, "at most {high}")
        } else {
            write!(formatter, "{low} to {high}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_printed_number_is_every_number_that_prints_so() {
        let range = |text, unit| {
            let amount = Amount::parse(text, unit).unwrap();
            (amount.low_bytes.0, amount.high_bytes.0)
        };
        assert_eq!(range("1536", 1), (1536, 1536));
        assert_eq!(range("0", 1), (0, 0));
        // 1.99 GiB: from 1.985 to 1.995.
        assert_eq!(range("1.99", GIB), (2_131_377_521, 2_142_114_938));
        assert_eq!(range("20", 1 << 20).0, (39 << 20) / 2);
        assert_eq!(range("0.005555555", 1 << 20), (5825, 5826));
        assert_eq!(range("1.5", 1), (1, 2));
        for bad in ["", ".", ".5", "1.2.3", "-1", "1e9", "1.0000000001", "nan"] {
            assert_eq!(Amount::parse(bad, GIB), None, "{bad}");
        }
        assert_eq!(Amount::parse("17179869184.00", GIB), None);
        assert_eq!(Amount::parse("99999999999999999999999", 1), None);
        assert_eq!(
            Amount::parse("18446744073709551615.123456789", 1 << 40),
            None
        );
    }

    #[test]
    fn what_rounding_hides_is_not_told() {
        let amount = |text| Amount::parse(text, GIB).unwrap();
        let (large, small) = (amount("2.00"), amount("1.99"));
        assert_eq!(large.at_least(amount("1.98")), Some(true));
        assert_eq!(large.at_least(large), None);
        assert_eq!(small.exceeds(large), Some(false));
        assert_eq!(amount("1.98").exceeds(large), Some(false));
        assert_eq!(large.minus(large).to_string(), "at most 10.2 MiB");
        assert_eq!(large.minus(amount("1.50")).to_string(), "512.0 MiB");
        assert_eq!(Amount::UNKNOWN.at_least(large), None);
        assert_eq!(small.minus(large).low_bytes, Bytes::ZERO);
    }
}

//! Codes of 8 bits for the numbers of a moment.
//!
//! Responsible for what a code stands for, and for the nearest code of a number. Not responsible for how a block lies
//! in memory, nor for updates.
//!
//! Code `c` of `n` stands for `(c / n)^4` of the scale. The nearest code takes a fourth root. Roots of a processor take
//! several times as long as all else here, so that of a first moment is computed: a first guess from the number's bits, and a
//! polynomial of how far that is off. It is off by 2e-5 at most, 0.002 of a code.

use crate::blocks::{nearest_code, nearest_code_of};

/// The largest codes.
const MOST_SIGNED: f32 = 127.0;
const MOST_OF_ROOTS: f32 = 255.0;
/// A number's bits, shifted by two places and taken from these, are those of about one over its fourth root.
const GUESS: u32 = 0x4f58_1359;
/// With `y` such a guess for `x` and `t = x y^4`, the fourth root of `x` is `x y^3 t^(-3/4)`. The polynomial that is nearest
/// to that power where `t` comes to lie, from 0.876 to 1.123; lowest power first.
const REST: [f32; 4] = [3.026_582_7, -3.914_912_5, 2.499_993_8, -0.611_680_7];

/// The number that a code of a first moment stands for; the largest code for the scale itself.
#[inline]
pub(super) fn signed(code: u8, scale: f32) -> f32 {
    let part = f32::from(code.cast_signed()) / MOST_SIGNED;
    let square = part * part;
    (square * square * scale).copysign(part)
}

/// The root of the number that a code of a second moment stands for, as [`signed`].
#[inline]
pub(super) fn root(code: u8, scale: f32) -> f32 {
    let part = f32::from(code) / MOST_OF_ROOTS;
    part * part * scale
}

/// What a number of a first moment is for each fourth power of its code.
#[inline]
pub(super) fn signed_unit(scale: f32) -> f32 {
    scale * (1.0 / (MOST_SIGNED * MOST_SIGNED * MOST_SIGNED * MOST_SIGNED))
}

/// [`signed`] of a scale's unit, or a multiple of it; in fewer steps, so the last bit may be another.
#[inline]
pub(super) fn signed_in(unit: f32, code: u8) -> f32 {
    let code = f32::from(code.cast_signed());
    (code * code * unit) * (code.abs() * code)
}

/// What a root is for each square of its code.
#[inline]
pub(super) fn root_unit(scale: f32) -> f32 {
    scale * (1.0 / (MOST_OF_ROOTS * MOST_OF_ROOTS))
}

/// [`root`] of a scale's unit, as [`signed_in`].
#[inline]
pub(super) fn root_in(unit: f32, code: u8) -> f32 {
    let code = f32::from(code);
    code * code * unit
}

/// Codes of the numbers of a first moment that share a scale.
#[derive(Clone, Copy)]
pub(super) struct SignedCodes([f32; 4]);

impl SignedCodes {
    /// None but zero.
    pub(super) const NONE: Self = Self([0.0; 4]);

    #[inline]
    pub(super) fn of(scale: f32) -> Self {
        let codes_per = codes_per(MOST_SIGNED, scale.sqrt().sqrt());
        Self(REST.map(|it| it * codes_per))
    }

    /// The nearest code. Of numbers below 1e-38, which have fewer bits, it may be one nearer to zero.
    #[inline]
    pub(super) fn nearest(self, number: f32) -> u8 {
        let [a, b, c, d] = self.0;
        let size = number.abs();
        let guess = f32::from_bits(GUESS.wrapping_sub(size.to_bits() >> 2));
        let square = guess * guess;
        let off = size * (square * square);
        let rest = off.mul_add(off.mul_add(off.mul_add(d, c), b), a);
        nearest_code_of(number * (square * guess), rest)
    }
}

/// Codes of the roots of a second moment that share a scale.
#[derive(Clone, Copy)]
pub(super) struct RootCodes(f32);

impl RootCodes {
    /// None but the least.
    pub(super) const NONE: Self = Self(0.0);

    #[inline]
    pub(super) fn of(scale: f32) -> Self {
        Self(codes_per(MOST_OF_ROOTS, scale.sqrt()))
    }

    /// The nearest code; where the root is not zero it is not zero.
    #[inline]
    pub(super) fn nearest(self, root: f32) -> u8 {
        let code = root.sqrt() * self.0;
        let code = if code > 1.0 { code } else { 1.0 };
        nearest_code(if root > 0.0 { code } else { 0.0 })
    }
}

/// Codes for each unit of what is encoded; none where all of it is zero, or not a number.
#[inline]
fn codes_per(most: f32, largest: f32) -> f32 {
    if largest > 0.0 { most / largest } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_computed_root_is_off_by_less_than_a_hundredth_of_a_code() {
        for bits in (1 << 23..0x7e00_0000).step_by(997) {
            let number = f32::from_bits(bits);
            let SignedCodes(rest) = SignedCodes::of(number);
            let guess = f32::from_bits(GUESS.wrapping_sub(bits >> 2));
            let off = number * (guess * guess) * (guess * guess);
            let rest = rest[0] + off * (rest[1] + off * (rest[2] + off * rest[3]));
            let code = number * (guess * guess) * guess * rest;
            assert!((code - MOST_SIGNED).abs() < 0.003, "{number:e} {code}");
        }
    }

    #[test]
    fn every_code_is_the_nearest_of_what_it_stands_for() {
        for scale in [1e-30, 3.7e-5, 1.0, 2.0e30] {
            let (codes, unit) = (SignedCodes::of(scale), signed_unit(scale));
            assert_eq!(signed(127, scale).to_bits(), scale.to_bits());
            for code in (-127..=127_i8).map(i8::cast_unsigned) {
                assert_eq!(codes.nearest(signed(code, scale)), code);
                assert_eq!(codes.nearest(signed_in(unit, code)), code);
            }
        }
        for scale in [1e-20, 3.7e-5, 1.0, 1.0e19] {
            let (codes, unit) = (RootCodes::of(scale), root_unit(scale));
            assert_eq!(root(255, scale).to_bits(), scale.to_bits());
            for code in 0..=255 {
                assert_eq!(codes.nearest(root(code, scale)), code);
                assert_eq!(codes.nearest(root_in(unit, code)), code);
            }
        }
    }

    #[test]
    fn numbers_without_all_bits_are_not_taken_for_larger_ones() {
        for bits in (0..1 << 23).step_by(101) {
            let number = f32::from_bits(bits);
            let code = SignedCodes::of(number).nearest(number);
            assert!(code <= 127, "{number:e} {code}");
        }
    }
}

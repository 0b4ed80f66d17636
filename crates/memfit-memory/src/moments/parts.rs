//! A moment's memory in parts, one for each thread.
//!
//! Responsible for how long the memory of each is and for where it is cut. Not responsible for what is done with a part
//! (`update.rs`).

use memfit_engine::step::Narrow;

use crate::blocks::{BLOCK, WIDE};
use crate::forms::Form;

/// Fewer numbers for each thread are not worth one.
pub(super) const LEAST_OF_THREAD: usize = 1 << 17;

/// Lengths that do not go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{wide} bytes of numbers go with {expected} bytes of {what}, not {found}")]
pub struct LengthError {
    wide: usize,
    what: &'static str,
    found: usize,
    expected: u64,
}

/// Part of the memory of one moment: codes and scales.
pub(super) type Held<'m> = (&'m mut [u8], &'m mut [u8]);

pub(super) fn narrow(wide: usize) -> u64 {
    Narrow::EightBit.bytes(wide as u64)
}

/// Checks that so many bytes of numbers in 32 bits go with what holds a moment of them.
pub(super) fn check(wide: usize, found: usize, what: &'static str) -> Result<(), LengthError> {
    let expected = narrow(wide);
    if wide.is_multiple_of(WIDE) && expected == found as u64 {
        return Ok(());
    }
    Err(LengthError {
        wide,
        what,
        found,
        expected,
    })
}

pub(super) fn check_gradient(form: Form, numbers: usize, found: usize) -> Result<(), LengthError> {
    if numbers.is_multiple_of(form.bytes()) && numbers == found {
        return Ok(());
    }
    Err(LengthError {
        wide: numbers,
        what: "gradient",
        found,
        expected: numbers as u64,
    })
}

/// The place of the first number of a part; places begin anew after 2^32.
#[expect(clippy::cast_possible_truncation, reason = "it begins anew")]
pub(super) const fn place(number: usize, part: usize) -> u32 {
    number.wrapping_mul(part) as u32
}

/// The memory of a moment in parts of so many numbers.
pub(super) fn parts_of(held: &mut [u8], part: usize) -> impl Iterator<Item = Held<'_>> {
    let count = numbers_in(held.len());
    let (codes, scales) = held.split_at_mut(count);
    codes
        .chunks_mut(part)
        .zip(scales.chunks_mut(part / BLOCK * WIDE))
}

/// Numbers that so many bytes hold: each block has a scale more.
pub(super) const fn numbers_in(held: usize) -> usize {
    held - held.div_ceil(BLOCK + WIDE) * WIDE
}

//! 32-bit floating-point numbers in 8 bits, and back.
//!
//! Responsible for the form that `shrink` holds activations in on a CPU: each block of [`Narrow::BLOCK`] numbers in
//! memory has a scale, the largest of its absolute values over 127, and each number is the nearest whole multiple of it.
//! All codes come first, then all scales. A block with numbers that are not finite keeps them as such: its scale is
//! negative, and the outermost codes stand for them. Not responsible for what is held so (the executor).
//!
//! Nothing is allocated, and the result does not depend on the number of threads.

use std::num::NonZeroUsize;
use std::thread;

use memfit_engine::step::Narrow;

use crate::blocks::{BLOCK, WIDE, each, largest, nearest_code, part};
use crate::fastest::{Registers, for_registers};

/// The largest code of a block whose numbers are all finite, and of one whose are not.
const MOST: f32 = 127.0;
const MOST_BESIDE_OTHERS: f32 = 124.0;
/// Codes of what is not finite; for below zero the negative one.
const INFINITE: i8 = 126;
const NOT_A_NUMBER: i8 = 127;
/// Fewer numbers for each thread are not worth one.
const LEAST_OF_THREAD: usize = 1 << 18;

/// A length that does not go with another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{wide} bytes of numbers take {expected} bytes in 8 bits, not {narrow}")]
pub struct LengthError {
    wide: usize,
    narrow: usize,
    expected: u64,
}

/// Writes numbers in 8 bits.
///
/// # Errors
///
/// `narrow` has not [`Narrow::bytes`] of `wide`.
pub fn shrink(wide: &[u8], narrow: &mut [u8], threads: NonZeroUsize) -> Result<(), LengthError> {
    check(wide.len(), narrow.len())?;
    let count = wide.len() / WIDE;
    let (codes, scales) = narrow.split_at_mut(count);
    let part = part(count, threads, LEAST_OF_THREAD);
    let parts = wide
        .chunks(part * WIDE)
        .zip(codes.chunks_mut(part))
        .zip(scales.chunks_mut(part / BLOCK * WIDE));
    thread::scope(|scope| {
        each(parts, |((wide, codes), scales), is_last| {
            let mut run = move || fastest_shrink(Registers::widest(), wide, codes, scales);
            if is_last {
                run();
            } else {
                scope.spawn(run);
            }
        });
    });
    Ok(())
}

/// Writes numbers of 8 bits in 32.
///
/// # Errors
///
/// As [`shrink`].
pub fn expand(narrow: &[u8], wide: &mut [u8], threads: NonZeroUsize) -> Result<(), LengthError> {
    check(wide.len(), narrow.len())?;
    let count = wide.len() / WIDE;
    let (codes, scales) = narrow.split_at(count);
    let part = part(count, threads, LEAST_OF_THREAD);
    let parts = wide
        .chunks_mut(part * WIDE)
        .zip(codes.chunks(part))
        .zip(scales.chunks(part / BLOCK * WIDE));
    thread::scope(|scope| {
        each(parts, |((wide, codes), scales), is_last| {
            let mut run = move || fastest_expand(Registers::widest(), codes, scales, wide);
            if is_last {
                run();
            } else {
                scope.spawn(run);
            }
        });
    });
    Ok(())
}

fn check(wide: usize, narrow: usize) -> Result<(), LengthError> {
    let expected = Narrow::EightBit.bytes(wide as u64);
    if wide.is_multiple_of(WIDE) && expected == narrow as u64 {
        return Ok(());
    }
    Err(LengthError {
        wide,
        narrow,
        expected,
    })
}

for_registers!(fastest_shrink, shrink_blocks, wide: &[u8], codes: &mut [u8], scales: &mut [u8]);
for_registers!(fastest_expand, expand_blocks, codes: &[u8], scales: &[u8], wide: &mut [u8]);

#[expect(
    clippy::inline_always,
    reason = "compiled anew for each kind of processor"
)]
#[inline(always)]
fn shrink_blocks(wide: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    let blocks = wide.chunks(BLOCK * WIDE).zip(codes.chunks_mut(BLOCK));
    for ((wide, codes), scale) in blocks.zip(scales.chunks_mut(WIDE)) {
        let numbers = wide.as_chunks::<WIDE>().0;
        let largest = largest(numbers.iter().map(|&it| f32::from_ne_bytes(it)));
        if !largest.is_finite() {
            shrink_others(numbers, codes, scale);
            continue;
        }
        let per_code = largest / MOST;
        let codes_per = inverse(per_code);
        for (code, &number) in codes.iter_mut().zip(numbers) {
            *code = nearest_code(f32::from_ne_bytes(number) * codes_per);
        }
        scale.copy_from_slice(&per_code.to_ne_bytes());
    }
}

/// One over a scale; nothing of a block of zeros, or of numbers so small that there is no such number.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// A block with numbers that are not finite.
#[cold]
#[expect(
    clippy::cast_possible_truncation,
    reason = "codes of finite numbers are whole, and between the outermost"
)]
fn shrink_others(numbers: &[[u8; WIDE]], codes: &mut [u8], scale: &mut [u8]) {
    let numbers = || numbers.iter().map(|&it| f32::from_ne_bytes(it));
    let finite = numbers().filter(|it| it.is_finite());
    let largest = finite.fold(0.0_f32, |most, it| most.max(it.abs()));
    let per_code = largest / MOST_BESIDE_OTHERS;
    let codes_per = inverse(per_code);
    for (code, number) in codes.iter_mut().zip(numbers()) {
        let signed = if number.is_nan() {
            NOT_A_NUMBER
        } else if number.is_infinite() {
            INFINITE * number.signum() as i8
        } else {
            (number * codes_per).round_ties_even() as i8
        };
        *code = signed.cast_unsigned();
    }
    scale.copy_from_slice(&(-per_code).to_ne_bytes());
}

#[expect(
    clippy::inline_always,
    reason = "compiled anew for each kind of processor"
)]
#[inline(always)]
fn expand_blocks(codes: &[u8], scales: &[u8], wide: &mut [u8]) {
    let blocks = wide.chunks_mut(BLOCK * WIDE).zip(codes.chunks(BLOCK));
    for ((wide, codes), scale) in blocks.zip(scales.as_chunks::<WIDE>().0) {
        let per_code = f32::from_ne_bytes(*scale);
        let numbers = wide.as_chunks_mut::<WIDE>().0;
        // -0.0 too says that there are others.
        if per_code.is_sign_negative() {
            expand_others(codes, -per_code, numbers);
            continue;
        }
        for (number, &code) in numbers.iter_mut().zip(codes) {
            *number = (f32::from(code.cast_signed()) * per_code).to_ne_bytes();
        }
    }
}

#[cold]
fn expand_others(codes: &[u8], per_code: f32, numbers: &mut [[u8; WIDE]]) {
    for (number, &code) in numbers.iter_mut().zip(codes) {
        let code = code.cast_signed();
        let wide = match code.unsigned_abs().cast_signed() {
            NOT_A_NUMBER => f32::NAN,
            INFINITE => f32::INFINITY.copysign(f32::from(code)),
            _ => f32::from(code) * per_code,
        };
        *number = wide.to_ne_bytes();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|it| it.to_ne_bytes()).collect()
    }

    fn there_and_back(numbers: &[f32], threads: usize) -> (Vec<u8>, Vec<f32>) {
        let threads = NonZeroUsize::new(threads).unwrap();
        let wide = bytes(numbers);
        let mut narrow =
            vec![0; usize::try_from(Narrow::EightBit.bytes(wide.len() as u64)).unwrap()];
        shrink(&wide, &mut narrow, threads).unwrap();
        let mut back = vec![0; wide.len()];
        expand(&narrow, &mut back, threads).unwrap();
        let back = back.as_chunks::<WIDE>().0.iter();
        (narrow, back.map(|&it| f32::from_ne_bytes(it)).collect())
    }

    /// The same, number by number, as a book would have it.
    fn slowly(numbers: &[f32]) -> Vec<f32> {
        let block = |block: &[f32]| {
            let finite = block.iter().filter(|it| it.is_finite());
            let largest = finite.fold(0.0_f32, |most, it| most.max(it.abs()));
            let is_finite = block.iter().all(|it| it.is_finite());
            let scale = largest / if is_finite { 127.0 } else { 124.0 };
            let one = |&number: &f32| {
                if !number.is_finite() {
                    number
                } else if !(1.0 / scale).is_finite() {
                    0.0
                } else {
                    (number * (1.0 / scale)).round_ties_even() * scale
                }
            };
            block.iter().map(one).collect::<Vec<f32>>()
        };
        numbers.chunks(256).flat_map(block).collect()
    }

    proptest! {
        #[test]
        fn what_comes_back_is_what_a_book_says(
            numbers in prop::collection::vec(
                prop_oneof![8 => -4.0_f32..4.0, 1 => any::<f32>(), 1 => Just(f32::INFINITY), 1 => Just(0.0)],
                0..700,
            ),
        ) {
            let (_, back) = there_and_back(&numbers, 1);
            for (found, expected) in back.iter().zip(slowly(&numbers)) {
                let same = found.to_bits() == expected.to_bits() || *found == 0.0 && expected == 0.0;
                prop_assert!(same || found.is_nan() && expected.is_nan(), "{found} {expected}");
            }
        }

        #[test]
        fn no_number_is_farther_off_than_half_a_code(
            numbers in prop::collection::vec(-1e6_f32..1e6, 1..600),
        ) {
            let (_, back) = there_and_back(&numbers, 1);
            for (block, back) in numbers.chunks(256).zip(back.chunks(256)) {
                let largest = block.iter().fold(0.0_f32, |most, it| most.max(it.abs()));
                for (number, back) in block.iter().zip(back) {
                    prop_assert!((number - back).abs() <= largest / 127.0 * 0.5001);
                }
            }
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let number =
            |i: u32| (f32::from(i.to_ne_bytes()[0]) * 0.7).sin() * f32::from(i.to_ne_bytes()[1]);
        let numbers: Vec<f32> = (0..(1 << 20) + 77).map(number).collect();
        let one = there_and_back(&numbers, 1);
        assert!(one == there_and_back(&numbers, 3));
        assert!(one.1 == slowly(&numbers));
    }

    #[test]
    fn what_is_not_finite_stays_so_and_harms_only_the_steps_of_its_block() {
        let mut numbers = vec![1.0; 512];
        numbers[..3].copy_from_slice(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        let (_, back) = there_and_back(&numbers, 1);
        assert!(back[0].is_nan());
        assert_eq!(back[1..3], [f32::INFINITY, f32::NEG_INFINITY]);
        assert!(back[3..].iter().all(|it| (it - 1.0).abs() < 1e-6));
        let nothing_else = there_and_back(&[f32::NEG_INFINITY, 0.0], 1).1;
        assert_eq!(nothing_else, [f32::NEG_INFINITY, 0.0]);
    }

    #[test]
    fn a_length_that_does_not_fit_is_refused() {
        let threads = NonZeroUsize::MIN;
        let error = shrink(&[0; 8], &mut [0; 7], threads).unwrap_err();
        let said = "8 bytes of numbers take 6 bytes in 8 bits, not 7";
        assert_eq!(error.to_string(), said);
        assert!(shrink(&[0; 7], &mut [0; 5], threads).is_err());
        assert_eq!(shrink(&[], &mut [], threads), Ok(()));
    }
}

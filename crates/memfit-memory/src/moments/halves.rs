//! Updates of parameters in `bfloat16` whose lower halves are kept beside them.
//!
//! Responsible for putting numbers of 32 bits together from both halves, a chunk at a time, for the update of these, and for
//! taking them apart again. So a parameter is what it would be in 32 bits, and forward reads its upper half. Not responsible
//! for the update itself (`update.rs`).
//!
//! The upper half is the nearest `bfloat16`; the lower is what it is off by, in the last of 32 bits, with a sign. So
//! `upper << 16` and `lower` add up to the bits of the number. Numbers halfway between two go to the larger one.

use std::num::NonZeroUsize;
use std::thread;

use super::parts::{Held, LEAST_OF_THREAD, LengthError, check, check_gradient, parts_of};
use super::rules::{Adam, Momentum};
use super::update::{wide_adam, wide_momentum};
use crate::blocks::{BLOCK, WIDE, each, part};
use crate::fastest::Registers;
use crate::forms::{Form, Wide};

/// Bytes of a half.
const HALF: usize = 2;
/// Numbers that are in 32 bits at a time, for each thread: what its nearest cache holds.
const CHUNK: usize = 8 * BLOCK;

/// [`super::adam`] of a parameter in halves.
pub(super) fn adam_of_halves(
    rule: Adam,
    parameter: [&mut [u8]; 2],
    gradient: &[u8],
    [first, second]: [&mut [u8]; 2],
    threads: NonZeroUsize,
) -> Result<(), LengthError> {
    let numbers = check_halves(&parameter, gradient)?;
    check(numbers * WIDE, first.len(), "first moment")?;
    check(numbers * WIDE, second.len(), "second moment")?;
    let registers = Registers::widest();
    let part = part(numbers, threads, LEAST_OF_THREAD);
    let moments = parts_of(first, part).zip(parts_of(second, part));
    thread::scope(|scope| {
        let parts = halves_of(parameter, part)
            .zip(gradient.chunks(part * HALF))
            .zip(moments);
        each(
            parts,
            |((parameter, gradient), (first, second)), is_last| {
                let run = move || {
                    let moments = chunks_of(first).zip(chunks_of(second));
                    let chunks = halves_of(parameter, CHUNK).zip(gradient.chunks(CHUNK * HALF));
                    for ((halves, gradient), moments) in chunks.zip(moments) {
                        whole(halves, gradient, |numbers, slopes| {
                            wide_adam(registers, Wide, 0, rule, numbers, slopes, moments.into());
                        });
                    }
                };
                if is_last {
                    run();
                } else {
                    scope.spawn(run);
                }
            },
        );
    });
    Ok(())
}

/// [`super::momentum`] of a parameter in halves.
pub(super) fn momentum_of_halves(
    rule: Momentum,
    parameter: [&mut [u8]; 2],
    gradient: &[u8],
    held: &mut [u8],
    threads: NonZeroUsize,
) -> Result<(), LengthError> {
    let numbers = check_halves(&parameter, gradient)?;
    check(numbers * WIDE, held.len(), "momentum")?;
    let registers = Registers::widest();
    let part = part(numbers, threads, LEAST_OF_THREAD);
    let moments = parts_of(held, part);
    thread::scope(|scope| {
        let parts = halves_of(parameter, part)
            .zip(gradient.chunks(part * HALF))
            .zip(moments);
        each(parts, |((parameter, gradient), held), is_last| {
            let run = move || {
                let chunks = halves_of(parameter, CHUNK).zip(gradient.chunks(CHUNK * HALF));
                for ((halves, gradient), held) in chunks.zip(chunks_of(held)) {
                    whole(halves, gradient, |numbers, slopes| {
                        wide_momentum(registers, Wide, 0, rule, numbers, slopes, held);
                    });
                }
            };
            if is_last {
                run();
            } else {
                scope.spawn(run);
            }
        });
    });
    Ok(())
}

/// Changes numbers of 32 bits, given in halves, by slopes of 16.
fn whole(halves: [&mut [u8]; 2], gradient: &[u8], update: impl FnOnce(&mut [u8], &[u8])) {
    let mut numbers = [[0; WIDE]; CHUNK];
    let mut slopes = [[0; WIDE]; CHUNK];
    let [upper, lower] = halves.map(|half| half.as_chunks_mut::<HALF>().0);
    let gradient = gradient.as_chunks::<HALF>().0;
    for (number, (upper, lower)) in numbers.iter_mut().zip(upper.iter().zip(&*lower)) {
        *number = joined(*upper, *lower);
    }
    for (slope, half) in slopes.iter_mut().zip(gradient) {
        *slope = joined(*half, [0; HALF]);
    }
    let count = upper.len();
    update(
        numbers[..count].as_flattened_mut(),
        slopes[..count].as_flattened(),
    );
    for (number, (upper, lower)) in numbers.iter().zip(upper.iter_mut().zip(lower)) {
        (*upper, *lower) = split(*number);
    }
}

/// The number of both halves. Somebody may have written the upper one since: zero is zero then, and infinity stays so.
#[inline]
fn joined(upper: [u8; HALF], lower: [u8; HALF]) -> [u8; WIDE] {
    let upper = u32::from(u16::from_ne_bytes(upper)) << 16;
    let off = i32::from(i16::from_ne_bytes(lower));
    // A number below the least upper half is above zero, and one next to infinity is below it.
    let size = upper & !(1 << 31);
    let is_another = (size == 0 && off < 0) || (size == INFINITE && off > 0);
    let off = if is_another { 0 } else { off };
    upper.wrapping_add_signed(off).to_ne_bytes()
}

/// The bits of infinity.
const INFINITE: u32 = 0x7f80_0000;

/// Both halves of a number. What is none has one half that is none.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "that is what a half is")]
fn split(number: [u8; WIDE]) -> ([u8; HALF], [u8; HALF]) {
    let number = f32::from_ne_bytes(number);
    let bits = number.to_bits();
    if number.is_nan() {
        return (NOT_A_NUMBER.to_ne_bytes(), [0; HALF]);
    }
    let upper = (bits.wrapping_add(1 << 15) >> 16) as u16;
    (upper.to_ne_bytes(), (bits as u16).to_ne_bytes())
}

/// `bfloat16` that is not a number.
const NOT_A_NUMBER: u16 = 0x7fc0;

/// Both halves in parts of so many numbers.
fn halves_of([upper, lower]: [&mut [u8]; 2], part: usize) -> impl Iterator<Item = [&mut [u8]; 2]> {
    let uppers = upper.chunks_mut(part * HALF);
    let halves = uppers.zip(lower.chunks_mut(part * HALF));
    halves.map(|(upper, lower)| [upper, lower])
}

/// Codes and scales of a part of a moment, in chunks.
fn chunks_of((codes, scales): Held<'_>) -> impl Iterator<Item = Held<'_>> {
    let codes = codes.chunks_mut(CHUNK);
    codes.zip(scales.chunks_mut(CHUNK / BLOCK * WIDE))
}

/// How many numbers there are, in halves.
fn check_halves([upper, lower]: &[&mut [u8]; 2], gradient: &[u8]) -> Result<usize, LengthError> {
    let form = Form::Half(0);
    check_gradient(form, upper.len(), gradient.len())?;
    check_gradient(form, upper.len(), lower.len())?;
    Ok(upper.len() / HALF)
}

#[cfg(test)]
mod tests {
    use super::super::{update_by_adam, update_by_momentum};
    use super::*;

    const ADAM: Adam = Adam {
        direction: 1.0,
        penalty: 0.01,
        decay: 0.999,
        first_added: 0.1,
        second_stays: 0.999,
        second_added: 0.001,
        step: 1e-4,
        root_correction: 1.0,
        epsilon: 1e-8,
    };
    const MOMENTUM: Momentum = Momentum {
        direction: -1.0,
        penalty: 0.01,
        stays: 0.9,
        added: 0.7,
        nesterov: Some(0.9),
        step: 1e-4,
    };

    #[test]
    fn halves_are_the_nearest_and_what_it_is_off_by() {
        for bits in (0..=u32::MAX).step_by(9973) {
            let number = f32::from_bits(bits);
            let (upper, lower) = split(number.to_ne_bytes());
            let again = f32::from_ne_bytes(joined(upper, lower));
            let half = f32::from_ne_bytes(joined(upper, [0; HALF]));
            if number.is_nan() {
                assert!(again.is_nan() && half.is_nan());
                continue;
            }
            assert_eq!(again.to_bits(), bits);
            let below = f32::from_bits(bits & 0xffff_0000);
            assert!(half.is_infinite() || (half - number).abs() <= (below - number).abs());
        }
        for number in [f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -0.0, 1.0e-45] {
            let (upper, lower) = split(number.to_ne_bytes());
            assert_eq!(joined(upper, lower), number.to_ne_bytes());
        }
    }

    #[test]
    fn an_upper_half_that_somebody_wrote_makes_no_other_number_than_near_it() {
        let near = |upper: f32, lower: i16| {
            let upper = split(upper.to_ne_bytes()).0;
            f32::from_ne_bytes(joined(upper, lower.to_ne_bytes()))
        };
        for lower in [i16::MIN, -1, 0, 1, i16::MAX] {
            for upper in [0.0, -0.0, 1.0, -3.0e-38, 2.0e30] {
                let found = near(upper, lower);
                assert!((found - upper).abs() <= upper.abs() / 256.0 + 1e-40);
            }
            for upper in [f32::INFINITY, f32::NEG_INFINITY] {
                let found = near(upper, lower);
                assert!(found.to_bits() == upper.to_bits() || (lower < 0 && found.abs() > 3.3e38));
            }
        }
    }

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let bits = (0..count)
            .zip(0..)
            .map(|(_, i): (_, u32)| (i ^ seed).wrapping_mul(0x9e37_79b1));
        bits.map(|it| f32::from_bits(it >> 9 | 0x3f80_0000) - 1.5)
            .collect()
    }

    fn bytes(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|it| it.to_ne_bytes()).collect()
    }

    /// Updates in halves beside those of numbers of 32 bits by the same gradient: bit for bit.
    #[test]
    fn updates_are_those_of_numbers_of_32_bits() {
        let threads = NonZeroUsize::new(3).unwrap();
        for count in [256, 300, 5000, 2 * LEAST_OF_THREAD + 1000] {
            let mut wide = bytes(&numbers(count, 1));
            let (mut upper, mut lower) = (Vec::new(), Vec::new());
            for number in wide.as_chunks::<WIDE>().0 {
                let halves = split(*number);
                upper.extend(halves.0);
                lower.extend(halves.1);
            }
            let held = count + count.div_ceil(BLOCK) * WIDE;
            let mut moments = [(); 4].map(|()| vec![0; held]);
            for step in 0..3 {
                let halves = numbers(count, 7 + step).into_iter().map(|it| it * 1e-3);
                let gradient: Vec<u8> = halves.flat_map(|it| split(it.to_ne_bytes()).0).collect();
                let slopes: Vec<u8> = gradient
                    .as_chunks::<HALF>()
                    .0
                    .iter()
                    .flat_map(|half| joined(*half, [0; HALF]))
                    .collect();
                let [a, b, c, d] = &mut moments;
                if step == 2 {
                    let update = |numbers: &mut [u8], lower, slopes: &[u8], held| {
                        let form = Form::Wide;
                        update_by_momentum(MOMENTUM, form, numbers, lower, slopes, held, threads)
                    };
                    update(&mut wide, None, &slopes, a).unwrap();
                    update(&mut upper, Some(&mut lower[..]), &gradient, c).unwrap();
                } else {
                    let update = |numbers: &mut [u8], lower, slopes: &[u8], moments| {
                        let form = Form::Wide;
                        update_by_adam(ADAM, form, numbers, lower, slopes, moments, threads)
                    };
                    update(&mut wide, None, &slopes, [a, b]).unwrap();
                    update(&mut upper, Some(&mut lower[..]), &gradient, [c, d]).unwrap();
                }
            }
            let halves = upper.as_chunks::<HALF>().0.iter().zip(lower.as_chunks().0);
            let again: Vec<u8> = halves.flat_map(|(u, l)| joined(*u, *l)).collect();
            assert!(again == wide, "{count}");
            assert!(moments[0] == moments[2] && moments[1] == moments[3]);
        }
    }

    #[test]
    fn halves_that_do_not_go_together_are_refused() {
        let (mut upper, mut lower, mut held) = ([0; 512], [0; 510], [0; 260]);
        let parameter = [&mut upper[..], &mut lower[..]];
        let threads = NonZeroUsize::MIN;
        let done = momentum_of_halves(MOMENTUM, parameter, &[0; 512], &mut held, threads);
        assert!(done.is_err());
    }
}

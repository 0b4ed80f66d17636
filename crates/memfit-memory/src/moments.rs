//! The state of an optimizer in 8 bits, and the updates that read and write it.
//!
//! Responsible for the form that `optimizer_bits` holds moments in on a CPU, and for shares of threads. Not responsible for
//! one pass over a parameter (`moments/update.rs`), nor for which parameters are updated so, or when (the executor).
//!
//! A block is `Narrow::BLOCK` numbers with the largest of their absolute values as scale; all codes come first, then all
//! scales. Numbers of one moment lie many powers of ten apart, so codes are no even steps: code `c` of `n` stands for
//! `(c / n)^4` of the scale. Steps are 1.6 % of a number near the scale and 16 % at a ten-thousandth of it, much as in the
//! dynamic code of Dettmers et al. (2021); but both ways are plain arithmetic (`moments/codes.rs`), which needs no table. First moments
//! and momentum take a sign and 127 codes. A second moment takes 255, by its root: `(c / 255)^2` of the largest root.
//! There, what is not zero never becomes zero, or the next update would divide by nothing.
//!
//! A block with numbers that are not finite has a scale that is none: all of it is then not a number, and stays so.
//! The result does not depend on the number of threads nor on the processor. Parameters and gradients have 32 bits, or are
//! `bfloat16` (`forms.rs`); the arithmetic between has 32 bits either way.

use std::num::NonZeroUsize;
use std::thread;

use crate::blocks::{BLOCK, WIDE, each, largest, part};
use crate::fastest::Registers;
use crate::forms::{Form, Half, Wide};

mod codes;
mod halves;
mod parts;
mod rules;
mod update;

use codes::{RootCodes, SignedCodes, root, signed};
use halves::{adam_of_halves, momentum_of_halves};
use parts::{LEAST_OF_THREAD, check, check_gradient, parts_of, place};
use update::{half_adam, half_momentum, scale_of, wide_adam, wide_momentum};

pub use parts::LengthError;
pub use rules::{Adam, Momentum};

/// What a moment is, which says how its numbers are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// A mean of gradients, of either sign.
    First,
    /// A mean of squares.
    Second,
}

impl Moment {
    /// The first, or the second.
    #[must_use]
    pub const fn of(is_second: bool) -> Self {
        if is_second { Self::Second } else { Self::First }
    }
}

/// Updates a parameter by Adam: in its form, or with `lower` in 32 bits, of which the parameter is the upper half.
///
/// # Errors
///
/// The gradient or the lower half has another length than the parameter, or a moment has not `Narrow::bytes` of its
/// numbers in 32 bits.
pub fn update_by_adam(
    rule: Adam,
    form: Form,
    parameter: &mut [u8],
    lower: Option<&mut [u8]>,
    gradient: &[u8],
    [first, second]: [&mut [u8]; 2],
    threads: NonZeroUsize,
) -> Result<(), LengthError> {
    match lower {
        None => adam(rule, form, parameter, gradient, first, second, threads),
        Some(lower) => {
            let (halves, moments) = ([parameter, lower], [first, second]);
            adam_of_halves(rule, halves, gradient, moments, threads)
        }
    }
}

/// Updates a parameter by gradient descent with momentum; as [`update_by_adam`].
///
/// # Errors
///
/// As there.
pub fn update_by_momentum(
    rule: Momentum,
    form: Form,
    parameter: &mut [u8],
    lower: Option<&mut [u8]>,
    gradient: &[u8],
    held: &mut [u8],
    threads: NonZeroUsize,
) -> Result<(), LengthError> {
    match lower {
        None => momentum(rule, form, parameter, gradient, held, threads),
        Some(lower) => momentum_of_halves(rule, [parameter, lower], gradient, held, threads),
    }
}

/// Updates a parameter by Adam in its form.
fn adam(
    rule: Adam,
    form: Form,
    parameter: &mut [u8],
    gradient: &[u8],
    first: &mut [u8],
    second: &mut [u8],
    threads: NonZeroUsize,
) -> Result<(), LengthError> {
    check_gradient(form, parameter.len(), gradient.len())?;
    let (wide, bytes) = (parameter.len() / form.bytes() * WIDE, form.bytes());
    check(wide, first.len(), "first moment")?;
    check(wide, second.len(), "second moment")?;
    let registers = Registers::widest();
    let part = part(wide / WIDE, threads, LEAST_OF_THREAD);
    let parts = parameter
        .chunks_mut(part * bytes)
        .zip(gradient.chunks(part * bytes))
        .zip(parts_of(first, part).zip(parts_of(second, part)));
    thread::scope(|scope| {
        each(
            parts.enumerate(),
            |(number, (numbers, moments)), is_last| {
                let (parameter, gradient) = numbers;
                let moments = moments.into();
                let place = place(number, part);
                let run = move || match form {
                    Form::Wide => {
                        wide_adam(registers, Wide, place, rule, parameter, gradient, moments);
                    }
                    Form::Half(seed) => {
                        half_adam(
                            registers,
                            Half(seed),
                            place,
                            rule,
                            parameter,
                            gradient,
                            moments,
                        );
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

/// Updates a parameter by gradient descent with momentum in its form.
fn momentum(
    rule: Momentum,
    form: Form,
    parameter: &mut [u8],
    gradient: &[u8],
    held: &mut [u8],
    threads: NonZeroUsize,
) -> Result<(), LengthError> {
    check_gradient(form, parameter.len(), gradient.len())?;
    let (wide, bytes) = (parameter.len() / form.bytes() * WIDE, form.bytes());
    check(wide, held.len(), "momentum")?;
    let registers = Registers::widest();
    let part = part(wide / WIDE, threads, LEAST_OF_THREAD);
    let parts = parameter
        .chunks_mut(part * bytes)
        .zip(gradient.chunks(part * bytes))
        .zip(parts_of(held, part));
    thread::scope(|scope| {
        each(parts.enumerate(), |(number, (numbers, held)), is_last| {
            let (parameter, gradient) = numbers;
            let place = place(number, part);
            let run = move || match form {
                Form::Wide => {
                    wide_momentum(registers, Wide, place, rule, parameter, gradient, held);
                }
                Form::Half(seed) => {
                    half_momentum(
                        registers,
                        Half(seed),
                        place,
                        rule,
                        parameter,
                        gradient,
                        held,
                    );
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

/// Writes a moment in 8 bits.
///
/// # Errors
///
/// `held` has not `Narrow::bytes` of `wide`.
pub fn shrink(moment: Moment, wide: &[u8], held: &mut [u8]) -> Result<(), LengthError> {
    check(wide.len(), held.len(), "codes")?;
    let (codes, scales) = held.split_at_mut(wide.len() / WIDE);
    let blocks = wide.chunks(BLOCK * WIDE).zip(codes.chunks_mut(BLOCK));
    for ((wide, codes), scale) in blocks.zip(scales.as_chunks_mut::<WIDE>().0) {
        let mut block = [0.0; BLOCK];
        for (into, number) in block.iter_mut().zip(wide.as_chunks::<WIDE>().0) {
            *into = f32::from_ne_bytes(*number);
        }
        let block = &block[..codes.len()];
        let largest = scale_of(largest(block.iter().copied()).to_bits());
        let numbers = codes.iter_mut().zip(block);
        *scale = match moment {
            Moment::First => {
                let nearest = SignedCodes::of(largest);
                numbers.for_each(|(code, &number)| *code = nearest.nearest(number));
                largest
            }
            Moment::Second => {
                let nearest = RootCodes::of(largest.sqrt());
                numbers.for_each(|(code, number)| *code = nearest.nearest(number.sqrt()));
                largest.sqrt()
            }
        }
        .to_ne_bytes();
    }
    Ok(())
}

/// Writes a moment of 8 bits in 32.
///
/// # Errors
///
/// As [`shrink`].
pub fn expand(moment: Moment, held: &[u8], wide: &mut [u8]) -> Result<(), LengthError> {
    check(wide.len(), held.len(), "codes")?;
    let (codes, scales) = held.split_at(wide.len() / WIDE);
    let blocks = wide.chunks_mut(BLOCK * WIDE).zip(codes.chunks(BLOCK));
    for ((wide, codes), scale) in blocks.zip(scales.as_chunks::<WIDE>().0) {
        let scale = f32::from_ne_bytes(*scale);
        for (number, &code) in wide.as_chunks_mut::<WIDE>().0.iter_mut().zip(codes) {
            let value = match moment {
                Moment::First => signed(code, scale),
                Moment::Second => root(code, scale).powi(2),
            };
            *number = value.to_ne_bytes();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;

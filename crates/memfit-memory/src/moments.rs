//! The state of an optimizer in 8 bits, and the updates that read and write it.
//!
//! Responsible for the form that `optimizer_bits` holds moments in on a CPU, and for one pass over a parameter that
//! expands its moments, updates all of them, and shrinks them again, block by block and without a temporary. Not
//! responsible for which parameters are updated so, or when (the executor).
//!
//! A block is [`Narrow::BLOCK`] numbers with the largest of their absolute values as scale; all codes come first, then all
//! scales. Numbers of one moment lie many powers of ten apart, so codes are no even steps: code `c` of `n` stands for
//! `(c / n)^4` of the scale. Steps are 1.6 % of a number near the scale and 16 % at a ten-thousandth of it, much as in the
//! dynamic code of Dettmers et al. (2021); but both ways are plain arithmetic, which needs no table. First moments
//! and momentum take a sign and 127 codes. A second moment takes 255, by its root: `(c / 255)^2` of the largest root.
//! There, what is not zero never becomes zero, or the next update would divide by nothing.
//!
//! A block with numbers that are not finite has a scale that is none: all of it is then not a number, and stays so.
//! The result does not depend on the number of threads nor on the processor. Parameters and gradients have 32 bits, or are
//! `bfloat16` (`forms.rs`); the arithmetic between has 32 bits either way.

use std::num::NonZeroUsize;
use std::thread;

use memfit_engine::step::Narrow;

use crate::blocks::{BLOCK, WIDE, each, largest, nearest_code, part};
use crate::fastest::fastest;
use crate::forms::{Form, Half, NumberForm, Wide};

/// Places of a block.
#[expect(clippy::cast_possible_truncation, reason = "256")]
const BLOCK_PLACES: u32 = BLOCK as u32;
/// Fewer numbers for each thread are not worth one.
const LEAST_OF_THREAD: usize = 1 << 17;
/// The largest codes.
const MOST_SIGNED: f32 = 127.0;
const MOST_OF_ROOTS: f32 = 255.0;
/// Lengths that do not go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{wide} bytes of numbers go with {expected} bytes of {what}, not {found}")]
pub struct LengthError {
    wide: usize,
    what: &'static str,
    found: usize,
    expected: u64,
}

/// What a moment is, which says how its numbers are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// A mean of gradients, of either sign.
    First,
    /// A mean of squares.
    Second,
}

/// One update by Adam, as torch has it: what depends on the number of the step alone is computed already.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// 1, or -1 to go uphill.
    pub direction: f32,
    /// Added to the gradient for each unit of the parameter.
    pub penalty: f32,
    /// What the parameter is multiplied by before (`AdamW`).
    pub decay: f32,
    /// Part of the gradient that the first moment takes on; the rest of it stays.
    pub first_added: f32,
    /// Part of the second moment that stays.
    pub second_stays: f32,
    /// Part of the gradient's square that it takes on.
    pub second_added: f32,
    /// The learning rate over the correction of the first moment.
    pub step: f32,
    /// One over the root of the correction of the second.
    pub root_correction: f32,
    /// Added to the root.
    pub epsilon: f32,
}

/// One update by gradient descent with momentum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Momentum {
    /// 1, or -1 to go uphill.
    pub direction: f32,
    /// Added to the gradient for each unit of the parameter.
    pub penalty: f32,
    /// Part of the momentum that stays.
    pub stays: f32,
    /// Part of the gradient that is added to it.
    pub added: f32,
    /// Part of the momentum that is added to the gradient once more; `None` where the momentum is the step.
    pub nesterov: Option<f32>,
    /// The learning rate.
    pub step: f32,
}

/// Part of the memory of one moment: codes and scales.
type Held<'m> = (&'m mut [u8], &'m mut [u8]);

/// Updates a parameter by Adam.
///
/// # Errors
///
/// The gradient has another length than the parameter, or a moment has not [`Narrow::bytes`] of its numbers in 32 bits.
pub fn adam(
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
                let (first, second) = moments;
                let place = place(number, part);
                let run = move || match form {
                    Form::Wide => wide_adam(Wide, place, rule, parameter, gradient, first, second),
                    Form::Half(seed) => {
                        half_adam(Half(seed), place, rule, parameter, gradient, first, second);
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

/// Updates a parameter by gradient descent with momentum.
///
/// # Errors
///
/// As [`adam`].
pub fn momentum(
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
                Form::Wide => wide_momentum(Wide, place, rule, parameter, gradient, held),
                Form::Half(seed) => {
                    half_momentum(Half(seed), place, rule, parameter, gradient, held);
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
/// `held` has not [`Narrow::bytes`] of `wide`.
pub fn shrink(moment: Moment, wide: &[u8], held: &mut [u8]) -> Result<(), LengthError> {
    check(wide.len(), held.len(), "codes")?;
    let (codes, scales) = held.split_at_mut(wide.len() / WIDE);
    let blocks = wide.chunks(BLOCK * WIDE).zip(codes.chunks_mut(BLOCK));
    for ((wide, codes), scale) in blocks.zip(scales.as_chunks_mut::<WIDE>().0) {
        let mut block = [0.0; BLOCK];
        for (into, number) in block.iter_mut().zip(wide.as_chunks::<WIDE>().0) {
            *into = f32::from_ne_bytes(*number);
        }
        let block = &mut block[..codes.len()];
        *scale = match moment {
            Moment::First => encode(block, codes),
            Moment::Second => {
                for number in &mut *block {
                    *number = number.sqrt();
                }
                encode_roots(block, codes)
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
                Moment::First => decode(code, scale),
                Moment::Second => {
                    let root = decode_root(code, scale);
                    root * root
                }
            };
            *number = value.to_ne_bytes();
        }
    }
    Ok(())
}

fn narrow(wide: usize) -> u64 {
    Narrow::EightBit.bytes(wide as u64)
}

/// Checks that so many bytes of numbers in 32 bits go with what holds a moment of them.
fn check(wide: usize, found: usize, what: &'static str) -> Result<(), LengthError> {
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

fn check_gradient(form: Form, numbers: usize, found: usize) -> Result<(), LengthError> {
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
const fn place(number: usize, part: usize) -> u32 {
    number.wrapping_mul(part) as u32
}

/// The memory of a moment in parts of so many numbers.
fn parts_of(held: &mut [u8], part: usize) -> impl Iterator<Item = Held<'_>> {
    let count = numbers_in(held.len());
    let (codes, scales) = held.split_at_mut(count);
    codes
        .chunks_mut(part)
        .zip(scales.chunks_mut(part / BLOCK * WIDE))
}

/// Numbers that so many bytes hold: each block has a scale more.
const fn numbers_in(held: usize) -> usize {
    held - held.div_ceil(BLOCK + WIDE) * WIDE
}

fastest!(wide_adam, adam_blocks, form: Wide, place: u32, rule: Adam, parameter: &mut [u8], gradient: &[u8], first: Held<'_>, second: Held<'_>);
fastest!(half_adam, adam_blocks, form: Half, place: u32, rule: Adam, parameter: &mut [u8], gradient: &[u8], first: Held<'_>, second: Held<'_>);
fastest!(wide_momentum, momentum_blocks, form: Wide, place: u32, rule: Momentum, parameter: &mut [u8], gradient: &[u8], held: Held<'_>);
fastest!(half_momentum, momentum_blocks, form: Half, place: u32, rule: Momentum, parameter: &mut [u8], gradient: &[u8], held: Held<'_>);

#[expect(
    clippy::inline_always,
    reason = "compiled anew for each kind of processor"
)]
#[inline(always)]
fn adam_blocks<const N: usize, F: NumberForm<N>>(
    form: F,
    mut place: u32,
    rule: Adam,
    parameter: &mut [u8],
    gradient: &[u8],
    first: Held<'_>,
    second: Held<'_>,
) {
    let numbers = parameter
        .chunks_mut(BLOCK * N)
        .zip(gradient.chunks(BLOCK * N));
    let moments = blocks(first).zip(blocks(second));
    let (mut means, mut roots) = ([0.0_f32; BLOCK], [0.0_f32; BLOCK]);
    for ((parameter, gradient), ((first, mean), (second, root))) in numbers.zip(moments) {
        let parameter = parameter.as_chunks_mut::<N>().0;
        let gradient = gradient.as_chunks::<N>().0;
        let (mean_scale, root_scale) = (f32::from_ne_bytes(*mean), f32::from_ne_bytes(*root));
        let (means, roots) = (&mut means[..first.len()], &mut roots[..first.len()]);
        let old = first.iter().zip(second.iter());
        let new = means.iter_mut().zip(roots.iter_mut());
        let places = (0..BLOCK_PLACES).map(|it| place.wrapping_add(it));
        for (((number, gradient), (&first, &second)), ((mean, root), place)) in parameter
            .iter_mut()
            .zip(gradient)
            .zip(old)
            .zip(new.zip(places))
        {
            let before = F::read(*number);
            let slope = rule.direction * F::read(*gradient) + rule.penalty * before;
            let old = decode(first, mean_scale);
            *mean = old + rule.first_added * (slope - old);
            let old = decode_root(second, root_scale);
            let square = rule.second_stays * (old * old);
            *root = (square + rule.second_added * slope * slope).sqrt();
            let per = *root * rule.root_correction + rule.epsilon;
            let after = before * rule.decay - rule.step * (*mean / per);
            *number = form.written(place, after);
        }
        place = place.wrapping_add(BLOCK_PLACES);
        *mean = encode(means, first).to_ne_bytes();
        *root = encode_roots(roots, second).to_ne_bytes();
    }
}

#[expect(
    clippy::inline_always,
    reason = "compiled anew for each kind of processor"
)]
#[inline(always)]
fn momentum_blocks<const N: usize, F: NumberForm<N>>(
    form: F,
    mut place: u32,
    rule: Momentum,
    parameter: &mut [u8],
    gradient: &[u8],
    held: Held<'_>,
) {
    let numbers = parameter
        .chunks_mut(BLOCK * N)
        .zip(gradient.chunks(BLOCK * N));
    let mut moved = [0.0_f32; BLOCK];
    let (slopes, again) = rule.nesterov.map_or((0.0, 1.0), |again| (1.0, again));
    for ((parameter, gradient), (codes, scale)) in numbers.zip(blocks(held)) {
        let parameter = parameter.as_chunks_mut::<N>().0;
        let gradient = gradient.as_chunks::<N>().0;
        let old_scale = f32::from_ne_bytes(*scale);
        let moved = &mut moved[..codes.len()];
        let moments = codes.iter().zip(moved.iter_mut());
        let places = (0..BLOCK_PLACES).map(|it| place.wrapping_add(it));
        for ((number, gradient), ((&code, moved), place)) in
            parameter.iter_mut().zip(gradient).zip(moments.zip(places))
        {
            let before = F::read(*number);
            let slope = rule.direction * F::read(*gradient) + rule.penalty * before;
            *moved = rule.stays * decode(code, old_scale) + rule.added * slope;
            let along = slopes * slope + again * *moved;
            *number = form.written(place, before - rule.step * along);
        }
        place = place.wrapping_add(BLOCK_PLACES);
        *scale = encode(moved, codes).to_ne_bytes();
    }
}

/// The blocks of a moment, each with its scale.
#[inline]
fn blocks(held: Held<'_>) -> impl Iterator<Item = (&mut [u8], &mut [u8; WIDE])> {
    let (codes, scales) = held;
    codes
        .chunks_mut(BLOCK)
        .zip(scales.as_chunks_mut::<WIDE>().0)
}

#[inline]
fn decode(code: u8, scale: f32) -> f32 {
    let part = f32::from(code.cast_signed()) * (1.0 / MOST_SIGNED);
    let square = part * part;
    (square * square * scale).copysign(part)
}

#[inline]
fn decode_root(code: u8, scale: f32) -> f32 {
    let part = f32::from(code) * (1.0 / MOST_OF_ROOTS);
    part * part * scale
}

/// Writes the codes of a block; its scale.
#[inline]
fn encode(numbers: &[f32], codes: &mut [u8]) -> f32 {
    let scale = scale_of(numbers);
    let codes_per = codes_per(MOST_SIGNED, scale.sqrt().sqrt());
    for (code, &number) in codes.iter_mut().zip(numbers) {
        let part = number.abs().sqrt().sqrt() * codes_per;
        *code = nearest_code(part.copysign(number));
    }
    scale
}

/// As [`encode`], for the roots of a second moment.
#[inline]
fn encode_roots(roots: &[f32], codes: &mut [u8]) -> f32 {
    let scale = scale_of(roots);
    let codes_per = codes_per(MOST_OF_ROOTS, scale.sqrt());
    for (code, &root) in codes.iter_mut().zip(roots) {
        let least = if root > 0.0 { 1.0 } else { 0.0 };
        *code = nearest_code((root.sqrt() * codes_per).max(least));
    }
    scale
}

/// The scale of a block: its largest absolute value; not a number where one is not finite.
#[inline]
fn scale_of(numbers: &[f32]) -> f32 {
    let largest = largest(numbers.iter().copied());
    if largest.is_finite() {
        largest
    } else {
        f32::NAN
    }
}

/// Codes for each unit of what is encoded; none where all of it is zero.
#[inline]
fn codes_per(most: f32, largest: f32) -> f32 {
    if largest > 0.0 { most / largest } else { 0.0 }
}

#[cfg(test)]
mod tests;

//! Updates of a parameter that read and write moments in 8 bits.
//!
//! Responsible for one pass over a parameter, block by block, without a temporary: it expands the moments, updates all of
//! it, and shrinks them again; and for the kinds of processor that it is compiled for. Not responsible for what a code stands for (`codes.rs`), nor for threads.
//!
//! The scale of a block is known when the last of its numbers is, and the codes of the first need it. So a block begins before
//! the one before it ends: the processor has something to do meanwhile.

#![expect(
    clippy::inline_always,
    reason = "compiled anew for each kind of processor"
)]

use super::codes::{RootCodes, SignedCodes, root_in, root_unit, signed_in, signed_unit};
use super::parts::Held;
use super::rules::{Adam, Momentum};
use crate::blocks::{BLOCK, SIGN, WIDE};
use crate::fastest::for_registers;
use crate::forms::{Half, NumberForm, Wide};

/// Places of a block.
#[expect(clippy::cast_possible_truncation, reason = "256")]
const BLOCK_PLACES: u32 = BLOCK as u32;

/// Something done with one block after another, each in two parts.
trait Pass {
    /// What the first part of a block leaves to the second.
    type Begun: Copy;
    /// Nothing begun yet.
    const NONE: Self::Begun;

    /// The first part of a block.
    fn begin(&mut self, block: usize, begun: &mut Self::Begun);
    /// The second part.
    fn end(&mut self, block: usize, begun: &Self::Begun);

    /// All blocks.
    #[inline(always)]
    fn run(&mut self, blocks: usize) {
        let (mut even, mut odd) = (Self::NONE, Self::NONE);
        for block in 0..=blocks {
            let (this, last) = if block % 2 == 0 {
                (&mut even, &odd)
            } else {
                (&mut odd, &even)
            };
            if block < blocks {
                self.begin(block, this);
            }
            if block > 0 {
                self.end(block - 1, last);
            }
        }
    }
}

/// Numbers of a block, as they lie in memory.
type Numbers<const N: usize> = [[u8; N]; BLOCK];
/// Codes of a block.
type Codes = [u8; BLOCK];
/// The scale of a block.
type Scale = [u8; WIDE];

/// [`super::adam`] of one part, whose first number has a place.
#[inline(always)]
pub(super) fn adam_blocks<const N: usize, F: NumberForm<N>>(
    form: F,
    place: u32,
    rule: Adam,
    parameter: &mut [u8],
    gradient: &[u8],
    moments: [Held<'_>; 2],
) {
    let (parameter, rest) = parameter.as_chunks_mut::<N>().0.as_chunks_mut();
    let (gradient, rest_of_gradient) = gradient.as_chunks::<N>().0.as_chunks();
    let [(means, mean_scales), (roots, root_scales)] = moments;
    let (means, rest_of_means) = means.as_chunks_mut();
    let (roots, rest_of_roots) = roots.as_chunks_mut();
    let blocks = parameter.len();
    let (mean_scales, last_mean) = mean_scales.as_chunks_mut().0.split_at_mut(blocks);
    let (root_scales, last_root) = root_scales.as_chunks_mut().0.split_at_mut(blocks);
    AdamPass {
        form,
        place,
        rule,
        parameter,
        gradient,
        means: (means, mean_scales),
        roots: (roots, root_scales),
    }
    .run(blocks);
    if rest.is_empty() {
        return;
    }
    let mut numbers = padded(rest, [0; N]);
    let (mut means, mut roots) = (padded(rest_of_means, 0), padded(rest_of_roots, 0));
    AdamPass {
        form,
        place: place_of(place, blocks),
        rule,
        parameter: &mut numbers,
        gradient: &padded(rest_of_gradient, [0; N]),
        means: (&mut means, last_mean),
        roots: (&mut roots, last_root),
    }
    .run(1);
    let count = rest.len();
    rest.copy_from_slice(&numbers[0][..count]);
    rest_of_means.copy_from_slice(&means[0][..count]);
    rest_of_roots.copy_from_slice(&roots[0][..count]);
}

/// [`super::momentum`] of one part, whose first number has a place.
#[inline(always)]
pub(super) fn momentum_blocks<const N: usize, F: NumberForm<N>>(
    form: F,
    place: u32,
    rule: Momentum,
    parameter: &mut [u8],
    gradient: &[u8],
    held: Held<'_>,
) {
    let (parameter, rest) = parameter.as_chunks_mut::<N>().0.as_chunks_mut();
    let (gradient, rest_of_gradient) = gradient.as_chunks::<N>().0.as_chunks();
    let (codes, scales) = held;
    let (codes, rest_of_codes) = codes.as_chunks_mut();
    let blocks = parameter.len();
    let (scales, last_scale) = scales.as_chunks_mut().0.split_at_mut(blocks);
    MomentumPass {
        form,
        place,
        rule,
        parameter,
        gradient,
        held: (codes, scales),
    }
    .run(blocks);
    if rest.is_empty() {
        return;
    }
    let (mut numbers, mut codes) = (padded(rest, [0; N]), padded(rest_of_codes, 0));
    MomentumPass {
        form,
        place: place_of(place, blocks),
        rule,
        parameter: &mut numbers,
        gradient: &padded(rest_of_gradient, [0; N]),
        held: (&mut codes, last_scale),
    }
    .run(1);
    let count = rest.len();
    rest.copy_from_slice(&numbers[0][..count]);
    rest_of_codes.copy_from_slice(&codes[0][..count]);
}

/// A block that begins with these; what follows them changes no scale.
#[inline]
fn padded<T: Copy>(rest: &[T], nothing: T) -> [[T; BLOCK]; 1] {
    let mut block = [nothing; BLOCK];
    block[..rest.len()].copy_from_slice(rest);
    [block]
}

/// The place of the first number of a block.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "it begins anew")]
const fn place_of(first: u32, block: usize) -> u32 {
    first.wrapping_add((block as u32).wrapping_mul(BLOCK_PLACES))
}

/// Updates by Adam.
struct AdamPass<'m, const N: usize, F> {
    form: F,
    place: u32,
    rule: Adam,
    parameter: &'m mut [Numbers<N>],
    gradient: &'m [Numbers<N>],
    means: (&'m mut [Codes], &'m mut [Scale]),
    roots: (&'m mut [Codes], &'m mut [Scale]),
}

/// New moments of a block, and their codes.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Moments {
    means: [f32; BLOCK],
    squares: [f32; BLOCK],
    codes: SignedCodes,
    codes_of_roots: RootCodes,
}

impl<const N: usize, F: NumberForm<N>> Pass for AdamPass<'_, N, F> {
    type Begun = Moments;
    const NONE: Moments = Moments {
        means: [0.0; BLOCK],
        squares: [0.0; BLOCK],
        codes: SignedCodes::NONE,
        codes_of_roots: RootCodes::NONE,
    };

    /// New moments.
    #[inline(always)]
    fn begin(&mut self, block: usize, new: &mut Moments) {
        let rule = self.rule;
        // The direction is a sign, which a square has not.
        let added = rule.first_added * rule.direction;
        let penalty = rule.penalty * rule.direction;
        let scale = f32::from_ne_bytes(self.means.1[block]);
        let mean_unit = signed_unit(scale) * (1.0 - rule.first_added);
        let scale = f32::from_ne_bytes(self.roots.1[block]);
        let old_unit = root_unit(scale) * rule.second_stays.sqrt();
        let (parameter, gradient) = (&self.parameter[block], &self.gradient[block]);
        let (means, roots) = (&self.means.0[block], &self.roots.0[block]);
        let (mut largest_mean, mut largest_square) = (0, 0);
        for i in 0..BLOCK {
            let slope = penalty.mul_add(F::read(parameter[i]), F::read(gradient[i]));
            let mean = added.mul_add(slope, signed_in(mean_unit, means[i]));
            let old = root_in(old_unit, roots[i]);
            let square = old.mul_add(old, rule.second_added * slope * slope);
            new.means[i] = mean;
            new.squares[i] = square;
            largest_mean = largest_mean.max(mean.to_bits() & !SIGN);
            largest_square = largest_square.max(square.to_bits() & !SIGN);
        }
        let (mean, root) = (scale_of(largest_mean), scale_of(largest_square).sqrt());
        self.means.1[block] = mean.to_ne_bytes();
        self.roots.1[block] = root.to_ne_bytes();
        new.codes = SignedCodes::of(mean);
        new.codes_of_roots = RootCodes::of(root);
    }

    /// New numbers, and codes of the moments.
    #[inline(always)]
    fn end(&mut self, block: usize, new: &Moments) {
        let rule = self.rule;
        let place = place_of(self.place, block);
        let parameter = &mut self.parameter[block];
        let (means, roots) = (&mut self.means.0[block], &mut self.roots.0[block]);
        for (i, at) in (0..BLOCK).zip(0..) {
            let (mean, root) = (new.means[i], new.squares[i].sqrt());
            let per = root.mul_add(rule.root_correction, rule.epsilon);
            let after = (mean / per).mul_add(-rule.step, F::read(parameter[i]) * rule.decay);
            means[i] = new.codes.nearest(mean);
            roots[i] = new.codes_of_roots.nearest(root);
            parameter[i] = self.form.written(place.wrapping_add(at), after);
        }
    }
}

/// Updates by gradient descent with momentum.
struct MomentumPass<'m, const N: usize, F> {
    form: F,
    place: u32,
    rule: Momentum,
    parameter: &'m mut [Numbers<N>],
    gradient: &'m [Numbers<N>],
    held: (&'m mut [Codes], &'m mut [Scale]),
}

/// The new momentum of a block, and its codes.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Moved {
    moved: [f32; BLOCK],
    codes: SignedCodes,
}

impl<const N: usize, F: NumberForm<N>> Pass for MomentumPass<'_, N, F> {
    type Begun = Moved;
    const NONE: Moved = Moved {
        moved: [0.0; BLOCK],
        codes: SignedCodes::NONE,
    };

    /// The new momentum, and new numbers.
    #[inline(always)]
    fn begin(&mut self, block: usize, new: &mut Moved) {
        let rule = self.rule;
        let (slopes, again) = rule.nesterov.map_or((0.0, 1.0), |again| (1.0, again));
        let (slopes, again) = (-rule.step * rule.direction * slopes, -rule.step * again);
        let added = rule.added * rule.direction;
        let penalty = rule.penalty * rule.direction;
        let unit = signed_unit(f32::from_ne_bytes(self.held.1[block])) * rule.stays;
        let place = place_of(self.place, block);
        let (parameter, gradient) = (&mut self.parameter[block], &self.gradient[block]);
        let codes = &self.held.0[block];
        let mut largest = 0;
        for (i, at) in (0..BLOCK).zip(0..) {
            let before = F::read(parameter[i]);
            let slope = penalty.mul_add(before, F::read(gradient[i]));
            let moved = added.mul_add(slope, signed_in(unit, codes[i]));
            new.moved[i] = moved;
            largest = largest.max(moved.to_bits() & !SIGN);
            let along = again.mul_add(moved, slopes * slope);
            parameter[i] = self.form.written(place.wrapping_add(at), before + along);
        }
        let scale = scale_of(largest);
        self.held.1[block] = scale.to_ne_bytes();
        new.codes = SignedCodes::of(scale);
    }

    /// Codes of the momentum.
    #[inline(always)]
    fn end(&mut self, block: usize, new: &Moved) {
        let codes = &mut self.held.0[block];
        for (code, &moved) in codes.iter_mut().zip(&new.moved) {
            *code = new.codes.nearest(moved);
        }
    }
}

/// What the scale comes from, by the bits of the largest absolute value: that; not a number where it is not finite.
#[inline]
pub(super) fn scale_of(largest: u32) -> f32 {
    let largest = f32::from_bits(largest);
    if largest.is_finite() {
        largest
    } else {
        f32::NAN
    }
}

for_registers!(pub(super) wide_adam, adam_blocks, form: Wide, place: u32, rule: Adam, parameter: &mut [u8], gradient: &[u8], moments: [Held<'_>; 2]);
for_registers!(pub(super) half_adam, adam_blocks, form: Half, place: u32, rule: Adam, parameter: &mut [u8], gradient: &[u8], moments: [Held<'_>; 2]);
for_registers!(pub(super) wide_momentum, momentum_blocks, form: Wide, place: u32, rule: Momentum, parameter: &mut [u8], gradient: &[u8], held: Held<'_>);
for_registers!(pub(super) half_momentum, momentum_blocks, form: Half, place: u32, rule: Momentum, parameter: &mut [u8], gradient: &[u8], held: Held<'_>);

//! Numbers of 32 bits in blocks that share a scale.
//!
//! Responsible for what the forms of 8 bits have in common: how a block lies in memory, how a number becomes the nearest
//! code, and how blocks are shared out among threads, which changes no bit. Not responsible for what a code means
//! (`narrow.rs`, `moments.rs`).

use std::num::NonZeroUsize;

use memfit_engine::step::Narrow;

/// Numbers that share a scale.
#[expect(clippy::cast_possible_truncation, reason = "256")]
pub(crate) const BLOCK: usize = Narrow::BLOCK as usize;
/// Bytes of a number.
pub(crate) const WIDE: usize = size_of::<f32>();
/// The sign in the bits of a number.
pub(crate) const SIGN: u32 = 1 << 31;
/// Place of the lowest byte of a number in memory.
const LOWEST: usize = if cfg!(target_endian = "little") { 0 } else { 3 };
/// Adding it leaves the nearest whole number in the lowest bits, ties to even, for absolute values up to 2^22.
const ROUNDS: f32 = 12_582_912.0;

/// The nearest whole number, in its lowest byte.
#[inline]
pub(crate) const fn nearest_code(number: f32) -> u8 {
    (number + ROUNDS).to_bits().to_ne_bytes()[LOWEST]
}

/// The nearest whole number to a product, as [`nearest_code`].
#[inline]
pub(crate) fn nearest_code_of(number: f32, times: f32) -> u8 {
    number.mul_add(times, ROUNDS).to_bits().to_ne_bytes()[LOWEST]
}

/// The largest absolute value; infinite, or not a number, where one is.
#[inline]
pub(crate) fn largest(numbers: impl Iterator<Item = f32>) -> f32 {
    // The bits of an absolute value are in the order of the values, and those of what is not finite come last.
    let bits = numbers.map(|it| it.to_bits() & !SIGN);
    f32::from_bits(bits.fold(0, u32::max))
}

/// Numbers of each thread, in whole blocks, where fewer than `least` are not worth one.
pub(crate) fn part(count: usize, threads: NonZeroUsize, least: usize) -> usize {
    let part = count.div_ceil(threads.get()).max(least);
    part.next_multiple_of(BLOCK)
}

/// Does something with each, and says which is the last: the thread that asks does that itself.
pub(crate) fn each<T>(items: impl Iterator<Item = T>, mut with: impl FnMut(T, bool)) {
    let mut items = items.peekable();
    while let Some(item) = items.next() {
        let is_last = items.peek().is_none();
        with(item, is_last);
    }
}

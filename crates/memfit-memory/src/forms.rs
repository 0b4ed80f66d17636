//! How the numbers of a parameter and of its gradient lie in memory: in 32 bits, or in `bfloat16`.
//!
//! Responsible for reading them and for writing what was computed in 32 bits. Rounded to the nearest, most updates of a
//! `bfloat16` would be none: its steps are 0.4 to 0.8 % of a number. So it is rounded up or down at random, each in
//! proportion to how near it is, and the mean of what is written is what was computed (Zamirai et al., *Revisiting
//! `BFloat16` Training*, 2020). What is drawn depends on a seed and the number's place alone: the result is the same for any number of
//! threads, and no generator's state changes. Not responsible for the seed, nor for what is computed.

/// The form of a parameter's numbers and of its gradient's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// 32 bits.
    Wide,
    /// `bfloat16`; what is written is rounded by what this seed draws.
    Half(u32),
}

impl Form {
    /// Bytes of a number.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Wide => 4,
            Self::Half(_) => 2,
        }
    }
}

/// A form of `N` bytes a number.
pub(crate) trait NumberForm<const N: usize>: Copy + Send {
    /// The number in 32 bits.
    fn read(bytes: [u8; N]) -> f32;
    /// What is written for the number at a place.
    fn written(self, place: u32, number: f32) -> [u8; N];
}

/// 32 bits.
#[derive(Clone, Copy)]
pub(crate) struct Wide;

/// `bfloat16`, rounded by what this seed draws.
#[derive(Clone, Copy)]
pub(crate) struct Half(pub(crate) u32);

impl NumberForm<4> for Wide {
    #[inline]
    fn read(bytes: [u8; 4]) -> f32 {
        f32::from_ne_bytes(bytes)
    }

    #[inline]
    fn written(self, _: u32, number: f32) -> [u8; 4] {
        number.to_ne_bytes()
    }
}

impl NumberForm<2> for Half {
    #[inline]
    fn read(bytes: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_ne_bytes(bytes)) << 16)
    }

    #[inline]
    fn written(self, place: u32, number: f32) -> [u8; 2] {
        // Bits of an absolute value are in the order of the values, so adding below the last bit that stays rounds away
        // from zero as often as that is near. NaN would overflow; infinity has no bits there and stays.
        let drawn = drawn(self.0, place) >> 16;
        let rounded = number.to_bits().wrapping_add(drawn) >> 16;
        let bits = if number.is_nan() {
            NOT_A_NUMBER
        } else {
            rounded
        };
        #[expect(clippy::cast_possible_truncation, reason = "the upper half is empty")]
        let half = bits as u16;
        half.to_ne_bytes()
    }
}

/// `bfloat16` that is not a number.
const NOT_A_NUMBER: u32 = 0x7fc0;

/// 32 random bits for a place: the finaliser of `MurmurHash3`, in which each bit of what goes in changes half of the bits.
#[inline]
const fn drawn(seed: u32, place: u32) -> u32 {
    let mut bits = place.wrapping_mul(0x9e37_79b1) ^ seed;
    bits = (bits ^ (bits >> 16)).wrapping_mul(0x85eb_ca6b);
    bits = (bits ^ (bits >> 13)).wrapping_mul(0xc2b2_ae35);
    bits ^ (bits >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(seed: u32, place: u32, number: f32) -> f32 {
        Half::read(Half(seed).written(place, number))
    }

    #[test]
    fn what_a_bfloat16_can_hold_is_written_as_it_is() {
        let held = [
            0.0,
            -0.0,
            1.0,
            -3.5,
            1.0e-38,
            3.0e38_f32,
            f32::INFINITY,
            f32::NEG_INFINITY,
        ];
        for number in held.map(|it| f32::from_bits(it.to_bits() & 0xffff_0000)) {
            for place in 0..100 {
                assert_eq!(rounded(7, place, number).to_bits(), number.to_bits());
            }
        }
        assert!(rounded(1, 2, f32::NAN).is_nan());
        let all_ones = f32::from_bits(u32::MAX);
        assert!((0..1000).all(|place| rounded(3, place, all_ones).is_nan()));
    }

    #[test]
    fn the_mean_of_what_is_written_is_the_number() {
        let count: u32 = 1 << 16;
        for number in [1.001_f32, -1.001, 0.123_456, 1.0 + 1.0 / 1024.0, -7.77e-12] {
            for seed in [0, 1, 0xdead_beef] {
                let written = (0..count).map(|place| rounded(seed, place, number));
                let written: Vec<f64> = written.map(f64::from).collect();
                let (below, above) = (
                    written.iter().copied().fold(f64::INFINITY, f64::min),
                    written.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                );
                let step = above - below;
                assert!(step > 0.0 && step <= f64::from(number.abs()) / 128.0);
                let mean = written.iter().sum::<f64>() / f64::from(count);
                // Five deviations of the mean of so many draws of two values.
                let off = step * 0.5 / f64::from(count).sqrt() * 5.0;
                assert!((mean - f64::from(number)).abs() < off, "{number} {mean}");
            }
        }
    }

    #[test]
    fn neighbours_and_following_seeds_are_rounded_apart() {
        let up = |seed, place| rounded(seed, place, 1.0 + 1.0 / 256.0) > 1.0;
        let same = |a: &dyn Fn(u32) -> bool, b: &dyn Fn(u32) -> bool| {
            (0..10_000).filter(|&it| a(it) == b(it)).count()
        };
        let by_place = same(&|it| up(5, it), &|it| up(5, it + 1));
        let by_seed = same(&|it| up(5, it), &|it| up(6, it));
        let in_time = same(&|it| up(it, 9), &|it| up(it + 1, 9));
        for alike in [by_place, by_seed, in_time] {
            assert!((4_700..5_300).contains(&alike), "{alike}");
        }
    }
}

//! From values to places on paper, and the round values that are written along an axis.

use memfit_engine::bytes::Bytes;

/// A linear axis.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    /// Values at its two ends.
    pub(super) from: f64,
    pub(super) to: f64,
    /// Places of the two ends, in pixels.
    pub(super) start: f64,
    pub(super) end: f64,
}

impl Axis {
    /// The place of a value; what lies outside stays at the edge.
    pub(super) fn at(&self, value: f64) -> f64 {
        let part = (value - self.from) / (self.to - self.from).max(f64::MIN_POSITIVE);
        self.start + part.clamp(0.0, 1.0) * (self.end - self.start)
    }

    pub(super) fn contains(&self, value: f64) -> bool {
        self.from <= value && value <= self.to
    }

    /// About `most` round values at equal distances, and how many digits tell them apart.
    pub(super) fn ticks(&self, most: u32) -> (Vec<f64>, usize) {
        let span = self.to - self.from;
        if !span.is_finite() || span <= 0.0 {
            return (vec![self.from], 2);
        }
        let rough = span / f64::from(most.max(1));
        let magnitude = 10_f64.powf(rough.log10().floor());
        let factors = [1.0, 2.0, 2.5, 5.0, 10.0];
        let factor = factors.into_iter().find(|f| f * magnitude >= rough * 0.999);
        let step = factor.unwrap_or(10.0) * magnitude;
        let first = (self.from / step - 1e-9).ceil();
        let values = (0..200_u32)
            .map(|i| (first + f64::from(i)) * step)
            .take_while(|value| *value <= self.to + step * 1e-9);
        let digits = (0..6).find(|&digits| {
            let scaled = step * 10_f64.powi(digits);
            (scaled - scaled.round()).abs() < 1e-6 * scaled.max(1.0)
        });
        let digits = digits.and_then(|digits| usize::try_from(digits).ok());
        (values.collect(), digits.unwrap_or(6))
    }
}

/// The unit in which bytes of this size are read, and how many bytes it has.
pub(super) fn unit(largest: Bytes) -> (&'static str, f64) {
    let units = [("GiB", 1_u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let fits = units.into_iter().find(|&(_, size)| largest.0 >= size);
    let (name, size) = fits.unwrap_or(("B", 1));
    (name, Bytes(size).as_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        let axis = |from, to| Axis {
            from,
            to,
            start: 0.0,
            end: 100.0,
        };
        let written = |from, to, most| {
            let (values, digits) = axis(from, to).ticks(most);
            let texts = values.iter().map(|value| format!("{value:.digits$}"));
            texts.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(written(0.97, 1.31, 6), "1.0 1.1 1.2 1.3");
        assert_eq!(written(2.3, 6.6, 8), "3 4 5 6");
        assert_eq!(written(0.0, 1.1, 5), "0.00 0.25 0.50 0.75 1.00");
        assert_eq!(axis(1.0, 1.0).ticks(5).0, [1.0]);
        assert_eq!(axis(0.0, f64::NAN).ticks(5).0, [0.0]);
    }
}

//! Measured seconds by size of work.
//!
//! Responsible for one curve: its points, their check, and what it says between and beyond them. Not
//! responsible for which op follows which curve ([`crate::cost`]).
//!
//! Invariant: [`Curve::seconds`] never falls when the work grows, whatever noise the points hold.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cost::error::CostError;

/// One measured size.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Point {
    /// FLOPs or bytes, as the curve's owner says.
    pub work: f64,
    /// Seconds of the whole op, dispatch included.
    pub seconds: f64,
}

/// Seconds of an op by its work, as measured at a few sizes.
///
/// A roofline (Williams, Waterman and Patterson, *Roofline*, CACM 52(4), 2009) with one number for each roof
/// says that small ops reach the peak rate, which they do not. A curve holds the rate that each size reached.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Curve {
    /// Ascending by work.
    pub points: Vec<Point>,
}

impl Curve {
    /// Checks that there are points and that they are positive, finite and ascending.
    ///
    /// # Errors
    ///
    /// Names the number that is not.
    pub fn check(&self, what: &str) -> Result<(), CostError> {
        if self.points.is_empty() {
            return Err(CostError::NoPoints(what.to_owned()));
        }
        let mut before = 0.0;
        for point in &self.points {
            for (name, value) in [("work", point.work), ("seconds", point.seconds)] {
                if !(value.is_finite() && value > 0.0) {
                    let what = format!("{what}.{name}");
                    return Err(CostError::NotPositive { what, value });
                }
            }
            if point.work <= before {
                return Err(CostError::NotAscending(what.to_owned()));
            }
            before = point.work;
        }
        Ok(())
    }

    /// Seconds for some work.
    ///
    /// Between two points, a straight line in the logarithms of both axes, so that the rate changes
    /// smoothly over orders of magnitude. Below the first point its seconds, which are mostly dispatch; above
    /// the last its rate. A point that was faster than a smaller one counts as slow as that one: noise.
    #[must_use]
    pub fn seconds(&self, work: f64) -> f64 {
        let mut below: Option<Point> = None;
        for &point in &self.points {
            let slowest = below.map_or(0.0, |p: Point| p.seconds);
            let point = Point {
                seconds: point.seconds.max(slowest),
                ..point
            };
            if work <= point.work {
                return below.map_or(point.seconds, |below| between(below, point, work));
            }
            below = Some(point);
        }
        below.map_or(0.0, |last| last.seconds * (work / last.work))
    }
}

fn between(low: Point, high: Point, work: f64) -> f64 {
    let share = (work / low.work).ln() / (high.work / low.work).ln();
    let seconds = low.seconds * (high.seconds / low.seconds).powf(share);
    // Rounding must not break the order.
    seconds.clamp(low.seconds, high.seconds)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn curve(points: &[(f64, f64)]) -> Curve {
        let points = points.iter();
        Curve {
            points: points
                .map(|&(work, seconds)| Point { work, seconds })
                .collect(),
        }
    }

    #[test]
    fn points_are_hit_and_the_ends_go_on_as_documented() {
        let curve = curve(&[(1e3, 1e-6), (1e5, 1e-5), (1e6, 1e-4)]);
        for point in &curve.points {
            assert!((curve.seconds(point.work) / point.seconds - 1.0).abs() < 1e-12);
        }
        // Half way in the logarithm: sqrt(1e-6 * 1e-5) at 1e4.
        assert!((curve.seconds(1e4) / 10_f64.powf(-5.5) - 1.0).abs() < 1e-12);
        assert!((curve.seconds(1.0) - 1e-6).abs() < 1e-18);
        assert!((curve.seconds(1e8) - 1e-2).abs() < 1e-12);
    }

    #[test]
    fn bad_points_are_named() {
        let message =
            |points: &[(f64, f64)]| curve(points).check("matmul").unwrap_err().to_string();
        assert!(message(&[]).contains("`matmul`"));
        assert!(message(&[(1.0, f64::NAN)]).contains("`matmul.seconds`"));
        assert!(message(&[(-1.0, 1.0)]).contains("`matmul.work`"));
        assert!(message(&[(2.0, 1.0), (2.0, 1.0)]).contains("ascend"));
        assert!(curve(&[(1.0, 1.0), (2.0, 0.5)]).check("matmul").is_ok());
    }

    proptest! {
        #[test]
        fn more_work_never_takes_less_time(
            mut works in prop::collection::vec(1.0_f64..1e12, 1..8),
            seconds in prop::collection::vec(1e-7_f64..1.0, 8),
            first in 0.0_f64..1e13,
            second in 0.0_f64..1e13,
        ) {
            works.sort_by(f64::total_cmp);
            works.dedup();
            let points: Vec<_> = works.into_iter().zip(seconds).collect();
            let curve = curve(&points);
            prop_assert!(curve.check("any").is_ok());
            let (less, more) = (first.min(second), first.max(second));
            prop_assert!(curve.seconds(less) <= curve.seconds(more));
            prop_assert!(curve.seconds(more).is_finite());
        }
    }
}

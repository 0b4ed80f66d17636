//! How long each op takes.
//!
//! Responsible for turning a device profile or measured op times into seconds per op. Not responsible
//! for measuring (the Python package does) nor for what is recomputed ([`crate::plan`]).
//!
//! Ratios of these times are what a plan needs. On a CPU the roofline is crude, because tensors sit in
//! cache and a step is 2 to 3.5 times faster than it says; it still ranks a matrix product above a copy.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::trace::{Phase, Trace};

/// What a device can do, measured by calibration or taken from a datasheet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceProfile {
    /// What was measured, for people.
    pub name: String,
    /// Floating-point operations a second in a large matrix product, by element type (`float32`).
    pub flops_per_second: BTreeMap<String, f64>,
    /// Bytes a second read plus written by a large element-wise op.
    pub bytes_per_second: f64,
    /// Least time of any op.
    pub op_overhead_seconds: f64,
}

/// Where op times come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum CostSource {
    /// `max(flops / rate, bytes / bandwidth) + overhead` for each op.
    Roofline {
        /// The device.
        profile: DeviceProfile,
    },
    /// Seconds of each op of the trace, from one real step.
    Profile {
        /// Indexed like [`Trace::ops`].
        op_seconds: Vec<f64>,
    },
}

/// Why op times cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CostError {
    /// The profile was taken of another trace.
    #[error(
        "the profile has {found} op times, the trace has {wanted} ops: profile this trace again"
    )]
    OtherTrace {
        /// Number of op times.
        found: usize,
        /// Number of ops.
        wanted: usize,
    },
    /// A rate or time is not a positive, finite number.
    #[error("`{what}` of the cost source is {value}, which is not a positive number")]
    NotPositive {
        /// Which number.
        what: String,
        /// Its value.
        value: f64,
    },
}

/// Seconds per op of one trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    seconds: Vec<f64>,
    source: String,
    update_bytes_per_second: f64,
}

impl Costs {
    /// Op times of `trace` under `source`.
    ///
    /// # Errors
    ///
    /// A profile of another trace, or numbers that are not positive and finite.
    pub fn new(trace: &Trace, source: &CostSource) -> Result<Self, CostError> {
        match source {
            CostSource::Roofline { profile } => {
                positive("bytes_per_second", profile.bytes_per_second)?;
                positive("op_overhead_seconds", profile.op_overhead_seconds)?;
                for (dtype, &rate) in &profile.flops_per_second {
                    positive(&format!("flops_per_second[{dtype}]"), rate)?;
                }
                Ok(Self {
                    seconds: roofline(trace, profile),
                    source: format!("roofline ({})", profile.name),
                    update_bytes_per_second: profile.bytes_per_second,
                })
            }
            CostSource::Profile { op_seconds } => {
                let (found, wanted) = (op_seconds.len(), trace.ops.len());
                if found != wanted {
                    return Err(CostError::OtherTrace { found, wanted });
                }
                if let Some(&value) = op_seconds.iter().find(|s| !s.is_finite() || **s < 0.0) {
                    return Err(CostError::NotPositive {
                        what: "op_seconds".into(),
                        value,
                    });
                }
                Ok(Self {
                    seconds: op_seconds.clone(),
                    source: "profile (op times of one real step)".to_owned(),
                    update_bytes_per_second: update_rate(trace, op_seconds),
                })
            }
        }
    }

    /// The same ops on a batch scaled by `work`: times shrink with the work, not below the floor of a
    /// tenth, as no op gets arbitrarily cheap.
    #[must_use]
    pub fn scaled(&self, full: &Trace, part: &Trace) -> Self {
        let seconds =
            self.seconds
                .iter()
                .zip(full.ops.iter().zip(&part.ops))
                .map(|(&s, (f, p))| {
                    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 1.0 };
                    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
                    let work = if f.flops > 0 {
                        ratio(p.flops as f64, f.flops as f64)
                    } else {
                        ratio(p.moved_bytes.as_f64(), f.moved_bytes.as_f64())
                    };
                    s * work.max(0.1)
                });
        Self {
            seconds: seconds.collect(),
            ..self.clone()
        }
    }

    /// Seconds of one op.
    #[must_use]
    pub fn seconds(&self, op: usize) -> f64 {
        self.seconds.get(op).copied().unwrap_or(0.0)
    }

    /// Seconds of the ops of some phases.
    #[must_use]
    pub fn phase_seconds(&self, trace: &Trace, phases: &[Phase]) -> f64 {
        let ops = trace.ops.iter().zip(&self.seconds);
        ops.filter(|(op, _)| phases.contains(&op.phase))
            .map(|(_, &seconds)| seconds)
            .sum()
    }

    /// Seconds of the whole step.
    #[must_use]
    pub fn step_seconds(&self) -> f64 {
        self.seconds.iter().sum()
    }

    /// Seconds to add `bytes` of gradient into another gradient: two reads, one write.
    #[must_use]
    pub fn accumulate_seconds(&self, bytes: f64) -> f64 {
        3.0 * bytes / self.update_bytes_per_second
    }

    /// Where the times come from, for people.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }
}

fn positive(what: &str, value: f64) -> Result<(), CostError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(CostError::NotPositive {
        what: what.to_owned(),
        value,
    })
}

fn roofline(trace: &Trace, profile: &DeviceProfile) -> Vec<f64> {
    let fallback = profile
        .flops_per_second
        .values()
        .copied()
        .fold(0.0, f64::max);
    let rate_of = |dtype: &str| {
        profile
            .flops_per_second
            .get(dtype)
            .copied()
            .unwrap_or(fallback)
    };
    let seconds = trace.ops.iter().map(|op| {
        let only_reserves = trace.string(op.name).contains("empty");
        if op.view || only_reserves {
            return profile.op_overhead_seconds;
        }
        let dtype = op
            .outputs
            .first()
            .map_or("", |&v| trace.string(trace.values[v.index()].dtype));
        let rate = rate_of(dtype);
        #[expect(
            clippy::cast_precision_loss,
            reason = "times need no more than 53 bits"
        )]
        let compute = if rate > 0.0 {
            op.flops as f64 / rate
        } else {
            0.0
        };
        let transfer = op.moved_bytes.as_f64() / profile.bytes_per_second;
        compute.max(transfer) + profile.op_overhead_seconds
    });
    seconds.collect()
}

/// Bytes a second of the element-wise ops in a profiled step, for ops that the step does not contain.
fn update_rate(trace: &Trace, op_seconds: &[f64]) -> f64 {
    let (mut bytes, mut seconds) = (0.0, 0.0);
    for (op, &time) in trace.ops.iter().zip(op_seconds) {
        if op.flops == 0 && !op.view && op.moved_bytes.0 > 1 << 16 {
            bytes += op.moved_bytes.as_f64();
            seconds += time;
        }
    }
    // A step without any such op has no gradients worth adding up either: any plausible rate will do.
    if seconds > 0.0 { bytes / seconds } else { 1e10 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample;

    pub(crate) fn profile() -> DeviceProfile {
        DeviceProfile {
            name: "test".into(),
            flops_per_second: BTreeMap::from([("float32".into(), 1e9)]),
            bytes_per_second: 1e9,
            op_overhead_seconds: 1e-6,
        }
    }

    #[test]
    fn the_slower_of_compute_and_transfer_counts() {
        let mut trace = sample::chain();
        trace.ops[0].flops = 1_000_000;
        let costs = Costs::new(&trace, &CostSource::Roofline { profile: profile() }).unwrap();
        assert!((costs.seconds(0) - (1e-3 + 1e-6)).abs() < 1e-12);
        let moved = trace.ops[1].moved_bytes.as_f64();
        assert!((costs.seconds(1) - (moved / 1e9 + 1e-6)).abs() < 1e-12);
    }

    #[test]
    fn a_profile_of_another_trace_is_refused() {
        let source = CostSource::Profile {
            op_seconds: vec![1.0; 3],
        };
        let error = Costs::new(&sample::chain(), &source).unwrap_err();
        assert_eq!(
            error,
            CostError::OtherTrace {
                found: 3,
                wanted: 9
            }
        );
        let source = CostSource::Profile {
            op_seconds: vec![f64::NAN; 9],
        };
        assert!(matches!(
            Costs::new(&sample::chain(), &source),
            Err(CostError::NotPositive { .. })
        ));
    }
}

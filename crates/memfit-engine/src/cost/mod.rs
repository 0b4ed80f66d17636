//! How long each op takes.
//!
//! Responsible for turning a device profile or measured op times into seconds per op. Not responsible
//! for measuring (the Python package does) nor for what is recomputed ([`crate::plan`]).
//!
//! Three sources, from crude to good. A flat roofline has one rate for each roof and is crude on a CPU,
//! where small tensors sit in cache. A calibrated one has curves: the seconds that each size took. A
//! profiled step has the seconds of every op. Ratios of these times are what a plan needs.

pub mod curve;
mod derived_times;
pub mod devices;
mod error;

pub use error::CostError;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;
use crate::cost::curve::Curve;
use crate::trace::{Op, OpIndex, Phase, Trace};

/// Name in [`DeviceProfile::flops_per_second`] for float32 convolutions on CUDA, which use TF32 tensor cores
/// unless `torch.backends.cudnn.allow_tf32` is off (torch documentation, *CUDA semantics*).
pub const TF32: &str = "tf32";

/// What a device can do, measured by calibration or taken from a datasheet.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct DeviceProfile {
    /// What was measured, for people.
    pub name: String,
    /// Floating-point operations a second in a large matrix product, by element type (`float32`). One that is
    /// missing computes as `float32` does, else as the fastest.
    pub flops_per_second: BTreeMap<String, f64>,
    /// Bytes a second read plus written by a large element-wise op.
    pub bytes_per_second: f64,
    /// Least time of any op.
    pub op_overhead_seconds: f64,
    /// Bytes a second at which memory is touched for the first time that the system has just mapped, beyond the time of
    /// filling it. Absent where large results are not mapped anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_memory_bytes_per_second: Option<f64>,
    /// Seconds by size, where measured.
    #[serde(default, skip_serializing_if = "Curves::is_empty")]
    pub curves: Curves,
    /// How fast bytes move when they are offloaded.
    #[serde(default, skip_serializing_if = "Transfers::is_empty")]
    pub transfers: Transfers,
}

/// Measured seconds of ops by their work, dispatch included.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Curves {
    /// By kind (`matmul`, `convolution`, `convolution_backward`, `attention`, `attention_backward`) and element
    /// type; work in FLOPs. A kind that is missing follows `matmul`, and without that the flat rate.
    #[serde(default)]
    pub compute: BTreeMap<String, BTreeMap<String, Curve>>,
    /// By operator without overload (`gelu_backward`); work in bytes moved. Others follow `in_place` where
    /// they make no tensor and `elementwise` where they do; without those, the flat bandwidth.
    #[serde(default)]
    pub memory: BTreeMap<String, Curve>,
}

impl Curves {
    fn is_empty(&self) -> bool {
        self.compute.is_empty() && self.memory.is_empty()
    }

    fn check(&self) -> Result<(), CostError> {
        for (kind, by_type) in &self.compute {
            for (dtype, curve) in by_type {
                curve.check(&format!("curves.compute.{kind}.{dtype}"))?;
            }
        }
        for (operator, curve) in &self.memory {
            curve.check(&format!("curves.memory.{operator}"))?;
        }
        Ok(())
    }
}

/// Bytes a second between a device and where it offloads to, each absent where not known.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default)]
pub struct Transfers {
    /// From pinned host memory.
    pub host_to_device_pinned: Option<f64>,
    /// To pinned host memory.
    pub device_to_host_pinned: Option<f64>,
    /// From pageable host memory.
    pub host_to_device_pageable: Option<f64>,
    /// To pageable host memory.
    pub device_to_host_pageable: Option<f64>,
    /// Writing files, on the disk when counted.
    pub disk_write: Option<f64>,
    /// Reading files that no cache holds.
    pub disk_read: Option<f64>,
}

impl Transfers {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn check(&self) -> Result<(), CostError> {
        for (what, rate) in [
            ("host_to_device_pinned", self.host_to_device_pinned),
            ("device_to_host_pinned", self.device_to_host_pinned),
            ("host_to_device_pageable", self.host_to_device_pageable),
            ("device_to_host_pageable", self.device_to_host_pageable),
            ("disk_write", self.disk_write),
            ("disk_read", self.disk_read),
        ] {
            rate.map_or(Ok(()), |rate| positive(&format!("transfers.{what}"), rate))?;
        }
        Ok(())
    }
}

impl DeviceProfile {
    /// Checks every number.
    ///
    /// # Errors
    ///
    /// Names the one that is not positive and finite, or the curve that does not ascend.
    pub fn check(&self) -> Result<(), CostError> {
        positive("bytes_per_second", self.bytes_per_second)?;
        positive("op_overhead_seconds", self.op_overhead_seconds)?;
        if let Some(rate) = self.new_memory_bytes_per_second {
            positive("new_memory_bytes_per_second", rate)?;
        }
        for (dtype, &rate) in &self.flops_per_second {
            positive(&format!("flops_per_second[{dtype}]"), rate)?;
        }
        self.curves.check()?;
        self.transfers.check()
    }

    fn source(&self) -> String {
        if self.curves.is_empty() {
            format!("roofline ({})", self.name)
        } else {
            self.name.clone()
        }
    }
}

/// Where op times come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum CostSource {
    /// For each op the slower of computing and moving bytes: by the profile's curves where it has them, else
    /// `max(flops / rate, bytes / bandwidth) + overhead`.
    Roofline {
        /// The device.
        profile: DeviceProfile,
    },
    /// Seconds of each op of the trace, from one real step.
    Profile {
        /// Indexed like [`Trace::ops`].
        op_seconds: Vec<f64>,
        /// As in [`DeviceProfile`], for ops in another type than theirs; one that is missing is no faster.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        flops_per_second: BTreeMap<String, f64>,
    },
}

impl CostSource {
    /// The seconds of each op of a trace, where no more is known.
    #[must_use]
    pub const fn profile(op_seconds: Vec<f64>) -> Self {
        Self::Profile {
            op_seconds,
            flops_per_second: BTreeMap::new(),
        }
    }

    /// Is the device known to multiply matrices of a type more slowly than those of 32 bits?
    #[must_use]
    pub fn slows_down(&self, dtype: &str) -> bool {
        let rates = match self {
            Self::Roofline { profile } => &profile.flops_per_second,
            Self::Profile {
                flops_per_second, ..
            } => flops_per_second,
        };
        let wide = rates.get("float32");
        rates
            .get(dtype)
            .zip(wide)
            .is_some_and(|(own, wide)| own < wide)
    }
}

/// Seconds per op of one trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    seconds: Vec<f64>,
    source: String,
    update_bytes_per_second: f64,
    /// As in [`CostSource::Profile`].
    flops_per_second: BTreeMap<String, f64>,
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
                profile.check()?;
                Ok(Self {
                    seconds: roofline(trace, profile),
                    source: profile.source(),
                    update_bytes_per_second: profile.bytes_per_second,
                    flops_per_second: profile.flops_per_second.clone(),
                })
            }
            CostSource::Profile {
                op_seconds,
                flops_per_second,
            } => {
                for (dtype, &rate) in flops_per_second {
                    positive(&format!("flops_per_second[{dtype}]"), rate)?;
                }
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
                    flops_per_second: flops_per_second.clone(),
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

    /// Times of another way of running the step, from times of its ops: an op that both have takes the same
    /// time, or less in a type in which the device computes faster; any other takes it by its work, at the rate of the
    /// ops of its name or else of the step.
    #[must_use]
    pub fn carried_over(&self, from: &Trace, to: &Trace) -> Self {
        Self {
            seconds: derived_times::seconds(from, &self.seconds, &self.flops_per_second, to),
            source: format!("{}; others by their work", self.source),
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

    /// Seconds to copy `bytes`: one read, one write.
    #[must_use]
    pub fn copy_seconds(&self, bytes: f64) -> f64 {
        2.0 * bytes / self.update_bytes_per_second
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
    let overhead = profile.op_overhead_seconds;
    let seconds = trace.ops.iter().zip(0..).map(|(op, index)| {
        let name = trace.string(op.name);
        if op.view || name.contains("empty") {
            return overhead;
        }
        let compute = compute_seconds(trace, op, name, profile);
        let transfer = transfer_seconds(op, name, profile);
        // A curve holds the dispatch and what new memory takes, a flat rate does not.
        let mapping = mapping_seconds(trace, op, OpIndex(index), profile);
        let whole = |part: Part| match part {
            Part::Measured(seconds) => seconds,
            Part::Flat(seconds) => seconds + overhead + mapping,
        };
        whole(compute).max(whole(transfer)).max(overhead)
    });
    seconds.collect()
}

/// Results of so many bytes and more are mapped anew by glibc, whatever was freed before: `M_MMAP_THRESHOLD` grows no
/// further (mallopt(3), `DEFAULT_MMAP_THRESHOLD_MAX`).
const MAPPED_ANEW: Bytes = Bytes(32 << 20);

/// What touching the new memory of an op's large results takes.
fn mapping_seconds(trace: &Trace, op: &Op, id: OpIndex, profile: &DeviceProfile) -> f64 {
    let Some(rate) = profile.new_memory_bytes_per_second else {
        return 0.0;
    };
    let made = op
        .outputs
        .iter()
        .map(|value| &trace.allocations[trace.values[value.index()].allocation.index()]);
    let large = made.filter(|it| it.producer == Some(id) && it.bytes >= MAPPED_ANEW);
    large.map(|it| it.bytes.as_f64()).sum::<f64>() / rate
}

/// One side of the roofline.
#[derive(Clone, Copy)]
enum Part {
    /// From a curve, dispatch included.
    Measured(f64),
    /// From a rate.
    Flat(f64),
}

fn compute_seconds(trace: &Trace, op: &Op, name: &str, profile: &DeviceProfile) -> Part {
    if op.flops == 0 {
        return Part::Flat(0.0);
    }
    #[expect(
        clippy::cast_precision_loss,
        reason = "times need no more than 53 bits"
    )]
    let flops = op.flops as f64;
    let dtype = derived_times::computed_in(trace, op);
    let kind = kind_of(name);
    let curves = &profile.curves.compute;
    let curve = [kind, "matmul"]
        .iter()
        .find_map(|kind| curves.get(*kind)?.get(dtype));
    if let Some(curve) = curve {
        return Part::Measured(curve.seconds(flops));
    }
    let rates = &profile.flops_per_second;
    let tensor_cores = dtype == "float32" && kind.starts_with("convolution");
    let rate = tensor_cores
        .then(|| rates.get(TF32))
        .flatten()
        .or_else(|| rates.get(dtype))
        .or_else(|| rates.get("float32"))
        .copied()
        .unwrap_or_else(|| rates.values().copied().fold(0.0, f64::max));
    Part::Flat(if rate > 0.0 { flops / rate } else { 0.0 })
}

/// Which curve an op with FLOPs follows.
fn kind_of(name: &str) -> &'static str {
    match (
        name.contains("conv"),
        name.contains("attention"),
        name.contains("backward"),
    ) {
        (true, _, false) => "convolution",
        (true, _, true) => "convolution_backward",
        (_, true, false) => "attention",
        (_, true, true) => "attention_backward",
        _ => "matmul",
    }
}

fn transfer_seconds(op: &Op, name: &str, profile: &DeviceProfile) -> Part {
    let bytes = op.moved_bytes.as_f64();
    let curves = &profile.curves.memory;
    // `aten.gelu_backward.default` is `gelu_backward`.
    let operator = name.split('.').nth(1).unwrap_or(name);
    let makes_none = op.outputs.is_empty() || operator.ends_with('_');
    let common = if makes_none {
        "in_place"
    } else {
        "elementwise"
    };
    let curve = curves
        .get(operator)
        .or_else(|| curves.get(common))
        .or_else(|| curves.get("elementwise"));
    curve.map_or(Part::Flat(bytes / profile.bytes_per_second), |curve| {
        Part::Measured(curve.seconds(bytes))
    })
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
    use crate::cost::curve::Point;
    use crate::trace::sample;

    pub(crate) fn profile() -> DeviceProfile {
        DeviceProfile {
            name: "test".into(),
            flops_per_second: BTreeMap::from([("float32".into(), 1e9)]),
            bytes_per_second: 1e9,
            op_overhead_seconds: 1e-6,
            ..DeviceProfile::default()
        }
    }

    #[test]
    fn large_results_take_new_memory_that_small_ones_do_not() {
        let mut trace = sample::chain();
        let (index, op) = (0..)
            .zip(&trace.ops)
            .find(|(_, op)| !op.view && !op.outputs.is_empty())
            .expect("an op that makes something");
        let made = trace.values[op.outputs[0].index()].allocation.index();
        let plain = profile();
        let dear = DeviceProfile {
            new_memory_bytes_per_second: Some(1e6),
            ..profile()
        };
        trace.allocations[made].producer = Some(OpIndex(index));
        let at = usize::try_from(index).unwrap();
        for (bytes, more) in [(MAPPED_ANEW.0 - 1, 0.0), (MAPPED_ANEW.0, 33.554_432)] {
            trace.allocations[made].bytes = Bytes(bytes);
            let before = seconds_of(at, &trace, plain.clone());
            let after = seconds_of(at, &trace, dear.clone());
            assert!(
                (after - before - more).abs() < 1e-9,
                "{bytes}: {before} {after}"
            );
        }
        let wrong = DeviceProfile {
            new_memory_bytes_per_second: Some(0.0),
            ..profile()
        };
        assert!(wrong.check().is_err());
    }

    fn line(work: f64, seconds: f64) -> Curve {
        Curve {
            points: vec![Point { work, seconds }],
        }
    }

    fn seconds_of(op: usize, trace: &Trace, profile: DeviceProfile) -> f64 {
        let costs = Costs::new(trace, &CostSource::Roofline { profile }).unwrap();
        costs.seconds(op)
    }

    #[test]
    fn curves_come_before_rates_and_missing_ones_fall_back_as_documented() {
        let mut trace = sample::chain();
        trace.ops[0].flops = 1_000_000;
        let flat = seconds_of(0, &trace, profile());
        let with = |kind: &str, dtype: &str| {
            let mut measured = profile();
            let curves = BTreeMap::from([(dtype.to_owned(), line(1e6, 0.5))]);
            measured.curves.compute.insert(kind.to_owned(), curves);
            seconds_of(0, &trace, measured)
        };
        assert!((with("matmul", "float32") - 0.5).abs() < 1e-12);
        assert!((with("matmul", "bfloat16") - flat).abs() < 1e-12);
        assert!((with("convolution", "float32") - flat).abs() < 1e-12);

        let mut other = profile();
        other.flops_per_second = BTreeMap::from([("bfloat16".into(), 4e9), ("int8".into(), 8e9)]);
        assert!((seconds_of(0, &trace, other) - (1e6 / 8e9 + 1e-6)).abs() < 1e-12);

        let mut memory = profile();
        memory
            .curves
            .memory
            .insert("elementwise".into(), line(1.0, 0.25));
        let moved = trace.ops[1].moved_bytes.as_f64();
        assert!((seconds_of(1, &trace, memory.clone()) - moved * 0.25).abs() < 1e-9);
        let name = trace.string(trace.ops[1].name).split('.').nth(1).unwrap();
        memory.curves.memory.insert(name.to_owned(), line(1.0, 0.5));
        assert!((seconds_of(1, &trace, memory) - moved * 0.5).abs() < 1e-9);
    }

    #[test]
    fn products_in_8_bits_have_a_rate_of_their_own() {
        let mut trace = sample::chain();
        trace.ops[0].flops = 1_000_000;
        trace.strings.push("aten._int_mm.default".to_owned());
        trace.ops[0].name = u32::try_from(trace.strings.len() - 1).unwrap();
        let plain = seconds_of(0, &trace, profile());
        let mut fast = profile();
        let plain_rate = fast.flops_per_second["float32"];
        fast.flops_per_second
            .insert("int8".into(), 4.0 * plain_rate);
        let moved = 1e6 / (4.0 * plain_rate) + 1e-6;
        assert!((plain - (1e6 / plain_rate + 1e-6)).abs() < 1e-12);
        assert!((seconds_of(0, &trace, fast.clone()) - moved).abs() < 1e-12);

        let mut own = sample::chain();
        own.ops[0].flops = 1_000_000;
        let source = CostSource::Profile {
            op_seconds: vec![1.0; own.ops.len()],
            flops_per_second: fast.flops_per_second,
        };
        let costs = Costs::new(&own, &source).unwrap();
        let carried = costs.carried_over(&own, &trace);
        assert!((carried.seconds(0) - 0.25).abs() < 1e-12);
    }

    #[test]
    fn a_profile_written_before_there_were_curves_is_read() {
        let old = r#"{"name": "old", "flops_per_second": {"float32": 1.0}, "bytes_per_second": 1.0,
            "op_overhead_seconds": 1.0}"#;
        let profile: DeviceProfile = serde_json::from_str(old).unwrap();
        assert!(profile.check().is_ok());
        assert!(!serde_json::to_string(&profile).unwrap().contains("curves"));
    }

    #[test]
    fn nonsense_in_a_profile_is_named() {
        let mut bad = profile();
        bad.transfers.disk_write = Some(-1.0);
        assert!(
            bad.check()
                .unwrap_err()
                .to_string()
                .contains("transfers.disk_write")
        );
        let mut bad = profile();
        bad.curves.memory.insert("gelu".into(), Curve::default());
        assert!(
            bad.check()
                .unwrap_err()
                .to_string()
                .contains("curves.memory.gelu")
        );
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
        let source = CostSource::profile(vec![1.0; 3]);
        let error = Costs::new(&sample::chain(), &source).unwrap_err();
        assert_eq!(
            error,
            CostError::OtherTrace {
                found: 3,
                wanted: 9
            }
        );
        let source = CostSource::profile(vec![f64::NAN; 9]);
        assert!(matches!(
            Costs::new(&sample::chain(), &source),
            Err(CostError::NotPositive { .. })
        ));
    }
}

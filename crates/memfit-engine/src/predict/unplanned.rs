//! The peak of a step as it is, and how far the truth may be from it.
//!
//! Responsible for these two numbers alone. Not responsible for who takes the bytes (`mod.rs`).

use crate::bytes::Bytes;
use crate::step::{Evaluator, StepModel, Treatment, Variant};
use crate::trace::Trace;

/// The peak of the unplanned step at any batch, without the rest.
#[must_use]
pub fn unplanned_peak(trace: &Trace) -> Bytes {
    let model = StepModel::new(trace, Variant::default());
    Evaluator::new(&model)
        .evaluate(&vec![Treatment::Keep; trace.allocations.len()])
        .peak_bytes
}

/// What a plan keeps free for what the prediction is not sure of.
#[must_use]
pub fn margin(trace: &Trace, peak: Bytes) -> Bytes {
    interval(trace, peak).0.1 - peak
}

/// Whether both captures knew what ops take inside.
fn is_probed_twice(trace: &Trace) -> bool {
    trace.ops.iter().any(|op| op.workspace_per_item.is_some())
}

/// How far the truth may be from the peak predicted, and why.
///
/// What a dispatcher does not see: scratch inside ops, which is probed where it is known to exist (one
/// allocation more or less, at most [`SCRATCH_FRACTION`] of the peak), and numbers that autograd keeps as
/// tensors, a few bytes each.
pub(super) fn interval(trace: &Trace, peak: Bytes) -> ((Bytes, Bytes), Vec<String>) {
    let largest = trace
        .ops
        .iter()
        .map(|op| op.workspace_bytes)
        .max()
        .unwrap_or(Bytes::ZERO);
    let unseen = Bytes(UNSEEN_BYTES.min(peak.0 / 500));
    let (mut low, mut high, mut reasons) = (peak, peak + unseen, Vec::new());
    let probed_batch = trace.meta.probed_batch;
    if probed_batch != 0 && probed_batch != trace.meta.batch && largest > Bytes::ZERO {
        low -= largest;
        let also = match trace.meta.second_batch {
            second if is_probed_twice(trace) => format!(" and {second}"),
            _ => String::new(),
        };
        reasons.push(format!(
            "op workspaces (up to {largest}) were probed at batch {probed_batch}{also}, and scaled"
        ));
    }
    if trace.meta.probe_threads == 0 {
        high += Bytes(peak.0 / 20);
        reasons.push("scratch inside ops was not probed: up to 5 % more".to_owned());
    } else if largest > Bytes::ZERO {
        let slack = Bytes(largest.0.min(peak.0 / SCRATCH_FRACTION));
        low = low.min(peak - slack);
        high += slack;
        reasons.push(format!(
            "op workspaces of up to {largest} are probed, not traced"
        ));
    }
    ((low, high), reasons)
}

/// Scratch is taken to differ from its probe by no more than this part of the peak. Measured peaks of
/// eight models, unplanned and planned, were within 288 bytes of predicted (`benchmarks/results`).
const SCRATCH_FRACTION: u64 = 200;

/// Numbers that autograd saves as tensors, and the random states that replays put back.
const UNSEEN_BYTES: u64 = 128 << 10;

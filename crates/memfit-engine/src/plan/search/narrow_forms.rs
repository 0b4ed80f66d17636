//! Which allocations may be held in fewer bits, and what that costs.
//!
//! Responsible for the narrowest form of each and for the seconds of a way into it or out of it. Not responsible for
//! whether a plan may use them (`technique/shrink.rs`).

use crate::bytes::Bytes;
use crate::cost::Costs;
use crate::step::{Narrow, StepModel};
use crate::trace::{AllocationId, Phase, Trace};

/// Smaller allocations stay: what it takes to shrink one is more than that of its bytes.
pub(in crate::plan) const LEAST_BYTES: Bytes = Bytes(64 << 10);

/// The narrowest form that each allocation may have; `None` where it has to stay as it is.
pub(in crate::plan) fn forms(
    trace: &Trace,
    model: &StepModel,
    least_bytes: Bytes,
) -> Vec<Option<Narrow>> {
    let mut forms = vec![None; trace.allocations.len()];
    for (index, form) in forms.iter_mut().enumerate() {
        let id = AllocationId(u32::try_from(index).unwrap_or(u32::MAX));
        let is_large = model.bytes(id) >= least_bytes.max(Bytes(1));
        if is_large && model.is_shrinkable(id) && is_first_output(trace, id) {
            *form = Some(Narrow::EightBit);
        }
    }
    let forward = trace.ops.iter().filter(|op| op.phase == Phase::Forward);
    for op in forward.filter(|op| trace.string(op.name).contains("batch_norm")) {
        for read in &op.reads {
            let form = &mut forms[trace.allocation_of(*read).index()];
            *form = form.map(|_| Narrow::Half);
        }
    }
    forms
}

/// What an op returns beside its result is statistics, indices or masks.
fn is_first_output(trace: &Trace, id: AllocationId) -> bool {
    let producer = trace.allocations[id.index()].producer;
    let op = producer.and_then(|op| trace.ops.get(op.index()));
    let first = op.and_then(|op| op.outputs.first());
    first.is_some_and(|&value| trace.allocation_of(value) == id)
}

/// Seconds to shrink or to expand each byte of an allocation.
#[derive(Debug, Clone, Copy)]
pub(in crate::plan) struct Speed {
    copy_seconds_per_byte: f64,
    request_seconds: f64,
}

/// How long either form takes each way, in copies of the same bytes: both move fewer bytes than a copy does, and the
/// arithmetic hides behind that (0.65 to 0.89 on a server's core, `benchmarks/precision.py kernel`).
const COPIES: f64 = 0.9;

/// Seconds of the executor's own work for one allocation, each way. An estimate, that of `search/transfers.rs`.
const REQUEST_SECONDS: f64 = 5e-5;

impl Speed {
    pub(in crate::plan) fn new(trace: &Trace, costs: &Costs) -> Self {
        let is_cpu = trace.meta.device_kind == "cpu";
        Self {
            copy_seconds_per_byte: costs.copy_seconds(1.0),
            request_seconds: if is_cpu { REQUEST_SECONDS } else { 0.0 },
        }
    }

    /// One way.
    pub(in crate::plan) fn seconds(self, bytes: Bytes) -> f64 {
        COPIES * bytes.as_f64() * self.copy_seconds_per_byte + self.request_seconds
    }
}

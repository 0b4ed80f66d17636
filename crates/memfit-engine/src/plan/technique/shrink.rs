//! Activations held in fewer bits between forward and backward.
//!
//! Forward and loss stay what they are, bit for bit; gradients are those of activations that were rounded. Only whole
//! 32-bit floating-point numbers are shrunk. Most go to 8 bits, in blocks with a scale of their own, as in `ActNN` (Chen et
//! al. 2021) and GACT (Liu et al. 2022); what batch normalisation saves goes to `bfloat16` at the narrowest, for
//! its backward takes differences of it. Statistics stay: one number of them stands for a whole row.
//!
//! Responsible for whether they may be, for which form each may have, for what that costs, for the action and for the
//! words. Not responsible for which are (`search/`), nor for where the executor finds them (`addresses.rs`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActsOn, Technique, counted};
use crate::bytes::Bytes;
use crate::cost::Costs;
use crate::plan::actions::Chosen;
use crate::plan::{Action, ActionKind, ActiveRegion, Class, Details, Dropped, Plan, PlanRequest};
use crate::step::{Narrow, StepModel, Variant};
use crate::trace::{AllocationId, Phase, Trace};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Shrink,
    name: "shrink",
    title: "fewer bits",
    help: "Hold saved activations in 8 or 16 bits until backward",
    promise: Class::Approximate,
    effect: |action| {
        let what = counted(action.count, "tensor");
        format!("{what} held in fewer bits until backward")
    },
    short: Some(|count| format!("fewer bits for {}", counted(count, "tensor"))),
    acts_on: ActsOn::Activations,
    only_where_needed: false,
    refusal,
    is_used: |_, candidate| candidate.treatments.iter().any(|it| it.is_shrink()),
    write,
};

/// Smaller allocations stay: what it takes to shrink one is more than that of its bytes.
pub(in crate::plan) const LEAST_BYTES: Bytes = Bytes(64 << 10);

/// What to shrink, addressed like [`Remat`](crate::plan::Remat).
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Shrink {
    /// The allocations held in `bfloat16`, by creating op, ascending.
    pub half: Vec<Dropped>,
    /// The allocations held in 8 bits, likewise.
    pub eight_bit: Vec<Dropped>,
    /// As in [`Remat::active`](crate::plan::Remat::active).
    pub active: Vec<ActiveRegion>,
    /// As in [`Remat::names`](crate::plan::Remat::names).
    pub names: Vec<String>,
    /// As in [`Remat::forward`](crate::plan::Remat::forward).
    pub forward: Vec<u32>,
}

/// Why nothing can be shrunk; `None` where something can, or where it was not asked for.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if !request.asks_for(ActionKind::Shrink) {
        return None;
    }
    if request.forbid.contains(&ActionKind::Shrink) {
        return Some("forbidden by the request".to_owned());
    }
    if trace.meta.captured == "joint" {
        return Some("a compiled step saves what its compiler chose".to_owned());
    }
    let model = StepModel::new(trace, Variant::default());
    let forms = forms(trace, &model, LEAST_BYTES);
    forms
        .iter()
        .all(Option::is_none)
        .then(|| format!("nothing that autograd saves is 32-bit numbers of {LEAST_BYTES} or more"))
}

/// May it be used, where somebody asked for it?
pub(in crate::plan) fn may(trace: &Trace, request: &PlanRequest) -> bool {
    request.asks_for(ActionKind::Shrink) && refusal(trace, request).is_none()
}

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

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some(shrink) = chosen.directions.shrink.clone() else {
        return;
    };
    let saved = |shrunk: &[Dropped], to: Narrow| -> u64 {
        let bytes = shrunk.iter().map(|it| it.bytes.0);
        bytes
            .map(|bytes| bytes.saturating_sub(to.bytes(bytes)))
            .sum()
    };
    let bytes = saved(&shrink.half, Narrow::Half) + saved(&shrink.eight_bit, Narrow::EightBit);
    let count = (shrink.half.len() + shrink.eight_bit.len()) as u64;
    let details = Details::Shrink { shrink };
    plan.actions.push(Action::new(details, count, Bytes(bytes)));
}

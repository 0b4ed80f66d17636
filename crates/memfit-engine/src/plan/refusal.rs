//! Why a technique cannot be used on a step.
//!
//! Responsible for the proofs that the optimizer may run inside backward and that the batch may be cut,
//! and for the words when they fail. Not responsible for whether using them pays.

use super::rooms::LEAST_PARAMETER;
use super::variants::LEAST_STATE;
use super::{ActionKind, PlanRequest};
use crate::bytes::Bytes;
use crate::step::{ParametersAway, StateAway};
use crate::trace::{AllocationId, CouplingKind, Phase, Trace};

/// Why the optimizer step cannot run inside backward; `None` when it can.
pub(super) fn fuse_optimizer(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if request.forbid.contains(&ActionKind::FuseOptimizer) {
        return Some("forbidden by the request".to_owned());
    }
    if request.own_loop {
        return Some("the optimizer is called by the user's own loop".to_owned());
    }
    if let Some(reason) = &trace.meta.fused_optimizer_refusal {
        return Some(reason.clone());
    }
    if trace.updates.is_empty() || trace.meta.optimizer.is_empty() {
        return Some("the step has no optimizer".to_owned());
    }
    let late_read = trace.updates.iter().find(|update| {
        trace.ops[update.ready.index().min(trace.ops.len())..]
            .iter()
            .any(|op| {
                op.phase == Phase::Backward
                    && op
                        .reads
                        .iter()
                        .any(|&read| trace.allocation_of(read) == update.parameter)
            })
    });
    late_read.map(|update| {
        let parameter = &trace.allocations[update.parameter.index()];
        format!(
            "parameter `{}` is read in backward after its gradient is complete",
            trace.string(parameter.name)
        )
    })
}

/// Why activations cannot be offloaded to the place that was named; `None` when they can, or none was.
pub(super) fn offload(request: &PlanRequest) -> Option<String> {
    let forbidden = request.forbid.contains(&ActionKind::Offload);
    let named = request.offload.is_some();
    (named && forbidden).then(|| "forbidden by the request".to_owned())
}

/// Why the optimizer's state cannot be offloaded to the place that was named; `None` when it can, or none was.
pub(super) fn offload_optimizer(trace: &Trace, request: &PlanRequest) -> Option<String> {
    request.offload.as_ref()?;
    if request.forbid.contains(&ActionKind::OffloadOptimizer) {
        return Some("forbidden by the request".to_owned());
    }
    if request.own_loop {
        return Some("the optimizer is called by the user's own loop".to_owned());
    }
    if let Some(reason) = &trace.meta.per_parameter_refusal {
        return Some(reason.clone());
    }
    let away = StateAway {
        window_bytes: Bytes::ZERO,
        least_bytes: LEAST_STATE,
    };
    let goes = |update| away.bytes(trace, update) > Bytes::ZERO;
    let none = !trace.updates.iter().any(goes);
    none.then(|| format!("the optimizer keeps no state of {LEAST_STATE} or more for a parameter"))
}

/// Why parameters cannot be offloaded to the place that was named; `None` when they can, or none was.
pub(super) fn offload_parameters(trace: &Trace, request: &PlanRequest) -> Option<String> {
    request.offload.as_ref()?;
    if request.forbid.contains(&ActionKind::OffloadParameters) {
        return Some("forbidden by the request".to_owned());
    }
    if request.own_loop {
        return Some("the step is run by the user's own loop".to_owned());
    }
    if let Some(reason) = &trace.meta.offloaded_parameters_refusal {
        return Some(reason.clone());
    }
    // Without an optimizer nothing needs all parameters at once.
    let optimizer = (!trace.meta.optimizer.is_empty()).then_some(&trace.meta.per_parameter_refusal);
    if let Some(Some(reason)) = optimizer {
        return Some(reason.clone());
    }
    let away = ParametersAway {
        room_bytes: Bytes::ZERO,
        ahead_bytes: Bytes::ZERO,
        least_bytes: LEAST_PARAMETER,
    };
    if away.of(trace).next().is_some() {
        return None;
    }
    let mut fixed = trace.meta.fixed_parameters.iter();
    let is_large = |id: &AllocationId| trace.allocations[id.index()].bytes >= LEAST_PARAMETER;
    Some(if fixed.any(is_large) {
        "the parameters lie in memory that cannot be let go, of a file that was loaded or mapped, an array or a \
         parkable model, or shared with other processes: copies could (`p.data = p.data.clone()`)"
            .to_owned()
    } else {
        format!("the model has no parameter of {LEAST_PARAMETER} or more")
    })
}

/// Why the batch cannot be cut; `None` when it can.
pub(super) fn micro_batch(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if request.forbid.contains(&ActionKind::MicroBatch) {
        return Some("forbidden by the request".to_owned());
    }
    if request.own_loop {
        return Some("the batch is fed by the user's own loop".to_owned());
    }
    if !trace.meta.training {
        return Some("the step does not train".to_owned());
    }
    if trace.meta.batch < 2 {
        return Some("the batch cannot be cut".to_owned());
    }
    if trace.couplings.is_some() && piece_counts(trace).next().is_none() {
        return Some(format!(
            "a batch of {} cannot be cut evenly",
            trace.meta.batch
        ));
    }
    let Some(couplings) = &trace.couplings else {
        return Some("the step was captured at one batch size only".to_owned());
    };
    if let Some(coupling) = couplings.first() {
        let op = &trace.ops[coupling.op.index()];
        let how = match coupling.kind {
            CouplingKind::Statistic => "computes a statistic over the batch",
            CouplingKind::Cross => "compares the items of the batch with each other",
            CouplingKind::Along => "works along the batch dimension",
        };
        let place = [trace.string(op.module), trace.string(op.source)];
        let place = place
            .into_iter()
            .find(|text| !text.is_empty())
            .unwrap_or("the loss");
        return Some(format!("`{}` in `{place}` {how}", trace.string(op.name)));
    }
    if trace.meta.loss_reduction.is_empty() {
        return Some("how the loss reduces over the batch was not recognised".to_owned());
    }
    None
}

/// A batch is not cut into more pieces than this.
const MOST_PIECES: u64 = 1024;

/// Numbers of pieces that the trace speaks for. On a batch of one, torch runs other ops (a size of one
/// needs no copy), so a piece of one item counts only where one was captured.
pub(super) fn piece_counts(trace: &Trace) -> impl Iterator<Item = u64> + '_ {
    let meta = &trace.meta;
    let divisors =
        (2..=meta.batch.min(MOST_PIECES)).filter(|pieces| meta.batch.is_multiple_of(*pieces));
    divisors.filter(|pieces| meta.batch / pieces > 1 || meta.second_batch == 1)
}

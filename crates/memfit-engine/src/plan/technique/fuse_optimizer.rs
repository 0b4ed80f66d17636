//! The optimizer's step inside backward, parameter by parameter.
//!
//! Responsible for the proof that it may run there and for the words where it fails. Not responsible for whether that
//! pays (`combinations.rs`), nor for what it does to memory ([`crate::step`]).

use crate::plan::{ActionKind, PlanRequest};
use crate::trace::{Phase, Trace};

/// Why the optimizer step cannot run inside backward; `None` when it can.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
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

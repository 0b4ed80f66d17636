//! The optimizer's step inside backward, parameter by parameter.
//!
//! Responsible for the proof that it may run there, for the words where it fails, and for the action. Not responsible
//! for whether that pays (`combinations.rs`), nor for what it does to memory ([`crate::step`]).

use super::{ActsOn, Technique, counted};
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::trace::{Phase, Trace};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::FuseOptimizer,
    name: "fuse_optimizer",
    title: "optimizer step in backward",
    help: "Run the optimizer step inside backward",
    promise: Class::Exact,
    effect: |action| {
        let gradients = match action.count {
            1 => "its gradient is",
            _ => "their gradients are",
        };
        let parameters = counted(action.count, "parameter");
        format!("{parameters} updated as soon as {gradients} ready")
    },
    short: None,
    acts_on: ActsOn::Optimizer,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.variant.fuse_optimizer,
    write,
};

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

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let trace = chosen.planner.trace;
    let gradients = trace.updates.iter().map(|update| {
        let gradient = &trace.allocations[update.gradient.index()];
        gradient.bytes
    });
    let count = trace.updates.len() as u64;
    let details = Details::FuseOptimizer {};
    plan.actions
        .push(Action::new(details, count, gradients.sum()));
}

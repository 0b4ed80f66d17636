//! Updates of the optimizer one parameter at a time, after backward.
//!
//! Responsible for when that may be, for the bytes of all updates at once that it spares, for the action and for the
//! words. Not responsible for updates inside backward (`fuse_optimizer.rs`), nor for state that is offloaded
//! (`offload_optimizer.rs`): both make updates one by one too.

use super::{ActsOn, Technique, counted};
use crate::bytes::Bytes;
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::trace::{Phase, Trace};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::OneByOne,
    name: "one_by_one",
    title: "updates one by one",
    help: "Update one parameter at a time, not all at once",
    promise: Class::Exact,
    effect: |action| format!("{} updated one by one", counted(action.count, "parameter")),
    short: None,
    acts_on: ActsOn::Optimizer,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.variant.one_by_one,
    write,
};

/// Why updates cannot come one by one; `None` where they can, or where nothing would be spared.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if spared_bytes(trace) == Bytes::ZERO {
        return None;
    }
    if request.forbid.contains(&ActionKind::OneByOne) {
        return Some("forbidden by the request".to_owned());
    }
    if request.own_loop {
        return Some("the optimizer is called by the user's own loop".to_owned());
    }
    trace.meta.per_parameter_refusal.clone()
}

/// May updates come one by one, and would that spare anything?
pub(in crate::plan) fn pays(trace: &Trace, request: &PlanRequest) -> bool {
    spared_bytes(trace) > Bytes::ZERO && refusal(trace, request).is_none()
}

/// How much more temporaries take where all parameters are updated at once (`foreach`).
fn spared_bytes(trace: &Trace) -> Bytes {
    let alone = trace
        .updates
        .iter()
        .map(|update| update.temporary_bytes)
        .max();
    alone.map_or(Bytes::ZERO, |alone| at_once_bytes(trace) - alone)
}

/// Most bytes of temporaries at once in the optimizer's phase.
fn at_once_bytes(trace: &Trace) -> Bytes {
    let count = trace.ops.len();
    let is_optimizer = |op: &crate::trace::Op| op.phase == Phase::Optimizer;
    let begin = trace.ops.iter().position(is_optimizer).unwrap_or(count);
    let mut change = vec![0_i128; count + 1];
    for allocation in &trace.allocations {
        if allocation.producer.is_some_and(|op| op.index() >= begin) {
            for &(start, end) in &allocation.natural {
                change[start.index().min(count)] += i128::from(allocation.bytes.0);
                change[end.index().min(count)] -= i128::from(allocation.bytes.0);
            }
        }
    }
    let mut alive = 0;
    let heights = trace.ops.iter().zip(change).map(|(op, change)| {
        alive += change;
        alive + i128::from(op.workspace_bytes.0)
    });
    let most = heights.skip(begin).max().unwrap_or_default();
    Bytes(u64::try_from(most).unwrap_or_default())
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let trace = chosen.planner.trace;
    let count = trace.updates.len() as u64;
    let details = Details::OneByOne {};
    plan.actions
        .push(Action::new(details, count, spared_bytes(trace)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Budget;
    use crate::cost::CostSource;
    use crate::plan::plan;
    use crate::trace::{Category, OpIndex, sample};

    /// The chain, whose optimizer makes 4 KB of temporaries at once, and 8 bytes for its parameter alone.
    fn at_once() -> Trace {
        let mut trace = sample::chain();
        let last = trace.ops.len() - 1;
        let mut temporary = trace.allocations[0].clone();
        temporary.category = Category::Temporary;
        temporary.bytes = Bytes(4096);
        temporary.producer = Some(OpIndex(u32::try_from(last).unwrap()));
        temporary.natural = vec![(temporary.producer.unwrap(), trace.end())];
        trace.allocations.push(temporary);
        trace.updates[0].temporary_bytes = Bytes(8);
        trace.meta.fused_optimizer_refusal = Some("the script clips".to_owned());
        assert_eq!(trace.check(), Ok(()));
        trace
    }

    fn planned(trace: &Trace, forbid: Vec<ActionKind>) -> Plan {
        let op_seconds = vec![1.0; trace.ops.len()];
        let request = PlanRequest {
            budget: Budget::Absolute(Bytes(2048)),
            forbid,
            ..PlanRequest::default()
        };
        plan(trace, &CostSource::profile(op_seconds), &request).unwrap()
    }

    #[test]
    fn updates_come_one_by_one_where_all_at_once_take_too_much() {
        let trace = at_once();
        let plan = planned(&trace, Vec::new());
        let action = plan
            .actions
            .iter()
            .find(|action| action.kind() == ActionKind::OneByOne);
        let action = action.expect("nothing else lowers the optimizer's temporaries");
        assert_eq!((action.count, action.bytes), (1, Bytes(4096 - 8)));
        assert!(plan.planned.predicted_peak_bytes <= Bytes(2048));
        assert_eq!(action.summary().effect(), "1 parameter updated one by one");
    }

    #[test]
    fn they_stay_together_where_that_is_asked_for_or_spares_nothing() {
        let refused = planned(&at_once(), vec![ActionKind::OneByOne]);
        let reasons = refused
            .refusals
            .iter()
            .find(|it| it.kind == ActionKind::OneByOne);
        assert_eq!(reasons.unwrap().reason, "forbidden by the request");
        assert!(refused.planned.predicted_peak_bytes > Bytes(4096));
        let none = planned(&sample::chain(), Vec::new());
        assert!(
            none.refusals
                .iter()
                .all(|it| it.kind != ActionKind::OneByOne)
        );
    }
}

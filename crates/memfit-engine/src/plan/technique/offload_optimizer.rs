//! The optimizer's state offloaded between updates.
//!
//! Responsible for whether it may go, for the smallest tensor that is worth it, for the action and for the words. Not
//! responsible for the windows that are tried (`combinations.rs`), nor for when state moves ([`crate::step`]).

use super::{ActsOn, Technique, counted};
use crate::bytes::Bytes;
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, OffloadOptimizer, Plan, PlanRequest};
use crate::step::{StateAway, UpdateTurn, update_turns};
use crate::trace::Trace;

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::OffloadOptimizer,
    name: "offload_optimizer",
    title: "optimizer state offloading",
    help: "Offload the optimizer's state between updates",
    promise: Class::Exact,
    effect: |action| {
        let parameters = counted(action.count, "parameter");
        format!("optimizer state of {parameters} offloaded between updates")
    },
    short: None,
    acts_on: ActsOn::Optimizer,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.variant.offload_optimizer.is_some(),
    write,
};

/// Smaller state stays in memory: fetching it would take longer than it is worth.
pub(in crate::plan) const LEAST_STATE: Bytes = Bytes(4096);

/// Why the optimizer's state cannot be offloaded to the place that was named; `None` when it can, or none was.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
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

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let (trace, variant) = (&chosen.outcome.trace, chosen.outcome.variant);
    let offer = chosen.planner.state_offer();
    let Some((away, offer)) = variant.offload_optimizer.zip(offer) else {
        return;
    };
    let updates = update_turns(trace, variant).into_iter();
    let updates: Vec<usize> = updates
        .filter_map(|(_, turn)| match turn {
            UpdateTurn::Out(update) => Some(update),
            _ => None,
        })
        .collect();
    let moved = variant.states_moved(trace).into_iter().flatten();
    let moved = moved.map(|state| trace.allocations[state.index()].bytes);
    let sliced = variant.offloaded_moments(trace);
    let in_slices = sliced.iter().filter(|moments| !moments.is_empty()).count();
    let bytes = moved.chain(sliced.iter().flatten().map(|moment| moment.bytes));
    let parameter = |&update: &usize| {
        let parameter = &trace.allocations[trace.updates[update].parameter.index()];
        trace.string(parameter.name).to_owned()
    };
    let offload_optimizer = OffloadOptimizer {
        tier: offer.tier,
        folder: offer.folder.clone(),
        window_bytes: away.window_bytes,
        least_bytes: away.least_bytes,
        order: updates.iter().map(parameter).collect(),
    };
    let (count, bytes) = ((updates.len() + in_slices) as u64, bytes.sum());
    let details = Details::OffloadOptimizer { offload_optimizer };
    plan.actions.push(Action::new(details, count, bytes));
}

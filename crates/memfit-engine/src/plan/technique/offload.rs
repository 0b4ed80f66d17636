//! Activations offloaded between forward and backward.
//!
//! Responsible for whether they may go, for the action that stores become, and for the words. Not responsible for
//! which go (`search/`), for what moving them costs (`search/transfers.rs`), nor for where the executor finds them
//! (`addresses.rs`).

use super::{ActsOn, Technique, counted};
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::trace::Trace;

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Offload,
    name: "offload",
    title: "offloading",
    help: "Offload activations in forward and fetch them in backward",
    promise: Class::Exact,
    effect: |action| {
        format!(
            "{} offloaded until backward",
            counted(action.count, "tensor")
        )
    },
    short: Some(|count| format!("offloading of {}", counted(count, "tensor"))),
    acts_on: ActsOn::Activations,
    only_where_needed: false,
    refusal,
    is_used: |_, candidate| candidate.treatments.iter().any(|it| it.is_store()),
    write,
};

/// Why activations cannot be offloaded to the place that was named; `None` when they can, or none was.
pub(in crate::plan) fn refusal(_trace: &Trace, request: &PlanRequest) -> Option<String> {
    let forbidden = request.forbid.contains(&ActionKind::Offload);
    let named = request.offload.is_some();
    (named && forbidden).then(|| "forbidden by the request".to_owned())
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some(offload) = chosen.directions.offload.clone() else {
        return;
    };
    let count = offload.stores.len() as u64;
    let bytes = offload.stores.iter().map(|store| store.bytes).sum();
    let details = Details::Offload { offload };
    plan.actions.push(Action::new(details, count, bytes));
}

//! Activation checkpointing: activations dropped in forward and recomputed in backward.
//!
//! Responsible for the action that drops become, and for the words. Not responsible for which activations are dropped
//! (`search/`), nor for where the executor finds them (`addresses.rs`).

use super::{ActsOn, Technique, counted, unneeded_saves};
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Remat,
    name: "remat",
    title: "activation checkpointing",
    help: "Activation checkpointing: recompute activations in backward",
    promise: Class::Exact,
    effect: |action| format!("{} recomputed in backward", counted(action.count, "tensor")),
    short: Some(|count| format!("activation checkpointing of {}", counted(count, "tensor"))),
    acts_on: ActsOn::Activations,
    only_where_needed: false,
    // Every step has activations. Where a request forbids it, plans have never said so.
    refusal: |_, _| None,
    is_used: |outcome, candidate| unneeded_saves::drops(&outcome.trace, &candidate.treatments).1,
    write,
};

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some(remat) = chosen.directions.remat.clone() else {
        return;
    };
    let count = remat.drops.len() as u64;
    let bytes = remat.drops.iter().map(|drop| drop.bytes).sum();
    let details = Details::Remat { remat };
    plan.actions.push(Action::new(details, count, bytes));
}

//! Part of a step in slices: the loss, or a module call that treats its rows one by one.
//!
//! Responsible for what is worth a capture in slices (`candidates.rs`), for the proof that a call may be cut
//! (`row_proof.rs`), for captured steps in slices as a choice (`alternatives.rs`), and for the action. Not responsible
//! for the capture (the Python package).

pub(in crate::plan) mod alternatives;
pub(in crate::plan) mod candidates;
mod row_proof;

use super::{ActsOn, Technique, counted};
use crate::plan::actions::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan};
use crate::predict;
use crate::trace::Chunk;

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Chunk,
    name: "chunk",
    title: "chunking",
    help: "Compute a loss over many classes, and wide layers, in slices of rows",
    promise: Class::Equivalent,
    effect: |action| format!("computed in up to {}", counted(action.count, "slice")),
    short: Some(|count| format!("chunking into {}", counted(count, "slice"))),
    acts_on: ActsOn::Computation,
    is_way: true,
    refusal: alternatives::why_none,
    is_used: |outcome, _| outcome.sliced.is_some(),
    write,
};

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some(step) = chosen.planner.step_of(chosen.outcome) else {
        return;
    };
    let chunk = step.alternative.chunk.clone();
    plan.notes.extend(notes(&chunk));
    step.costs.source().clone_into(&mut plan.cost_source);
    let less = chosen.planner.unplanned_peak - predict::unplanned_peak(&step.alternative.trace);
    let count = chunk.slices();
    let details = Details::Chunk { chunk };
    plan.actions.push(Action::new(details, count, less));
}

/// What runs in slices, for a reader.
fn notes(chunk: &Chunk) -> Vec<String> {
    let mut parts = Vec::new();
    if let Some(loss) = &chunk.loss {
        parts.push(format!(
            "the loss over `{}` in {}",
            loss.weight, loss.slices
        ));
    }
    if let Some(first) = chunk.calls.first() {
        let others = match chunk.calls.len() - 1 {
            0 => String::new(),
            count => format!(" and {count} more"),
        };
        parts.push(format!("`{}`{others} in {}", first.module, first.slices));
    }
    let mut notes = vec![format!("slices: {}", parts.join(", "))];
    if let Some(call) = chunk.calls.iter().find(|call| call.draws) {
        notes.push(format!(
            "`{}` draws random numbers (dropout): each slice draws its own, so the gradients equal the unplanned ones \
             in distribution, not in value",
            call.module
        ));
    }
    notes
}

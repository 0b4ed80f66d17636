//! Part of a step in slices: the loss, a module call that treats its rows one by one, messages along the edges of a
//! graph, or large images and attention of inference.
//!
//! Responsible for what is worth a capture in slices (`candidates.rs`), for the proof that a call may be cut
//! (`row_proof.rs`), and for the action. Not responsible for the capture (the Python package), nor for trying it
//! (`plan/ways.rs`).

pub(in crate::plan) mod candidates;
mod row_proof;

use super::{ActsOn, Technique, counted};
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::trace::{Chunk, Trace, Way};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Chunk,
    name: "chunk",
    title: "chunking",
    help: "Compute losses, wide layers, messages, images, attention in slices",
    promise: Class::Equivalent,
    effect: |action| match action.count {
        1 => "logits of those rows alone that are used".to_owned(),
        count => format!("computed in up to {}", counted(count, "slice")),
    },
    short: Some(|count| format!("chunking into {}", counted(count, "slice"))),
    acts_on: ActsOn::Computation,
    only_where_needed: true,
    refusal,
    is_used: |outcome, _| outcome.way.chunk.is_some(),
    write,
};

/// Why something, or all, cannot run in slices; `None` when what is worth it can.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if request.forbid.contains(&ActionKind::Chunk) {
        return Some("forbidden by the request".to_owned());
    }
    if let Some(found) = &trace.alternatives {
        let is_sliced = found.steps.iter().any(|step| step.way.chunk.is_some());
        return match (is_sliced, found.refusals.slices.as_str()) {
            (true, "") => None,
            (false, "") => Some("nothing runs in slices".to_owned()),
            (_, reason) => Some(reason.to_owned()),
        };
    }
    let reason = candidates::chunks(trace).err();
    Some(reason.unwrap_or_else(|| "the step was not captured in slices".to_owned()))
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some(chunk) = chosen.outcome.way.chunk.clone() else {
        return;
    };
    plan.notes.extend(notes(&chunk));
    // What autocast brings by itself is autocast's.
    let without = Way {
        chunk: None,
        ..chosen.outcome.way.clone()
    };
    let less = chosen.peak_in(&without) - chosen.peak_in(&chosen.outcome.way);
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
    if let Some(edges) = &chunk.edges {
        parts.push(format!("messages along edges in {}", edges.slices));
    }
    let mut notes = Vec::new();
    if !parts.is_empty() {
        notes.push(format!("slices: {}", parts.join(", ")));
    }
    if let Some(head) = &chunk.head {
        notes.push(format!(
            "logits of `{}`, {} in all, are computed for those rows alone that are used",
            head.weight, head.logit_bytes
        ));
    }
    if let Some(strips) = &chunk.strips {
        notes.push(format!(
            "convolutions of images and products of attention take a strip of rows at a time, of up to {}: what they take \
             never exists as a whole where it has {} or more",
            strips.strips, strips.least_bytes
        ));
    }
    if let Some(call) = chunk.calls.iter().find(|call| call.draws) {
        notes.push(format!(
            "`{}` draws random numbers (dropout): each slice draws its own, so the gradients equal the unplanned ones \
             in distribution, not in value",
            call.module
        ));
    }
    notes
}

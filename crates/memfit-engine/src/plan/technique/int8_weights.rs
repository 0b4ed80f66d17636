//! Weights of linear layers in 8 bits, for inference: a quarter of their bytes.
//!
//! torchao quantises each row of a weight with a scale of its own (`Int8WeightOnlyConfig`), and a layer computes its
//! product with the numbers that this gives. While it does the whole weight is there in the type of the product, which
//! the captured step shows.
//!
//! Responsible for which weights may be, for when, for the way worth a capture, for the action and for the words. Not
//! responsible for which modules are linear layers, nor for the quantisation (the Python package, torchao).

use super::{ActsOn, Technique, counted, weights};
use crate::bytes::Bytes;
use crate::plan::actions::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::trace::{Int8Weights, Trace, Way};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Int8Weights,
    name: "int8_weights",
    title: "weights in 8 bits",
    help: "Hold weights of linear layers in 8 bits (torchao), for inference",
    promise: Class::Approximate,
    effect: |action| format!("{} in 8 bits", counted(action.count, "weight")),
    short: None,
    acts_on: ActsOn::Parameters,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.way.int8_weights.is_some(),
    write,
};

/// The products that a linear layer makes of its weight.
const PRODUCTS: [&str; 4] = [
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.linear.default",
];

/// Bytes of the smallest weight that is worth it.
const LEAST_BYTES: u64 = 16 << 10;

fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if !request.asks_for(ActionKind::Int8Weights) {
        return None;
    }
    if let Some(reason) = step_refusal(trace, request) {
        return Some(reason);
    }
    let found = trace.alternatives.as_ref()?;
    let is_captured = found.steps.iter().any(|it| it.way.int8_weights.is_some());
    match (is_captured, found.refusals.int8_weights.as_str()) {
        (true, _) => None,
        (false, "") => Some("the step was not captured with weights in 8 bits".to_owned()),
        (false, reason) => Some(reason.to_owned()),
    }
}

/// The same by the plain step alone, whatever was captured.
fn step_refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if request.forbid.contains(&ActionKind::Int8Weights) {
        return Some("forbidden by the request".to_owned());
    }
    if trace.meta.training {
        return Some("the step trains, and weights in 8 bits cannot".to_owned());
    }
    if trace.meta.captured != "fake" {
        return Some("the step was captured as it ran, and in no other way".to_owned());
    }
    named(trace, request)
        .is_empty()
        .then(|| "no linear layer has a large weight in float32 of its own".to_owned())
}

/// Names of the parameters that may be weights of linear layers.
fn named(trace: &Trace, request: &PlanRequest) -> Vec<String> {
    let suits = weights::read_alone(trace, &PRODUCTS);
    weights::names(trace, &request.keep, LEAST_BYTES, |id| suits.contains(&id))
}

/// The bytes of weights that it would narrow, where it may be used and nobody asked for it.
pub(in crate::plan) fn with_leave(trace: &Trace, request: &PlanRequest) -> Option<Bytes> {
    let mut asked = request.clone();
    asked.allow_kinds.push(ActionKind::Int8Weights);
    let is_new = !request.asks_for(ActionKind::Int8Weights) && may(trace, &asked);
    is_new.then(|| weights::bytes(trace, &named(trace, &asked)))
}

/// May it be used, where somebody asked for it?
pub(in crate::plan) fn may(trace: &Trace, request: &PlanRequest) -> bool {
    request.asks_for(ActionKind::Int8Weights) && step_refusal(trace, request).is_none()
}

/// The way worth a capture; who captures leaves out what is no linear layer's.
pub(in crate::plan) fn ways(trace: &Trace, request: &PlanRequest) -> Option<Way> {
    may(trace, request).then(|| Way {
        int8_weights: Some(Int8Weights {
            names: named(trace, request),
        }),
        ..Way::default()
    })
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some(int8_weights) = chosen.outcome.way.int8_weights.clone() else {
        return;
    };
    let wide = weights::all_bytes(chosen.planner.trace);
    let less = wide - weights::all_bytes(&chosen.outcome.trace);
    plan.notes.push(weights::ROUNDED.to_owned());
    let count = int8_weights.names.len() as u64;
    let details = Details::Int8Weights { int8_weights };
    plan.actions.push(Action::new(details, count, less));
}

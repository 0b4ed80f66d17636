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
        // With leave for the class it is captured where nothing else fits.
        (false, "") if !request.allow_kinds.contains(&ActionKind::Int8Weights) => None,
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

/// The bytes of weights that it would narrow, where it may be used and was not asked for.
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

/// The way worth a capture; the capture leaves out what is no linear layer's.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Budget;
    use crate::cost::CostSource;
    use crate::plan::plan;
    use crate::trace::{Alternative, Alternatives, Category, sample};

    /// An inference with two large weights that products read, `up.weight` and `head.down.weight`.
    fn weighted() -> Trace {
        let mut trace = sample::inference(64);
        let mut names = ["up.weight", "head.down.weight"].iter();
        let mut strings = trace.strings.clone();
        for allocation in &mut trace.allocations {
            if allocation.category == Category::Parameter {
                allocation.bytes = Bytes(1 << 20);
                strings.push((*names.next().unwrap()).to_owned());
                allocation.name = u32::try_from(strings.len() - 1).unwrap();
            }
        }
        trace.strings = strings;
        assert_eq!(trace.check(), Ok(()));
        trace
    }

    fn request(budget: u64) -> PlanRequest {
        PlanRequest {
            budget: Budget::Absolute(Bytes(budget)),
            allow_kinds: vec![ActionKind::Int8Weights],
            // The bytes that these traces were given follow no law.
            forbid: vec![ActionKind::MicroBatch],
            ..PlanRequest::default()
        }
    }

    /// The same with the weights in a quarter of their bytes.
    fn captured(trace: &Trace, request: &PlanRequest) -> Trace {
        let mut narrow = trace.clone();
        for allocation in &mut narrow.allocations {
            if allocation.category == Category::Parameter {
                allocation.bytes.0 /= 4;
            }
        }
        let steps = ways(trace, request).map(|way| Alternative { way, trace: narrow });
        let steps = steps.into_iter().collect();
        let found = Alternatives {
            steps,
            ..Alternatives::default()
        };
        trace.with_alternatives(found).unwrap()
    }

    #[test]
    fn weights_that_products_alone_read_are_quantised_but_for_those_that_are_kept() {
        let mut trace = weighted();
        let mut asked = request(1);
        assert_eq!(named(&trace, &asked), ["up.weight", "head.down.weight"]);
        asked.keep = vec!["head".to_owned()];
        assert_eq!(named(&trace, &asked), ["up.weight"]);
        asked.keep = vec!["hea".to_owned(), "head.down.w".to_owned()];
        assert_eq!(
            named(&trace, &asked).len(),
            2,
            "a part of a name is no module"
        );
        let relu = trace.ops.iter().position(|op| op.reads.len() == 1).unwrap();
        let weight = trace.ops[0].reads[1];
        trace.ops[relu].reads.push(weight);
        assert_eq!(named(&trace, &request(1)), ["head.down.weight"]);
    }

    #[test]
    fn a_plan_says_what_it_holds_and_in_which_way_it_runs() {
        let asked = request(1);
        let trace = captured(&weighted(), &asked);
        let costs = CostSource::profile(vec![1.0; trace.ops.len()]);
        let lowest = plan(&trace, &costs, &asked).unwrap();
        let mut actions = lowest.actions.iter();
        let action = actions.find(|it| it.kind() == ActionKind::Int8Weights);
        assert_eq!(action.unwrap().bytes, Bytes(3 << 19));
        assert_eq!(lowest.promise, Class::Approximate);
        // Pieces of the batch are recorded in this way.
        assert_eq!(lowest.way(), trace.alternatives()[0].way);
    }

    #[test]
    fn it_is_refused_by_a_sentence() {
        let trace = weighted();
        assert_eq!(refusal(&trace, &request(1)), None);
        let without = PlanRequest {
            forbid: vec![ActionKind::Int8Weights],
            ..request(1)
        };
        assert_eq!(
            refusal(&trace, &without).unwrap(),
            "forbidden by the request"
        );
        let trains = sample::chain();
        assert!(
            refusal(&trains, &request(1))
                .unwrap()
                .starts_with("the step trains")
        );
        assert_eq!(
            refusal(&trains, &PlanRequest::default()),
            None,
            "it was not asked for"
        );
        let exact = PlanRequest::default();
        assert_eq!(with_leave(&trace, &exact), Some(Bytes(2 << 20)));
        assert_eq!(with_leave(&trace, &request(1)), None);
    }
}

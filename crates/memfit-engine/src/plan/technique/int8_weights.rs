//! Weights of linear layers in 8 bits, for inference: a quarter of their bytes.
//!
//! torchao quantises each row of a weight with a scale of its own (`Int8WeightOnlyConfig`), and a layer computes its
//! product with the numbers that this gives. While it does the whole weight is there in the type of the product, which
//! the captured step shows. Where the product is in 8 bits too (`int8_dynamic.rs`), the weights are these.
//!
//! Responsible for which weights may be, for when, for the ways worth a capture, for the action and for the words. Not
//! responsible for which modules are linear layers, nor for the quantisation (the Python package, torchao).

use super::{ActsOn, Technique, counted, weights};
use crate::bytes::Bytes;
use crate::plan::choice::Chosen;
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
    refusal: |trace, request| refusal_of(ActionKind::Int8Weights, trace, request),
    is_used: |outcome, _| is_used(ActionKind::Int8Weights, &outcome.way),
    write,
};

/// The products that a linear layer makes of its weight.
const PRODUCTS: [&str; 4] = [
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.linear.default",
];

/// The techniques that hold weights so: with products in the type of the step, and in 8 bits.
pub(in crate::plan) const KINDS: [ActionKind; 2] =
    [ActionKind::Int8Weights, ActionKind::Int8Dynamic];

/// Bytes of the smallest weight that is worth it.
const LEAST_BYTES: u64 = 16 << 10;

/// Which of the two techniques holds weights so.
pub(in crate::plan) fn kind_of(held: &Int8Weights) -> ActionKind {
    if held.dynamic.is_empty() {
        ActionKind::Int8Weights
    } else {
        ActionKind::Int8Dynamic
    }
}

/// Does a way use one of the two?
pub(super) fn is_used(kind: ActionKind, way: &Way) -> bool {
    way.int8_weights.as_ref().map(kind_of) == Some(kind)
}

/// Why one of the two cannot be used, as a sentence; `None` where it can, or where it was not asked for.
pub(super) fn refusal_of(kind: ActionKind, trace: &Trace, request: &PlanRequest) -> Option<String> {
    if !request.asks_for(kind) {
        return None;
    }
    if let Some(reason) = step_refusal(kind, trace, request) {
        return Some(reason);
    }
    let found = trace.alternatives.as_ref()?;
    let is_captured = found.steps.iter().any(|it| is_used(kind, &it.way));
    match (is_captured, found.refusals.int8_weights.as_str()) {
        (true, _) => None,
        // With leave for the class it is captured where nothing else fits.
        (false, "") if !request.allow_kinds.contains(&kind) => None,
        (false, "") => Some("the step was not captured with weights in 8 bits".to_owned()),
        (false, reason) => Some(reason.to_owned()),
    }
}

/// The same by the plain step alone, whatever was captured.
fn step_refusal(kind: ActionKind, trace: &Trace, request: &PlanRequest) -> Option<String> {
    if request.forbid.contains(&kind) {
        return Some("forbidden by the request".to_owned());
    }
    if request.forbid.contains(&ActionKind::Int8Weights) {
        let name = TECHNIQUE.name;
        return Some(format!("it needs `{name}`, which is forbidden"));
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

/// The bytes of weights that it would narrow, where it may be used and neither technique was asked for.
pub(in crate::plan) fn with_leave(trace: &Trace, request: &PlanRequest) -> Option<Bytes> {
    let mut asked = request.clone();
    asked.allow_kinds.push(ActionKind::Int8Weights);
    let is_asked = KINDS.iter().any(|&kind| request.asks_for(kind));
    let is_new = !is_asked && may(ActionKind::Int8Weights, trace, &asked);
    is_new.then(|| weights::bytes(trace, &named(trace, &asked)))
}

/// May one of the two be used, where somebody asked for it?
pub(in crate::plan) fn may(kind: ActionKind, trace: &Trace, request: &PlanRequest) -> bool {
    request.asks_for(kind) && step_refusal(kind, trace, request).is_none()
}

/// May any?
pub(in crate::plan) fn may_any(trace: &Trace, request: &PlanRequest) -> bool {
    KINDS.into_iter().any(|kind| may(kind, trace, request))
}

/// The ways worth a capture; the capture leaves out what is no linear layer's, and what has no product in 8 bits.
pub(in crate::plan) fn ways(trace: &Trace, request: &PlanRequest) -> Vec<Way> {
    let kinds = KINDS.into_iter().filter(|&kind| may(kind, trace, request));
    let way = |kind| {
        let names = named(trace, request);
        let is_dynamic = kind == ActionKind::Int8Dynamic;
        let dynamic = if is_dynamic {
            names.clone()
        } else {
            Vec::new()
        };
        Way {
            int8_weights: Some(Int8Weights { names, dynamic }),
            ..Way::default()
        }
    };
    kinds.map(way).collect()
}

/// What a plan in such a way holds in 8 bits, and the bytes that this saves, with the note that goes with it.
pub(super) fn held(chosen: &Chosen<'_>, plan: &mut Plan) -> Option<(Int8Weights, Bytes)> {
    let held = chosen.outcome.way.int8_weights.clone()?;
    let wide = weights::all_bytes(chosen.planner.trace);
    plan.notes.push(weights::ROUNDED.to_owned());
    Some((held, wide - weights::all_bytes(&chosen.outcome.trace)))
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some((int8_weights, less)) = held(chosen, plan) else {
        return;
    };
    let count = int8_weights.names.len() as u64;
    let details = Details::Int8Weights { int8_weights };
    plan.actions.push(Action::new(details, count, less));
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::bytes::Budget;
    use crate::cost::CostSource;
    use crate::plan::plan;
    use crate::predict;
    use crate::trace::{Alternative, Alternatives, Category, sample};

    /// An inference with two large weights that products read, `up.weight` and `head.down.weight`.
    pub(in crate::plan::technique) fn weighted() -> Trace {
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

    /// The same with the weights in a quarter of their bytes, in each way that is asked for.
    fn captured(trace: &Trace, request: &PlanRequest) -> Trace {
        let mut narrow = trace.clone();
        for allocation in &mut narrow.allocations {
            if allocation.category == Category::Parameter {
                allocation.bytes.0 /= 4;
            }
        }
        let ways = ways(trace, request).into_iter();
        let steps = ways.map(|way| Alternative {
            way,
            trace: narrow.clone(),
        });
        let steps = steps.collect();
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
    fn products_in_8_bits_are_chosen_where_they_are_faster() {
        let both = PlanRequest {
            allow_kinds: KINDS.to_vec(),
            ..request(1)
        };
        let mut trace = captured(&weighted(), &both);
        let held: Vec<_> = ways(&trace, &both)
            .into_iter()
            .filter_map(|way| way.int8_weights)
            .collect();
        let names = &held[1].names;
        assert_eq!((&held[0].names, held[0].dynamic.len()), (names, 0));
        assert_eq!(&held[1].dynamic, names);

        let profile = |seconds: f64| crate::cost::DeviceProfile {
            flops_per_second: [("float32", 1e9), ("int8", 1e9 / seconds)]
                .map(|(dtype, rate)| (dtype.to_owned(), rate))
                .into(),
            bytes_per_second: 1e15,
            op_overhead_seconds: 1e-9,
            ..crate::cost::DeviceProfile::default()
        };
        let alternatives = trace.alternatives.as_mut().unwrap();
        for (index, step) in alternatives.steps.iter_mut().enumerate() {
            step.trace.ops[0].flops = 1 << 30;
            if index == 1 {
                step.trace.strings.push("aten._int_mm.default".to_owned());
                step.trace.ops[0].name = u32::try_from(step.trace.strings.len() - 1).unwrap();
            }
        }
        for (seconds, kind) in [
            (0.1, ActionKind::Int8Dynamic),
            (10.0, ActionKind::Int8Weights),
        ] {
            let source = CostSource::Roofline {
                profile: profile(seconds),
            };
            let budget = predict::unplanned_peak(&trace.alternatives()[0].trace);
            let request = PlanRequest {
                budget: Budget::Absolute(budget + Bytes(1 << 20)),
                ..both.clone()
            };
            let made = plan(&trace, &source, &request).unwrap();
            let kinds: Vec<_> = made.actions.iter().map(Action::kind).collect();
            assert_eq!(kinds, [kind], "{:?}", made.refusals);
            let alone = PlanRequest {
                forbid: vec![ActionKind::MicroBatch, ActionKind::Int8Dynamic],
                ..request.clone()
            };
            let made = plan(&trace, &source, &alone).unwrap();
            assert_eq!(made.actions[0].kind(), ActionKind::Int8Weights);
        }
    }

    #[test]
    fn products_in_8_bits_need_leave_of_their_own_and_weights_in_8_bits() {
        let dynamic = PlanRequest {
            allow_kinds: vec![ActionKind::Int8Dynamic],
            ..request(1)
        };
        let trace = captured(&weighted(), &dynamic);
        assert_eq!(trace.alternatives().len(), 1);
        assert!(may(ActionKind::Int8Dynamic, &trace, &dynamic));
        assert!(!may(ActionKind::Int8Dynamic, &trace, &request(1)));
        assert_eq!(with_leave(&trace, &dynamic), None);
        let without = PlanRequest {
            forbid: vec![ActionKind::Int8Weights],
            ..dynamic.clone()
        };
        let said = |request| refusal_of(ActionKind::Int8Dynamic, &trace, request);
        assert_eq!(
            said(&without).unwrap(),
            "it needs `int8_weights`, which is forbidden"
        );
        assert_eq!(said(&dynamic), None);
    }

    #[test]
    fn it_is_refused_by_a_sentence() {
        let refusal = |trace: &Trace, request: &PlanRequest| {
            refusal_of(ActionKind::Int8Weights, trace, request)
        };
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

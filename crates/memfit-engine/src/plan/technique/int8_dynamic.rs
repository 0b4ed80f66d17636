//! Products of linear layers in 8 bits, for inference: weights in 8 bits, and what they multiply quantised each time.
//!
//! torchao quantises each row of an input by its largest number while the step runs, multiplies whole numbers and scales
//! the sums (`Int8DynamicActivationInt8WeightConfig`). What is made of the input and of the sums on the way is several
//! times as large as either, and on some processors the weight is there in 32 bits for a moment, so that a layer takes
//! less or more than with a weight in 8 bits alone: the captured step shows it. Where 8 bits multiply faster than 32 it
//! is the faster of the two.
//!
//! Responsible for which layers multiply so where there is no room for all, and for the words. Not responsible for which
//! weights, for when and for the ways worth a capture before that (`int8_weights.rs`), nor for which layers have such
//! products (the Python package, torchao).

use std::collections::BTreeSet;

use super::{ActsOn, Technique, counted, int8_weights};
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::predict;
use crate::step::{Evaluator, StepModel, Treatment, Variant};
use crate::trace::{Int8Weights, Trace, Way};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Int8Dynamic,
    name: "int8_dynamic",
    title: "products in 8 bits",
    help: "Compute linear layers of an inference in 8 bits (torchao, dynamic)",
    promise: Class::Approximate,
    effect: |action| {
        format!(
            "{} in 8 bits, and their products",
            counted(action.count, "weight")
        )
    },
    short: None,
    acts_on: ActsOn::Parameters,
    only_where_needed: false,
    refusal: |trace, request| int8_weights::refusal_of(ActionKind::Int8Dynamic, trace, request),
    is_used: |outcome, _| int8_weights::is_used(ActionKind::Int8Dynamic, &outcome.way),
    write,
};

/// The way in which those layers alone multiply in 8 bits that have room for it under the budget of a plan, and the
/// others have weights in 8 bits alone; `None` where all have room, none has, or something else has none.
pub(in crate::plan) fn mixed(trace: &Trace, request: &PlanRequest, made: &Plan) -> Option<Way> {
    if !int8_weights::may(ActionKind::Int8Dynamic, trace, request) {
        return None;
    }
    let mut steps = trace.alternatives().iter();
    // The first is the one in which all do.
    let step = steps.find(|it| int8_weights::is_used(ActionKind::Int8Dynamic, &it.way))?;
    let held = step.way.int8_weights.as_ref()?;
    let margin = predict::margin(&step.trace, predict::unplanned_peak(&step.trace));
    let room = made.budget_bytes - made.margin_bytes.max(margin);
    let model = StepModel::new(&step.trace, Variant::default());
    let kept = vec![Treatment::Keep; step.trace.allocations.len()];
    let heights = Evaluator::new(&model).timeline(&kept);
    let ops = step.trace.ops.iter().zip(heights);
    let high = ops.filter(|&(_, height)| height > room);
    let high: BTreeSet<_> = high
        .map(|(op, _)| format!("{}.weight", step.trace.string(op.module)))
        .collect();
    let (without, dynamic): (Vec<_>, Vec<_>) = held
        .dynamic
        .iter()
        .cloned()
        .partition(|name| high.contains(name));
    let is_all = dynamic.is_empty() || without.is_empty() || without.len() < high.len();
    (!is_all).then(|| Way {
        int8_weights: Some(Int8Weights {
            names: held.names.clone(),
            dynamic,
        }),
        ..step.way.clone()
    })
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some((int8_dynamic, less)) = int8_weights::held(chosen, plan) else {
        return;
    };
    plan.notes.push(
        "rows of what these layers are given are rounded to 8 bits at each use: outputs are further off than with \
         weights in 8 bits alone; `memfit verify` says how far"
            .to_owned(),
    );
    let count = int8_dynamic.names.len() as u64;
    let multiplying = int8_dynamic.dynamic.len() as u64;
    if multiplying < count {
        plan.notes.push(format!(
            "{multiplying} of {} multiply in 8 bits: for the others there is no room, or no such product",
            counted(count, "weight")
        ));
    }
    let details = Details::Int8Dynamic { int8_dynamic };
    plan.actions.push(Action::new(details, count, less));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::{Budget, Bytes};
    use crate::cost::CostSource;
    use crate::plan::plan;
    use crate::trace::{Alternative, Alternatives, sample};

    /// An inference whose ops are in the modules `a` and `b` and in none, with so much scratch there; all its linear
    /// layers multiply in 8 bits.
    fn multiplying(scratch: [u64; 3]) -> Trace {
        let mut trace = sample::inference(64);
        let first = u32::try_from(trace.strings.len()).unwrap();
        trace.strings.extend(["a", "b"].map(str::to_owned));
        let count = trace.ops.len();
        assert!(count >= 3, "one op a place");
        let places = [first, first + 1, 0];
        for (op, (module, bytes)) in trace.ops.iter_mut().zip(places.into_iter().zip(scratch)) {
            op.module = module;
            op.workspace_bytes = Bytes(bytes);
        }
        for op in &mut trace.ops[3..] {
            op.module = 0;
        }
        assert_eq!(trace.check(), Ok(()));
        trace
    }

    /// A step that may have large weights of its own, with the other as its way.
    fn with_way(step: Trace) -> Trace {
        let mut plain = int8_weights::tests::weighted();
        plain.meta.batch = step.meta.batch;
        let names = ["a.weight", "b.weight"].map(str::to_owned).to_vec();
        let dynamic = names.clone();
        let way = Way {
            int8_weights: Some(Int8Weights { names, dynamic }),
            ..Way::default()
        };
        let steps = vec![Alternative { way, trace: step }];
        let found = Alternatives {
            steps,
            ..Alternatives::default()
        };
        plain.with_alternatives(found).unwrap()
    }

    fn asked(budget: u64) -> PlanRequest {
        PlanRequest {
            budget: Budget::Absolute(Bytes(budget)),
            allow_kinds: vec![ActionKind::Int8Dynamic],
            forbid: vec![ActionKind::MicroBatch],
            ..PlanRequest::default()
        }
    }

    /// The layers that multiply in 8 bits in the way that is mixed.
    fn mixed_in(scratch: [u64; 3], budget: u64, request: &PlanRequest) -> Option<Vec<String>> {
        let trace = with_way(multiplying(scratch));
        let costs = CostSource::profile(vec![1.0; trace.ops.len()]);
        let mut made = plan(&trace, &costs, &asked(budget)).unwrap();
        made.budget_bytes = Bytes(budget);
        made.margin_bytes = Bytes(0);
        Some(mixed(&trace, request, &made)?.int8_weights?.dynamic)
    }

    #[test]
    fn layers_without_room_have_weights_in_8_bits_alone() {
        let mib = 1 << 20;
        let budget = 8 * mib;
        let request = asked(budget);
        let only = |name: &str| Some(vec![format!("{name}.weight")]);
        assert_eq!(mixed_in([16 * mib, 0, 0], budget, &request), only("b"));
        assert_eq!(mixed_in([0, 16 * mib, 0], budget, &request), only("a"));
        assert_eq!(mixed_in([0, 0, 0], budget, &request), None, "all have room");
        assert_eq!(mixed_in([16 * mib; 3], budget, &request), None, "none has");
        let elsewhere = mixed_in([16 * mib, 0, 16 * mib], budget, &request);
        assert_eq!(elsewhere, None, "what is no linear layer has none");
        let without = PlanRequest {
            forbid: vec![ActionKind::Int8Dynamic],
            ..request
        };
        assert_eq!(mixed_in([16 * mib, 0, 0], budget, &without), None);
    }
}

//! Parameters in 16 bits, their gradients with them: half of the bytes of both. That is `bfloat16`, and `float16` in
//! inference where `autocast_fp16` is named.
//!
//! Forward runs under autocast, which casts whatever meets a narrow parameter, and casts the parameter itself no more. An
//! update in so few bits would be lost where it is smaller than half of a last bit, so memfit updates such parameters
//! itself: the arithmetic has 32 bits, and the result is rounded up or down by chance, in proportion (Zamirai et al.,
//! *Revisiting `BFloat16` Training*, 2020). Their optimizer's state is in 8 bits, as the same kernel has it. What norms,
//! biases and other arithmetic read stays in 32 bits. Inference has no updates, and then it is the weights alone.
//!
//! Responsible for which parameters, for when it may be, for the ways worth a capture, for the action and for the words.
//! Not responsible for autocast (`autocast.rs`), for the state (`optimizer_bits.rs`) nor for the update (the kernel,
//! `memfit-memory/src/moments.rs`).

use std::collections::BTreeSet;

use super::{ActsOn, Technique, autocast, counted, optimizer_bits, weights};
use crate::bytes::Bytes;
use crate::plan::choice::Chosen;
use crate::plan::context::Outcome;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::step::EightBitState;
use crate::trace::{AllocationId, Autocast, Chunk, HalfParameters, Trace, Way};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::HalfParameters,
    name: "half_parameters",
    title: "parameters in 16 bits",
    help: "Hold weights and their gradients in 16 bits, norms in float32",
    promise: Class::Approximate,
    effect: |action| format!("{} in 16 bits", counted(action.count, "parameter")),
    short: None,
    acts_on: ActsOn::Parameters,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.way.half_parameters.is_some(),
    write,
};

/// Numbers of the smallest parameter that is narrowed: those whose state is in 8 bits.
const LEAST_NUMBERS: u64 = optimizer_bits::STATE.least_bytes.0 / WIDE;
/// Bytes of a number of 32 bits.
const WIDE: u64 = 4;

/// The ops that compute with a narrow operand under autocast, or only look numbers up.
const PRODUCTS: [&str; 8] = [
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten.convolution.default",
    "aten.mkldnn_convolution.default",
    "aten.linear.default",
    "aten.embedding.default",
];

fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if !request.asks_for(ActionKind::HalfParameters) {
        return None;
    }
    if let Some(reason) = step_refusal(trace, request) {
        return Some(reason);
    }
    let found = trace.alternatives.as_ref()?;
    let is_captured = found
        .steps
        .iter()
        .any(|it| it.way.half_parameters.is_some());
    match (is_captured, found.refusals.half_parameters.as_str()) {
        (true, _) => None,
        // With leave for the class it is captured where nothing else fits.
        (false, "") if !request.allow_kinds.contains(&ActionKind::HalfParameters) => None,
        (false, "") => Some("the step was not captured with parameters in 16 bits".to_owned()),
        (false, reason) => Some(reason.to_owned()),
    }
}

/// The same by the plain step alone, whatever was captured.
fn step_refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if request.forbid.contains(&ActionKind::HalfParameters) {
        return Some("forbidden by the request".to_owned());
    }
    let of_state = trace.meta.training.then_some(ActionKind::OptimizerBits);
    for needed in [cast(trace, request)].into_iter().chain(of_state) {
        if request.forbid.contains(&needed) {
            let name = needed.technique().name;
            return Some(format!("it needs `{name}`, which is forbidden"));
        }
    }
    if request.own_loop && trace.meta.training {
        return Some("parameters are updated by the user's own loop".to_owned());
    }
    if let Some(reason) = autocast::step_refusal(cast(trace, request), trace, request) {
        return Some(reason);
    }
    let needed = PlanRequest {
        allow_kinds: NEEDED.to_vec(),
        ..request.clone()
    };
    if !narrowed(trace, &needed).is_empty() {
        return None;
    }
    let of_state = optimizer_bits::refusal(trace, &needed).filter(|_| trace.meta.training);
    Some(of_state.unwrap_or_else(|| {
        format!(
            "no parameter of {LEAST_NUMBERS} numbers of 32 bits or more is read by matrix products, convolutions and \
             embeddings alone"
        )
    }))
}

/// The technique that its forward runs under: in inference the one in float16 where that is named.
fn cast(trace: &Trace, request: &PlanRequest) -> ActionKind {
    let is_named = autocast::is_asked_for(ActionKind::AutocastFp16, request);
    if is_named && !trace.meta.training {
        ActionKind::AutocastFp16
    } else {
        ActionKind::Autocast
    }
}

/// What it consists of where parameters train.
const NEEDED: [ActionKind; 2] = [ActionKind::Autocast, ActionKind::OptimizerBits];

/// The bytes of weights that it would narrow, where it may be used and was not asked for.
pub(in crate::plan) fn with_leave(trace: &Trace, request: &PlanRequest) -> Option<Bytes> {
    let mut asked = request.clone();
    asked.allow_kinds.push(ActionKind::HalfParameters);
    let is_new = !request.asks_for(ActionKind::HalfParameters) && may(trace, &asked);
    is_new.then(|| weights::bytes(trace, &narrowed(trace, &asked)))
}

/// May it be used, where somebody asked for it?
pub(in crate::plan) fn may(trace: &Trace, request: &PlanRequest) -> bool {
    request.asks_for(ActionKind::HalfParameters) && step_refusal(trace, request).is_none()
}

/// The ways worth a capture: whole, and with the smallest slices. Weights are not cast, so that a cache would hold next to
/// nothing.
pub(in crate::plan) fn ways(
    trace: &Trace,
    request: &PlanRequest,
    smallest: Option<&Chunk>,
) -> Vec<Way> {
    if !may(trace, request) {
        return Vec::new();
    }
    let names = narrowed(trace, request);
    let dtype = match cast(trace, request) {
        ActionKind::AutocastFp16 => autocast::FLOAT16,
        _ => autocast::BFLOAT16,
    };
    let way = |chunk: Option<&Chunk>| Way {
        chunk: chunk.cloned(),
        autocast: Some(Autocast {
            dtype: dtype.to_owned(),
            cache: false,
            keep: request.keep.clone(),
        }),
        half_parameters: Some(HalfParameters {
            names: names.clone(),
        }),
        ..Way::default()
    };
    let mut ways = vec![way(None)];
    ways.extend(smallest.map(|chunk| way(Some(chunk))));
    ways
}

/// What may be done with a step in such a way, given what may be done with the plain one: the state of parameters that
/// train is in 8 bits, whether or not that was asked for.
pub(in crate::plan) fn request_in_way(request: &PlanRequest) -> PlanRequest {
    let mut allow_kinds = request.allow_kinds.clone();
    allow_kinds.extend(NEEDED);
    PlanRequest {
        allow_kinds,
        ..request.clone()
    }
}

/// Must the state be in 8 bits? It must where a parameter that trains was narrowed.
pub(in crate::plan) fn must_narrow_state(trace: &Trace) -> bool {
    let is_narrow = |id: AllocationId| {
        let mut values = trace.values.iter();
        values.any(|it| it.allocation == id && trace.string(it.dtype) == autocast::BFLOAT16)
    };
    trace.meta.half_parameters && trace.updates.iter().any(|it| is_narrow(it.parameter))
}

/// The forms that state in 8 bits may have: with lower halves of parameters in 16 bits first, for updates have 32 bits then.
pub(in crate::plan) fn forms_of_state(trace: &Trace) -> Vec<EightBitState> {
    let whole = EightBitState {
        lower_halves: true,
        ..optimizer_bits::STATE
    };
    let halves = must_narrow_state(trace).then_some(whole);
    halves.into_iter().chain([optimizer_bits::STATE]).collect()
}

/// Does a plan keep the lower halves of parameters in 16 bits, so that their updates have 32?
pub(in crate::plan) fn keeps_updates(outcome: &Outcome) -> bool {
    let state = outcome.variant.eight_bit_state;
    state.is_some_and(|it| it.lower_halves) && must_narrow_state(&outcome.trace)
}

/// Does it round these updates instead?
pub(in crate::plan) fn rounds_updates(outcome: &Outcome) -> bool {
    must_narrow_state(&outcome.trace) && !keeps_updates(outcome)
}

/// Names of the parameters that are narrowed, in the trace's order: large ones of 32 bits that forward reads in products
/// and embeddings alone. One that trains needs state in 8 bits.
fn narrowed(trace: &Trace, request: &PlanRequest) -> Vec<String> {
    let suits = weights::read_alone(trace, &PRODUCTS);
    let trains: BTreeSet<AllocationId> = trace.updates.iter().map(|it| it.parameter).collect();
    let request = request_in_way(request);
    let updated: BTreeSet<AllocationId> = if optimizer_bits::may(trace, &request) {
        let narrow = optimizer_bits::narrow(trace);
        narrow.map(|(update, _)| update.parameter).collect()
    } else {
        BTreeSet::new()
    };
    weights::names(trace, &request.keep, LEAST_NUMBERS * WIDE, |id| {
        suits.contains(&id) && (!trains.contains(&id) || updated.contains(&id))
    })
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some(half_parameters) = chosen.outcome.way.half_parameters.clone() else {
        return;
    };
    let trace = chosen.planner.trace;
    let bytes = Bytes(weights::bytes(trace, &half_parameters.names).0 / 2);
    plan.notes.push(note(chosen).to_owned());
    let count = half_parameters.names.len() as u64;
    let details = Details::HalfParameters { half_parameters };
    plan.actions.push(Action::new(details, count, bytes));
}

fn note(chosen: &Chosen<'_>) -> &'static str {
    if !chosen.planner.trace.meta.training {
        weights::ROUNDED
    } else if rounds_updates(chosen.outcome) {
        "parameters in bfloat16: updates are computed in float32 and rounded at random, up or down in proportion; \
         closing the fitted workload makes them float32 again"
    } else {
        "parameters in bfloat16: their lower halves are kept for updates, which are those of float32; closing the fitted \
         workload makes them float32 again"
    }
}

#[cfg(test)]
pub(in crate::plan) mod tests {
    use super::*;
    use crate::bytes::Budget;
    use crate::cost::CostSource;
    use crate::plan::{Plan, plan};
    use crate::trace::{Alternative, Alternatives, Category, Phase, sample};

    /// A step with a matrix product whose weight is large and has a moment.
    pub(in crate::plan) fn product() -> Trace {
        let mut trace = sample::chain();
        for allocation in &mut trace.allocations {
            allocation.bytes = Bytes(allocation.bytes.0 * 1000);
        }
        let mut strings = trace.strings.clone();
        let number = |strings: &mut Vec<String>, text: &str| {
            strings.push(text.to_owned());
            u32::try_from(strings.len() - 1).unwrap()
        };
        let (name, mm) = (
            number(&mut strings, "head.weight"),
            number(&mut strings, "aten.mm.default"),
        );
        trace.strings = strings;
        let weight = trace.updates[0].parameter;
        trace.allocations[weight.index()].name = name;
        let mut state = trace.allocations[weight.index()].clone();
        (state.category, state.name) = (Category::OptimizerState, 0);
        let id = AllocationId(u32::try_from(trace.allocations.len()).unwrap());
        trace.allocations.push(state);
        trace.updates[0].state.push(id);
        let mut value = trace.values[0].clone();
        (value.allocation, value.version) = (id, 0);
        trace.values.push(value);
        let allocations: Vec<_> = trace.values.iter().map(|it| it.allocation).collect();
        for op in &mut trace.ops {
            let mut read = op.reads.iter().map(|value| allocations[value.index()]);
            if op.phase == Phase::Forward && read.any(|it| it == weight) {
                (op.name, op.flops) = (mm, 1 << 20);
            }
        }
        assert_eq!(trace.check(), Ok(()));
        trace
    }

    /// The same with the weight, its gradient and its state in half of the bytes.
    fn halved(trace: &Trace) -> Trace {
        let mut narrow = trace.clone();
        narrow.meta.half_parameters = true;
        narrow.strings.push("bfloat16".to_owned());
        let dtype = u32::try_from(narrow.strings.len() - 1).unwrap();
        let update = narrow.updates[0].clone();
        for id in [update.parameter, update.gradient]
            .into_iter()
            .chain(update.state)
        {
            narrow.allocations[id.index()].bytes.0 /= 2;
            for value in narrow.values.iter_mut().filter(|it| it.allocation == id) {
                value.dtype = dtype;
            }
        }
        narrow
    }

    fn request(allow: &[ActionKind], budget: u64) -> PlanRequest {
        PlanRequest {
            budget: Budget::Absolute(Bytes(budget)),
            allow_kinds: allow.to_vec(),
            forbid: vec![ActionKind::Chunk, ActionKind::MicroBatch],
            ..PlanRequest::default()
        }
    }

    fn planned(trace: &Trace, request: &PlanRequest) -> Plan {
        let costs = CostSource::profile(vec![1.0; trace.ops.len()]);
        plan(trace, &costs, request).unwrap()
    }

    fn captured(trace: &Trace, request: &PlanRequest) -> Trace {
        let steps = ways(trace, request, None)
            .into_iter()
            .map(|way| Alternative {
                way,
                trace: halved(trace),
            });
        trace
            .with_alternatives(Alternatives {
                steps: steps.collect(),
                ..Alternatives::default()
            })
            .unwrap()
    }

    #[test]
    fn what_products_alone_read_is_narrowed() {
        let half = request(&[ActionKind::HalfParameters], 1);
        let mut trace = product();
        assert_eq!(narrowed(&trace, &half), ["head.weight"]);
        let weight = trace.updates[0].parameter;
        trace.meta.fixed_parameters = vec![weight];
        assert!(
            narrowed(&trace, &half).is_empty(),
            "it is not memfit's to let go"
        );
        trace.meta.fixed_parameters.clear();
        let read = trace.values.iter().position(|it| it.allocation == weight);
        let read = crate::trace::ValueId(u32::try_from(read.unwrap()).unwrap());
        let last = trace.forward_end().index() - 1;
        trace.ops[last].reads.push(read);
        assert!(
            narrowed(&trace, &half).is_empty(),
            "an op that is no product reads it"
        );
    }

    #[test]
    fn state_of_narrow_parameters_is_in_8_bits_without_being_asked_for() {
        let half = request(&[ActionKind::HalfParameters], 1);
        let trace = captured(&product(), &half);
        let lowest = planned(&trace, &half);
        let kinds: Vec<_> = lowest.actions.iter().map(Action::kind).collect();
        for needed in [
            ActionKind::HalfParameters,
            ActionKind::Autocast,
            ActionKind::OptimizerBits,
        ] {
            assert!(kinds.contains(&needed), "{kinds:?}");
        }
        assert_eq!(lowest.promise, Class::Approximate);
        let action = lowest
            .actions
            .iter()
            .find(|it| it.kind() == ActionKind::HalfParameters);
        let full = trace.allocations[trace.updates[0].parameter.index()].bytes;
        assert_eq!(action.unwrap().bytes, Bytes(full.0 / 2));
        let exact = planned(&trace, &request(&[], 1));
        assert!(lowest.minimum_peak_bytes + full < exact.minimum_peak_bytes);
    }

    #[test]
    fn the_whole_class_takes_it_last() {
        let half = request(&[ActionKind::HalfParameters], 1);
        let trace = captured(&product(), &half);
        let exact = planned(&trace, &request(&[], 1)).minimum_budget_bytes().0;
        let all = |budget| PlanRequest {
            allow: Class::Approximate,
            ..request(&[], budget)
        };
        let uses = |plan: &Plan| {
            let mut kinds = plan.actions.iter().map(Action::kind);
            kinds.any(|kind| kind == ActionKind::HalfParameters)
        };
        assert!(!uses(&planned(&trace, &all(exact))));
        assert!(uses(&planned(&trace, &all(1))));
    }

    #[test]
    fn it_is_refused_by_a_sentence() {
        let mut trace = product();
        let half = request(&[ActionKind::HalfParameters], 1);
        assert_eq!(refusal(&trace, &half), None);
        let without = PlanRequest {
            forbid: vec![ActionKind::OptimizerBits],
            ..half.clone()
        };
        assert_eq!(
            refusal(&trace, &without).unwrap(),
            "it needs `optimizer_bits`, which is forbidden"
        );
        trace.meta.eight_bit_refusal = Some("`RMSprop` has no form in 8 bits".to_owned());
        assert_eq!(
            refusal(&trace, &half).unwrap(),
            "`RMSprop` has no form in 8 bits"
        );
        assert_eq!(
            refusal(&trace, &request(&[], 1)),
            None,
            "it was not asked for"
        );
        trace = product();
        for op in &mut trace.ops {
            op.flops = 0;
        }
        assert!(
            refusal(&trace, &half)
                .unwrap()
                .contains("no matrix product")
        );
    }
}

//! The optimizer's state in 8 bits, between updates and during them.
//!
//! The first step is what it would be but for rounding; those after it read moments that were rounded. Updates come one
//! by one, each in one pass over its parameter that makes no temporaries.
//!
//! Responsible for whether it may be, for the smallest parameter that is worth it, for what it costs, for the action and
//! for the words. Not responsible for what the state then takes ([`crate::step`]), nor for the form of the numbers (the
//! kernel, `memfit-memory/src/moments.rs`).

use super::{ActsOn, Technique, counted};
use crate::bytes::Bytes;
use crate::cost::Costs;
use crate::cost::devices::LAUNCH_SECONDS;
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, OptimizerBits, Plan, PlanRequest};
use crate::step::{EightBitState, NarrowMoment, Variant};
use crate::trace::{ParameterUpdate, Trace};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::OptimizerBits,
    name: "optimizer_bits",
    title: "optimizer state in 8 bits",
    help: "Hold the optimizer's state in 8 bits",
    promise: Class::Approximate,
    effect: |action| {
        let parameters = counted(action.count, "parameter");
        format!("optimizer state of {parameters} in 8 bits")
    },
    short: None,
    acts_on: ActsOn::Optimizer,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.variant.eight_bit_state.is_some(),
    write,
};

/// State of smaller parameters stays in 32 bits: 4,096 numbers. The executor takes the word of the plan.
pub(in crate::plan) const STATE: EightBitState = EightBitState {
    least_bytes: Bytes(4 * 4096),
    lower_halves: false,
};

/// Why the state cannot be in 8 bits; `None` where it can, or where it was not asked for.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if !request.asks_for(ActionKind::OptimizerBits) {
        return None;
    }
    if request.forbid.contains(&ActionKind::OptimizerBits) {
        return Some("forbidden by the request".to_owned());
    }
    if request.own_loop {
        return Some("the optimizer is called by the user's own loop".to_owned());
    }
    if trace.meta.optimizer.is_empty() {
        return Some("the step has no optimizer".to_owned());
    }
    if let Some(reason) = &trace.meta.per_parameter_refusal {
        return Some(reason.clone());
    }
    if let Some(reason) = &trace.meta.eight_bit_refusal {
        return Some(reason.clone());
    }
    let none = narrow(trace).next().is_none();
    none.then(|| {
        "no parameter of 4,096 numbers of 32 bits or more has state of its size".to_owned()
    })
}

/// May it be used, where somebody asked for it?
pub(in crate::plan) fn may(trace: &Trace, request: &PlanRequest) -> bool {
    request.asks_for(ActionKind::OptimizerBits) && refusal(trace, request).is_none()
}

/// The updates with moments in 8 bits.
pub(in crate::plan) fn narrow(
    trace: &Trace,
) -> impl Iterator<Item = (&ParameterUpdate, Vec<NarrowMoment>)> {
    let moments = STATE.moments(trace);
    let updates = trace.updates.iter().zip(moments);
    updates.filter(|(_, moments)| !moments.is_empty())
}

/// How long the kernel takes, in copies of the bytes that it moves: 1.6 for Adam and 1.1 for momentum, on a server's core
/// (`benchmarks/optimizer_bits.py`).
const COPIES: f64 = 1.6;
/// Seconds of the executor's own work for one parameter.
const REQUEST_SECONDS: f64 = 2e-5;
/// Torch's ops for each slice of a parameter where there is no kernel, as `tests/apply/test_moments_by_ops.py` counts them. How
/// long one takes is an estimate.
fn ops_of_slice(moments: usize, is_half: bool, keeps_halves: bool) -> f64 {
    let of_moments = if moments > 1 { 69.0 } else { 39.0 };
    let of_halves = match (is_half, keeps_halves) {
        (false, _) => 0.0,
        (true, false) => 21.0,
        (true, true) => 39.0,
    };
    of_moments + of_halves
}

/// Seconds of all updates of a step, of which those of the trace take `update_seconds` in all.
pub(in crate::plan) fn update_seconds(
    trace: &Trace,
    costs: &Costs,
    variant: Variant,
    update_seconds: f64,
) -> f64 {
    let Some(state) = variant.eight_bit_state else {
        return update_seconds;
    };
    let moved = |update: &ParameterUpdate| update.moved_bytes.as_f64().max(1.0);
    let all: f64 = trace.updates.iter().map(moved).sum();
    let (mut spared, mut taken) = (0.0, 0.0_f64);
    for (update, moments) in narrow(trace) {
        let held: f64 = moments.iter().map(|it| it.bytes.as_f64()).sum();
        // Arithmetic has 32 bits in any case.
        let full = moments.first().map_or(0, |it| it.numbers * 4);
        spared += moved(update);
        // The parameter is read and written, the gradient read; a copy does both.
        let copied = 1.5 * Bytes(full).as_f64() + held;
        taken += REQUEST_SECONDS;
        taken += if trace.meta.device_kind == "cpu" {
            COPIES * costs.copy_seconds(copied)
        } else {
            let slices = Bytes(full).as_f64() / Bytes(4 * EightBitState::SLICE_NUMBERS).as_f64();
            let op =
                (costs.copy_seconds(Bytes(full).as_f64()) / slices.max(1.0)).max(LAUNCH_SECONDS);
            let parameter = trace.allocations[update.parameter.index()].bytes;
            let is_half = parameter < Bytes(full);
            ops_of_slice(moments.len(), is_half, state.lower_halves) * slices.ceil() * op
        };
    }
    // Time is no reason to round: where the kernel is faster, that is not counted.
    let spared = update_seconds * spared / all.max(1.0);
    update_seconds - spared + taken.max(spared)
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let trace = &chosen.outcome.trace;
    let (mut names, mut bytes) = (Vec::new(), Bytes::ZERO);
    for (update, moments) in narrow(trace) {
        let parameter = &trace.allocations[update.parameter.index()];
        names.push(trace.string(parameter.name).to_owned());
        for moment in moments {
            bytes += Bytes(moment.numbers * 4) - moment.bytes;
        }
    }
    let count = names.len() as u64;
    let state = chosen.outcome.variant.eight_bit_state;
    let optimizer_bits = OptimizerBits {
        names,
        lower_halves: trace.meta.half_parameters && state.is_some_and(|it| it.lower_halves),
    };
    let details = Details::OptimizerBits { optimizer_bits };
    plan.actions.push(Action::new(details, count, bytes));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Budget;
    use crate::cost::CostSource;
    use crate::plan::search::transfers::Offer;
    use crate::plan::{Tier, Verdict, plan};
    use crate::step::{Evaluator, StateAway, StepModel, Treatment};
    use crate::trace::{AllocationId, Category, sample};

    /// The chain with a weight of 256,000 bytes, two moments of its size, and a count of steps.
    fn with_moments() -> Trace {
        let mut trace = sample::chain();
        for allocation in &mut trace.allocations {
            allocation.bytes = Bytes(allocation.bytes.0 * 1000);
        }
        let weight = trace.updates[0].parameter.index();
        for bytes in [trace.allocations[weight].bytes; 2]
            .into_iter()
            .chain([Bytes(4)])
        {
            let mut state = trace.allocations[weight].clone();
            (state.category, state.bytes) = (Category::OptimizerState, bytes);
            let id = u32::try_from(trace.allocations.len()).unwrap();
            trace.allocations.push(state);
            trace.updates[0].state.push(AllocationId(id));
        }
        trace.updates[0].temporary_bytes = Bytes(64_000);
        assert_eq!(trace.check(), Ok(()));
        trace
    }

    fn planned(trace: &Trace, request: PlanRequest) -> Plan {
        let op_seconds = vec![1.0; trace.ops.len()];
        let peak = crate::predict::unplanned_peak(trace).0;
        let request = PlanRequest {
            budget: Budget::Absolute(Bytes(peak - 300_000)),
            ..request
        };
        plan(trace, &CostSource::profile(op_seconds), &request).unwrap()
    }

    fn with_leave() -> PlanRequest {
        PlanRequest {
            allow_kinds: vec![ActionKind::OptimizerBits],
            ..PlanRequest::default()
        }
    }

    #[test]
    fn moments_take_a_byte_a_number_and_updates_make_no_temporaries() {
        let trace = with_moments();
        let peak = |variant| {
            let model = StepModel::new(&trace, variant);
            let kept = vec![Treatment::Keep; trace.allocations.len()];
            Evaluator::new(&model).evaluate(&kept).peak_bytes
        };
        let variant = |eight_bit_state| Variant {
            one_by_one: true,
            eight_bit_state,
            ..Variant::default()
        };
        let numbers = 64_000;
        let spared = 2 * (4 * numbers - numbers - 4 * 250);
        let [wide, narrow] = [None, Some(STATE)].map(|it| peak(variant(it)));
        // One by one, the peak is the update with its temporaries; without them it is at another op.
        assert!(wide - narrow >= Bytes(spared), "{wide} {narrow}");
        assert!(wide - narrow <= Bytes(spared + 64_000), "{wide} {narrow}");
    }

    #[test]
    fn on_a_gpu_an_update_takes_room_for_a_slice_of_its_numbers() {
        let mut trace = with_moments();
        let of = |trace: &Trace| {
            let (_, moments) = narrow(trace).next().unwrap();
            EightBitState::temporary_bytes(trace, &moments)
        };
        assert_eq!(of(&trace), Bytes::ZERO);
        trace.meta.device_kind = "cuda".to_owned();
        assert_eq!(of(&trace), Bytes(18 * 64_000));
        for allocation in &mut trace.allocations {
            allocation.bytes.0 *= 100;
        }
        assert_eq!(of(&trace), Bytes(18 << 20));
    }

    #[test]
    fn of_offloaded_moments_a_slice_is_in_memory_during_their_update() {
        let mut trace = with_moments();
        let away = StateAway {
            window_bytes: Bytes::ZERO,
            least_bytes: Bytes(4096),
        };
        let variant = |offload_optimizer| Variant {
            eight_bit_state: Some(STATE),
            offload_optimizer,
            ..Variant::default()
        };
        let of_both = |numbers: u64| Bytes(2 * (numbers + 4 * numbers.div_ceil(256)));
        for (numbers, times, slices) in [(64_000, 1, 1), (6_400_000, 100, 7)] {
            for allocation in &mut trace.allocations {
                allocation.bytes.0 *= times;
            }
            let [here, without] = [None, Some(away)].map(|away| {
                let model = StepModel::new(&trace, variant(away));
                let kept = vec![Treatment::Keep; trace.allocations.len()];
                Evaluator::new(&model).timeline(&kept)
            });
            assert_eq!(here[0] - without[0], of_both(numbers), "in forward");
            let moments = variant(Some(away)).offloaded_moments(&trace);
            assert!(moments[0].iter().all(|moment| moment.slices() == slices));
            let slice = moments[0].iter().map(|moment| moment.slice_bytes());
            let most = numbers.min(EightBitState::SLICE_NUMBERS);
            assert_eq!(slice.sum::<Bytes>(), of_both(most));
        }
    }

    #[test]
    fn a_plan_offloads_it_where_that_is_needed() {
        let trace = with_moments();
        let offer = Offer {
            tier: Tier::Disk,
            folder: "/scratch".to_owned(),
            write_bytes_per_second: 1e6,
            read_bytes_per_second: 1e6,
        };
        let at = |budget: u64, offload: Option<&Offer>| {
            let request = PlanRequest {
                budget: Budget::Absolute(Bytes(budget)),
                forbid: vec![ActionKind::OffloadParameters],
                offload: offload.cloned(),
                ..with_leave()
            };
            let costs = CostSource::profile(vec![1.0; trace.ops.len()]);
            plan(&trace, &costs, &request).unwrap()
        };
        let here = at(1, None).minimum_peak_bytes;
        let least = at(1, Some(&offer)).minimum_peak_bytes;
        assert!(least < here);
        let asked = at(1, Some(&offer)).minimum_budget_bytes();
        let found = at(asked.0, Some(&offer));
        assert_eq!(found.verdict, Verdict::Fits);
        let of = |kind| found.actions.iter().find(|it| it.kind() == kind);
        assert!(of(ActionKind::OptimizerBits).is_some());
        let action = of(ActionKind::OffloadOptimizer).unwrap();
        assert_eq!((action.count, action.bytes), (1, Bytes(2 * 65_000)));
        let Details::OffloadOptimizer { offload_optimizer } = &action.details else {
            panic!("{action:?}")
        };
        assert!(offload_optimizer.order.is_empty(), "none moves as one");
        // Both ways of all of it, and nothing hides them.
        let seconds = |plan: &Plan| plan.planned.predicted_step_seconds;
        let added = seconds(&found) - seconds(&at(here.0 * 2, None));
        assert!(added >= 2.0 * 0.13, "{added}");
    }

    #[test]
    fn it_is_used_with_leave_alone() {
        let trace = with_moments();
        let plan = planned(&trace, with_leave());
        assert_eq!(
            (plan.verdict, plan.promise),
            (Verdict::Fits, Class::Approximate)
        );
        let mut actions = plan.actions.iter();
        let action = actions
            .find(|it| it.kind() == ActionKind::OptimizerBits)
            .unwrap();
        assert_eq!(
            (action.count, action.bytes),
            (1, Bytes(2 * (192_000 - 1000)))
        );
        let Details::OptimizerBits { optimizer_bits } = &action.details else {
            panic!("{action:?}")
        };
        assert_eq!(optimizer_bits.names.len(), 1);
        assert_eq!(
            action.summary().effect(),
            "optimizer state of 1 parameter in 8 bits"
        );
        let without = planned(&trace, PlanRequest::default());
        assert_eq!(without.verdict, Verdict::DoesNotFit);
        assert!(without.minimum_peak_bytes > plan.minimum_peak_bytes);
        assert!(
            without
                .refusals
                .iter()
                .all(|it| it.kind != ActionKind::OptimizerBits)
        );
    }

    #[test]
    fn it_is_refused_by_a_sentence() {
        let reason = |trace: &Trace, request: &PlanRequest| refusal(trace, request);
        let mut trace = with_moments();
        assert_eq!(reason(&trace, &with_leave()), None);
        let own_loop = PlanRequest {
            own_loop: true,
            ..with_leave()
        };
        let said = reason(&trace, &own_loop).unwrap();
        assert_eq!(said, "the optimizer is called by the user's own loop");
        let forbidden = PlanRequest {
            forbid: vec![ActionKind::OptimizerBits],
            ..with_leave()
        };
        assert_eq!(
            reason(&trace, &forbidden).unwrap(),
            "forbidden by the request"
        );
        trace.meta.eight_bit_refusal = Some("`RMSprop` has no form in 8 bits".to_owned());
        let said = reason(&trace, &with_leave()).unwrap();
        assert_eq!(said, "`RMSprop` has no form in 8 bits");
        trace.meta.per_parameter_refusal = Some("`LBFGS` is not known".to_owned());
        assert_eq!(
            reason(&trace, &with_leave()).unwrap(),
            "`LBFGS` is not known"
        );
        let mut small = with_moments();
        for allocation in &mut small.allocations {
            allocation.bytes = Bytes(allocation.bytes.0 / 100);
        }
        let said = reason(&small, &with_leave()).unwrap();
        assert!(said.contains("no parameter of 4,096 numbers"), "{said}");
    }
}

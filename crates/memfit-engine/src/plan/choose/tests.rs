//! Whole plans: their bytes, their bounds, and what they say where nothing fits.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::*;
use crate::bytes::Budget;
use crate::cost::DeviceProfile;
use crate::step::random;
use crate::trace::sample::{self, Builder};
use crate::trace::{Alternative, Alternatives, Autocast, Category, Phase, Way};

fn source(trace: &Trace) -> CostSource {
    CostSource::profile(vec![1.0; trace.ops.len()])
}

fn request(budget: u64) -> PlanRequest {
    PlanRequest {
        budget: Budget::Absolute(Bytes(budget)),
        ..PlanRequest::default()
    }
}

/// Traces with something to plan.
fn traces(count: usize) -> Vec<Trace> {
    let mut runner = TestRunner::deterministic();
    let next = || random::recipes().new_tree(&mut runner).unwrap().current();
    std::iter::repeat_with(next)
        .map(|(recipe, _, _)| random::build(&recipe))
        .take(count)
        .collect()
}

#[test]
fn the_same_request_gives_the_same_bytes() {
    for trace in traces(60) {
        let budget = predict::unplanned_peak(&trace).0 * 3 / 4;
        let plan = |trace: &Trace| plan(trace, &source(trace), &request(budget)).unwrap();
        let (first, second) = (plan(&trace), plan(&trace.clone()));
        assert_eq!(
            crate::file::encode_plan(&first),
            crate::file::encode_plan(&second)
        );
    }
}

#[test]
fn a_limit_on_work_gives_the_same_plan_each_time_and_takes_no_more_work() {
    for trace in traces(60) {
        let budget = predict::unplanned_peak(&trace).0 * 3 / 4;
        let (source, request) = (source(&trace), request(budget));
        let within = |limit| plan_within(&trace, &source, &request, limit).unwrap();
        let [none, least, again] = [Limit::None, Limit::Work(0.0), Limit::Work(0.0)].map(within);
        assert_eq!(
            crate::file::encode_plan(&least),
            crate::file::encode_plan(&again)
        );
        assert!(least.evaluations <= none.evaluations);
        assert!(
            least.evaluations < none.evaluations
                || none.verdict == Verdict::DoesNotFit
                || none.stop_reason != StopReason::LocalOptimum
        );
    }
}

#[test]
fn a_limit_on_work_seeks_the_smallest_peak_only_where_nothing_fits() {
    let mut fitting = 0;
    for trace in traces(60) {
        for percent in [1, 75] {
            let budget = predict::unplanned_peak(&trace).0 * percent / 100;
            let (source, request) = (source(&trace), request(budget));
            let within = |limit| plan_within(&trace, &source, &request, limit).unwrap();
            let [all, limited] = [Limit::None, Limit::Work(1e3)].map(within);
            assert_eq!(limited.verdict, all.verdict);
            if limited.verdict == Verdict::DoesNotFit {
                assert_eq!(limited.minimum_peak_bytes, all.minimum_peak_bytes);
                continue;
            }
            fitting += 1;
            assert!(limited.evaluations < all.evaluations);
            assert!(limited.planned.predicted_peak_bytes.0 <= budget);
            assert!(limited.predicted_step_ratio >= all.lower_bound_ratio - 1e-9);
        }
    }
    assert!(fitting > 10, "{fitting}");
}

#[test]
fn a_plan_that_fits_is_within_its_budget_and_bounds() {
    for trace in traces(120) {
        let peak = predict::unplanned_peak(&trace);
        for percent in [95, 80, 60, 30] {
            let budget = (peak.0 * percent / 100).max(1);
            let plan = plan(&trace, &source(&trace), &request(budget)).unwrap();
            assert!(
                plan.planned.predicted_peak_bytes <= peak,
                "never above no plan"
            );
            assert!(plan.minimum_peak_bytes <= plan.planned.predicted_peak_bytes);
            if plan.verdict == Verdict::Fits {
                let high = plan.planned.predicted_peak_bytes + plan.margin_bytes;
                assert!(high <= plan.budget_bytes);
                assert!(plan.lower_bound_ratio <= plan.predicted_step_ratio + 1e-9);
            } else {
                assert!(plan.minimum_budget_bytes() > plan.budget_bytes);
                assert!(plan.bottleneck.is_some());
            }
        }
    }
}

#[test]
fn the_smallest_budget_that_a_refusal_names_is_enough() {
    let mut refused = 0;
    for trace in traces(120) {
        let peak = predict::unplanned_peak(&trace);
        let plan = |budget: Bytes| plan(&trace, &source(&trace), &request(budget.0)).unwrap();
        for percent in [1, 30, 60] {
            let tried = plan(Bytes((peak.0 * percent / 100).max(1)));
            if tried.verdict == Verdict::DoesNotFit {
                let again = plan(tried.minimum_budget_bytes());
                assert_eq!(again.verdict, Verdict::Fits);
                refused += 1;
            }
        }
    }
    assert!(refused > 120, "only {refused} refusals");
}

#[test]
fn an_ample_budget_needs_nothing() {
    let trace = sample::chain();
    let plan = plan(&trace, &source(&trace), &request(1 << 30)).unwrap();
    assert_eq!(
        (plan.stop_reason, plan.actions.len()),
        (StopReason::NothingToDo, 0)
    );
}

#[test]
fn on_cuda_a_plan_fits_only_if_the_allocator_lets_it_run() {
    let (mut set, mut refused) = (0, 0);
    for mut trace in traces(100) {
        trace.meta.device_kind = "cuda".into();
        for allocation in &mut trace.allocations {
            allocation.bytes = Bytes(allocation.bytes.0 * 1_000_000);
        }
        let peak = predict::unplanned_peak(&trace);
        let budget = peak + predict::margin(&trace, peak) + Bytes(8 << 20);
        let free = plan(&trace, &source(&trace), &request(budget.0)).unwrap();
        let has = |kind| free.actions.iter().any(|action| action.kind() == kind);
        set += u32::from(has(ActionKind::AllocatorSettings));
        let forbid = vec![
            ActionKind::Remat,
            ActionKind::FuseOptimizer,
            ActionKind::MicroBatch,
            ActionKind::AllocatorSettings,
        ];
        let bound = PlanRequest {
            forbid,
            ..request(budget.0)
        };
        let bound = plan(&trace, &source(&trace), &bound).unwrap();
        // The requests fit: only the allocator can be against it.
        let said = |note: &String| note.contains("refuse one of them");
        let is_refused = bound.notes.iter().any(said);
        assert_eq!(bound.verdict == Verdict::DoesNotFit, is_refused);
        assert!(bound.reserved.is_some() && free.reserved.is_some());
        refused += u32::from(is_refused);
    }
    assert!(set > 0 && refused > 0, "{set} {refused}");
}

#[test]
fn forbidden_actions_are_left_out_and_said() {
    let trace = sample::chain();
    let forbid = vec![
        ActionKind::Remat,
        ActionKind::FuseOptimizer,
        ActionKind::MicroBatch,
        ActionKind::Chunk,
    ];
    let request = PlanRequest {
        forbid,
        ..request(760)
    };
    let plan = plan(&trace, &source(&trace), &request).unwrap();
    assert_eq!((plan.verdict, plan.actions.len()), (Verdict::DoesNotFit, 0));
    assert!(
        plan.refusals
            .iter()
            .all(|refusal| refusal.reason.contains("forbidden"))
    );
}

/// Six layers whose results backward needs, each of 128 KiB, of which nothing may be recomputed.
fn stubborn(allow_kinds: Vec<ActionKind>, percent: u64) -> Plan {
    const LAYERS: u32 = 6;
    let mut builder = Builder::new(64);
    let shape = [64, 512];
    let mut value = builder.allocation(&shape, Category::Input, 0);
    for layer in 0..LAYERS {
        value = builder.op("aten.tanh.default", Phase::Forward, &[value], &shape);
        let unpack = 2 * LAYERS - layer;
        builder.save(value, layer + 1, unpack, unpack + 1);
    }
    let loss = builder.op("aten.mean.default", Phase::Forward, &[value], &[]);
    let mut gradient = loss;
    for _ in 0..LAYERS {
        let read = [gradient];
        gradient = builder.op("aten.tanh_backward.default", Phase::Backward, &read, &shape);
    }
    let trace = builder.finish();
    let budget = predict::unplanned_peak(&trace).0 * percent / 100;
    let forbid = vec![
        ActionKind::Remat,
        ActionKind::FuseOptimizer,
        ActionKind::MicroBatch,
        ActionKind::Chunk,
    ];
    let request = PlanRequest {
        allow_kinds,
        forbid,
        ..request(budget)
    };
    plan(&trace, &source(&trace), &request).unwrap()
}

#[test]
fn what_only_an_action_with_leave_would_reach_is_named() {
    let without = stubborn(Vec::new(), 90);
    assert_eq!(without.verdict, Verdict::DoesNotFit);
    let next = without.next_class.expect("fewer bits reach it");
    let named = (next.promise, next.kinds.as_slice());
    assert_eq!(named, (Class::Approximate, &[ActionKind::Shrink][..]));
    let with = stubborn(vec![ActionKind::Shrink], 90);
    let peak = with.planned.predicted_peak_bytes;
    assert_eq!(
        (with.verdict, with.promise),
        (Verdict::Fits, Class::Approximate)
    );
    assert_eq!(peak, next.predicted_peak_bytes);
    // Out of reach for all.
    assert_eq!(stubborn(Vec::new(), 20).next_class, None);
}

#[test]
fn a_budget_below_what_stays_is_refused_with_the_sum() {
    let trace = sample::chain();
    let plan = plan(&trace, &source(&trace), &request(100)).unwrap();
    assert_eq!(plan.stop_reason, StopReason::ProvedInfeasible);
    let sum = "parameter 256 B + input 128 B = 384 B are alive throughout the step";
    assert!(
        plan.notes.iter().any(|note| note.contains(sum)),
        "{:?}",
        plan.notes
    );
}

/// A step that also runs under autocast: all that it makes takes so many of ten parts of its own, and all that it moves.
fn with_cast(mut trace: Trace, made: u64, moved: u64) -> Trace {
    for (op, number) in trace.ops.iter_mut().zip(0..) {
        op.moved_bytes = Bytes(1000 + number * 7919 % 5000);
    }
    let product = trace.ops.iter().position(|op| op.phase == Phase::Forward);
    trace.ops[product.expect("there is one")].flops = 1;
    let mut cast = trace.clone();
    for allocation in &mut cast.allocations {
        if allocation.producer.is_some() {
            allocation.bytes = Bytes(allocation.bytes.0 * made / 10);
        }
    }
    for op in &mut cast.ops {
        op.moved_bytes = Bytes(op.moved_bytes.0 * moved / 10);
    }
    let way = Way {
        autocast: Some(Autocast {
            dtype: "bfloat16".to_owned(),
            cache: false,
            keep: Vec::new(),
        }),
        ..Way::default()
    };
    trace.alternatives = Some(Alternatives {
        steps: vec![Alternative { way, trace: cast }],
        ..Alternatives::default()
    });
    trace
}

/// What a bound shows to be hopeless is what a search without it does not choose.
#[test]
fn what_is_left_out_is_never_what_is_chosen() {
    let source = CostSource::Roofline {
        profile: DeviceProfile {
            bytes_per_second: 1e6,
            op_overhead_seconds: 1e-6,
            ..DeviceProfile::default()
        },
    };
    // Smaller and faster, neither, and such that bytes and time are against each other.
    let kinds = [(6, 6), (12, 12), (12, 9), (7, 11), (14, 8)];
    let (mut faster, mut fitting) = (0, 0);
    let (mut few, mut all) = (0, 0);
    for (number, trace) in traces(100).into_iter().enumerate() {
        let (made, moved) = kinds[number % kinds.len()];
        let trace = with_cast(trace, made, moved);
        for percent in [60, 75, 90] {
            let request = PlanRequest {
                allow: Class::Approximate,
                ..request(predict::unplanned_peak(&trace).0 * percent / 100)
            };
            let costs = Costs::new(&trace, &source).unwrap();
            let ways = ways::with_costs(&trace, &source, &costs, &request).unwrap();
            let planned = |share| {
                let planner = Planner::new(&trace, &costs, &ways, &request, share);
                let mut plan = planner.empty_plan();
                planner.solve(&mut plan).unwrap();
                (plan, planner.casts_are_faster())
            };
            let ((found, is_faster), (twin, _)) =
                (planned(Share::FULL), planned(Share::FULL.thorough()));
            assert_eq!(
                (found.verdict, found.planned, &found.actions),
                (twin.verdict, twin.planned, &twin.actions),
                "{number} at {percent} %"
            );
            faster += u32::from(is_faster);
            fitting += u32::from(found.verdict == Verdict::Fits);
            few += found.evaluations;
            all += twin.evaluations;
        }
    }
    assert!(
        (60..240).contains(&faster),
        "some are, and some are not: {faster}"
    );
    assert!(fitting >= 90, "{fitting}");
    assert!(few * 10 <= all * 9, "{few} of {all}");
}

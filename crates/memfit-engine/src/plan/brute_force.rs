//! Small cases against all subsets.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::bound::bound;
use super::problem::{Problem, Scorer};
use super::relaxation::Relaxation;
use super::search::{Effort, search};
use crate::bytes::Bytes;
use crate::cost::{CostSource, Costs};
use crate::step::{Evaluator, Treatment, Variant, random};
use crate::trace::Trace;

/// Random traces on which each moment is held against all subsets.
const CASES: u32 = 400;

/// The least replay time of any valid subset within `target`, and the lowest peak of any.
fn optimum(problem: &Problem<'_>, target: Bytes) -> (Option<f64>, Bytes) {
    let mut scorer = Scorer::new(problem);
    let (mut fastest, mut lowest): (Option<f64>, Bytes) = (None, Bytes(u64::MAX));
    for subset in 0_u32..1 << problem.candidates.len() {
        let mut dropped = vec![Treatment::Keep; problem.trace.allocations.len()];
        for (i, id) in problem.candidates.iter().enumerate() {
            dropped[id.index()] = Treatment::dropped(subset >> i & 1 == 1);
        }
        let (evaluation, seconds) = scorer.peek(&dropped);
        if !evaluation.valid {
            continue;
        }
        lowest = lowest.min(evaluation.peak_bytes);
        if evaluation.peak_bytes <= target && fastest.is_none_or(|fastest| seconds < fastest) {
            fastest = Some(seconds);
        }
    }
    (fastest, lowest)
}

fn costs(trace: &Trace) -> Costs {
    // Uneven op times, so that ties are rare and order matters.
    let op_seconds = (0..trace.ops.len())
        .map(|i| 1.0 + f64::from(u8::try_from(i * 7 % 11).unwrap()))
        .collect();
    Costs::new(trace, &CostSource::Profile { op_seconds }).unwrap()
}

#[test]
fn no_moment_bounds_above_the_optimum() {
    let mut runner = TestRunner::deterministic();
    let (mut bounds, mut tight) = (0, 0);
    for case in 0..CASES {
        let (recipe, _, _) = random::recipes().new_tree(&mut runner).unwrap().current();
        let trace = random::build(&recipe);
        let costs = costs(&trace);
        let variant = Variant {
            fuse_optimizer: case % 2 == 1,
            accumulate: case % 4 >= 2,
            ..Variant::default()
        };
        let problem = Problem::new(&trace, variant, &costs);
        if problem.candidates.len() < 2 || problem.candidates.len() > 10 {
            continue;
        }
        let nothing = vec![Treatment::Keep; trace.allocations.len()];
        let heights = Evaluator::new(&problem.model).timeline(&nothing);
        let peak = heights.iter().copied().max().unwrap();
        let (_, bottom) = optimum(&problem, Bytes::ZERO);
        for share in [0, 3, 7] {
            let target = Bytes(bottom.0 + (peak.0 - bottom.0) / 10 * share);
            let fastest = optimum(&problem, target).0.unwrap();
            let most = (0..heights.len())
                .map(|op| Relaxation::new(&problem, op, heights[op]).solve(target))
                .fold(0.0, |most, relaxed| relaxed.replay_seconds.max(most));
            assert!(most <= fastest + 1e-9, "{most} is above {fastest}");
            bounds += u32::from(fastest > 0.0);
            tight += u32::from(fastest > 0.0 && most >= fastest * 0.5);
        }
    }
    // It would be no bound worth computing if it were far below most of the time.
    assert!(bounds > 100 && tight * 2 > bounds, "{tight} of {bounds}");
}

#[test]
fn the_search_finds_the_optimum_of_small_cases() {
    let mut runner = TestRunner::deterministic();
    let (mut cases, mut optimal, mut lowest_found) = (0, 0, 0);
    let mut off: f64 = 0.0;
    while cases < 400 {
        let (recipe, _, _) = random::recipes().new_tree(&mut runner).unwrap().current();
        let trace = random::build(&recipe);
        let costs = costs(&trace);
        let variant = Variant {
            fuse_optimizer: cases % 2 == 1,
            accumulate: cases % 4 >= 2,
            ..Variant::default()
        };
        let problem = Problem::new(&trace, variant, &costs);
        let nothing = vec![Treatment::Keep; trace.allocations.len()];
        let peak = Scorer::new(&problem).peek(&nothing).0.peak_bytes;
        let (_, bottom) = optimum(&problem, Bytes::ZERO);
        if problem.candidates.len() < 3 || problem.candidates.len() > 12 || bottom >= peak {
            continue;
        }
        cases += 1;
        let target = Bytes(u64::midpoint(bottom.0, peak.0));
        let (fastest, _) = optimum(&problem, target);
        let least = bound(&problem, target);
        let found = search(&problem, target, &least, f64::INFINITY, Effort::Full);
        assert!(
            least.peak_bytes <= bottom,
            "the bound on the peak is above the optimum"
        );
        assert!(found.lowest.evaluation.peak_bytes >= bottom);
        lowest_found += u32::from(found.lowest.evaluation.peak_bytes == bottom);
        let Some(fastest) = fastest else {
            assert!(found.best.is_none());
            optimal += 1;
            continue;
        };
        assert!(
            least.replay_seconds <= fastest + 1e-9,
            "the bound is above the optimum"
        );
        if let Some(best) = found.best {
            assert!(best.evaluation.peak_bytes <= target);
            assert!(
                best.replay_seconds >= fastest - 1e-9,
                "faster than every subset"
            );
            optimal += u32::from(best.replay_seconds <= fastest + 1e-9);
            let step = costs.step_seconds();
            off = off.max((best.replay_seconds - fastest) / (step + fastest));
        }
    }
    assert!(
        optimal * 100 >= cases * 95,
        "optimal in {optimal} of {cases}"
    );
    assert!(off <= 0.02, "{off} of the step time above the optimum");
    assert!(
        lowest_found * 100 >= cases * 95,
        "lowest peak in {lowest_found} of {cases}"
    );
}

//! Small cases against all subsets.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::limits::Share;
use super::problem::{Allowed, Problem, Scorer};
use super::search::search;
use super::transfers::Offer;
use crate::bytes::Bytes;
use crate::cost::{CostSource, Costs};
use crate::plan::Tier;
use crate::plan::bound::bound::bound;
use crate::plan::bound::relaxation::Relaxation;
use crate::step::{Evaluator, Treatment, Variant, random};
use crate::trace::{AllocationId, Trace};

/// Random traces on which each moment is held against all subsets.
const CASES: u32 = 400;

/// Most subsets of a larger case that are tried. Optimised code tries all that are needed: two million at most.
const MOST_VISITED: u64 = if cfg!(debug_assertions) {
    5_000
} else {
    1 << 24
};

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

/// All subsets that take less time than the best so far, for cases that are too large for all.
///
/// Dropping more never takes less time, so what takes as long as the best is not added to.
/// `leaving_out_what_takes_longer_leaves_the_optimum` holds that against all subsets.
struct Cheaper<'p, 's> {
    problem: &'p Problem<'p>,
    scorer: &'s mut Scorer<'p>,
    target: Bytes,
    best_seconds: f64,
    dropped: Vec<Treatment>,
    visited: u64,
}

impl<'p, 's> Cheaper<'p, 's> {
    /// The least time of a subset within `target`, if it is below `seconds`; else `seconds`. `None` after so
    /// many subsets without an end.
    fn than(
        seconds: f64,
        problem: &'p Problem<'p>,
        scorer: &'s mut Scorer<'p>,
        target: Bytes,
        most_visited: u64,
    ) -> Option<f64> {
        let mut tried = Self {
            problem,
            scorer,
            target,
            best_seconds: seconds,
            dropped: vec![Treatment::Keep; problem.trace.allocations.len()],
            visited: 0,
        };
        tried.visit(0, most_visited);
        (tried.visited <= most_visited).then_some(tried.best_seconds)
    }

    /// Tries what is dropped now, and everything that drops more from a place on.
    fn visit(&mut self, from: usize, most_visited: u64) {
        self.visited += 1;
        if self.visited > most_visited {
            return;
        }
        let (evaluation, seconds) = self.scorer.peek(&self.dropped);
        if seconds >= self.best_seconds {
            return;
        }
        if evaluation.valid && evaluation.peak_bytes <= self.target {
            self.best_seconds = seconds;
            return;
        }
        for place in from..self.problem.candidates.len() {
            let id = self.problem.candidates[place].index();
            self.dropped[id] = Treatment::dropped(true);
            self.visit(place + 1, most_visited);
            self.dropped[id] = Treatment::Keep;
        }
    }
}

fn costs(trace: &Trace) -> Costs {
    // Uneven op times, so that ties are rare and order matters.
    let op_seconds = (0..trace.ops.len())
        .map(|i| 1.0 + f64::from(u8::try_from(i * 7 % 11).unwrap()))
        .collect();
    Costs::new(trace, &CostSource::profile(op_seconds)).unwrap()
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
        let problem = Problem::new(&trace, variant, &costs, Allowed::REMAT);
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
                .fold(0.0, |most, relaxed| relaxed.added_seconds.max(most));
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
        let problem = Problem::new(&trace, variant, &costs, Allowed::REMAT);
        if !(3..=12).contains(&problem.candidates.len()) {
            continue;
        }
        let nothing = vec![Treatment::Keep; trace.allocations.len()];
        let peak = Scorer::new(&problem).peek(&nothing).0.peak_bytes;
        let (_, bottom) = optimum(&problem, Bytes::ZERO);
        if bottom >= peak {
            continue;
        }
        cases += 1;
        let target = Bytes(u64::midpoint(bottom.0, peak.0));
        let (fastest, _) = optimum(&problem, target);
        let least = bound(&problem, target);
        let found = search(&problem, target, &least, f64::INFINITY, Share::FULL);
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
            least.added_seconds <= fastest + 1e-9,
            "the bound is above the optimum"
        );
        if let Some(best) = found.best {
            assert!(best.evaluation.peak_bytes <= target);
            assert!(
                best.added_seconds >= fastest - 1e-9,
                "faster than every subset"
            );
            optimal += u32::from(best.added_seconds <= fastest + 1e-9);
            let step = costs.step_seconds();
            off = off.max((best.added_seconds - fastest) / (step + fastest));
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

#[test]
fn leaving_out_what_takes_longer_leaves_the_optimum() {
    let mut runner = TestRunner::deterministic();
    let mut cases = 0;
    while cases < 200 {
        let (recipe, _, _) = random::recipes().new_tree(&mut runner).unwrap().current();
        let trace = random::build(&recipe);
        let costs = costs(&trace);
        let problem = Problem::new(&trace, Variant::default(), &costs, Allowed::REMAT);
        if !(3..=10).contains(&problem.candidates.len()) {
            continue;
        }
        cases += 1;
        let mut scorer = Scorer::new(&problem);
        let nothing = vec![Treatment::Keep; trace.allocations.len()];
        let peak = scorer.peek(&nothing).0.peak_bytes;
        let (_, bottom) = optimum(&problem, Bytes::ZERO);
        for share in [0, 2, 5, 9] {
            let target = Bytes(bottom.0 + (peak.0 - bottom.0) / 10 * share);
            let fastest = optimum(&problem, target).0.unwrap();
            for seconds in [f64::INFINITY, fastest] {
                let found = Cheaper::than(seconds, &problem, &mut scorer, target, u64::MAX);
                assert_eq!(found, Some(fastest));
            }
        }
    }
}

#[test]
fn the_search_finds_the_optimum_of_larger_cases() {
    let mut runner = TestRunner::deterministic();
    let (mut cases, mut optimal, mut given_up) = (0, 0, 0);
    let mut off: f64 = 0.0;
    while cases < 60 {
        let larger = random::recipes_of(14..30);
        let (recipe, _, _) = larger.new_tree(&mut runner).unwrap().current();
        let trace = random::build(&recipe);
        let costs = costs(&trace);
        let variant = Variant {
            fuse_optimizer: cases % 2 == 1,
            ..Variant::default()
        };
        let problem = Problem::new(&trace, variant, &costs, Allowed::REMAT);
        if !(13..=25).contains(&problem.candidates.len()) {
            continue;
        }
        let mut scorer = Scorer::new(&problem);
        let nothing = vec![Treatment::Keep; trace.allocations.len()];
        let peak = scorer.peek(&nothing).0.peak_bytes;
        let least = bound(&problem, Bytes::ZERO);
        let lowest = search(&problem, Bytes::ZERO, &least, f64::INFINITY, Share::FULL).lowest;
        let bottom = lowest.evaluation.peak_bytes;
        if bottom >= peak {
            continue;
        }
        cases += 1;
        let target = Bytes(bottom.0 + (peak.0 - bottom.0) / 4 * (cases % 4));
        let least = bound(&problem, target);
        let found = search(&problem, target, &least, f64::INFINITY, Share::FULL);
        let found = found.best.expect("the lowest peak fits").added_seconds;
        assert!(least.added_seconds <= found + 1e-9);
        let below = found - 1e-9;
        let Some(fastest) = Cheaper::than(below, &problem, &mut scorer, target, MOST_VISITED)
        else {
            given_up += 1;
            continue;
        };
        optimal += u64::from(fastest >= found - 1e-9);
        off = off.max((found - fastest - 1e-9) / (costs.step_seconds() + fastest));
    }
    let decided = cases - given_up;
    assert!(decided >= if cfg!(debug_assertions) { 25 } else { 60 });
    assert!(
        optimal * 100 >= decided * 95,
        "optimal in {optimal} of {decided}"
    );
    assert!(off <= 0.02, "{off} of the step time above the optimum");
}

/// The least time added by any treatments within `target`, and the lowest peak of any.
fn optimum_of_all(problem: &Problem<'_>, target: Bytes) -> (Option<f64>, Bytes) {
    let mut scorer = Scorer::new(problem);
    let choices: Vec<(AllocationId, Vec<Treatment>)> = problem
        .candidates
        .iter()
        .map(|&id| (id, problem.treatments(id).collect()))
        .collect();
    let mut treatments = vec![Treatment::Keep; problem.trace.allocations.len()];
    let (mut fastest, mut lowest): (Option<f64>, Bytes) = (None, Bytes(u64::MAX));
    let total: usize = choices.iter().map(|(_, all)| all.len()).product();
    for mut number in 0..total {
        for (id, all) in &choices {
            treatments[id.index()] = all[number % all.len()];
            number /= all.len();
        }
        let (evaluation, seconds) = scorer.peek(&treatments);
        if evaluation.valid {
            lowest = lowest.min(evaluation.peak_bytes);
            let fits = evaluation.peak_bytes <= target;
            if fits && fastest.is_none_or(|fastest| seconds < fastest) {
                fastest = Some(seconds);
            }
        }
    }
    (fastest, lowest)
}

#[test]
fn the_search_finds_the_optimum_of_small_cases_with_stores() {
    let mut runner = TestRunner::deterministic();
    let (mut cases, mut optimal, mut lowest_found, mut stored) = (0, 0, 0, 0);
    let mut off: f64 = 0.0;
    while cases < 150 {
        let (recipe, _, _) = random::recipes().new_tree(&mut runner).unwrap().current();
        let trace = random::build(&recipe);
        let costs = costs(&trace);
        // From hardly ever to nearly always cheaper than computing again.
        let rate = [2.0, 20.0, 200.0, 2000.0][cases % 4];
        let offer = Offer {
            tier: Tier::Disk,
            folder: String::new(),
            write_bytes_per_second: rate,
            read_bytes_per_second: rate * 2.0,
        };
        let variant = Variant {
            fuse_optimizer: cases % 2 == 1,
            window_bytes: Bytes(if cases % 3 == 0 { 0 } else { 300 }),
            ..Variant::default()
        };
        let allowed = Allowed {
            remat: cases % 5 != 0,
            unneeded_saves: cases % 7 != 0,
            offer: Some(&offer),
            shrink: None,
        };
        let problem = Problem::new(&trace, variant, &costs, allowed);
        if problem.candidates.len() < 2 || problem.candidates.len() > 7 {
            continue;
        }
        let nothing = vec![Treatment::Keep; trace.allocations.len()];
        let peak = Scorer::new(&problem).peek(&nothing).0.peak_bytes;
        let (_, bottom) = optimum_of_all(&problem, Bytes::ZERO);
        if bottom >= peak {
            continue;
        }
        cases += 1;
        let target = Bytes(u64::midpoint(bottom.0, peak.0));
        let (fastest, _) = optimum_of_all(&problem, target);
        let fastest = fastest.unwrap();
        let least = bound(&problem, target);
        assert!(least.peak_bytes <= bottom);
        assert!(least.added_seconds <= fastest + 1e-9, "{least:?} {fastest}");
        let found = search(&problem, target, &least, f64::INFINITY, Share::FULL);
        assert!(found.lowest.evaluation.peak_bytes >= bottom);
        lowest_found += u32::from(found.lowest.evaluation.peak_bytes == bottom);
        let best = found.best.expect("something fits");
        assert!(best.evaluation.peak_bytes <= target);
        assert!(best.added_seconds >= fastest - 1e-9);
        // The search ends where it is near the bound.
        let near = problem.op_seconds.iter().sum::<f64>() * 1e-3;
        optimal += u32::from(best.added_seconds <= fastest + near);
        off = off.max((best.added_seconds - fastest) / (costs.step_seconds() + fastest));
        stored += u32::from(best.treatments.iter().any(|treatment| treatment.is_store()));
    }
    assert!(optimal >= 143, "optimal in {optimal} of {cases}");
    assert!(
        lowest_found >= 143,
        "lowest peak in {lowest_found} of {cases}"
    );
    assert!(off <= 0.02, "{off} of the step time above the optimum");
    assert!(stored > 30, "stored in {stored} only");
}

#[test]
fn the_search_finds_the_optimum_of_small_cases_with_fewer_bits() {
    let mut runner = TestRunner::deterministic();
    let (mut cases, mut optimal, mut lowest_found, mut shrunk) = (0, 0, 0, 0);
    while cases < 120 {
        let (recipe, _, _) = random::recipes().new_tree(&mut runner).unwrap().current();
        let trace = random::build(&recipe);
        let costs = costs(&trace);
        let variant = Variant {
            fuse_optimizer: cases % 2 == 1,
            ..Variant::default()
        };
        let allowed = Allowed {
            remat: cases % 5 != 0,
            unneeded_saves: true,
            offer: None,
            shrink: Some(Bytes(8)),
        };
        let problem = Problem::new(&trace, variant, &costs, allowed);
        if problem.candidates.len() < 2 || problem.candidates.len() > 5 {
            continue;
        }
        let nothing = vec![Treatment::Keep; trace.allocations.len()];
        let peak = Scorer::new(&problem).peek(&nothing).0.peak_bytes;
        let (_, bottom) = optimum_of_all(&problem, Bytes::ZERO);
        if bottom >= peak {
            continue;
        }
        cases += 1;
        let target = Bytes(u64::midpoint(bottom.0, peak.0));
        let fastest = optimum_of_all(&problem, target).0.unwrap();
        let least = bound(&problem, target);
        assert!(least.peak_bytes <= bottom);
        assert!(least.added_seconds <= fastest + 1e-9, "{least:?} {fastest}");
        let found = search(&problem, target, &least, f64::INFINITY, Share::FULL);
        assert!(found.lowest.evaluation.peak_bytes >= bottom);
        lowest_found += u32::from(found.lowest.evaluation.peak_bytes == bottom);
        let best = found.best.expect("something fits");
        assert!(best.evaluation.peak_bytes <= target);
        assert!(best.added_seconds >= fastest - 1e-9);
        let near = problem.op_seconds.iter().sum::<f64>() * 1e-3;
        optimal += u32::from(best.added_seconds <= fastest + near);
        shrunk += u32::from(best.treatments.iter().any(|it| it.is_shrink()));
    }
    assert!(optimal >= 114, "optimal in {optimal} of {cases}");
    assert!(lowest_found >= 114, "lowest in {lowest_found} of {cases}");
    assert!(shrunk > 30, "shrunk in {shrunk} only");
}

//! The way to the smallest peak.
//!
//! Responsible for polishing what a descent found until nothing lowers its peak. Not responsible for time.

use super::problem::{Candidate, Problem};
use super::search::{SMALL_PROBLEM, Search, lower};
use crate::bytes::Bytes;
use crate::step::Treatment;
use crate::trace::AllocationId;

/// Bottoms that are polished further.
const BOTTOMS: usize = 3;
/// Up to this many candidates, all ways to treat three of them are tried.
const TINY_PROBLEM: usize = 12;
/// Moves tried to leave a bottom.
const ESCAPES: usize = 6;

impl Search<'_> {
    /// The lowest of the bottoms, after polishing the few lowest.
    pub(in crate::plan) fn lowest(&mut self, mut bottoms: Vec<Candidate>) -> Candidate {
        bottoms.sort_by_key(|bottom| bottom.evaluation.peak_bytes);
        let polished = bottoms
            .iter()
            .take(BOTTOMS)
            .map(|bottom| self.settle(bottom.clone()));
        let polished: Vec<Candidate> = polished.collect();
        let all = polished.into_iter().chain(bottoms);
        let lowest = all.reduce(|a, b| if lower(&b, &a) { b } else { a });
        lowest.expect("there is always the start with nothing dropped")
    }

    /// Polishes a bottom: treats one allocation otherwise at a time, then drops or keeps each together with one it is
    /// computed from (or, in small problems, with any other), and descends again, until nothing lowers the peak.
    fn settle(&mut self, mut at: Candidate) -> Candidate {
        let mut before = Bytes(u64::MAX);
        while at.evaluation.peak_bytes < before && !self.exhausted() {
            before = at.evaluation.peak_bytes;
            let mut concerned = self.concerned(&at);
            for &id in &self.problem.candidates {
                for treatment in self.problem.treatments(id) {
                    let same_peak_will_do = treatment.is_keep();
                    if same_peak_will_do || concerned[id.index()] {
                        let known = at.treatments[id.index()];
                        at = self.change(at, &[(id, treatment)], same_peak_will_do);
                        if at.treatments[id.index()] != known {
                            concerned = self.concerned(&at);
                        }
                    }
                }
            }
            for (id, other) in pairs(self.problem) {
                if !concerned[id.index()] && !concerned[other.index()] {
                    continue;
                }
                for changes in self.ways(&at, &[id, other]) {
                    let known = at.evaluation;
                    at = self.change(at, &changes, false);
                    if at.evaluation != known {
                        concerned = self.concerned(&at);
                    }
                }
            }
            at = self.descend(at, Bytes::ZERO, None);
            if at.evaluation.peak_bytes == before {
                at = self.escape(at);
            }
        }
        at
    }

    /// Which allocations are worth another treatment: in small problems all.
    fn concerned(&mut self, at: &Candidate) -> Vec<bool> {
        if self.problem.candidates.len() <= SMALL_PROBLEM {
            return vec![true; at.treatments.len()];
        }
        self.concerned_at_peak(at)
    }

    /// Which allocations have to do with what is there at the peak: they are, or something is that they are computed
    /// from. To drop or store another one seldom takes anything away from there (where it moves a replay, it may).
    fn concerned_at_peak(&mut self, at: &Candidate) -> Vec<bool> {
        let mut there = vec![false; at.treatments.len()];
        for holding in self.scorer.evaluator.holdings_at_peak(&at.treatments) {
            there[holding.allocation.index()] = true;
        }
        let mut concerned = there.clone();
        for &id in &self.problem.candidates {
            let mut inputs = self.problem.inputs[id.index()].iter();
            concerned[id.index()] |= inputs.any(|input| there[input.index()]);
        }
        concerned
    }

    /// Takes one move at the peak whether it lowers it or not, then keeps again and descends: a way out
    /// of a bottom where two things have to change together.
    fn escape(&mut self, at: Candidate) -> Candidate {
        let moves = self.moves(&at, None);
        for mv in moves.iter().take(ESCAPES) {
            let mut next = self.taking(&at, std::slice::from_ref(mv));
            if !next.evaluation.valid {
                continue;
            }
            for id in self.treated(&next) {
                if mv.changes.iter().all(|&(moved, _)| moved != id) {
                    next = self.change(next, &[(id, Treatment::Keep)], true);
                }
            }
            let next = self.descend(next, Bytes::ZERO, None);
            if next.evaluation.peak_bytes < at.evaluation.peak_bytes {
                return next;
            }
            if self.exhausted() {
                break;
            }
        }
        at
    }

    /// What is kept becomes dropped, or stored or shrunk where it may not be; what is not becomes kept.
    pub(super) fn flipped(
        &self,
        at: &Candidate,
        ids: &[AllocationId],
    ) -> Vec<(AllocationId, Treatment)> {
        let flip = |&id: &AllocationId| match at.treatments[id.index()] {
            Treatment::Keep => (id, self.problem.away_from_memory(id)),
            _ => (id, Treatment::Keep),
        };
        ids.iter().map(flip).collect()
    }

    /// Ways to treat some allocations otherwise at once: all where they may be stored or shrunk and the problem is
    /// small, else the flip.
    pub(in crate::plan) fn ways(
        &self,
        at: &Candidate,
        ids: &[AllocationId],
    ) -> Vec<Vec<(AllocationId, Treatment)>> {
        let problem = self.problem;
        let most = if ids.len() > 2 {
            TINY_PROBLEM
        } else {
            SMALL_PROBLEM
        };
        let only_drops = problem.schedule.is_none() && !problem.may_shrink();
        if only_drops || problem.candidates.len() > most {
            return vec![self.flipped(at, ids)];
        }
        let mut ways = vec![Vec::new()];
        for &id in ids {
            let longer = ways.iter().flat_map(|way| {
                let with = |treatment| [way.as_slice(), &[(id, treatment)]].concat();
                problem.treatments(id).map(with).collect::<Vec<_>>()
            });
            ways = longer.collect();
        }
        ways
    }

    /// Treats allocations otherwise if that lowers the peak, or leaves it where `same_peak_will_do`.
    fn change(
        &mut self,
        at: Candidate,
        changes: &[(AllocationId, Treatment)],
        same_peak_will_do: bool,
    ) -> Candidate {
        let peak = at.evaluation.peak_bytes;
        self.change_if(at, changes, peak, |new, _| {
            new.evaluation.peak_bytes < peak || same_peak_will_do
        })
    }

    /// Treats allocations otherwise if that is valid, stays within `limit` and is `better`, which gets the new
    /// evaluation and time, and the time before.
    pub(super) fn change_if(
        &mut self,
        mut at: Candidate,
        changes: &[(AllocationId, Treatment)],
        limit: Bytes,
        better: impl Fn(&Candidate, f64) -> bool,
    ) -> Candidate {
        let differs =
            |&(id, treatment): &(AllocationId, Treatment)| at.treatments[id.index()] != treatment;
        if self.exhausted() || !changes.iter().any(differs) {
            return at;
        }
        let (evaluation, seconds) = (at.evaluation, at.added_seconds);
        let before = exchange(&mut at.treatments, changes);
        (at.evaluation, at.added_seconds) = self.scorer.peek_within(&at.treatments, limit);
        let fits = at.evaluation.valid && at.evaluation.peak_bytes <= limit;
        if fits && better(&at, seconds) {
            return at;
        }
        (at.evaluation, at.added_seconds) = (evaluation, seconds);
        for (&(id, _), treatment) in changes.iter().zip(before) {
            at.treatments[id.index()] = treatment;
        }
        at
    }
}

/// Makes the changes and says what was there before.
fn exchange(treatments: &mut [Treatment], changes: &[(AllocationId, Treatment)]) -> Vec<Treatment> {
    changes
        .iter()
        .map(|&(id, treatment)| std::mem::replace(&mut treatments[id.index()], treatment))
        .collect()
}

/// Each candidate with one it is computed from; in small problems, with any other.
pub(in crate::plan) fn pairs(problem: &Problem<'_>) -> Vec<(AllocationId, AllocationId)> {
    let candidates = &problem.candidates;
    let mut pairs = Vec::new();
    for (i, &id) in candidates.iter().enumerate() {
        if candidates.len() <= SMALL_PROBLEM {
            pairs.extend(candidates[..i].iter().map(|&other| (id, other)));
        } else {
            let inputs = problem.inputs[id.index()].iter();
            let droppable = inputs.filter(|input| problem.may_drop(**input));
            pairs.extend(droppable.map(|&input| (id, input)));
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use proptest::strategy::{Strategy, ValueTree};
    use proptest::test_runner::TestRunner;

    use super::super::search::search;
    use super::*;
    use crate::cost::{CostSource, Costs};
    use crate::plan::bound::bound::bound;
    use crate::plan::search::limits::Share;
    use crate::plan::search::problem::Allowed;
    use crate::step::{Variant, random};

    #[test]
    fn the_bottom_is_the_steps_own_whatever_ops_took() {
        let mut runner = TestRunner::deterministic();
        let recipes = random::recipes_of(40..60);
        for _ in 0..12 {
            let (recipe, ..) = recipes.new_tree(&mut runner).unwrap().current();
            let trace = random::build(&recipe);
            let count = u32::try_from(trace.ops.len()).unwrap();
            let lowest = |factor: u32| {
                let seconds = |op| 0.2 + f64::from(op * factor % 13);
                let op_seconds = (0..count).map(seconds).collect();
                let costs = Costs::new(&trace, &CostSource::profile(op_seconds)).unwrap();
                let problem = Problem::new(&trace, Variant::default(), &costs, Allowed::REMAT);
                let target = Bytes::ZERO;
                let least = bound(&problem, target);
                let found = search(&problem, target, &least, f64::INFINITY, Share::FULL);
                found.lowest.evaluation.peak_bytes
            };
            let expected = lowest(0);
            for factor in [7919, 104_729, 31] {
                assert_eq!(lowest(factor), expected);
            }
        }
    }

    #[test]
    fn what_is_not_concerned_seldom_lowers_the_peak() {
        let mut runner = TestRunner::deterministic();
        let (mut left_out, mut lower, mut tried, mut lower_there) = (0, 0, 0, 0);
        for case in 0..2000 {
            let recipes = random::recipes_of(6..30);
            let (recipe, drops, _) = recipes.new_tree(&mut runner).unwrap().current();
            let trace = random::build(&recipe);
            let op_seconds = vec![1.0; trace.ops.len()];
            let costs = Costs::new(&trace, &CostSource::profile(op_seconds)).unwrap();
            let variant = Variant {
                fuse_optimizer: case % 2 == 1,
                ..Variant::default()
            };
            let problem = Problem::new(&trace, variant, &costs, Allowed::REMAT);
            let mut search = Search::new(&problem, Share::FULL);
            let mut treatments = search.nothing();
            for &id in &problem.candidates {
                treatments[id.index()] = Treatment::dropped(drops[id.index() % drops.len()]);
            }
            search.repair(&mut treatments);
            let at = search.scorer.score(treatments);
            if !at.evaluation.valid {
                continue;
            }
            let concerned = search.concerned_at_peak(&at);
            for &id in &problem.candidates {
                let known = at.treatments[id.index()];
                let others = problem.treatments(id);
                for treatment in others.filter(|other| !other.is_keep() && *other != known) {
                    let mut changed = at.treatments.clone();
                    changed[id.index()] = treatment;
                    let (evaluation, _) = search.scorer.peek(&changed);
                    let is_lower =
                        evaluation.valid && evaluation.peak_bytes < at.evaluation.peak_bytes;
                    let (count, found) = if concerned[id.index()] {
                        (&mut tried, &mut lower_there)
                    } else {
                        (&mut left_out, &mut lower)
                    };
                    *count += 1;
                    *found += u32::from(is_lower);
                }
            }
        }
        // 4 of 1570 where this was written, against 8118 of 10958 of those that are tried.
        assert!(
            left_out > 1000 && lower * 100 <= left_out,
            "{lower} of {left_out}"
        );
        assert!(lower_there * 2 >= tried, "{lower_there} of {tried}");
    }
}

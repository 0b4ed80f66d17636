//! Moves of the search that save time within a target.
//!
//! Responsible for keeping again what need not go, for doing something else about what must, and for leaving a local
//! optimum. Not responsible for getting within the target (`moves.rs`).

use super::bottom::pairs;
use super::problem::Candidate;
use super::search::{SMALL_PROBLEM, Search, faster};
use crate::bytes::Bytes;
use crate::step::Treatment;
use crate::trace::AllocationId;

/// Exchanges tried without success before the search ends.
const EXCHANGE_PATIENCE: usize = 32;

impl Search<'_> {
    /// Keeps again whatever the target allows and saves time, most seconds per byte first.
    pub(super) fn prune(&mut self, mut at: Candidate, target: Bytes) -> Candidate {
        loop {
            let problem = self.problem;
            let worth = |id: &AllocationId, treatments: &[Treatment]| {
                let seconds = problem.treatment_seconds(*id, treatments[id.index()]);
                seconds / problem.model.bytes(*id).as_f64().max(1.0)
            };
            let mut order = self.treated(&at);
            order.sort_by(|a, b| {
                let (x, y) = (worth(a, &at.treatments), worth(b, &at.treatments));
                y.total_cmp(&x).then(a.cmp(b))
            });
            let before = at.added_seconds;
            let mut heights = self.scorer.evaluator.timeline(&at.treatments);
            for id in order {
                if self.exhausted() {
                    return at;
                }
                if !self.has_room(id, &at.treatments, &heights, target) {
                    continue;
                }
                let treated = at.treatments[id.index()];
                at.treatments[id.index()] = Treatment::Keep;
                let (evaluation, seconds) = self.scorer.peek_within(&at.treatments, target);
                let fits = evaluation.valid && evaluation.peak_bytes <= target;
                if fits && seconds <= at.added_seconds {
                    at.evaluation = evaluation;
                    at.added_seconds = seconds;
                    heights = self.scorer.evaluator.timeline(&at.treatments);
                } else {
                    at.treatments[id.index()] = treated;
                }
            }
            if at.added_seconds >= before {
                return at;
            }
        }
    }

    /// Whether keeping `id` could fit, judged by the heights of the step as planned now: while only
    /// autograd holds it, its bytes come on top, less what its records no longer pin.
    fn has_room(
        &self,
        id: AllocationId,
        treatments: &[Treatment],
        heights: &[Bytes],
        target: Bytes,
    ) -> bool {
        let Some((from, until)) = self.problem.away(id) else {
            return true;
        };
        let top = heights[from.min(until)..until.min(heights.len())]
            .iter()
            .max()
            .copied();
        let model = &self.problem.model;
        let inputs = self.problem.inputs[id.index()].iter();
        let pinned = inputs.filter(|input| treatments[input.index()].is_keep());
        let pinned: Bytes = pinned.map(|&input| model.bytes(input)).sum();
        let narrow = match treatments[id.index()] {
            shrunk @ Treatment::Shrink { .. } => self.problem.held_bytes(id, shrunk),
            _ => Bytes::ZERO,
        };
        top.unwrap_or(Bytes::ZERO) + model.bytes(id) <= target + pinned + narrow
    }

    /// Treats one allocation otherwise at a time, then flips pairs and, in small problems, threes, as long as that
    /// makes the plan faster within the target.
    pub(super) fn polish(&mut self, mut at: Candidate, target: Bytes) -> Candidate {
        let problem = self.problem;
        let candidates = &problem.candidates;
        let pairs = pairs(problem);
        let mut threes: Vec<[AllocationId; 3]> = Vec::new();
        if candidates.len() <= SMALL_PROBLEM {
            for &(id, other) in &pairs {
                let third = candidates.iter().take_while(|&&third| third < other);
                threes.extend(third.map(|&third| [id, other, third]));
            }
        }
        let mut before = f64::INFINITY;
        while at.added_seconds < before && !self.exhausted() {
            before = at.added_seconds;
            for &id in candidates {
                // What is kept costs nothing.
                if at.treatments[id.index()].is_keep() {
                    continue;
                }
                for treatment in problem.treatments(id) {
                    at = self.quicken(at, &[(id, treatment)], target);
                }
            }
            // What only treats more costs time.
            let is_kept = |at: &Candidate, id: AllocationId| at.treatments[id.index()].is_keep();
            for &(id, other) in &pairs {
                if is_kept(&at, id) && is_kept(&at, other) {
                    continue;
                }
                for changes in self.ways(&at, &[id, other]) {
                    at = self.quicken(at, &changes, target);
                }
            }
            for ids in &threes {
                if ids.iter().all(|&id| is_kept(&at, id)) {
                    continue;
                }
                for changes in self.ways(&at, ids) {
                    at = self.quicken(at, &changes, target);
                }
            }
        }
        at
    }

    /// Rounds less where the target allows it at no cost in time: the wider form first for the largest of what is shrunk.
    pub(super) fn widen(&mut self, mut at: Candidate, target: Bytes) -> Candidate {
        let problem = self.problem;
        if !problem.may_shrink() {
            return at;
        }
        let mut order = self.treated(&at);
        order.sort_by_key(|&id| (std::cmp::Reverse(problem.model.bytes(id)), id));
        for id in order {
            let now = at.treatments[id.index()];
            let wider = problem.shrunk(id).next();
            let Some(wider) = wider.filter(|_| now.is_shrink()) else {
                continue;
            };
            let wider = [(id, wider.with_home(now.home()))];
            at = self.change_if(at, &wider, target, |new, seconds| {
                new.added_seconds <= seconds
            });
        }
        at
    }

    /// Makes the changes if that saves time within `target`.
    fn quicken(
        &mut self,
        at: Candidate,
        changes: &[(AllocationId, Treatment)],
        target: Bytes,
    ) -> Candidate {
        self.change_if(at, changes, target, |new, seconds| {
            new.added_seconds < seconds
        })
    }

    /// Forbids to touch one expensive allocation at a time, most seconds first.
    pub(super) fn exchange(&mut self, mut at: Candidate, target: Bytes) -> Candidate {
        let problem = self.problem;
        let mut order = self.treated(&at);
        let seconds = |id: &AllocationId| problem.treatment_seconds(*id, at.treatments[id.index()]);
        order.sort_by(|a, b| seconds(b).total_cmp(&seconds(a)).then(a.cmp(b)));
        let mut failures = 0;
        for id in order {
            if failures >= EXCHANGE_PATIENCE || self.exhausted() {
                break;
            }
            if at.treatments[id.index()].is_keep() {
                continue;
            }
            let mut treatments = at.treatments.clone();
            treatments[id.index()] = Treatment::Keep;
            self.repair(&mut treatments);
            let start = self.scorer.score(treatments);
            let met = self.descend(start, target, Some(id));
            if met.evaluation.valid && met.evaluation.peak_bytes <= target {
                let pruned = self.prune(met, target);
                if faster(&pruned, &at) {
                    at = pruned;
                    failures = 0;
                    continue;
                }
            }
            failures += 1;
        }
        at
    }
}

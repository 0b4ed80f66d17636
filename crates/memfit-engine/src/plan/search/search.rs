//! The inner search: what to do with each allocation, for the least time within a target.
//!
//! Responsible for one [`Problem`]: for the starts and for the order of the work. Every candidate is judged by the
//! exact peak of the transformed trace and the exact time of replays and transfers, never by saved bytes. The moves
//! are those of `moves.rs` (down), `bottom.rs` (to the smallest peak) and `improve.rs` (faster).
//!
//! # How
//!
//! 1. *Starts*: what is best at one moment (`bound/relaxation.rs`), for the target and for somewhat less, as
//!    replays need room too; nothing dropped; everything without floating-point work dropped; everything dropped;
//!    everything but some boundaries of repeated blocks (`block_starts.rs`) dropped, with and without homes; as much
//!    stored as hides behind computing, and everything.
//! 2. *Descend* from each: find the peak, take what autograd alone holds there, do what frees the most
//!    bytes per second: store it, or drop it with and without recomputing its inputs instead of pinning them, or let
//!    what is there too early pass; several at once while the target is far. Repeat until it is met or nothing at
//!    the peak can go.
//! 3. *Prune*: keep again whatever the target allows, most seconds first.
//! 4. *Exchange*: forbid one expensive choice at a time, descend and prune again, accept what is faster.
//! 5. *Polish*: change one or a few at once, accept what is faster.
//! 6. *Widen*: of what is shrunk, give the largest the wider form where that costs nothing.
//!
//! The search ends early where the bound leaves next to nothing to gain.
//!
//! Deterministic without a time limit: ties go to the lower index, and the limit counts evaluations, not seconds.

use super::block_starts;
use super::limits::Share;
use super::problem::{Candidate, Problem, Scorer};
use crate::bytes::Bytes;
use crate::plan::StopReason;
use crate::plan::bound::bound::Bound;
use crate::step::Treatment;
use crate::trace::AllocationId;

/// Shares of the limit that are spent when the bottom and the starts are done.
const BOTTOM_SHARE: f64 = 0.4;
const START_SHARE: f64 = 0.7;
/// A plan is good enough where its replays take no more than this part of forward above the bound.
const NEAR: f64 = 1e-3;
/// Up to this many candidates, all pairs are tried when polishing.
pub(super) const SMALL_PROBLEM: usize = 32;

/// What an inner search found.
#[derive(Debug)]
pub(in crate::plan) struct Found {
    /// The fastest candidate within the target, if any.
    pub(in crate::plan) best: Option<Candidate>,
    /// The candidate with the smallest peak.
    pub(in crate::plan) lowest: Candidate,
    /// Evaluations spent.
    pub(in crate::plan) evaluations: u64,
    /// The limit that was reached, if one was.
    pub(in crate::plan) limited: Option<StopReason>,
    /// The best is so near the bound that the search ended.
    pub(in crate::plan) near: bool,
}

/// `least` is the bound for the target. Where it shows that no plan adds less than `worth` seconds,
/// only the bottom is looked for; where the share has none, or knows one that is lower than any, not even that. Where it has none of any, the lowest is the
/// best.
pub(in crate::plan) fn search(
    problem: &Problem<'_>,
    target: Bytes,
    least: &Bound,
    worth: f64,
    share: Share<'_>,
) -> Found {
    let mut search = Search::new(problem, share);
    let hopeless = least.added_seconds >= worth && share.leaves_out();
    if hopeless && !share.has_bottom(least.peak_bytes) {
        let lowest = search.scorer.score(search.nothing());
        return search.found(None, lowest, least);
    }
    let starts = search.starts();
    if !share.has_bottoms() {
        let best = search.within(target, least, starts, None);
        let lowest = best.clone();
        let lowest = lowest.unwrap_or_else(|| search.scorer.score(search.nothing()));
        return search.found(best, lowest, least);
    }
    // The way to the bottom comes first, and knows neither the target nor what ops took here: the minimum is the step's
    // own, and a budget that is named by it fits when the step is measured again.
    search.allow(BOTTOM_SHARE);
    search.is_timeless = true;
    let descents = starts
        .iter()
        .map(|start| search.descend(start.clone(), Bytes::ZERO, None));
    let bottoms = descents.collect();
    let mut lowest = search.lowest(bottoms);
    search.is_timeless = false;
    search.allow(1.0);
    if hopeless {
        return search.found(None, lowest, least);
    }
    let best = search.within(target, least, starts, Some(&lowest));
    if let Some(best) = &best
        && best.evaluation.peak_bytes < lowest.evaluation.peak_bytes
    {
        lowest = best.clone();
    }
    search.found(best, lowest, least)
}

/// What there is where nothing may be done to any allocation.
pub(in crate::plan) fn nothing_done(problem: &Problem<'_>, target: Bytes) -> Found {
    let mut scorer = Scorer::new(problem);
    let only = scorer.score(vec![Treatment::Keep; problem.trace.allocations.len()]);
    let best = (only.evaluation.peak_bytes <= target).then(|| only.clone());
    Found {
        best,
        lowest: only,
        evaluations: 1,
        limited: None,
        near: false,
    }
}

pub(in crate::plan) fn faster(a: &Candidate, b: &Candidate) -> bool {
    let by_time = a.added_seconds.total_cmp(&b.added_seconds);
    by_time
        .then(a.evaluation.peak_bytes.cmp(&b.evaluation.peak_bytes))
        .is_lt()
}

pub(in crate::plan) fn lower(a: &Candidate, b: &Candidate) -> bool {
    let by_peak = a.evaluation.peak_bytes.cmp(&b.evaluation.peak_bytes);
    by_peak
        .then(a.added_seconds.total_cmp(&b.added_seconds))
        .is_lt()
}

pub(in crate::plan) struct Search<'p> {
    pub(in crate::plan) problem: &'p Problem<'p>,
    pub(super) scorer: Scorer<'p>,
    share: Share<'p>,
    /// The part of the share that may be spent by now.
    allowed: f64,
    /// Whether moves are chosen by nominal times, not by those of the problem.
    pub(super) is_timeless: bool,
}

impl<'p> Search<'p> {
    pub(in crate::plan) fn new(problem: &'p Problem<'p>, share: Share<'p>) -> Self {
        Self {
            problem,
            scorer: Scorer::new(problem),
            share,
            allowed: 1.0,
            is_timeless: false,
        }
    }

    fn found(self, best: Option<Candidate>, lowest: Candidate, least: &Bound) -> Found {
        let near = best.as_ref().is_some_and(|best| self.is_near(best, least));
        let limited = self.share.spent(self.scorer.events, self.allowed);
        self.share.done(self.scorer.events);
        Found {
            best,
            lowest,
            evaluations: self.scorer.evaluations,
            limited,
            near,
        }
    }

    fn is_near(&self, candidate: &Candidate, least: &Bound) -> bool {
        let forward_seconds: f64 = self.problem.op_seconds.iter().sum();
        candidate.added_seconds <= least.added_seconds + forward_seconds * NEAR
    }

    /// The fastest candidate within `target`.
    fn within(
        &mut self,
        target: Bytes,
        least: &Bound,
        starts: Vec<Candidate>,
        lowest: Option<&Candidate>,
    ) -> Option<Candidate> {
        self.allow(START_SHARE);
        let mut best: Option<Candidate> = None;
        let relaxed = self.relaxed_starts(least);
        for start in relaxed.into_iter().chain(starts).chain(lowest.cloned()) {
            let met = self.descend(start, target, None);
            if met.evaluation.peak_bytes <= target {
                let pruned = self.prune(met, target);
                if best.as_ref().is_none_or(|best| faster(&pruned, best)) {
                    best = Some(pruned);
                }
            }
            if best.as_ref().is_some_and(|best| self.is_near(best, least)) {
                self.allow(1.0);
                return best.map(|best| self.widen(best, target));
            }
        }
        self.allow(1.0);
        let best = best.map(|best| self.exchange(best, target));
        let best = best.map(|best| self.polish(best, target));
        best.map(|best| self.widen(best, target))
    }

    /// What the relaxations chose, as far as it can be done.
    fn relaxed_starts(&mut self, least: &Bound) -> Vec<Candidate> {
        let mut starts: Vec<Candidate> = Vec::new();
        for choice in &least.choices {
            let mut set = self.nothing();
            for &(id, treatment) in choice {
                set[id.index()] = treatment;
            }
            self.repair(&mut set);
            if starts.iter().all(|start| start.treatments != set) {
                let start = self.scorer.score(set);
                starts.extend(start.evaluation.valid.then_some(start));
            }
        }
        starts
    }

    /// Allows a part of the share to be spent.
    fn allow(&mut self, part: f64) {
        self.allowed = part;
    }

    pub(super) fn exhausted(&self) -> bool {
        self.share.spent(self.scorer.events, self.allowed).is_some()
    }

    pub(in crate::plan) fn nothing(&self) -> Vec<Treatment> {
        vec![Treatment::Keep; self.problem.trace.allocations.len()]
    }

    fn starts(&mut self) -> Vec<Candidate> {
        let problem = self.problem;
        let mut cheap = self.nothing();
        let mut everything = self.nothing();
        for &id in &problem.candidates {
            let mut makers = problem.model.makers(id);
            let no_flops = makers.all(|op| problem.trace.ops[op.index()].flops == 0);
            cheap[id.index()] = Treatment::dropped(no_flops && problem.may_drop(id));
            everything[id.index()] = problem.away_from_memory(id);
        }
        let mut sets = vec![self.nothing(), cheap, everything];
        sets.extend(self.stores());
        sets.extend(self.shrinks());
        for (number, blocks) in problem.blocks.iter().enumerate() {
            sets.extend(block_starts::starts(problem, blocks, false));
            // One kind of block is enough to be at home in.
            if number == 0 {
                sets.extend(block_starts::starts(problem, blocks, true));
            }
        }
        let mut starts: Vec<Candidate> = Vec::new();
        for mut set in sets {
            self.repair(&mut set);
            if starts.iter().any(|start| start.treatments == set) {
                continue;
            }
            let start = self.scorer.score(set);
            if start.evaluation.valid {
                starts.push(start);
            }
        }
        starts
    }

    /// Largest first: what hides behind computing; everything; and everything with the rest dropped.
    fn stores(&self) -> Vec<Vec<Treatment>> {
        let problem = self.problem;
        let Some(schedule) = &problem.schedule else {
            return Vec::new();
        };
        let (out, back) = schedule.hidden(problem.op_seconds.len());
        let mut order: Vec<AllocationId> = problem.candidates.clone();
        order.retain(|&id| problem.may_store(id));
        order.sort_by_key(|&id| (std::cmp::Reverse(problem.model.bytes(id)), id));
        let mut sets = vec![self.nothing(); 3];
        let mut left = out.min(back);
        for &id in &order {
            let bytes = problem.model.bytes(id);
            if bytes <= left {
                left -= bytes;
                sets[0][id.index()] = Treatment::STORE;
            }
            sets[1][id.index()] = Treatment::STORE;
        }
        for &id in &problem.candidates {
            sets[2][id.index()] = match sets[1][id.index()] {
                Treatment::Keep => problem.away_from_memory(id),
                stored => stored,
            };
        }
        sets
    }

    /// All in the widest form that is narrower; all in the narrowest; and that with the rest dropped, or with everything
    /// dropped that takes no floating-point work.
    fn shrinks(&self) -> Vec<Vec<Treatment>> {
        let problem = self.problem;
        if !problem.may_shrink() {
            return Vec::new();
        }
        let mut sets = vec![self.nothing(); 4];
        for &id in &problem.candidates {
            let (widest, narrowest) = (problem.shrunk(id).next(), problem.shrunk(id).last());
            let mut makers = problem.model.makers(id);
            let no_flops = makers.all(|op| problem.trace.ops[op.index()].flops == 0);
            let is_cheap = no_flops && problem.may_drop(id);
            sets[0][id.index()] = widest.unwrap_or_default();
            sets[1][id.index()] = narrowest.unwrap_or_default();
            sets[2][id.index()] = narrowest.unwrap_or_else(|| problem.away_from_memory(id));
            sets[3][id.index()] = if is_cheap {
                Treatment::DROP
            } else {
                narrowest.unwrap_or_default()
            };
        }
        sets
    }

    /// Keeps again what cannot be dropped beside what is kept: a pinned input that is overwritten.
    pub(super) fn repair(&self, treatments: &mut [Treatment]) {
        let model = &self.problem.model;
        loop {
            let mut changed = false;
            for &id in &self.problem.candidates {
                let fine = |input: &AllocationId| {
                    treatments[input.index()].is_drop() || model.may_pin(id, *input)
                };
                let inputs = &self.problem.inputs[id.index()];
                if treatments[id.index()].is_drop() && !inputs.iter().all(fine) {
                    treatments[id.index()] = Treatment::Keep;
                    changed = true;
                }
            }
            if !changed {
                return;
            }
        }
    }

    /// What is not simply kept.
    pub(in crate::plan) fn treated(&self, at: &Candidate) -> Vec<AllocationId> {
        let candidates = self.problem.candidates.iter().copied();
        candidates
            .filter(|id| !at.treatments[id.index()].is_keep())
            .collect()
    }
}

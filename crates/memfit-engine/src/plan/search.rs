//! The inner search: which allocations to drop, for the least time within a target.
//!
//! Responsible for one [`Problem`]. Every candidate is judged by the exact peak of the transformed trace
//! and the exact replay time, never by saved bytes.
//!
//! # How
//!
//! 1. *Starts*: what is best at one moment (`relaxation.rs`), for the target and for somewhat less, as
//!    replays need room too; nothing dropped; everything without floating-point work dropped; everything dropped;
//!    everything but the inputs of repeated blocks (and of every second or third block) dropped.
//! 2. *Descend* from each: find the peak, take what autograd alone holds there, drop what frees the most
//!    bytes per second, with and without recomputing its inputs instead of pinning them; several at
//!    once while the target is far. Repeat until it is met or nothing at the peak can go.
//! 3. *Prune*: keep again whatever the target allows, most seconds first.
//! 4. *Exchange*: forbid one expensive drop at a time, descend and prune again, accept what is faster.
//! 5. *Polish*: change a few at once, accept what is faster.
//!
//! The search ends early where the bound leaves next to nothing to gain.
//!
//! Deterministic: ties go to the lower index, and the limit counts evaluations, not seconds.

use super::blocks::block_boundaries;
use super::bound::Bound;
use super::problem::{Candidate, Problem, Scorer};
use crate::bytes::Bytes;
use crate::step::Treatment;
use crate::trace::AllocationId;

/// Events one inner search may sweep; a sweep touches each event of the model at most once.
const EVENT_LIMIT: u64 = 40_000_000;
/// Shares of the limit that are spent when the bottom and the starts are done.
const BOTTOM_SHARE: f64 = 0.4;
const START_SHARE: f64 = 0.7;
/// A plan is good enough where its replays take no more than this part of forward above the bound.
const NEAR: f64 = 1e-3;
/// Exchanges tried without success before the search ends.
const EXCHANGE_PATIENCE: usize = 32;
/// Single moves tried at one peak before it counts as stuck.
const MOVE_PATIENCE: usize = 24;
/// Moves taken at once while the target is far.
const MOVES_AT_ONCE: usize = 48;
/// Up to this many candidates, all pairs are tried when polishing.
const SMALL_PROBLEM: usize = 32;
/// Bottoms that are polished further.
const BOTTOMS: usize = 3;
/// Moves tried to leave a bottom.
const ESCAPES: usize = 6;

/// What an inner search found.
#[derive(Debug)]
pub(super) struct Found {
    /// The fastest candidate within the target, if any.
    pub(super) best: Option<Candidate>,
    /// The candidate with the smallest peak.
    pub(super) lowest: Candidate,
    /// Evaluations spent.
    pub(super) evaluations: u64,
    /// The limit was reached.
    pub(super) limited: bool,
    /// The best is so near the bound that the search ended.
    pub(super) near: bool,
}

/// `least` is the bound for the target. Where it shows that no plan replays for less than `worth` seconds,
/// only the bottom is looked for.
pub(super) fn search(
    problem: &Problem<'_>,
    target: Bytes,
    least: &Bound,
    worth: f64,
    effort: Effort,
) -> Found {
    let mut search = Search::new(problem, effort);
    let hopeless = least.replay_seconds >= worth;
    if hopeless && effort == Effort::Glance {
        let nothing = vec![Treatment::Keep; problem.trace.allocations.len()];
        let lowest = search.scorer.score(nothing);
        return search.found(None, lowest, least);
    }
    let starts = search.starts();
    // The way to the bottom comes first and does not know the target: the minimum is the step's own.
    search.allow(BOTTOM_SHARE);
    let descents = starts
        .iter()
        .map(|start| search.descend(start.clone(), Bytes::ZERO, None));
    let bottoms = descents.collect();
    let mut lowest = search.lowest(bottoms);
    search.allow(1.0);
    if hopeless {
        return search.found(None, lowest, least);
    }
    let best = search.within(target, least, starts, &lowest);
    if let Some(best) = &best
        && best.evaluation.peak_bytes < lowest.evaluation.peak_bytes
    {
        lowest = best.clone();
    }
    search.found(best, lowest, least)
}

/// What there is where nothing may be dropped.
pub(super) fn nothing_dropped(problem: &Problem<'_>, target: Bytes) -> Found {
    let mut scorer = Scorer::new(problem);
    let only = scorer.score(vec![Treatment::Keep; problem.trace.allocations.len()]);
    let best = (only.evaluation.peak_bytes <= target).then(|| only.clone());
    Found {
        best,
        lowest: only,
        evaluations: 1,
        limited: false,
        near: false,
    }
}

fn faster(a: &Candidate, b: &Candidate) -> bool {
    let by_time = a.replay_seconds.total_cmp(&b.replay_seconds);
    by_time
        .then(a.evaluation.peak_bytes.cmp(&b.evaluation.peak_bytes))
        .is_lt()
}

fn lower(a: &Candidate, b: &Candidate) -> bool {
    let by_peak = a.evaluation.peak_bytes.cmp(&b.evaluation.peak_bytes);
    by_peak
        .then(a.replay_seconds.total_cmp(&b.replay_seconds))
        .is_lt()
}

/// How much of the limit a search may spend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effort {
    /// All of it.
    Full,
    /// A quarter: the answer only tells what another class would gain.
    Glance,
}

struct Search<'p> {
    problem: &'p Problem<'p>,
    scorer: Scorer<'p>,
    most_events: u64,
    event_limit: u64,
}

/// A way to free an allocation: what to add to the dropped set, and an estimate of its worth.
struct Move {
    adds: Vec<AllocationId>,
    /// Bytes freed at the peak, less what is pinned anew there.
    bytes: f64,
    bytes_per_second: f64,
}

impl<'p> Search<'p> {
    fn new(problem: &'p Problem<'p>, effort: Effort) -> Self {
        let limit = match effort {
            Effort::Full => EVENT_LIMIT,
            Effort::Glance => EVENT_LIMIT / 4,
        };
        let scorer = Scorer::new(problem);
        Self {
            problem,
            scorer,
            most_events: limit,
            event_limit: limit,
        }
    }

    fn found(self, best: Option<Candidate>, lowest: Candidate, least: &Bound) -> Found {
        let near = best.as_ref().is_some_and(|best| self.is_near(best, least));
        Found {
            best,
            lowest,
            evaluations: self.scorer.evaluations,
            limited: self.exhausted(),
            near,
        }
    }

    fn is_near(&self, candidate: &Candidate, least: &Bound) -> bool {
        let forward_seconds: f64 = self.problem.op_seconds.iter().sum();
        candidate.replay_seconds <= least.replay_seconds + forward_seconds * NEAR
    }

    /// The fastest candidate within `target`.
    fn within(
        &mut self,
        target: Bytes,
        least: &Bound,
        starts: Vec<Candidate>,
        lowest: &Candidate,
    ) -> Option<Candidate> {
        self.allow(START_SHARE);
        let mut best: Option<Candidate> = None;
        let relaxed = self.relaxed_starts(least);
        for start in relaxed.into_iter().chain(starts).chain([lowest.clone()]) {
            let met = self.descend(start, target, None);
            if met.evaluation.peak_bytes <= target {
                let pruned = self.prune(met, target);
                if best.as_ref().is_none_or(|best| faster(&pruned, best)) {
                    best = Some(pruned);
                }
            }
            if best.as_ref().is_some_and(|best| self.is_near(best, least)) {
                self.allow(1.0);
                return best;
            }
        }
        self.allow(1.0);
        let best = best.map(|best| self.exchange(best, target));
        best.map(|best| self.polish(best, target))
    }

    /// Flips one allocation at a time, then pairs and, in small problems, threes, as long as that makes the
    /// plan faster within the target.
    fn polish(&mut self, mut at: Candidate, target: Bytes) -> Candidate {
        let candidates = &self.problem.candidates;
        let mut sets: Vec<Vec<AllocationId>> = candidates.iter().map(|&id| vec![id]).collect();
        let pairs = self.pairs();
        sets.extend(pairs.iter().map(|&(id, other)| vec![id, other]));
        if candidates.len() <= SMALL_PROBLEM {
            for (id, other) in pairs {
                let third = candidates.iter().take_while(|&&third| third < other);
                sets.extend(third.map(|&third| vec![id, other, third]));
            }
        }
        let mut before = f64::INFINITY;
        while at.replay_seconds < before && !self.exhausted() {
            before = at.replay_seconds;
            for ids in &sets {
                at = self.quicken(at, ids, target);
            }
        }
        at
    }

    /// Flips `ids` if that saves time within `target`.
    fn quicken(&mut self, mut at: Candidate, ids: &[AllocationId], target: Bytes) -> Candidate {
        // What only drops more costs time.
        if self.exhausted() || ids.iter().all(|id| at.dropped[id.index()].is_keep()) {
            return at;
        }
        for id in ids {
            at.dropped[id.index()] = at.dropped[id.index()].flipped();
        }
        let (evaluation, replay_seconds) = self.scorer.peek_within(&at.dropped, target);
        let fits = evaluation.valid && evaluation.peak_bytes <= target;
        if fits && replay_seconds < at.replay_seconds {
            return Candidate {
                evaluation,
                replay_seconds,
                ..at
            };
        }
        for id in ids {
            at.dropped[id.index()] = at.dropped[id.index()].flipped();
        }
        at
    }

    /// What the relaxations chose, as far as it can be done.
    fn relaxed_starts(&mut self, least: &Bound) -> Vec<Candidate> {
        let mut starts: Vec<Candidate> = Vec::new();
        for choice in &least.choices {
            let mut set = vec![Treatment::Keep; self.problem.trace.allocations.len()];
            for id in choice {
                set[id.index()] = Treatment::DROP;
            }
            self.repair(&mut set);
            if starts.iter().all(|start| start.dropped != set) {
                let start = self.scorer.score(set);
                starts.extend(start.evaluation.valid.then_some(start));
            }
        }
        starts
    }

    /// Sets the limit to a share of the most events allowed.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a small count"
    )]
    fn allow(&mut self, share: f64) {
        self.event_limit = (self.most_events as f64 * share) as u64;
    }

    fn exhausted(&self) -> bool {
        self.scorer.events >= self.event_limit
    }

    fn starts(&mut self) -> Vec<Candidate> {
        let problem = self.problem;
        let nothing = vec![Treatment::Keep; problem.trace.allocations.len()];
        let mut cheap = nothing.clone();
        for &id in &problem.candidates {
            let no_flops = problem
                .model
                .makers(id)
                .all(|op| problem.trace.ops[op.index()].flops == 0);
            cheap[id.index()] = Treatment::dropped(no_flops);
        }
        let mut everything = nothing.clone();
        for &id in &problem.candidates {
            everything[id.index()] = Treatment::DROP;
        }
        let mut sets = vec![nothing, cheap, everything.clone()];
        for boundaries in block_boundaries(problem) {
            for stride in 1..=3 {
                if stride > 1 && boundaries.len() < 2 * stride {
                    break;
                }
                let mut set = everything.clone();
                for kept in boundaries.iter().step_by(stride).flatten() {
                    set[kept.index()] = Treatment::Keep;
                }
                sets.push(set);
            }
        }
        let mut starts = Vec::new();
        for mut set in sets {
            self.repair(&mut set);
            let start = self.scorer.score(set);
            if start.evaluation.valid {
                starts.push(start);
            }
        }
        starts
    }

    /// Keeps again what cannot be dropped beside what is kept: a pinned input that is overwritten.
    fn repair(&self, dropped: &mut [Treatment]) {
        let model = &self.problem.model;
        loop {
            let mut changed = false;
            for &id in &self.problem.candidates {
                let fine = |input: &AllocationId| {
                    dropped[input.index()].is_drop() || model.may_pin(id, *input)
                };
                if dropped[id.index()].is_drop()
                    && !self.problem.inputs[id.index()].iter().all(fine)
                {
                    dropped[id.index()] = Treatment::Keep;
                    changed = true;
                }
            }
            if !changed {
                return;
            }
        }
    }

    /// Drops at the peak until the target is met or nothing more can go. Never raises the peak.
    fn descend(
        &mut self,
        mut at: Candidate,
        target: Bytes,
        tabu: Option<AllocationId>,
    ) -> Candidate {
        while at.evaluation.peak_bytes > target && !self.exhausted() {
            let moves = self.moves(&at, tabu);
            let next = self.several(&at, &moves, target);
            match next.or_else(|| self.single(&at, &moves)) {
                Some(next) => at = next,
                None => break,
            }
        }
        at
    }

    /// The best few moves at once, fewer and fewer until they lower the peak.
    fn several(&mut self, at: &Candidate, moves: &[Move], target: Bytes) -> Option<Candidate> {
        let excess = (at.evaluation.peak_bytes - target).as_f64();
        let mut freed = 0.0;
        let far = |mv: &&Move| {
            freed += mv.bytes;
            freed < excess * 0.8
        };
        let mut count = moves.iter().take_while(far).count().min(MOVES_AT_ONCE);
        while count > 1 {
            let next = self.taking(at, &moves[..count]);
            if next.evaluation.valid && next.evaluation.peak_bytes < at.evaluation.peak_bytes {
                return Some(next);
            }
            count /= 4;
        }
        None
    }

    /// The first single move that does not raise the peak.
    fn single(&mut self, at: &Candidate, moves: &[Move]) -> Option<Candidate> {
        for mv in moves.iter().take(MOVE_PATIENCE) {
            let next = self.taking(at, std::slice::from_ref(mv));
            if next.evaluation.valid && next.evaluation.peak_bytes <= at.evaluation.peak_bytes {
                return Some(next);
            }
        }
        None
    }

    fn taking(&mut self, at: &Candidate, moves: &[Move]) -> Candidate {
        let mut dropped = at.dropped.clone();
        for id in moves.iter().flat_map(|mv| &mv.adds) {
            dropped[id.index()] = Treatment::DROP;
        }
        self.scorer.score(dropped)
    }

    /// What could go at the peak, best estimate first.
    fn moves(&mut self, at: &Candidate, tabu: Option<AllocationId>) -> Vec<Move> {
        let holdings = self.scorer.evaluator.holdings_at_peak(&at.dropped);
        let position = at.evaluation.moment.position.index();
        // Whether each allocation is alive at the peak, and whether more than autograd holds it.
        let mut present = vec![(false, false); at.dropped.len()];
        for holding in &holdings {
            present[holding.allocation.index()] = (true, holding.natural > 0);
        }
        let mut moves = Vec::new();
        for holding in &holdings {
            let id = holding.allocation;
            let free = at.dropped[id.index()].is_keep() && self.problem.model.is_droppable(id);
            let away = self.problem.first_unpack[id.index()] >= position;
            if !free || !away || holding.natural > 0 || tabu == Some(id) {
                continue;
            }
            for recompute_inputs in [false, true] {
                let adds = self.drop_set(id, &at.dropped, &present, recompute_inputs, tabu);
                let Some(adds) = adds else { continue };
                if recompute_inputs && adds.len() == 1 {
                    continue;
                }
                moves.extend(self.estimate(adds, at, &present));
            }
        }
        moves.sort_by(|a, b| b.bytes_per_second.total_cmp(&a.bytes_per_second));
        moves
    }

    /// `id` and what must, or with `recompute_inputs` may, go with it: inputs of its makers that would
    /// otherwise be held anew at the peak.
    fn drop_set(
        &self,
        id: AllocationId,
        dropped: &[Treatment],
        present: &[(bool, bool)],
        recompute_inputs: bool,
        tabu: Option<AllocationId>,
    ) -> Option<Vec<AllocationId>> {
        let model = &self.problem.model;
        let mut adds = vec![id];
        let mut next = 0;
        while let Some(&current) = adds.get(next) {
            next += 1;
            for &input in &self.problem.inputs[current.index()] {
                if dropped[input.index()].is_drop() || adds.contains(&input) {
                    continue;
                }
                let must = !model.may_pin(current, input);
                let may = recompute_inputs && !present[input.index()].0;
                let can = model.is_droppable(input) && tabu != Some(input);
                if must && !can {
                    return None;
                }
                if must || (may && can) {
                    adds.push(input);
                }
            }
        }
        Some(adds)
    }

    /// Bytes freed at the peak less bytes pinned anew, per second of replay added.
    fn estimate(
        &self,
        adds: Vec<AllocationId>,
        at: &Candidate,
        present: &[(bool, bool)],
    ) -> Option<Move> {
        let model = &self.problem.model;
        let mut gained = 0.0;
        let mut seconds = 0.0;
        let mut pinned: Vec<AllocationId> = Vec::new();
        for &id in &adds {
            if present[id.index()] == (true, false) {
                gained += model.bytes(id).as_f64();
            }
            seconds += self.problem.drop_seconds(id);
            for &input in &self.problem.inputs[id.index()] {
                let held = present[input.index()].0 || at.dropped[input.index()].is_drop();
                if !held && !adds.contains(&input) && !pinned.contains(&input) {
                    gained -= model.bytes(input).as_f64();
                    pinned.push(input);
                }
            }
        }
        let bytes_per_second = gained / seconds.max(1e-9);
        (gained > 0.0).then_some(Move {
            adds,
            bytes: gained,
            bytes_per_second,
        })
    }

    /// Keeps again whatever the target allows and saves time, most seconds per byte first.
    fn prune(&mut self, mut at: Candidate, target: Bytes) -> Candidate {
        loop {
            let worth = |id: &AllocationId| {
                self.problem.drop_seconds(*id) / self.problem.model.bytes(*id).as_f64().max(1.0)
            };
            let mut order = self.dropped_ids(&at);
            order.sort_by(|a, b| worth(b).total_cmp(&worth(a)).then(a.cmp(b)));
            let before = at.replay_seconds;
            let mut heights = self.scorer.evaluator.timeline(&at.dropped);
            for id in order {
                if self.exhausted() {
                    return at;
                }
                if !self.has_room(id, &at.dropped, &heights, target) {
                    continue;
                }
                at.dropped[id.index()] = Treatment::Keep;
                let (evaluation, replay_seconds) = self.scorer.peek_within(&at.dropped, target);
                let fits = evaluation.valid && evaluation.peak_bytes <= target;
                if fits && replay_seconds <= at.replay_seconds {
                    at.evaluation = evaluation;
                    at.replay_seconds = replay_seconds;
                    heights = self.scorer.evaluator.timeline(&at.dropped);
                } else {
                    at.dropped[id.index()] = Treatment::DROP;
                }
            }
            if at.replay_seconds >= before {
                return at;
            }
        }
    }

    /// Whether keeping `id` could fit, judged by the heights of the step as planned now: while only
    /// autograd holds it, its bytes come on top, less what its records no longer pin.
    fn has_room(
        &self,
        id: AllocationId,
        dropped: &[Treatment],
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
        let pinned = inputs.filter(|input| dropped[input.index()].is_keep());
        let pinned: Bytes = pinned.map(|&input| model.bytes(input)).sum();
        top.unwrap_or(Bytes::ZERO) + model.bytes(id) <= target + pinned
    }

    fn dropped_ids(&self, at: &Candidate) -> Vec<AllocationId> {
        let candidates = self.problem.candidates.iter().copied();
        candidates
            .filter(|id| at.dropped[id.index()].is_drop())
            .collect()
    }

    /// The lowest of the bottoms, after polishing the few lowest.
    fn lowest(&mut self, mut bottoms: Vec<Candidate>) -> Candidate {
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

    /// Polishes a bottom: flips one allocation at a time, then each together with one it is computed
    /// from (or, in small problems, with any other), and descends again, until nothing lowers the peak.
    fn settle(&mut self, mut at: Candidate) -> Candidate {
        let mut before = Bytes(u64::MAX);
        while at.evaluation.peak_bytes < before && !self.exhausted() {
            before = at.evaluation.peak_bytes;
            for &id in &self.problem.candidates {
                // Keeping what need not be dropped saves time at the same peak.
                let same_peak_will_do = at.dropped[id.index()].is_drop();
                at = self.flip(at, &[id], same_peak_will_do);
            }
            for (id, other) in self.pairs() {
                at = self.flip(at, &[id, other], false);
            }
            at = self.descend(at, Bytes::ZERO, None);
            if at.evaluation.peak_bytes == before {
                at = self.escape(at);
            }
        }
        at
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
            for id in self.dropped_ids(&next) {
                if !mv.adds.contains(&id) {
                    next = self.flip(next, &[id], true);
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

    fn pairs(&self) -> Vec<(AllocationId, AllocationId)> {
        let candidates = &self.problem.candidates;
        let mut pairs = Vec::new();
        for (i, &id) in candidates.iter().enumerate() {
            if candidates.len() <= SMALL_PROBLEM {
                pairs.extend(candidates[..i].iter().map(|&other| (id, other)));
            } else {
                let inputs = self.problem.inputs[id.index()].iter();
                let droppable = inputs.filter(|input| self.problem.model.is_droppable(**input));
                pairs.extend(droppable.map(|&input| (id, input)));
            }
        }
        pairs
    }

    /// Flips `ids` if that lowers the peak, or leaves it where `same_peak_will_do`.
    fn flip(
        &mut self,
        mut at: Candidate,
        ids: &[AllocationId],
        same_peak_will_do: bool,
    ) -> Candidate {
        if self.exhausted() {
            return at;
        }
        for id in ids {
            at.dropped[id.index()] = at.dropped[id.index()].flipped();
        }
        let limit = at.evaluation.peak_bytes;
        let (evaluation, replay_seconds) = self.scorer.peek_within(&at.dropped, limit);
        let lower = evaluation.peak_bytes < at.evaluation.peak_bytes;
        let same = evaluation.peak_bytes == at.evaluation.peak_bytes;
        if evaluation.valid && (lower || (same && same_peak_will_do)) {
            return Candidate {
                evaluation,
                replay_seconds,
                ..at
            };
        }
        for id in ids {
            at.dropped[id.index()] = at.dropped[id.index()].flipped();
        }
        at
    }

    /// Forbids one drop at a time, most seconds first.
    fn exchange(&mut self, mut at: Candidate, target: Bytes) -> Candidate {
        let mut order = self.dropped_ids(&at);
        order.sort_by(|a, b| {
            let (x, y) = (self.problem.drop_seconds(*a), self.problem.drop_seconds(*b));
            y.total_cmp(&x).then(a.cmp(b))
        });
        let mut failures = 0;
        for id in order {
            if failures >= EXCHANGE_PATIENCE || self.exhausted() {
                break;
            }
            if at.dropped[id.index()].is_keep() {
                continue;
            }
            let mut dropped = at.dropped.clone();
            dropped[id.index()] = Treatment::Keep;
            self.repair(&mut dropped);
            let start = self.scorer.score(dropped);
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

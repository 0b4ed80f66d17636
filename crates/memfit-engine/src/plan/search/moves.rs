//! Moves of the search that lower the peak.
//!
//! Responsible for what could be done about what is alive at the peak, for an estimate of its worth, and for going
//! down with it. Not responsible for what is fastest (`improve.rs`).

use super::problem::Candidate;
use super::search::Search;
use crate::bytes::Bytes;
use crate::step::{Holding, Treatment};
use crate::trace::AllocationId;

/// Single moves tried at one peak before it counts as stuck.
const MOVE_PATIENCE: usize = 24;
/// Moves taken at once while the target is far.
const MOVES_AT_ONCE: usize = 48;

/// A way to free bytes at the peak, and an estimate of its worth.
pub(in crate::plan) struct Move {
    pub(in crate::plan) changes: Vec<(AllocationId, Treatment)>,
    /// Bytes freed at the peak, less what is pinned anew there.
    bytes: f64,
    bytes_per_second: f64,
}

/// What of an allocation is alive at the peak.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Presence {
    there: bool,
    /// More than autograd holds it.
    natural: bool,
}

impl Search<'_> {
    /// Goes down at the peak until the target is met or nothing more can go. Never raises the peak.
    pub(super) fn descend(
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

    pub(super) fn taking(&mut self, at: &Candidate, moves: &[Move]) -> Candidate {
        let mut treatments = at.treatments.clone();
        for &(id, treatment) in moves.iter().flat_map(|mv| &mv.changes) {
            treatments[id.index()] = treatment;
        }
        self.scorer.score(treatments)
    }

    /// What could go at the peak, best estimate first.
    pub(in crate::plan) fn moves(
        &mut self,
        at: &Candidate,
        tabu: Option<AllocationId>,
    ) -> Vec<Move> {
        let holdings = self.scorer.evaluator.holdings_at_peak(&at.treatments);
        let position = at.evaluation.moment.position.index();
        let mut present = vec![Presence::default(); at.treatments.len()];
        for holding in &holdings {
            present[holding.allocation.index()] = Presence {
                there: true,
                natural: holding.natural > 0,
            };
        }
        let crowded = self.crowded(at);
        let mut moves = Vec::new();
        for holding in &holdings {
            let id = holding.allocation;
            if tabu == Some(id) {
                continue;
            }
            let treatment = at.treatments[id.index()];
            if !treatment.is_keep() {
                moves.extend(self.letting_pass(holding, at, position));
            }
            if !treatment.is_keep() && !treatment.is_shrink() {
                continue;
            }
            let away = self.problem.first_unpack[id.index()] >= position;
            if !away || holding.natural > 0 {
                continue;
            }
            if self.problem.may_store(id) {
                moves.push(self.storing(id, crowded));
            }
            moves.extend(self.shrinking(id, treatment));
            if self.problem.may_drop(id) {
                moves.extend(self.dropping(id, at, &present, tabu));
            }
        }
        moves.sort_by(|a, b| b.bytes_per_second.total_cmp(&a.bytes_per_second));
        moves
    }

    /// To store an allocation. Where more is stored than hides behind computing, transfers are waited for.
    fn storing(&self, id: AllocationId, crowded: bool) -> Move {
        let bytes = self.problem.model.bytes(id);
        let seconds = self.problem.schedule.as_ref().map_or(0.0, |schedule| {
            if crowded {
                schedule.most_seconds(bytes)
            } else {
                schedule.least_seconds(bytes)
            }
        });
        Move {
            changes: vec![(id, Treatment::STORE)],
            bytes: bytes.as_f64(),
            bytes_per_second: bytes.as_f64() / seconds.max(1e-9),
        }
    }

    /// To hold an allocation in each form that is narrower than now.
    fn shrinking(&self, id: AllocationId, now: Treatment) -> impl Iterator<Item = Move> {
        let held = self.problem.held_bytes(id, now).as_f64();
        self.problem.shrunk(id).filter_map(move |treatment| {
            let bytes = held - self.problem.held_bytes(id, treatment).as_f64();
            let seconds = self.problem.treatment_seconds(id, treatment);
            (bytes > 0.0).then(|| Move {
                changes: vec![(id, treatment)],
                bytes,
                bytes_per_second: bytes / seconds.max(1e-9),
            })
        })
    }

    /// Is as much stored as can be transferred while the step computes?
    fn crowded(&self, at: &Candidate) -> bool {
        let Some(schedule) = &self.problem.schedule else {
            return false;
        };
        let candidates = self.problem.candidates.iter();
        let stored = candidates.filter(|id| at.treatments[id.index()].is_store());
        let stored: Bytes = stored.map(|&id| self.problem.model.bytes(id)).sum();
        let (out, back) = schedule.hidden(self.problem.op_seconds.len());
        stored >= out.min(back)
    }

    /// To give what is there because it was computed again too early a home, so that it passes.
    fn letting_pass(&self, holding: &Holding, at: &Candidate, position: usize) -> Option<Move> {
        let id = holding.allocation;
        let treatment = at.treatments[id.index()];
        let home = self.problem.home(id)?;
        let far = self.problem.asker(position) >= home.index();
        let may = holding.materialised && treatment.home() == Treatment::NO_HOME;
        if !may || !far {
            return None;
        }
        let bytes = holding.bytes.as_f64();
        let seconds = if treatment.is_drop() {
            self.drop_seconds(id)
        } else {
            self.problem.treatment_seconds(id, treatment)
        };
        Some(Move {
            changes: vec![(id, treatment.with_home(home))],
            bytes,
            bytes_per_second: bytes / seconds.max(1e-9),
        })
    }

    /// To drop an allocation: with its inputs held for it, or computed again as well.
    fn dropping(
        &self,
        id: AllocationId,
        at: &Candidate,
        present: &[Presence],
        tabu: Option<AllocationId>,
    ) -> Vec<Move> {
        let mut moves = Vec::new();
        for recompute_inputs in [false, true] {
            let adds = self.drop_set(id, &at.treatments, present, recompute_inputs, tabu);
            let Some(adds) = adds else { continue };
            if recompute_inputs && adds.len() == 1 {
                continue;
            }
            moves.extend(self.estimate(&adds, at, present));
        }
        moves
    }

    /// `id` and what must, or with `recompute_inputs` may, go with it: inputs of its makers that would
    /// otherwise be held anew at the peak.
    fn drop_set(
        &self,
        id: AllocationId,
        treatments: &[Treatment],
        present: &[Presence],
        recompute_inputs: bool,
        tabu: Option<AllocationId>,
    ) -> Option<Vec<AllocationId>> {
        let model = &self.problem.model;
        let mut adds = vec![id];
        let mut next = 0;
        while let Some(&current) = adds.get(next) {
            next += 1;
            for &input in &self.problem.inputs[current.index()] {
                if !treatments[input.index()].is_keep() || adds.contains(&input) {
                    continue;
                }
                let must = !model.may_pin(current, input);
                let may = recompute_inputs && !present[input.index()].there;
                let can = self.problem.may_drop(input) && tabu != Some(input);
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

    /// What dropping one allocation costs, for the estimates.
    fn drop_seconds(&self, id: AllocationId) -> f64 {
        if self.is_timeless {
            self.problem.nominal_drop_seconds(id)
        } else {
            self.problem.drop_seconds(id)
        }
    }

    /// Bytes freed at the peak less bytes pinned anew, per second of replay added.
    fn estimate(
        &self,
        adds: &[AllocationId],
        at: &Candidate,
        present: &[Presence],
    ) -> Option<Move> {
        let model = &self.problem.model;
        let mut gained = 0.0;
        let mut seconds = 0.0;
        let mut pinned: Vec<AllocationId> = Vec::new();
        for &id in adds {
            let presence = present[id.index()];
            if presence.there && !presence.natural {
                gained += self
                    .problem
                    .held_bytes(id, at.treatments[id.index()])
                    .as_f64();
            }
            seconds += self.drop_seconds(id);
            for &input in &self.problem.inputs[id.index()] {
                let held = present[input.index()].there || !at.treatments[input.index()].is_keep();
                if !held && !adds.contains(&input) && !pinned.contains(&input) {
                    gained -= model.bytes(input).as_f64();
                    pinned.push(input);
                }
            }
        }
        let changes = adds.iter().map(|&id| (id, Treatment::DROP));
        (gained > 0.0).then(|| Move {
            changes: changes.collect(),
            bytes: gained,
            bytes_per_second: gained / seconds.max(1e-9),
        })
    }
}

//! One inner problem: a trace at one batch size, under one choice of global actions.
//!
//! Responsible for what the search and the bound both need to know of it: what may be done to each allocation, what
//! that costs, where backward first asks for it, and the objective. Not responsible for choosing.

use super::blocks::{self, Blocks};
use super::narrow_forms::{Speed, forms};
use super::transfers::{Offer, Schedule};
use crate::bytes::Bytes;
use crate::cost::Costs;
use crate::plan::executor;
use crate::step::{
    Evaluation, IncrementalEvaluator, Narrow, StepModel, Transfer, Treatment, Variant,
};
use crate::trace::{AllocationId, Op, OpIndex, Trace};

/// Which treatments the request allows.
#[derive(Debug, Clone, Copy)]
pub(in crate::plan) struct Allowed<'r> {
    /// Computing again.
    pub(in crate::plan) remat: bool,
    /// Letting go of what autograd saved and backward never asks for.
    pub(in crate::plan) unneeded_saves: bool,
    /// Storing, and where.
    pub(in crate::plan) offer: Option<&'r Offer>,
    /// Holding in fewer bits, from so many bytes on.
    pub(in crate::plan) shrink: Option<Bytes>,
}

impl Allowed<'_> {
    /// Any at all?
    pub(in crate::plan) const fn any(&self) -> bool {
        self.remat || self.unneeded_saves || self.offer.is_some() || self.shrink.is_some()
    }

    /// Computing again only.
    #[cfg(test)]
    pub(in crate::plan) const REMAT: Self = Self {
        remat: true,
        unneeded_saves: true,
        offer: None,
        shrink: None,
    };
}

/// The inner problem. Everything is indexed like the trace.
#[derive(Debug)]
pub(in crate::plan) struct Problem<'t> {
    pub(in crate::plan) trace: &'t Trace,
    pub(in crate::plan) model: StepModel,
    /// Seconds to run each op of forward again.
    pub(in crate::plan) op_seconds: Vec<f64>,
    /// Position at which backward first asks for an allocation; `usize::MAX` when it never does.
    pub(in crate::plan) first_unpack: Vec<usize>,
    /// Position at which autograd lets go of an allocation for good; 0 when it never saved it.
    last_release: Vec<usize>,
    /// What the makers of each allocation read, see [`StepModel::inputs`].
    pub(in crate::plan) inputs: Vec<Vec<AllocationId>>,
    /// Lowest version of an allocation that backward asks for; `usize::MAX` when it asks for none.
    needed_versions: Vec<usize>,
    /// What may be treated and is worth a thought: it is saved, or read by something that may be dropped.
    pub(in crate::plan) candidates: Vec<AllocationId>,
    may_remat: bool,
    may_let_go: bool,
    /// Transfers in time; absent where nothing may be stored.
    pub(in crate::plan) schedule: Option<Schedule>,
    /// The narrowest form that each allocation may have; empty where none may be shrunk.
    forms: Vec<Option<Narrow>>,
    /// How long shrinking takes.
    speed: Speed,
    /// Repeated blocks, the coarsest kind first.
    pub(super) blocks: Vec<Blocks>,
    /// Per position: the op of forward whose value backward asked for last.
    askers: Vec<usize>,
}

impl<'t> Problem<'t> {
    pub(in crate::plan) fn new(
        trace: &'t Trace,
        variant: Variant,
        costs: &Costs,
        allowed: Allowed<'_>,
    ) -> Self {
        let model = StepModel::new(trace, variant);
        let mut first_unpack = vec![usize::MAX; trace.allocations.len()];
        let mut last_release = vec![0; trace.allocations.len()];
        for saved in &trace.saved {
            let allocation = trace.allocation_of(saved.value).index();
            let unpack = saved.unpack.map_or(usize::MAX, OpIndex::index);
            first_unpack[allocation] = first_unpack[allocation].min(unpack);
            last_release[allocation] = last_release[allocation].max(saved.release.index());
        }
        let mut needed_versions = vec![usize::MAX; trace.allocations.len()];
        for saved in trace.saved.iter().filter(|saved| saved.unpack.is_some()) {
            let value = &trace.values[saved.value.index()];
            let least = &mut needed_versions[value.allocation.index()];
            *least = (*least).min(value.version as usize);
        }
        let ids = (0..trace.allocations.len()).map(allocation_id);
        let inputs = ids.map(|id| model.inputs(id)).collect();
        let replay_seconds = executor::replay_seconds(&trace.meta);
        let op_seconds = (0..trace.forward_end().index())
            .map(|op| costs.seconds(op) + replay_seconds)
            .collect();
        let schedule = allowed
            .offer
            .map(|offer| Schedule::new(trace, offer.clone(), costs));
        let forms = allowed.shrink.map(|least| forms(trace, &model, least));
        let mut problem = Self {
            trace,
            model,
            op_seconds,
            first_unpack,
            last_release,
            inputs,
            needed_versions,
            candidates: Vec::new(),
            may_remat: allowed.remat,
            may_let_go: allowed.unneeded_saves,
            schedule,
            forms: forms.unwrap_or_default(),
            speed: Speed::new(trace, costs),
            blocks: Vec::new(),
            askers: askers(trace),
        };
        problem.candidates = problem.worth_a_thought();
        problem.blocks = blocks::kinds(trace, &problem.candidates);
        problem
    }

    /// What is saved and may be treated, and, through the ops that make it, what could be recomputed instead of
    /// pinned.
    fn worth_a_thought(&self) -> Vec<AllocationId> {
        let trace = self.trace;
        let mut wanted = vec![false; trace.allocations.len()];
        let saved = trace
            .saved
            .iter()
            .map(|saved| trace.allocation_of(saved.value));
        let mut queue: Vec<AllocationId> = saved.collect();
        while let Some(allocation) = queue.pop() {
            let known = std::mem::replace(&mut wanted[allocation.index()], true);
            if !known && self.may_drop(allocation) {
                queue.extend(&self.inputs[allocation.index()]);
            }
        }
        let ids = (0..trace.allocations.len()).map(allocation_id);
        ids.filter(|&id| {
            let may = self.may_drop(id) || self.may_store(id) || self.form(id).is_some();
            wanted[id.index()] && may && self.model.bytes(id) > Bytes::ZERO
        })
        .collect()
    }

    /// May it be dropped, to be computed again or, where backward never asks for it, for good?
    pub(in crate::plan) fn may_drop(&self, id: AllocationId) -> bool {
        let is_allowed = if self.is_unneeded(id) {
            self.may_let_go
        } else {
            self.may_remat
        };
        is_allowed && self.model.is_droppable(id)
    }

    /// Did autograd save it, and let go of it without anybody asking for it?
    fn is_unneeded(&self, id: AllocationId) -> bool {
        self.last_release[id.index()] > 0 && !self.may_be_asked_for(id)
    }

    /// Does backward ask for it, or is it still saved at the end of the step, where the backward of another may?
    pub(in crate::plan) fn may_be_asked_for(&self, id: AllocationId) -> bool {
        self.is_asked_for(id) || self.last_release[id.index()] >= self.trace.ops.len().max(1)
    }

    /// May it be stored?
    pub(super) fn may_store(&self, id: AllocationId) -> bool {
        self.schedule.is_some() && self.model.is_storable(id)
    }

    /// The narrowest form it may have; `None` where it has to stay as it is.
    pub(super) fn form(&self, id: AllocationId) -> Option<Narrow> {
        self.forms.get(id.index()).copied().flatten()
    }

    /// May anything be shrunk?
    pub(super) fn may_shrink(&self) -> bool {
        !self.forms.is_empty()
    }

    /// The forms it may have, the widest first.
    pub(super) fn shrunk(&self, id: AllocationId) -> impl Iterator<Item = Treatment> + use<> {
        let narrowest = self.form(id);
        let forms = [Narrow::Half, Narrow::EightBit].into_iter();
        let forms = forms.filter(move |&form| narrowest.is_some_and(|most| form <= most));
        forms.map(Treatment::shrunk)
    }

    /// Bytes that are there of an allocation that only autograd holds.
    pub(super) fn held_bytes(&self, id: AllocationId, treatment: Treatment) -> Bytes {
        let bytes = self.model.bytes(id);
        match treatment {
            Treatment::Shrink { to, .. } => Bytes(to.bytes(bytes.0)),
            _ => bytes,
        }
    }

    /// Dropped, or stored where it may not be, or else shrunk, or kept where nothing may be done.
    pub(super) fn away_from_memory(&self, id: AllocationId) -> Treatment {
        if self.may_drop(id) {
            Treatment::DROP
        } else if self.may_store(id) {
            Treatment::STORE
        } else {
            self.form(id).map_or(Treatment::Keep, Treatment::shrunk)
        }
    }

    /// The end of the block that makes an allocation, where that may be its home.
    pub(in crate::plan) fn home(&self, id: AllocationId) -> Option<OpIndex> {
        let maker = self.model.makers(id).next()?;
        let home = self.blocks.first()?.home(maker)?;
        self.may_have_home(id, home).then_some(home)
    }

    /// May `home` be the home of an allocation?
    pub(super) fn may_have_home(&self, id: AllocationId, home: OpIndex) -> bool {
        let maker = self.model.makers(id).next();
        let inside = home.index() < self.op_seconds.len();
        inside && self.model.may_have_home(id) && maker.is_some_and(|maker| maker < home)
    }

    /// Everything that may be done to an allocation.
    pub(in crate::plan) fn treatments(
        &self,
        id: AllocationId,
    ) -> impl Iterator<Item = Treatment> + use<> {
        let home = self.home(id);
        let drop = self.may_drop(id).then_some(Treatment::DROP);
        let store = self.may_store(id).then_some(Treatment::STORE);
        let passing = drop.and_then(|drop| Some(drop.with_home(home?)));
        let others = [Some(Treatment::Keep), drop, store, passing];
        others.into_iter().flatten().chain(self.shrunk(id))
    }

    /// The op of forward whose value backward asked for last at a position.
    pub(super) fn asker(&self, position: usize) -> usize {
        let last = self.askers.len().saturating_sub(1);
        self.askers
            .get(position.min(last))
            .copied()
            .unwrap_or(usize::MAX)
    }

    /// The ops during which autograd alone holds an allocation, so that dropping it frees it: after its
    /// forward life, before backward first asks for it.
    pub(in crate::plan) fn away(&self, id: AllocationId) -> Option<(usize, usize)> {
        let forward_end = self.op_seconds.len();
        let natural = &self.trace.allocations[id.index()].natural;
        let forward_life = natural
            .iter()
            .filter(|(start, _)| start.index() < forward_end);
        let from = forward_life.map(|(_, end)| end.index()).max().unwrap_or(0);
        let until = self.first_unpack[id.index()].min(self.last_release[id.index()]);
        (from < until).then_some((from, until))
    }

    /// Does backward ask for it?
    pub(in crate::plan) fn is_asked_for(&self, id: AllocationId) -> bool {
        self.first_unpack[id.index()] != usize::MAX
    }

    /// The ops that must run again if an allocation is dropped, at least.
    pub(in crate::plan) fn needed_makers(
        &self,
        id: AllocationId,
    ) -> impl Iterator<Item = OpIndex> + '_ {
        self.model
            .makers(id)
            .take(self.needed_versions[id.index()].saturating_add(1))
    }

    /// Seconds that dropping one allocation costs, if nothing else were dropped.
    pub(super) fn drop_seconds(&self, allocation: AllocationId) -> f64 {
        if self.is_unneeded(allocation) {
            return 0.0;
        }
        self.model
            .makers(allocation)
            .map(|op| self.op_seconds[op.index()])
            .sum()
    }

    /// What dropping one allocation would cost on a machine that is always the same, whatever was measured here.
    pub(super) fn nominal_drop_seconds(&self, allocation: AllocationId) -> f64 {
        if self.is_unneeded(allocation) {
            return 0.0;
        }
        let ops = &self.trace.ops;
        let makers = self.model.makers(allocation);
        makers.map(|op| nominal_seconds(&ops[op.index()])).sum()
    }

    /// What frees an allocation, or most of it, without an op that runs again for the fewest seconds, and those seconds:
    /// storing it, however well that hides, or shrinking it. Infinite where neither may be.
    pub(in crate::plan) fn least_elsewhere(&self, id: AllocationId) -> (Treatment, f64) {
        let store = match &self.schedule {
            Some(schedule) if self.may_store(id) => schedule.least_seconds(self.model.bytes(id)),
            _ => f64::INFINITY,
        };
        let shrunk = self
            .shrunk(id)
            .map(|it| (it, self.treatment_seconds(id, it)));
        shrunk.fold((Treatment::STORE, store), |least, next| {
            if next.1 < least.1 { next } else { least }
        })
    }

    /// Seconds to shrink an allocation or to expand it.
    pub(super) fn shrink_seconds(&self, id: AllocationId) -> f64 {
        self.speed.seconds(self.model.bytes(id))
    }

    /// Seconds that one treatment costs, about.
    pub(super) fn treatment_seconds(&self, id: AllocationId, treatment: Treatment) -> f64 {
        match (treatment, &self.schedule) {
            (Treatment::Drop { .. }, _) => self.drop_seconds(id),
            (Treatment::Shrink { .. }, _) => 2.0 * self.shrink_seconds(id),
            (Treatment::Store { .. }, Some(schedule)) => {
                schedule.most_seconds(self.model.bytes(id))
            }
            _ => 0.0,
        }
    }
}

/// A roofline of a few cores: 100 GFLOP/s, 10 GB/s and 5 us an op. Only the order that it gives matters.
fn nominal_seconds(op: &Op) -> f64 {
    const SECONDS: f64 = 5e-6;
    const FLOPS_PER_SECOND: f64 = 1e11;
    const BYTES_PER_SECOND: f64 = 1e10;
    if op.view {
        return SECONDS;
    }
    #[expect(
        clippy::cast_precision_loss,
        reason = "times need no more than 53 bits"
    )]
    let flops = op.flops as f64;
    SECONDS + (flops / FLOPS_PER_SECOND).max(op.moved_bytes.as_f64() / BYTES_PER_SECOND)
}

fn allocation_id(index: usize) -> AllocationId {
    AllocationId(u32::try_from(index).unwrap_or(u32::MAX))
}

fn askers(trace: &Trace) -> Vec<usize> {
    let mut askers = vec![usize::MAX; trace.ops.len() + 1];
    let forward_end = trace.forward_end();
    for saved in &trace.saved {
        let allocation = &trace.allocations[trace.allocation_of(saved.value).index()];
        if let (Some(unpack), Some(producer)) = (saved.unpack, allocation.producer)
            && producer < forward_end
        {
            askers[unpack.index()] = askers[unpack.index()].min(producer.index());
        }
    }
    let mut last = usize::MAX;
    for asker in &mut askers {
        if *asker == usize::MAX {
            *asker = last;
        }
        last = *asker;
    }
    askers
}

/// What is done to each allocation, and what it leads to.
#[derive(Debug, Clone)]
pub(in crate::plan) struct Candidate {
    pub(in crate::plan) treatments: Vec<Treatment>,
    pub(in crate::plan) evaluation: Evaluation,
    /// Seconds that it adds to the step: replays, and waits for what is stored.
    pub(in crate::plan) added_seconds: f64,
}

/// Evaluates candidates and counts how many.
#[derive(Debug)]
pub(in crate::plan) struct Scorer<'p> {
    pub(in crate::plan) problem: &'p Problem<'p>,
    pub(in crate::plan) evaluator: IncrementalEvaluator<'p>,
    schedule: Option<Schedule>,
    pub(in crate::plan) evaluations: u64,
    /// Events of their sweeps, those that were known included, and replays.
    pub(super) events: u64,
}

impl<'p> Scorer<'p> {
    pub(in crate::plan) fn new(problem: &'p Problem<'p>) -> Self {
        Self {
            problem,
            evaluator: IncrementalEvaluator::new(&problem.model),
            schedule: problem.schedule.clone(),
            evaluations: 0,
            events: 0,
        }
    }

    pub(super) fn score(&mut self, treatments: Vec<Treatment>) -> Candidate {
        let (evaluation, added_seconds) = self.peek(&treatments);
        Candidate {
            treatments,
            evaluation,
            added_seconds,
        }
    }

    /// Scores without taking the set.
    pub(super) fn peek(&mut self, treatments: &[Treatment]) -> (Evaluation, f64) {
        self.peek_within(treatments, Bytes(u64::MAX))
    }

    /// The same, but gives up where the peak is above `limit`: then only that is known, and what is
    /// returned has such a peak.
    pub(super) fn peek_within(
        &mut self,
        treatments: &[Treatment],
        limit: Bytes,
    ) -> (Evaluation, f64) {
        let evaluation = self.evaluator.evaluate_within(treatments, limit);
        let op_seconds = &self.problem.op_seconds;
        let mut replays = 0;
        let mut seconds = 0.0;
        for op in self.evaluator.replayed() {
            seconds += op_seconds[op.index()];
            replays += 1;
        }
        self.evaluations += 1;
        self.events += self.evaluator.swept() as u64 + replays + 1;
        if self.problem.may_shrink() {
            for &transfer in self.evaluator.transfers() {
                if let Transfer::Shrunk { allocation, .. } | Transfer::Expanded { allocation, .. } =
                    transfer
                {
                    seconds += self.problem.shrink_seconds(allocation);
                }
            }
        }
        if let Some(schedule) = &mut self.schedule {
            let model = &self.problem.model;
            seconds += schedule.seconds(self.evaluator.transfers(), |id| model.bytes(id));
        }
        (evaluation, seconds)
    }
}

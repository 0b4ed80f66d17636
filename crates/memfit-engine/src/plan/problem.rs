//! One inner problem: a trace at one batch size, under one choice of global actions.
//!
//! Responsible for what the search and the bound both need to know of it: time of each forward op, where
//! backward first asks for each allocation, and the objective. Not responsible for choosing.

use crate::bytes::Bytes;
use crate::cost::Costs;
use crate::step::{Evaluation, Evaluator, StepModel, Treatment, Variant};
use crate::trace::{AllocationId, OpIndex, Trace};

/// The inner problem. Everything is indexed like the trace.
#[derive(Debug)]
pub(super) struct Problem<'t> {
    pub(super) trace: &'t Trace,
    pub(super) model: StepModel,
    /// Seconds of each op of forward.
    pub(super) op_seconds: Vec<f64>,
    /// Position at which backward first asks for an allocation; `usize::MAX` when it never does.
    pub(super) first_unpack: Vec<usize>,
    /// Position at which autograd lets go of an allocation for good; 0 when it never saved it.
    last_release: Vec<usize>,
    /// What the makers of each allocation read, see [`StepModel::inputs`].
    pub(super) inputs: Vec<Vec<AllocationId>>,
    /// Lowest version of an allocation that backward asks for; `usize::MAX` when it asks for none.
    needed_versions: Vec<usize>,
    /// What may be dropped and is worth a thought: it is saved, or read by something that may be dropped.
    pub(super) candidates: Vec<AllocationId>,
}

impl<'t> Problem<'t> {
    pub(super) fn new(trace: &'t Trace, variant: Variant, costs: &Costs) -> Self {
        let model = StepModel::new(trace, variant);
        let mut first_unpack = vec![usize::MAX; trace.allocations.len()];
        let mut last_release = vec![0; trace.allocations.len()];
        for saved in &trace.saved {
            let allocation = trace.allocation_of(saved.value).index();
            let unpack = saved
                .unpack
                .map_or(usize::MAX, super::super::trace::OpIndex::index);
            first_unpack[allocation] = first_unpack[allocation].min(unpack);
            last_release[allocation] = last_release[allocation].max(saved.release.index());
        }
        let mut needed_versions = vec![usize::MAX; trace.allocations.len()];
        for saved in trace.saved.iter().filter(|saved| saved.unpack.is_some()) {
            let value = &trace.values[saved.value.index()];
            let least = &mut needed_versions[value.allocation.index()];
            *least = (*least).min(value.version as usize);
        }
        let candidates = candidates(trace, &model);
        let ids = (0..trace.allocations.len())
            .map(|index| AllocationId(u32::try_from(index).unwrap_or(u32::MAX)));
        let inputs = ids.map(|id| model.inputs(id)).collect();
        let op_seconds = (0..trace.forward_end().index())
            .map(|op| costs.seconds(op))
            .collect();
        Self {
            trace,
            model,
            op_seconds,
            first_unpack,
            last_release,
            inputs,
            needed_versions,
            candidates,
        }
    }

    /// The ops during which autograd alone holds an allocation, so that dropping it frees it: after its
    /// forward life, before backward first asks for it.
    pub(super) fn away(&self, id: AllocationId) -> Option<(usize, usize)> {
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
    pub(super) fn is_asked_for(&self, id: AllocationId) -> bool {
        self.first_unpack[id.index()] != usize::MAX
    }

    /// The ops that must run again if an allocation is dropped, at least.
    pub(super) fn needed_makers(&self, id: AllocationId) -> impl Iterator<Item = OpIndex> + '_ {
        self.model
            .makers(id)
            .take(self.needed_versions[id.index()].saturating_add(1))
    }

    /// Seconds that dropping one allocation costs, if nothing else were dropped.
    pub(super) fn drop_seconds(&self, allocation: AllocationId) -> f64 {
        self.model
            .makers(allocation)
            .map(|op| self.op_seconds[op.index()])
            .sum()
    }
}

/// Saved and droppable allocations, and, through the ops that make them, what could be recomputed
/// instead of pinned.
fn candidates(trace: &Trace, model: &StepModel) -> Vec<AllocationId> {
    let mut wanted = vec![false; trace.allocations.len()];
    let saved = trace
        .saved
        .iter()
        .map(|saved| trace.allocation_of(saved.value));
    let mut queue: Vec<AllocationId> = saved.collect();
    while let Some(allocation) = queue.pop() {
        let known = std::mem::replace(&mut wanted[allocation.index()], true);
        if !known && model.is_droppable(allocation) {
            queue.extend(model.inputs(allocation));
        }
    }
    let ids = (0..trace.allocations.len())
        .map(|index| AllocationId(u32::try_from(index).unwrap_or(u32::MAX)));
    ids.filter(|id| wanted[id.index()] && model.is_droppable(*id) && model.bytes(*id) > Bytes::ZERO)
        .collect()
}

/// A set of dropped allocations and what it leads to.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) dropped: Vec<Treatment>,
    pub(super) evaluation: Evaluation,
    /// Seconds spent in replays.
    pub(super) replay_seconds: f64,
}

/// Evaluates candidates and counts how many.
#[derive(Debug)]
pub(super) struct Scorer<'p> {
    pub(super) problem: &'p Problem<'p>,
    pub(super) evaluator: Evaluator<'p>,
    pub(super) evaluations: u64,
    /// Events swept for them.
    pub(super) events: u64,
}

impl<'p> Scorer<'p> {
    pub(super) fn new(problem: &'p Problem<'p>) -> Self {
        Self {
            problem,
            evaluator: Evaluator::new(&problem.model),
            evaluations: 0,
            events: 0,
        }
    }

    pub(super) fn score(&mut self, dropped: Vec<Treatment>) -> Candidate {
        let (evaluation, replay_seconds) = self.peek(&dropped);
        Candidate {
            dropped,
            evaluation,
            replay_seconds,
        }
    }

    /// Scores without taking the set.
    pub(super) fn peek(&mut self, dropped: &[Treatment]) -> (Evaluation, f64) {
        self.peek_within(dropped, Bytes(u64::MAX))
    }

    /// The same, but gives up where the peak is above `limit`: then only that is known, and what is
    /// returned has such a peak.
    pub(super) fn peek_within(&mut self, dropped: &[Treatment], limit: Bytes) -> (Evaluation, f64) {
        let evaluation = self.evaluator.evaluate_within(dropped, limit);
        self.evaluations += 1;
        self.events += self.evaluator.swept() as u64 + 1;
        let op_seconds = &self.problem.op_seconds;
        let seconds = self
            .evaluator
            .replayed()
            .map(|op| op_seconds[op.index()])
            .sum();
        (evaluation, seconds)
    }
}

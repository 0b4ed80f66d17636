//! One inner problem: a trace at one batch size, under one choice of global actions.
//!
//! Responsible for what the search and the bound both need to know of it: time of each forward op, where
//! backward first asks for each allocation, and the objective. Not responsible for choosing.

use crate::bytes::Bytes;
use crate::cost::Costs;
use crate::step::{Evaluation, Evaluator, StepModel, Variant};
use crate::trace::{AllocationId, Trace};

/// The inner problem. Everything is indexed like the trace.
#[derive(Debug)]
pub(super) struct Problem<'t> {
    pub(super) trace: &'t Trace,
    pub(super) model: StepModel,
    /// Seconds of each op of forward.
    pub(super) op_seconds: Vec<f64>,
    /// Position at which backward first asks for an allocation; the end when it never does.
    pub(super) first_unpack: Vec<usize>,
    /// What may be dropped and is worth a thought: it is saved, or read by something that may be dropped.
    pub(super) candidates: Vec<AllocationId>,
}

impl<'t> Problem<'t> {
    pub(super) fn new(trace: &'t Trace, variant: Variant, costs: &Costs) -> Self {
        let model = StepModel::new(trace, variant);
        let mut first_unpack = vec![usize::MAX; trace.allocations.len()];
        for saved in &trace.saved {
            let allocation = trace.allocation_of(saved.value).index();
            let unpack = saved.unpack.map_or(usize::MAX, |unpack| unpack.index());
            first_unpack[allocation] = first_unpack[allocation].min(unpack);
        }
        let candidates = candidates(trace, &model);
        let op_seconds = (0..trace.forward_end().index())
            .map(|op| costs.seconds(op))
            .collect();
        Self {
            trace,
            model,
            op_seconds,
            first_unpack,
            candidates,
        }
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
    pub(super) dropped: Vec<bool>,
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
}

impl<'p> Scorer<'p> {
    pub(super) fn new(problem: &'p Problem<'p>) -> Self {
        Self {
            problem,
            evaluator: Evaluator::new(&problem.model),
            evaluations: 0,
        }
    }

    pub(super) fn score(&mut self, dropped: Vec<bool>) -> Candidate {
        let (evaluation, replay_seconds) = self.peek(&dropped);
        Candidate {
            dropped,
            evaluation,
            replay_seconds,
        }
    }

    /// Scores without taking the set.
    pub(super) fn peek(&mut self, dropped: &[bool]) -> (Evaluation, f64) {
        self.evaluations += 1;
        let evaluation = self.evaluator.evaluate(dropped);
        let op_seconds = &self.problem.op_seconds;
        let seconds = self
            .evaluator
            .replayed()
            .map(|op| op_seconds[op.index()])
            .sum();
        (evaluation, seconds)
    }
}

//! Updates one by one: in which order they come, and what of the optimizer's state is there meanwhile.
//!
//! Responsible for the order of updates where the optimizer runs per parameter, and for the moments at which
//! offloaded state comes and goes. Part of laying a step out (`layout/events.rs` sums the bytes,
//! `lives.rs` writes them out one by one, `plan/search/transfers.rs` asks what they cost); not responsible for gradients.

use std::collections::VecDeque;

use crate::bytes::Bytes;
use crate::step::eight_bit_state::NarrowMoment;
use crate::step::variant::{StateAway, Variant};
use crate::trace::{AllocationId, Category, OpIndex, ParameterUpdate, Phase, Trace, op_index};

impl StateAway {
    /// The state of an update that is away.
    pub fn of<'t>(
        self,
        trace: &'t Trace,
        update: &'t ParameterUpdate,
    ) -> impl Iterator<Item = AllocationId> + 't {
        let goes = move |&id: &AllocationId| self.takes(trace, id);
        update.state.iter().copied().filter(goes)
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(self, trace: &Trace, update: &ParameterUpdate) -> Bytes {
        let sizes = self.of(trace, update);
        sizes.map(|id| trace.allocations[id.index()].bytes).sum()
    }

    /// Is this state that is away?
    pub(in crate::step) fn takes(self, trace: &Trace, id: AllocationId) -> bool {
        let allocation = &trace.allocations[id.index()];
        let is_state = allocation.category == Category::OptimizerState;
        is_state && allocation.bytes >= self.least_bytes.max(Bytes(1))
    }
}

impl Variant {
    /// Of each update, the state that is away and moves as one: all of it but moments in 8 bits.
    #[must_use]
    pub fn states_moved(self, trace: &Trace) -> Vec<Vec<AllocationId>> {
        let sliced = self.offloaded_moments(trace);
        let updates = trace.updates.iter().zip(sliced);
        let of_update = |(update, sliced): (&ParameterUpdate, Vec<NarrowMoment>)| {
            let away = self.offload_optimizer.into_iter();
            let states = away.flat_map(|away| away.of(trace, update));
            let is_sliced = |id| sliced.iter().any(|moment| moment.state == id);
            states.filter(|&id| !is_sliced(id)).collect()
        };
        updates.map(of_update).collect()
    }
}

/// Bytes of allocations as the trace has them.
pub(crate) fn bytes_of(trace: &Trace, states: &[AllocationId]) -> Bytes {
    let sizes = states.iter().map(|id| trace.allocations[id.index()].bytes);
    sizes.sum()
}

/// One thing that happens where updates come one by one; the update is an index into [`Trace::updates`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdateTurn {
    /// Its state is fetched, and waited for at once.
    Fetch(usize),
    /// The fetch of its state begins before its turn.
    Ahead(usize),
    /// Its state was fetched ahead and is needed now.
    Asked(usize),
    /// It runs.
    Update(usize),
    /// The write of its state begins.
    Out(usize),
    /// That write must have ended: its state is no longer there.
    Settled(usize),
}

/// All turns of a step, in order, each with its position; none where the optimizer runs as a whole.
#[must_use]
pub fn update_turns(trace: &Trace, variant: Variant) -> Vec<(OpIndex, UpdateTurn)> {
    if !variant.updates_one_by_one() {
        return Vec::new();
    }
    let end = updates_end(trace, variant);
    let mut order: Vec<(usize, usize)> = trace
        .updates
        .iter()
        .enumerate()
        .map(|(update, known)| {
            let inside = variant.fuse_optimizer;
            (if inside { known.ready.index() } else { end }, update)
        })
        .collect();
    order.sort_by_key(|&(position, _)| position);
    let moved = variant.states_moved(trace);
    let sizes = moved.iter().map(|states| bytes_of(trace, states));
    let away = variant.offload_optimizer;
    let mut script = Script {
        sizes: sizes.collect(),
        window: away.map_or(Bytes::ZERO, |away| away.window_bytes),
        next: 0,
        ahead: Bytes::ZERO,
        outgoing: VecDeque::new(),
        outgoing_bytes: Bytes::ZERO,
        turns: Vec::with_capacity(order.len()),
    };
    for place in 0..order.len() {
        script.update(&order, place);
    }
    if let Some(&(position, _)) = order.last() {
        script.settle_all(position);
    }
    script.turns
}

/// Where the ops of a step end whose updates come one by one: where its optimizer first touches a parameter or
/// its state. What comes before, such as clipping, runs as recorded.
pub(in crate::step) fn updates_end(trace: &Trace, variant: Variant) -> usize {
    let is_optimizer = |op: &crate::trace::Op| op.phase == Phase::Optimizer;
    let ops = &trace.ops;
    let begin = ops.iter().position(is_optimizer).unwrap_or(ops.len());
    if variant.fuse_optimizer {
        return begin;
    }
    let touches = |op: &crate::trace::Op| {
        let mut values = op.reads.iter().chain(&op.writes);
        values.any(|&value| {
            let allocation = &trace.allocations[trace.allocation_of(value).index()];
            matches!(
                allocation.category,
                Category::Parameter | Category::OptimizerState
            )
        })
    };
    let first = ops[begin..].iter().position(touches);
    first.map_or(begin, |first| begin + first)
}

struct Script {
    /// Bytes of state that is away, per update.
    sizes: Vec<Bytes>,
    window: Bytes,
    /// Place in the order from which on nothing has been fetched.
    next: usize,
    /// Fetched and not yet used.
    ahead: Bytes,
    outgoing: VecDeque<usize>,
    outgoing_bytes: Bytes,
    turns: Vec<(OpIndex, UpdateTurn)>,
}

impl Script {
    fn turn(&mut self, position: usize, turn: UpdateTurn) {
        self.turns.push((op_index(position), turn));
    }

    fn update(&mut self, order: &[(usize, usize)], place: usize) {
        let (position, update) = order[place];
        let bytes = self.sizes[update];
        if bytes > Bytes::ZERO {
            if place < self.next {
                self.turn(position, UpdateTurn::Asked(update));
                self.ahead -= bytes;
            } else {
                self.turn(position, UpdateTurn::Fetch(update));
            }
        }
        self.next = self.next.max(place + 1);
        self.look_ahead(order, position);
        self.turn(position, UpdateTurn::Update(update));
        if bytes > Bytes::ZERO {
            self.settle_until(position, bytes);
            self.turn(position, UpdateTurn::Out(update));
            self.outgoing.push_back(update);
            self.outgoing_bytes += bytes;
            if bytes > self.window {
                self.settle_until(position, Bytes::ZERO);
            }
        }
    }

    fn look_ahead(&mut self, order: &[(usize, usize)], position: usize) {
        while let Some(&(_, update)) = order.get(self.next) {
            let bytes = self.sizes[update];
            if bytes > Bytes::ZERO {
                if self.ahead + bytes > self.window {
                    return;
                }
                self.ahead += bytes;
                self.turn(position, UpdateTurn::Ahead(update));
            }
            self.next += 1;
        }
    }

    /// Settles the oldest writes until so many more bytes fit into the window, or none is left.
    fn settle_until(&mut self, position: usize, more: Bytes) {
        while self.outgoing_bytes + more > self.window && self.settle_oldest(position) {}
    }

    fn settle_all(&mut self, position: usize) {
        while self.settle_oldest(position) {}
    }

    /// False when there is none.
    fn settle_oldest(&mut self, position: usize) -> bool {
        let Some(oldest) = self.outgoing.pop_front() else {
            return false;
        };
        self.outgoing_bytes -= self.sizes[oldest];
        self.turn(position, UpdateTurn::Settled(oldest));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::{Evaluator, StepModel, Treatment};
    use crate::trace::sample;

    fn away(window_bytes: u64, least_bytes: u64) -> Variant {
        Variant {
            offload_optimizer: Some(StateAway {
                window_bytes: Bytes(window_bytes),
                least_bytes: Bytes(least_bytes),
            }),
            ..Variant::default()
        }
    }

    /// The chain, whose weight (256 bytes) is updated by two updates with a state of 1000 bytes each.
    fn chain_with_state() -> Trace {
        let mut trace = sample::chain();
        let mut state = trace.allocations[0].clone();
        state.category = Category::OptimizerState;
        state.bytes = Bytes(1000);
        for _ in 0..2 {
            let id = u32::try_from(trace.allocations.len()).unwrap();
            trace.allocations.push(state.clone());
            let mut update = trace.updates[0].clone();
            update.state = vec![AllocationId(id)];
            update.temporary_bytes = Bytes(8);
            trace.updates.push(update);
        }
        trace.updates.remove(0);
        assert_eq!(trace.check(), Ok(()));
        trace
    }

    fn peak(trace: &Trace, variant: Variant) -> Bytes {
        let model = StepModel::new(trace, variant);
        let kept = vec![Treatment::Keep; trace.allocations.len()];
        Evaluator::new(&model).evaluate(&kept).peak_bytes
    }

    #[test]
    fn offloaded_state_is_there_for_one_update_at_a_time() {
        let trace = chain_with_state();
        let without = peak(&sample::chain(), Variant::default());
        assert_eq!(
            peak(&trace, Variant::default()),
            without + Bytes(2000),
            "state stays throughout"
        );
        // Weight 256, input 128 and gradient 256 are alive where the optimizer phase would begin.
        let update = Bytes(256 + 128 + 256 + 1000 + 8);
        assert!(update > without);
        assert_eq!(peak(&trace, away(0, 0)), update);
    }

    #[test]
    fn state_that_no_update_names_stays_in_memory() {
        let mut trace = chain_with_state();
        trace.updates[1].state.clear();
        assert_eq!(
            peak(&trace, away(0, 0)),
            Bytes(256 + 128 + 256 + 1000 + 8 + 1000)
        );
    }

    #[test]
    fn what_is_on_its_way_within_the_window_is_there_too() {
        let trace = chain_with_state();
        let alone = peak(&trace, away(0, 0));
        assert_eq!(
            peak(&trace, away(999, 0)),
            alone,
            "too small a window for either"
        );
        // The second state comes while the first is there, or the first goes while the second is.
        assert_eq!(peak(&trace, away(1000, 0)), alone + Bytes(1000));
        let order: Vec<_> = update_turns(&trace, away(1000, 0))
            .into_iter()
            .map(|t| t.1)
            .collect();
        let expected = [
            UpdateTurn::Fetch(0),
            UpdateTurn::Ahead(1),
            UpdateTurn::Update(0),
            UpdateTurn::Out(0),
            UpdateTurn::Asked(1),
            UpdateTurn::Update(1),
            UpdateTurn::Settled(0),
            UpdateTurn::Out(1),
            UpdateTurn::Settled(1),
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn small_state_stays_in_memory() {
        let trace = chain_with_state();
        let stays = peak(&trace, away(0, 1001));
        assert_eq!(
            stays,
            peak(&sample::chain(), Variant::default()) + Bytes(2000)
        );
    }

    #[test]
    fn updates_come_after_what_the_optimizer_phase_does_to_gradients_alone() {
        let mut trace = chain_with_state();
        let begin = updates_end(&trace, away(0, 0));
        let gradient = trace.updates[0].gradient;
        let of_gradient = |trace: &Trace| {
            let values = 0..u32::try_from(trace.values.len()).unwrap();
            let mut values = values.map(crate::trace::ValueId);
            values.find(|&value| trace.allocation_of(value) == gradient)
        };
        let clip = of_gradient(&trace).unwrap();
        trace.ops.push(trace.ops[begin].clone());
        trace.ops[begin].reads = vec![clip];
        trace.ops[begin].writes.clear();
        assert_eq!(updates_end(&trace, away(0, 0)), begin + 1);
        let fused = Variant {
            fuse_optimizer: true,
            ..away(0, 0)
        };
        assert_eq!(updates_end(&trace, fused), begin);
    }
}

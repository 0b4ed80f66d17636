//! The peak of a transformed trace, in one sweep.
//!
//! Responsible for walking the events of a [`StepModel`] under a treatment of each allocation and
//! reporting the exact peak, where it is, and which ops were replayed. One sweep touches each event
//! once and allocates nothing, so a search can afford tens of thousands.
//!
//! # Invariant
//!
//! `live` is the sum over kept mobile allocations with a holder, plus materialised slots with a reference;
//! the model's ground is added at each look. Checked against `naive.rs` on random traces.

use super::change::{Change, Moment, Replay};
use super::narrow::narrow_bytes;
use super::state::{Doing, Hold, State, reset};
use super::traffic::Transfer;
use crate::bytes::Bytes;
use crate::step::layout::event::Event;
use crate::step::layout::model::{Slot, StepModel};
use crate::step::layout::treatment::Treatment;
use crate::trace::{AllocationId, OpIndex};

/// What one sweep found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evaluation {
    /// The peak; saturated when the plan is not valid.
    pub peak_bytes: Bytes,
    /// Where it is.
    pub moment: Moment,
    /// False when a replay would read something overwritten since, or an allocation may not be treated as it
    /// is: the treatments must not be used.
    pub valid: bool,
}

/// What holds an allocation at the peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// The allocation.
    pub allocation: AllocationId,
    /// Its bytes there; a dropped or stored allocation may be there more than once, a shrunk one in its narrower form.
    pub bytes: Bytes,
    /// Number of natural ranges that hold it.
    pub natural: u32,
    /// Number of saved tensors that hold it.
    pub saved: u32,
    /// Number of records that pin it.
    pub pins: u32,
    /// It is dropped or stored, and there because it was computed again or fetched.
    pub materialised: bool,
}

/// Sweeps one model; keeps its scratch memory between calls.
#[derive(Debug)]
pub struct Evaluator<'m> {
    pub(in crate::step) model: &'m StepModel,
    pub(in crate::step) state: State,
    /// Events the last sweep touched.
    swept: usize,
}

impl<'m> Evaluator<'m> {
    /// An evaluator for `model`.
    #[must_use]
    pub fn new(model: &'m StepModel) -> Self {
        Self {
            model,
            state: State::default(),
            swept: 0,
        }
    }

    /// The model it sweeps.
    #[must_use]
    pub const fn model(&self) -> &'m StepModel {
        self.model
    }

    /// Evaluates the step with `treatments[allocation]`. It is not valid if one of them is not allowed.
    pub fn evaluate(&mut self, treatments: &[Treatment]) -> Evaluation {
        self.evaluate_within(treatments, Bytes(u64::MAX))
    }

    /// The same, but stops where the step rises above `limit`: then the peak is what it rises to there,
    /// which is no more than the peak, and what comes after was not looked at.
    pub fn evaluate_within(&mut self, treatments: &[Treatment], limit: Bytes) -> Evaluation {
        self.sweep(treatments, u64::MAX, limit);
        self.found()
    }

    /// What the sweep found so far.
    pub(in crate::step) fn found(&self) -> Evaluation {
        let (position, doing) = self.state.peak_at.unwrap_or_default();
        let index = |i| OpIndex(u32::try_from(i).unwrap_or(u32::MAX));
        Evaluation {
            peak_bytes: Bytes(if self.state.valid {
                self.state.peak
            } else {
                u64::MAX
            }),
            moment: Moment {
                position: index(position),
                replay: match doing {
                    Doing::Replay(op) => Some(index(op)),
                    Doing::Op | Doing::Updates => None,
                },
            },
            valid: self.state.valid,
        }
    }

    /// Events that the last evaluation touched.
    #[must_use]
    pub const fn swept(&self) -> usize {
        self.swept
    }

    /// Forward ops replayed in the last evaluation, in the order they ran; with homes, an op may run again.
    pub fn replayed(&self) -> impl Iterator<Item = OpIndex> + '_ {
        let replayed = self.state.replayed.iter();
        replayed.map(|&op| OpIndex(u32::try_from(op).unwrap_or(u32::MAX)))
    }

    /// What moved in the last evaluation, in order. Empty where nothing is stored.
    #[must_use]
    pub fn transfers(&self) -> &[Transfer] {
        &self.state.traffic.transfers
    }

    /// What is alive at the peak of `treatments`, largest first, ties by index.
    pub fn holdings_at_peak(&mut self, treatments: &[Treatment]) -> Vec<Holding> {
        let no_limit = Bytes(u64::MAX);
        self.sweep(treatments, u64::MAX, no_limit);
        let tick = self.state.peak_tick;
        self.sweep(treatments, tick, no_limit);
        self.holdings(treatments)
    }

    /// What is alive where the sweep stands, which is at its peak, largest first, ties by index.
    pub(in crate::step) fn holdings(&self, treatments: &[Treatment]) -> Vec<Holding> {
        let (model, state) = (self.model, &self.state);
        let (position, doing) = state.peak_at.unwrap_or_default();
        let mut holdings = Vec::new();
        for (i, &bytes) in model.bytes.iter().enumerate() {
            let occupied = |&slot: &usize| !treatments[i].is_keep() && state.occupies(slot);
            let copies = model.slots_of(i).filter(occupied).count() as u64;
            let narrow = model.slots_of(i).map(|slot| {
                let is_there = state.slots.peek(slot).is_shrunk;
                u64::from(is_there) * narrow_bytes(model, treatments[i], slot)
            });
            let narrow: u64 = narrow.sum();
            let fixed = |&(start, stop): &(usize, usize)| {
                start < position + usize::from(doing == Doing::Op) && position < stop
            };
            let grounded = model.fixed_ranges[i].iter().any(fixed);
            let holders = *state.holders.peek(i);
            let original = u64::from(holders.any() || grounded);
            if copies + original + narrow > 0 && bytes > 0 {
                holdings.push(Holding {
                    allocation: AllocationId(u32::try_from(i).unwrap_or(u32::MAX)),
                    bytes: Bytes(
                        bytes
                            .saturating_mul(copies + original)
                            .saturating_add(narrow),
                    ),
                    natural: holders.natural + u32::from(grounded),
                    saved: holders.saved,
                    pins: holders.pins,
                    materialised: copies > 0,
                });
            }
        }
        holdings.sort_by_key(|h| (std::cmp::Reverse(h.bytes), h.allocation));
        holdings
    }

    /// Every replay of a sweep in order: the forward op that runs again, and the op before which it does.
    pub fn replays(&mut self, treatments: &[Treatment]) -> Vec<Replay> {
        self.begin(treatments);
        let mut replays = Vec::new();
        let index = |i| OpIndex(u32::try_from(i).unwrap_or(u32::MAX));
        for &(position, event) in &self.model.events {
            self.apply(treatments, position, event);
            let made = self.state.replayed.drain(..);
            replays.extend(made.map(|op| Replay {
                at: index(position),
                op: index(op),
            }));
        }
        replays
    }

    /// All changes of a sweep in order; `None` when the treatments are not valid.
    pub(in crate::step) fn changes(&mut self, treatments: &[Treatment]) -> Option<Vec<Change>> {
        self.begin(treatments);
        self.state.log = Some(Vec::new());
        for &(position, event) in &self.model.events {
            self.state.at = (position, event.rank());
            self.apply(treatments, position, event);
        }
        self.state.log.take().filter(|_| self.state.valid)
    }

    /// Bytes alive during each op, the largest replay before it included, and the op's own workspace.
    pub fn timeline(&mut self, treatments: &[Treatment]) -> Vec<Bytes> {
        let model = self.model;
        let mut heights = vec![Bytes::ZERO; model.ground.len()];
        // An update at the very end counts with the last op.
        let last = heights.len().saturating_sub(1);
        self.begin(treatments);
        for &(position, event) in &model.events {
            if let Event::Run { until, .. } = event {
                let live = Bytes(self.state.live);
                let stretch = heights[position..until].iter_mut();
                for (height, &ground) in stretch.zip(&model.ground[position..until]) {
                    *height = (*height).max(live + Bytes(ground));
                }
            }
            self.state.peak = 0;
            self.apply(treatments, position, event);
            if let Some(height) = heights.get_mut(position.min(last))
                && !matches!(event, Event::Run { .. })
            {
                *height = (*height).max(Bytes(self.state.peak));
            }
        }
        heights
    }

    fn begin(&mut self, treatments: &[Treatment]) {
        let model = self.model;
        self.reset();
        let state = &mut self.state;
        let mut homes = false;
        state.valid = treatments.len() == model.bytes.len();
        for (allocation, treatment) in treatments.iter().enumerate() {
            if !treatment.is_keep() {
                state.valid &= state.valid && model.allows(allocation, *treatment);
                homes |= treatment.home() != Treatment::NO_HOME;
            }
        }
        state.has_homes = homes;
    }

    /// Everything as at the start of a step.
    pub(super) fn reset(&mut self) {
        let model = self.model;
        let state = &mut self.state;
        state.live = 0;
        state.holders.reset(model.bytes.len());
        state.slots.reset(model.slots.len());
        state.records.reset(model.records.len());
        reset(&mut state.in_closure, model.records.len());
        state.peak = 0;
        state.peak_at = None;
        state.tick = 0;
        state.peak_tick = 0;
        state.stop_tick = u64::MAX;
        state.limit = u64::MAX;
        state.valid = true;
        state.has_homes = false;
        state.replayed.clear();
        state.traffic.begin(model);
        state.watch(false);
    }

    /// Walks all events, or those up to the look at the height numbered `stop_tick`, or to the first
    /// height above `limit`.
    fn sweep(&mut self, treatments: &[Treatment], stop_tick: u64, limit: Bytes) {
        self.begin(treatments);
        self.state.stop_tick = stop_tick;
        self.state.limit = limit.0;
        self.swept = 0;
        if !self.state.valid {
            return;
        }
        let model = self.model;
        for (index, &(position, event)) in model.events.iter().enumerate() {
            self.apply(treatments, position, event);
            if event.looks() && self.state.stopped() {
                self.swept = index + 1;
                return;
            }
        }
        self.swept = model.events.len();
    }

    pub(super) fn apply(&mut self, treatments: &[Treatment], position: usize, event: Event) {
        let model = self.model;
        let state = &mut self.state;
        match event {
            Event::Pack(saved) => match model.saved[saved] {
                (allocation, Some(slot)) if !state.treatment(treatments, allocation).is_keep() => {
                    state.refer(model, treatments[allocation], slot);
                    match treatments[allocation] {
                        Treatment::Store { .. } => state.go_out(model, allocation, position),
                        shrink @ Treatment::Shrink { .. } => {
                            state.shrink(model, shrink, slot, position);
                        }
                        Treatment::Keep | Treatment::Drop { .. } => {}
                    }
                }
                (allocation, _) => state.hold(model, allocation, Hold::Saved),
            },
            Event::ForwardEnd => state.settle_all(model, position),
            Event::Release(saved) => match model.saved[saved] {
                (allocation, Some(slot)) if !state.treatment(treatments, allocation).is_keep() => {
                    state.drop_ref(model, treatments, slot);
                }
                (allocation, _) => state.let_go(model, allocation, Hold::Saved),
            },
            Event::Unpack(saved) => match model.saved[saved] {
                (allocation, Some(slot)) if !state.treatment(treatments, allocation).is_keep() => {
                    self.request(treatments, slot, position);
                }
                _ => {}
            },
            Event::Start { allocation, slot } => match slot {
                Some(slot) if !state.treatment(treatments, allocation).is_keep() => {
                    state.refer(model, treatments[allocation], slot);
                }
                _ => state.hold(model, allocation, Hold::Natural),
            },
            Event::End { allocation, slot } => match slot {
                Some(slot) if !state.treatment(treatments, allocation).is_keep() => {
                    state.drop_ref(model, treatments, slot);
                }
                _ => {
                    state.let_go(model, allocation, Hold::Natural);
                    let refers =
                        treatments[allocation].is_drop() || treatments[allocation].is_shrink();
                    if state.holders.at(allocation).natural == 0 && refers {
                        state.forget_original(model, treatments, allocation);
                    }
                }
            },
            Event::Update { height } => state.observe(height, position, Doing::Updates),
            Event::Run { highest, .. } => {
                state.observe(model.ground[highest], highest, Doing::Op);
                if position < model.forward_end {
                    state.record(model, treatments, position);
                }
            }
        }
    }

    /// Backward asks for `slot`: runs, in forward order, every pending record that it needs, and fetches
    /// what is stored.
    fn request(&mut self, treatments: &[Treatment], slot: usize, position: usize) {
        let model = self.model;
        let state = &mut self.state;
        let Slot {
            allocation,
            maker: asker,
        } = model.slots[slot];
        let treatment = state.treatment(treatments, allocation);
        if treatment.is_fetched() {
            if state.slots.at(slot).refs == 0 {
                return;
            }
            state.closure.clear();
            state.want(slot, treatment);
        } else if state.records.at(asker).pending {
            state.collect_closure(model, treatments, asker);
        } else {
            return;
        }
        let mut fetched = 0;
        for i in 0..state.closure.len() {
            let op = state.closure[i];
            while let Some(&slot) = state.traffic.wanted.get(fetched)
                && model.slots[slot].maker <= op
            {
                fetched += 1;
                state.fetch(model, treatments, slot, asker, position);
                if state.stopped() {
                    return;
                }
            }
            if model.records[op].stale_from <= position {
                state.valid = false;
            }
            state.replay(model, treatments, op, asker, position);
            if state.stopped() {
                return;
            }
        }
        self.finish_request(treatments, fetched, asker, position);
    }

    /// What no record of the request reads, and what is fetched ahead after it.
    fn finish_request(
        &mut self,
        treatments: &[Treatment],
        fetched: usize,
        asker: usize,
        position: usize,
    ) {
        let state = &mut self.state;
        // A record reads what was made before it, so only a token's own slot is left.
        for i in fetched..state.traffic.wanted.len() {
            let slot = state.traffic.wanted[i];
            state.fetch(self.model, treatments, slot, asker, position);
            if state.stopped() {
                return;
            }
        }
        state.traffic.wanted.clear();
        state.fetch_ahead(self.model, treatments, position);
    }
}

//! The peak of a transformed trace, in one sweep.
//!
//! Responsible for walking the events of a [`StepModel`] under a set of dropped allocations and
//! reporting the exact peak, where it is, and which ops were replayed. One sweep touches each event
//! once and allocates nothing, so a search can afford tens of thousands.
//!
//! # Invariant
//!
//! `live` is the sum over kept mobile allocations with a holder, plus materialised slots with a reference;
//! the model's ground is added at each look. Checked against `naive.rs` on random traces.

use super::events::Event;
use super::model::StepModel;
use crate::bytes::Bytes;
use crate::trace::{AllocationId, OpIndex};

/// When something happens: at a position, and within it at a replayed op, if at one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// The op that runs, or the op before which the replay runs.
    pub position: OpIndex,
    /// The forward op being replayed there.
    pub replay: Option<OpIndex>,
}

/// What one sweep found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evaluation {
    /// The peak; saturated when the plan is not valid.
    pub peak_bytes: Bytes,
    /// Where it is.
    pub moment: Moment,
    /// A replay would read something overwritten since: the set must not be used.
    pub valid: bool,
}

/// What holds an allocation at the peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// The allocation.
    pub allocation: AllocationId,
    /// Its bytes there; a dropped allocation may be there more than once.
    pub bytes: Bytes,
    /// Number of natural ranges that hold it.
    pub natural: u32,
    /// Number of saved tensors that hold it.
    pub saved: u32,
    /// Number of records that pin it.
    pub pins: u32,
    /// It is dropped, and there because it was computed again.
    pub materialised: bool,
}

/// One change of what is alive, as a sweep goes along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// A kept allocation got its first holder.
    Held { at: (usize, u8), allocation: usize },
    /// It lost its last.
    LetGo { at: (usize, u8), allocation: usize },
    /// A replay made a version that something waits for.
    Made {
        at: (usize, u8),
        slot: usize,
        bytes: u64,
    },
    /// A replay wrote in place: the storage of slot `from` is now that of the next.
    Passed { at: (usize, u8), from: usize },
    /// A version that a replay made went.
    Gone {
        at: (usize, u8),
        slot: usize,
        bytes: u64,
    },
    /// A replay's outputs that nothing waits for, and its workspace.
    Scratch { at: (usize, u8), bytes: u64 },
}

impl Change {
    /// Position, and rank of the event within it.
    pub(super) const fn at(&self) -> (usize, u8) {
        match *self {
            Self::Held { at, .. }
            | Self::LetGo { at, .. }
            | Self::Made { at, .. }
            | Self::Passed { at, .. }
            | Self::Gone { at, .. }
            | Self::Scratch { at, .. } => at,
        }
    }
}

/// Sweeps one model; keeps its scratch memory between calls.
#[derive(Debug)]
pub struct Evaluator<'m> {
    model: &'m StepModel,
    state: State,
    /// Ops replayed in the last sweep, in order.
    replayed: Vec<usize>,
    /// Events the last sweep touched.
    swept: usize,
}

#[derive(Debug, Default, Clone)]
struct State {
    live: u64,
    natural: Vec<u32>,
    saved: Vec<u32>,
    pins: Vec<u32>,
    /// References to each slot: its tensor in forward, tokens, records that read it.
    slot_refs: Vec<u32>,
    materialised: Vec<bool>,
    /// The slot's storage became that of the next version.
    stolen: Vec<bool>,
    /// The record of this op exists and has not been replayed.
    pending: Vec<bool>,
    /// References to outputs of a pending record.
    output_refs: Vec<u32>,
    /// The tensor of this slot, or a later version of it, is alive in forward.
    original: Vec<bool>,
    /// Slots that lose one reference each when [`State::drain`] runs.
    stack: Vec<usize>,
    /// Ops to replay, and whether each op is among them.
    closure: Vec<usize>,
    in_closure: Vec<bool>,
    peak: u64,
    peak_at: Option<(usize, Option<usize>)>,
    /// Number of looks at the height so far, at the peak, and at which to stop.
    tick: u64,
    peak_tick: u64,
    stop_tick: u64,
    /// Height above which the sweep stops.
    limit: u64,
    valid: bool,
    /// What changes, when someone asked; and the event that is being applied.
    log: Option<Vec<Change>>,
    at: (usize, u8),
}

impl<'m> Evaluator<'m> {
    /// An evaluator for `model`.
    #[must_use]
    pub fn new(model: &'m StepModel) -> Self {
        Self {
            model,
            state: State::default(),
            replayed: Vec::new(),
            swept: 0,
        }
    }

    /// The model it sweeps.
    #[must_use]
    pub const fn model(&self) -> &'m StepModel {
        self.model
    }

    /// Evaluates the step with `dropped[allocation]`. Flags on undroppable allocations make it invalid.
    pub fn evaluate(&mut self, dropped: &[bool]) -> Evaluation {
        self.evaluate_within(dropped, Bytes(u64::MAX))
    }

    /// The same, but stops where the step rises above `limit`: then the peak is what it rises to there,
    /// which is no more than the peak, and what comes after was not looked at.
    pub fn evaluate_within(&mut self, dropped: &[bool], limit: Bytes) -> Evaluation {
        self.sweep(dropped, u64::MAX, limit);
        let (position, replay) = self.state.peak_at.unwrap_or((0, None));
        let index = |i| OpIndex(u32::try_from(i).unwrap_or(u32::MAX));
        Evaluation {
            peak_bytes: Bytes(if self.state.valid {
                self.state.peak
            } else {
                u64::MAX
            }),
            moment: Moment {
                position: index(position),
                replay: replay.map(index),
            },
            valid: self.state.valid,
        }
    }

    /// Events that the last evaluation touched.
    #[must_use]
    pub const fn swept(&self) -> usize {
        self.swept
    }

    /// Forward ops replayed in the last evaluation, in the order they ran.
    pub fn replayed(&self) -> impl Iterator<Item = OpIndex> + '_ {
        self.replayed
            .iter()
            .map(|&op| OpIndex(u32::try_from(op).unwrap_or(u32::MAX)))
    }

    /// What is alive at the peak of `dropped`, largest first, ties by index.
    pub fn holdings_at_peak(&mut self, dropped: &[bool]) -> Vec<Holding> {
        let no_limit = Bytes(u64::MAX);
        self.sweep(dropped, u64::MAX, no_limit);
        let tick = self.state.peak_tick;
        self.sweep(dropped, tick, no_limit);
        let (model, state) = (self.model, &self.state);
        let (position, replay) = state.peak_at.unwrap_or((0, None));
        let mut holdings = Vec::new();
        for (i, &bytes) in model.bytes.iter().enumerate() {
            let occupied = |&slot: &usize| dropped[i] && state.occupies(slot);
            let copies = model.slots_of(i).filter(occupied).count() as u64;
            let fixed = |&(start, stop): &(usize, usize)| {
                start < position + usize::from(replay.is_none()) && position < stop
            };
            let grounded = model.fixed_ranges[i].iter().any(fixed);
            let original = u64::from(state.held(i) || grounded);
            if copies + original > 0 && bytes > 0 {
                holdings.push(Holding {
                    allocation: AllocationId(u32::try_from(i).unwrap_or(u32::MAX)),
                    bytes: Bytes(bytes.saturating_mul(copies + original)),
                    natural: state.natural[i] + u32::from(grounded),
                    saved: state.saved[i],
                    pins: state.pins[i],
                    materialised: copies > 0,
                });
            }
        }
        holdings.sort_by_key(|h| (std::cmp::Reverse(h.bytes), h.allocation));
        holdings
    }

    /// All changes of a sweep in order; `None` when the set is not valid.
    pub(super) fn changes(&mut self, dropped: &[bool]) -> Option<Vec<Change>> {
        self.begin(dropped);
        self.state.log = Some(Vec::new());
        for &(position, event) in &self.model.events {
            self.state.at = (position, event.rank());
            self.apply(dropped, position, event);
        }
        self.state.log.take().filter(|_| self.state.valid)
    }

    /// Bytes alive during each op, the largest replay before it included, and the op's own workspace.
    pub fn timeline(&mut self, dropped: &[bool]) -> Vec<Bytes> {
        let model = self.model;
        let mut heights = vec![Bytes::ZERO; model.ground.len()];
        // An update at the very end counts with the last op.
        let last = heights.len().saturating_sub(1);
        self.begin(dropped);
        for &(position, event) in &model.events {
            if let Event::Run { until, .. } = event {
                let live = Bytes(self.state.live);
                let stretch = heights[position..until].iter_mut();
                for (height, &ground) in stretch.zip(&model.ground[position..until]) {
                    *height = (*height).max(live + Bytes(ground));
                }
            }
            self.state.peak = 0;
            self.apply(dropped, position, event);
            if let Some(height) = heights.get_mut(position.min(last))
                && !matches!(event, Event::Run { .. })
            {
                *height = (*height).max(Bytes(self.state.peak));
            }
        }
        heights
    }

    fn begin(&mut self, dropped: &[bool]) {
        let model = self.model;
        let state = &mut self.state;
        state.live = 0;
        reset(&mut state.natural, model.bytes.len());
        reset(&mut state.saved, model.bytes.len());
        reset(&mut state.pins, model.bytes.len());
        reset(&mut state.slot_refs, model.slots.len());
        reset(&mut state.materialised, model.slots.len());
        reset(&mut state.stolen, model.slots.len());
        reset(&mut state.pending, model.records.len());
        reset(&mut state.output_refs, model.records.len());
        reset(&mut state.original, model.slots.len());
        reset(&mut state.in_closure, model.records.len());
        state.peak = 0;
        state.peak_at = None;
        state.tick = 0;
        state.peak_tick = 0;
        state.stop_tick = u64::MAX;
        state.limit = u64::MAX;
        state.valid = dropped.len() == model.bytes.len()
            && dropped
                .iter()
                .zip(&model.undroppable)
                .all(|(&drop, why)| !drop || why.is_none());
        self.replayed.clear();
    }

    /// Walks all events, or those up to the look at the height numbered `stop_tick`, or to the first
    /// height above `limit`.
    fn sweep(&mut self, dropped: &[bool], stop_tick: u64, limit: Bytes) {
        self.begin(dropped);
        self.state.stop_tick = stop_tick;
        self.state.limit = limit.0;
        self.swept = 0;
        if !self.state.valid {
            return;
        }
        let model = self.model;
        for &(position, event) in &model.events {
            self.swept += 1;
            self.apply(dropped, position, event);
            if self.state.stopped() {
                return;
            }
        }
    }

    fn apply(&mut self, dropped: &[bool], position: usize, event: Event) {
        let model = self.model;
        let state = &mut self.state;
        match event {
            Event::Pack(saved) => match model.saved[saved] {
                (allocation, Some(slot)) if dropped[allocation] => state.add_ref(model, slot),
                (allocation, _) => state.hold(model, allocation, Hold::Saved),
            },
            Event::Release(saved) => match model.saved[saved] {
                (allocation, Some(slot)) if dropped[allocation] => {
                    state.drop_ref(model, dropped, slot);
                }
                (allocation, _) => state.let_go(model, allocation, Hold::Saved),
            },
            Event::Unpack(saved) => {
                if let (allocation, Some(slot)) = model.saved[saved]
                    && dropped[allocation]
                {
                    self.materialise(dropped, slot, position);
                }
            }
            Event::Start { allocation, slot } => match slot {
                Some(slot) if dropped[allocation] => state.add_ref(model, slot),
                _ => state.hold(model, allocation, Hold::Natural),
            },
            Event::End { allocation, slot } => match slot {
                Some(slot) if dropped[allocation] => state.drop_ref(model, dropped, slot),
                _ => {
                    state.let_go(model, allocation, Hold::Natural);
                    if dropped[allocation] && state.natural[allocation] == 0 {
                        state.forget_original(model, dropped, allocation);
                    }
                }
            },
            Event::Update { height } => state.observe(height, position, None),
            Event::Run { highest, .. } => {
                state.observe(model.ground[highest], highest, None);
                if position < model.forward_end {
                    state.record(model, dropped, position);
                }
            }
        }
    }

    /// Runs, in forward order, every pending record that `slot` needs.
    fn materialise(&mut self, dropped: &[bool], slot: usize, position: usize) {
        let model = self.model;
        let state = &mut self.state;
        if !state.pending[model.slots[slot].maker] {
            return;
        }
        state.collect_closure(model, dropped, slot);
        for i in 0..state.closure.len() {
            let op = state.closure[i];
            if model.records[op].stale_from <= position {
                state.valid = false;
            }
            state.replay(model, dropped, op, position);
            self.replayed.push(op);
            if state.stopped() {
                return;
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Hold {
    Natural,
    Saved,
    Pin,
}

impl State {
    fn stopped(&self) -> bool {
        self.tick >= self.stop_tick
    }

    fn held(&self, allocation: usize) -> bool {
        self.natural[allocation] + self.saved[allocation] + self.pins[allocation] > 0
    }

    /// Does this slot occupy memory of its own in backward?
    fn occupies(&self, slot: usize) -> bool {
        self.materialised[slot] && !self.stolen[slot] && self.slot_refs[slot] > 0
    }

    fn note(&mut self, change: impl FnOnce((usize, u8)) -> Change) {
        let at = self.at;
        if let Some(log) = &mut self.log {
            log.push(change(at));
        }
    }

    fn hold(&mut self, model: &StepModel, allocation: usize, by: Hold) {
        if !self.held(allocation) {
            self.live = self.live.saturating_add(model.bytes[allocation]);
            self.note(|at| Change::Held { at, allocation });
        }
        *self.count(allocation, by) += 1;
    }

    fn let_go(&mut self, model: &StepModel, allocation: usize, by: Hold) {
        let count = self.count(allocation, by);
        if *count == 0 {
            return;
        }
        *count -= 1;
        if !self.held(allocation) {
            self.live = self.live.saturating_sub(model.bytes[allocation]);
            self.note(|at| Change::LetGo { at, allocation });
        }
    }

    fn count(&mut self, allocation: usize, by: Hold) -> &mut u32 {
        match by {
            Hold::Natural => &mut self.natural[allocation],
            Hold::Saved => &mut self.saved[allocation],
            Hold::Pin => &mut self.pins[allocation],
        }
    }

    fn observe(&mut self, extra: u64, position: usize, replay: Option<usize>) {
        self.tick += 1;
        let height = self.live.saturating_add(extra);
        if height > self.peak {
            self.peak = height;
            self.peak_at = Some((position, replay));
            self.peak_tick = self.tick;
            if height > self.limit {
                self.stop_tick = self.tick;
            }
        }
    }

    /// The op has run in forward: if it made a dropped slot, its record starts to exist.
    fn record(&mut self, model: &StepModel, dropped: &[bool], op: usize) {
        let record = &model.records[op];
        let mut outputs = 0;
        for &slot in &record.makes {
            if dropped[model.slots[slot].allocation] {
                // The tensor itself refers to the record while its storage lives.
                self.slot_refs[slot] += 1;
                self.original[slot] = true;
                outputs += 1;
            }
        }
        if outputs == 0 {
            return;
        }
        self.pending[op] = true;
        self.output_refs[op] = outputs;
        for &(allocation, slot) in &record.reads {
            match slot {
                Some(slot) if dropped[allocation] => self.add_ref(model, slot),
                _ => {
                    if model.last_write[allocation].is_some_and(|write| write > op) {
                        self.valid = false;
                    }
                    self.hold(model, allocation, Hold::Pin);
                }
            }
        }
    }

    /// The storage of a dropped allocation died in forward: its tensors no longer refer to the records.
    fn forget_original(&mut self, model: &StepModel, dropped: &[bool], allocation: usize) {
        for slot in model.slots_of(allocation) {
            if std::mem::take(&mut self.original[slot]) {
                self.drop_ref(model, dropped, slot);
            }
        }
    }

    fn add_ref(&mut self, model: &StepModel, slot: usize) {
        self.slot_refs[slot] += 1;
        if self.slot_refs[slot] == 1 {
            self.output_refs[model.slots[slot].maker] += 1;
        }
    }

    fn drop_ref(&mut self, model: &StepModel, dropped: &[bool], slot: usize) {
        self.stack.push(slot);
        self.drain(model, dropped);
    }

    /// Takes one reference from each queued slot, and from what goes with it.
    fn drain(&mut self, model: &StepModel, dropped: &[bool]) {
        while let Some(slot) = self.stack.pop() {
            if self.slot_refs[slot] == 0 {
                continue;
            }
            self.slot_refs[slot] -= 1;
            if self.slot_refs[slot] > 0 {
                continue;
            }
            let maker = model.slots[slot].maker;
            if self.materialised[slot] {
                if !self.stolen[slot] {
                    let bytes = model.bytes[model.slots[slot].allocation];
                    self.live = self.live.saturating_sub(bytes);
                    self.note(|at| Change::Gone { at, slot, bytes });
                }
                continue;
            }
            self.output_refs[maker] = self.output_refs[maker].saturating_sub(1);
            if self.pending[maker] && self.output_refs[maker] == 0 {
                self.consume(model, dropped, maker);
            }
        }
    }

    /// The record of `op` goes: its pins let go, its references to inputs are queued for dropping.
    fn consume(&mut self, model: &StepModel, dropped: &[bool], op: usize) {
        self.pending[op] = false;
        for &(allocation, slot) in &model.records[op].reads {
            match slot {
                Some(slot) if dropped[allocation] => self.stack.push(slot),
                _ => self.let_go(model, allocation, Hold::Pin),
            }
        }
    }

    fn collect_closure(&mut self, model: &StepModel, dropped: &[bool], slot: usize) {
        self.closure.clear();
        self.stack.push(model.slots[slot].maker);
        while let Some(op) = self.stack.pop() {
            if std::mem::replace(&mut self.in_closure[op], true) {
                continue;
            }
            self.closure.push(op);
            for &(allocation, slot) in &model.records[op].reads {
                if let Some(slot) = slot
                    && dropped[allocation]
                    && self.pending[model.slots[slot].maker]
                {
                    self.stack.push(model.slots[slot].maker);
                }
            }
        }
        self.closure.sort_unstable();
        for &op in &self.closure {
            self.in_closure[op] = false;
        }
    }

    fn replay(&mut self, model: &StepModel, dropped: &[bool], op: usize, position: usize) {
        let record = &model.records[op];
        let steals = record
            .takes
            .filter(|&taken| self.steals(model, dropped, taken));
        let mut made: u64 = 0;
        for &slot in &record.makes {
            let allocation = model.slots[slot].allocation;
            if !(steals.is_some() && dropped[allocation] && is_next(model, steals, slot)) {
                made = made.saturating_add(model.bytes[allocation]);
            }
        }
        let ground = model.ground_between.get(position).copied().unwrap_or(0);
        let extra = made.saturating_add(record.workspace).saturating_add(ground);
        self.observe(extra, position, Some(op));
        for &slot in &record.makes {
            let allocation = model.slots[slot].allocation;
            if dropped[allocation] && self.slot_refs[slot] > 0 {
                self.materialised[slot] = true;
                self.output_refs[op] = self.output_refs[op].saturating_sub(1);
                if is_next(model, steals, slot) {
                    // The storage passes on; from here the taken slot occupies nothing.
                    self.stolen[slot - 1] = true;
                    self.note(|at| Change::Passed { at, from: slot - 1 });
                } else {
                    let bytes = model.bytes[allocation];
                    self.live = self.live.saturating_add(bytes);
                    made = made.saturating_sub(bytes);
                    self.note(|at| Change::Made { at, slot, bytes });
                }
            }
        }
        // What is left of it nothing waits for.
        let bytes = made.saturating_add(record.workspace);
        self.note(|at| Change::Scratch { at, bytes });
        if self.stopped() {
            return;
        }
        self.consume(model, dropped, op);
        self.drain(model, dropped);
    }

    /// May the replay that takes `slot` to its next version write on it in place?
    fn steals(&self, model: &StepModel, dropped: &[bool], slot: usize) -> bool {
        dropped[model.slots[slot].allocation]
            && self.materialised[slot]
            && self.slot_refs[slot] == 1
    }
}

fn is_next(model: &StepModel, taken: Option<usize>, slot: usize) -> bool {
    taken.is_some_and(|taken| {
        taken + 1 == slot && model.slots[taken].allocation == model.slots[slot].allocation
    })
}

fn reset<T: Clone + Default>(values: &mut Vec<T>, length: usize) {
    values.clear();
    values.resize(length, T::default());
}

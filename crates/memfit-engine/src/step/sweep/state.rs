//! Who refers to what while a step is swept.
//!
//! Responsible for counting what holds each allocation and each version, for what goes when the last
//! reference does, and for replays. Part of the sweep: `evaluate.rs` says when, this file what happens;
//! `transfers.rs` does the same for stored allocations, `narrow.rs` for shrunk ones.

use super::change::Change;
use super::column::Column;
use super::traffic::Traffic;
use crate::step::layout::model::{Slot, StepModel};
use crate::step::layout::treatment::Treatment;

/// What holds an allocation as forward made it, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::step) struct Holders {
    pub(in crate::step) natural: u32,
    pub(in crate::step) saved: u32,
    pub(in crate::step) pins: u32,
    /// Its write began.
    pub(in crate::step) sent: bool,
}

impl Holders {
    #[inline]
    pub(in crate::step) const fn any(self) -> bool {
        self.natural + self.saved + self.pins > 0
    }

    #[inline]
    const fn count(&mut self, by: Hold) -> &mut u32 {
        match by {
            Hold::Natural => &mut self.natural,
            Hold::Saved => &mut self.saved,
            Hold::Pin => &mut self.pins,
        }
    }
}

/// A version of an allocation that is not kept.
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that are independent of each other"
)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::step) struct SlotState {
    /// References to it: its tensor in forward if it is dropped, tokens, records that read it.
    pub(super) refs: u32,
    /// Records of this request that have yet to read it while it passes, and whether it is there.
    pub(super) readers: u32,
    pub(in crate::step) passing: bool,
    pub(in crate::step) materialised: bool,
    /// Its storage became that of the next version.
    pub(in crate::step) stolen: bool,
    /// Its tensor, or a later version of it, is alive in forward.
    pub(super) original: bool,
    /// It was fetched ahead, and nothing asked for it yet.
    pub(super) is_ahead: bool,
    /// A narrower form of it is there.
    pub(super) is_shrunk: bool,
    /// The request at hand must fetch it or wait for it.
    pub(super) is_wanted: bool,
}

/// The record of an op.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::step) struct RecordState {
    /// It exists and has not been replayed.
    pub(super) pending: bool,
    /// References to its outputs while it is pending.
    pub(super) output_refs: u32,
}

/// What a step is at when a sweep looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::step) enum Doing {
    /// The op of the position; what starts there is alive.
    #[default]
    Op,
    /// Before that op, another of forward again.
    Replay(usize),
    /// Before that op, updates one by one.
    Updates,
}

/// A look at the height, as it was seen.
#[derive(Debug, Clone, Copy)]
pub(in crate::step) struct Look {
    /// Above what was alive when the section began; below it where negative.
    pub(in crate::step) height: i64,
    /// The event that looked.
    pub(in crate::step) event: u32,
    /// Ops replayed in the section up to it.
    pub(in crate::step) replays: u32,
    /// Transfers in the section up to it.
    pub(in crate::step) transfers: u32,
    pub(in crate::step) at: (usize, Doing),
}

#[derive(Debug, Default, Clone)]
pub(in crate::step) struct State {
    pub(in crate::step) live: u64,
    pub(super) holders: Column<Holders>,
    pub(in crate::step) slots: Column<SlotState>,
    pub(in crate::step) records: Column<RecordState>,
    /// Slots that lose one reference each when [`State::drain`] runs.
    pub(super) stack: Vec<usize>,
    /// Ops to replay, and whether each op is among them.
    pub(super) closure: Vec<usize>,
    pub(super) in_closure: Vec<bool>,
    pub(in crate::step) peak: u64,
    pub(super) peak_at: Option<(usize, Doing)>,
    /// Number of looks at the height so far, at the peak, and at which to stop.
    pub(super) tick: u64,
    pub(super) peak_tick: u64,
    pub(super) stop_tick: u64,
    /// Height above which the sweep stops.
    pub(in crate::step) limit: u64,
    pub(in crate::step) valid: bool,
    /// Some allocation has a home.
    pub(super) has_homes: bool,
    pub(in crate::step) traffic: Traffic,
    /// Ops replayed, in order.
    pub(in crate::step) replayed: Vec<usize>,
    /// While a section is watched: its looks, what was alive when it began, and the event that is being applied.
    pub(in crate::step) looks: Option<Vec<Look>>,
    pub(super) live_before: u64,
    pub(super) replays_before: usize,
    pub(super) transfers_before: usize,
    pub(in crate::step) event: usize,
    /// What changes, when someone asked; and the event that is being applied.
    pub(super) log: Option<Vec<Change>>,
    pub(in crate::step) at: (usize, u8),
}

/// What holds an allocation as forward made it.
#[derive(Clone, Copy)]
pub(in crate::step) enum Hold {
    Natural,
    Saved,
    Pin,
}

impl State {
    /// From here on, or until further notice not, what is touched and seen is remembered.
    pub(super) fn watch(&mut self, is_watched: bool) {
        self.holders.watch(is_watched);
        self.slots.watch(is_watched);
        self.records.watch(is_watched);
        self.looks = None;
    }

    #[inline]
    pub(super) fn stopped(&self) -> bool {
        self.tick >= self.stop_tick
    }

    /// What is done to an allocation; what the sweep does from here depends on it.
    #[inline]
    pub(in crate::step) fn treatment(
        &mut self,
        treatments: &[Treatment],
        allocation: usize,
    ) -> Treatment {
        self.holders.touch(allocation);
        treatments[allocation]
    }

    /// Does this slot occupy memory of its own in backward?
    #[inline]
    pub(super) fn occupies(&self, slot: usize) -> bool {
        let slot = self.slots.peek(slot);
        slot.materialised && !slot.stolen && slot.refs > 0 || slot.passing
    }

    #[inline]
    pub(super) fn note(&mut self, change: impl FnOnce((usize, u8)) -> Change) {
        let at = self.at;
        if let Some(log) = &mut self.log {
            log.push(change(at));
        }
    }

    #[inline]
    pub(in crate::step) fn hold(&mut self, model: &StepModel, allocation: usize, by: Hold) {
        let holders = self.holders.at(allocation);
        let is_first = !holders.any();
        *holders.count(by) += 1;
        if is_first {
            self.live = self.live.saturating_add(model.bytes[allocation]);
            self.note(|at| Change::Held { at, allocation });
        }
    }

    #[inline]
    pub(super) fn let_go(&mut self, model: &StepModel, allocation: usize, by: Hold) {
        let holders = self.holders.at(allocation);
        let count = holders.count(by);
        if *count == 0 {
            return;
        }
        *count -= 1;
        if !holders.any() {
            self.live = self.live.saturating_sub(model.bytes[allocation]);
            self.note(|at| Change::LetGo { at, allocation });
        }
    }

    #[inline]
    pub(super) fn observe(&mut self, extra: u64, position: usize, doing: Doing) {
        self.tick += 1;
        let height = self.live.saturating_add(extra);
        if let Some(looks) = &mut self.looks {
            #[expect(clippy::cast_possible_truncation, reason = "no more than a trace has")]
            looks.push(Look {
                height: height.wrapping_sub(self.live_before).cast_signed(),
                event: self.event as u32,
                replays: (self.replayed.len() - self.replays_before) as u32,
                transfers: (self.traffic.transfers.len() - self.transfers_before) as u32,
                at: (position, doing),
            });
        }
        if height > self.peak {
            self.peak = height;
            self.peak_at = Some((position, doing));
            self.peak_tick = self.tick;
            if height > self.limit {
                self.stop_tick = self.tick;
            }
        }
    }

    /// The op has run in forward: if it made a dropped slot, its record starts to exist.
    pub(in crate::step) fn record(
        &mut self,
        model: &StepModel,
        treatments: &[Treatment],
        op: usize,
    ) {
        let record = &model.records[op];
        let mut outputs = 0;
        for &slot in &record.makes {
            if self
                .treatment(treatments, model.slots[slot].allocation)
                .is_drop()
            {
                // The tensor itself refers to the record while its storage lives.
                let state = self.slots.at(slot);
                state.refs += 1;
                state.original = true;
                outputs += 1;
            }
        }
        if outputs == 0 {
            return;
        }
        *self.records.at(op) = RecordState {
            pending: true,
            output_refs: outputs,
        };
        for &(allocation, slot) in &record.reads {
            let outdated = model.last_write[allocation].is_some_and(|write| write > op);
            match (self.treatment(treatments, allocation), slot) {
                (Treatment::Drop { .. }, Some(slot)) => self.add_ref(model, slot),
                (Treatment::Store { .. } | Treatment::Shrink { .. }, Some(slot)) => {
                    self.valid &= !outdated && model.last_slot(allocation) == Some(slot);
                    self.slots.at(slot).refs += 1;
                }
                _ => {
                    self.valid &= !outdated;
                    self.hold(model, allocation, Hold::Pin);
                }
            }
        }
    }

    /// The storage of a dropped allocation died in forward: its tensors no longer refer to the records.
    pub(super) fn forget_original(
        &mut self,
        model: &StepModel,
        treatments: &[Treatment],
        allocation: usize,
    ) {
        for slot in model.slots_of(allocation) {
            if std::mem::take(&mut self.slots.at(slot).original) {
                self.drop_ref(model, treatments, slot);
            }
        }
    }

    #[inline]
    pub(super) fn add_ref(&mut self, model: &StepModel, slot: usize) {
        let state = self.slots.at(slot);
        state.refs += 1;
        if state.refs == 1 {
            self.records.at(model.slots[slot].maker).output_refs += 1;
        }
    }

    /// One more reference to a slot that is not kept. Only a dropped one keeps a record.
    #[inline]
    pub(super) fn refer(&mut self, model: &StepModel, treatment: Treatment, slot: usize) {
        if treatment.is_drop() {
            self.add_ref(model, slot);
        } else {
            self.slots.at(slot).refs += 1;
        }
    }

    #[inline]
    pub(super) fn drop_ref(&mut self, model: &StepModel, treatments: &[Treatment], slot: usize) {
        self.stack.push(slot);
        self.drain(model, treatments);
    }

    /// Takes one reference from each queued slot, and from what goes with it.
    fn drain(&mut self, model: &StepModel, treatments: &[Treatment]) {
        while let Some(slot) = self.stack.pop() {
            let state = self.slots.at(slot);
            if state.refs == 0 {
                continue;
            }
            state.refs -= 1;
            if state.refs > 0 {
                continue;
            }
            let state = *state;
            let Slot { allocation, maker } = model.slots[slot];
            if state.materialised {
                if !state.stolen {
                    let bytes = model.bytes[allocation];
                    self.live = self.live.saturating_sub(bytes);
                    self.note(|at| Change::Gone { at, slot, bytes });
                    self.forget(slot, bytes);
                }
                continue;
            }
            if self.treatment(treatments, allocation).is_fetched() {
                self.leave_narrow(model, treatments[allocation], slot);
                continue;
            }
            let record = self.records.at(maker);
            record.output_refs = record.output_refs.saturating_sub(1);
            if record.pending && record.output_refs == 0 {
                self.consume(model, treatments, maker);
            }
        }
    }

    /// The record of `op` goes: its pins let go, its references to inputs are queued for dropping.
    fn consume(&mut self, model: &StepModel, treatments: &[Treatment], op: usize) {
        self.records.at(op).pending = false;
        for &(allocation, slot) in &model.records[op].reads {
            match slot {
                Some(slot) if !self.treatment(treatments, allocation).is_keep() => {
                    self.stack.push(slot);
                }
                _ => self.let_go(model, allocation, Hold::Pin),
            }
        }
    }

    /// The ops whose records run for a request for `slot`, which op `asker` made, in order; and the stored
    /// slots they read.
    pub(super) fn collect_closure(
        &mut self,
        model: &StepModel,
        treatments: &[Treatment],
        asker: usize,
    ) {
        self.closure.clear();
        self.stack.push(asker);
        while let Some(op) = self.stack.pop() {
            if std::mem::replace(&mut self.in_closure[op], true) {
                continue;
            }
            self.closure.push(op);
            for &(allocation, slot) in &model.records[op].reads {
                let Some(slot) = slot else { continue };
                match self.treatment(treatments, allocation) {
                    Treatment::Keep => {}
                    Treatment::Drop { .. } => {
                        let maker = model.slots[slot].maker;
                        if self.records.at(maker).pending {
                            self.stack.push(maker);
                            if self.has_homes && self.passes(model, treatments, maker, asker) {
                                self.slots.at(slot).readers += 1;
                            }
                        }
                    }
                    fetched @ (Treatment::Store { .. } | Treatment::Shrink { .. }) => {
                        let there = self.slots.at(slot).materialised;
                        self.want(slot, fetched);
                        if !there && fetched.passes(asker) {
                            self.slots.at(slot).readers += 1;
                        }
                    }
                }
            }
        }
        self.closure.sort_unstable();
        for &op in &self.closure {
            self.in_closure[op] = false;
        }
        // Slots are numbered by allocation.
        let place = |&slot: &usize| (model.slots[slot].maker, slot);
        self.traffic.wanted.sort_unstable_by_key(place);
    }

    /// Does the record of `op` stay pending when it runs for a request for what `asker` made?
    fn passes(
        &mut self,
        model: &StepModel,
        treatments: &[Treatment],
        op: usize,
        asker: usize,
    ) -> bool {
        self.has_homes
            && model.records[op].makes.iter().all(|&slot| {
                let made = self.treatment(treatments, model.slots[slot].allocation);
                !made.is_drop() || made.passes(asker)
            })
    }

    /// A record ran: what was passing and has no reader left in this request goes.
    fn let_pass(&mut self, model: &StepModel, op: usize) {
        for &(allocation, slot) in &model.records[op].reads {
            let Some(slot) = slot else { continue };
            let state = self.slots.at(slot);
            if !state.passing {
                continue;
            }
            state.readers = state.readers.saturating_sub(1);
            if state.readers == 0 {
                state.passing = false;
                let bytes = model.bytes[allocation];
                self.live = self.live.saturating_sub(bytes);
                self.note(|at| Change::Gone { at, slot, bytes });
            }
        }
    }

    /// Runs the record of `op` for a request for what `asker` made.
    pub(in crate::step) fn replay(
        &mut self,
        model: &StepModel,
        treatments: &[Treatment],
        op: usize,
        asker: usize,
        position: usize,
    ) {
        let record = &model.records[op];
        self.replayed.push(op);
        let passes = self.passes(model, treatments, op, asker);
        let steals = record
            .takes
            .filter(|&taken| self.steals(model, treatments, taken));
        let mut made: u64 = 0;
        for &slot in &record.makes {
            let allocation = model.slots[slot].allocation;
            let dropped = self.treatment(treatments, allocation).is_drop();
            if !(steals.is_some() && dropped && is_next(model, steals, slot)) {
                made = made.saturating_add(model.bytes[allocation]);
            }
        }
        let ground = model.ground_between.get(position).copied().unwrap_or(0);
        let extra = made.saturating_add(record.workspace).saturating_add(ground);
        self.observe(extra, position, Doing::Replay(op));
        for &slot in &record.makes {
            let allocation = model.slots[slot].allocation;
            if !treatments[allocation].is_drop() {
                continue;
            }
            let state = self.slots.at(slot);
            if passes {
                if state.readers == 0 {
                    continue;
                }
                state.passing = true;
            } else {
                if state.refs == 0 {
                    continue;
                }
                state.materialised = true;
                let record = self.records.at(op);
                record.output_refs = record.output_refs.saturating_sub(1);
            }
            if is_next(model, steals, slot) {
                // The storage passes on; from here the taken slot occupies nothing.
                self.slots.at(slot - 1).stolen = true;
                self.note(|at| Change::Passed { at, from: slot - 1 });
            } else {
                let bytes = model.bytes[allocation];
                self.live = self.live.saturating_add(bytes);
                made = made.saturating_sub(bytes);
                self.note(|at| Change::Made { at, slot, bytes });
            }
        }
        // What is left of it nothing waits for.
        let bytes = made.saturating_add(record.workspace);
        self.note(|at| Change::Scratch { at, bytes });
        if self.stopped() {
            return;
        }
        if self.has_homes {
            self.let_pass(model, op);
        }
        if !passes {
            self.consume(model, treatments, op);
            self.drain(model, treatments);
        }
    }

    /// May the replay that takes `slot` to its next version write on it in place?
    fn steals(&mut self, model: &StepModel, treatments: &[Treatment], slot: usize) -> bool {
        let state = *self.slots.at(slot);
        self.treatment(treatments, model.slots[slot].allocation)
            .is_drop()
            && state.materialised
            && state.refs == 1
    }
}

fn is_next(model: &StepModel, taken: Option<usize>, slot: usize) -> bool {
    taken.is_some_and(|taken| {
        taken + 1 == slot && model.slots[taken].allocation == model.slots[slot].allocation
    })
}

pub(super) fn reset<T: Clone + Default>(values: &mut Vec<T>, length: usize) {
    values.clear();
    values.resize(length, T::default());
}

//! Who refers to what while a step is swept.
//!
//! Responsible for counting what holds each allocation and each version, for what goes when the last
//! reference does, and for replays. Part of the sweep: `evaluate.rs` says when, this file what happens;
//! `transfers.rs` does the same for stored allocations.

use super::evaluate::Change;
use super::model::{Slot, StepModel};
use super::transfers::Traffic;
use super::treatment::Treatment;

#[derive(Debug, Default, Clone)]
pub(super) struct State {
    pub(super) live: u64,
    pub(super) natural: Vec<u32>,
    pub(super) saved: Vec<u32>,
    pub(super) pins: Vec<u32>,
    /// References to each slot: its tensor in forward if it is dropped, tokens, records that read it.
    pub(super) slot_refs: Vec<u32>,
    pub(super) materialised: Vec<bool>,
    /// The slot's storage became that of the next version.
    pub(super) stolen: Vec<bool>,
    /// The record of this op exists and has not been replayed.
    pub(super) pending: Vec<bool>,
    /// References to outputs of a pending record.
    pub(super) output_refs: Vec<u32>,
    /// The tensor of this slot, or a later version of it, is alive in forward.
    pub(super) original: Vec<bool>,
    /// Slots that lose one reference each when [`State::drain`] runs.
    pub(super) stack: Vec<usize>,
    /// Ops to replay, and whether each op is among them.
    pub(super) closure: Vec<usize>,
    pub(super) in_closure: Vec<bool>,
    pub(super) peak: u64,
    pub(super) peak_at: Option<(usize, Option<usize>)>,
    /// Number of looks at the height so far, at the peak, and at which to stop.
    pub(super) tick: u64,
    pub(super) peak_tick: u64,
    pub(super) stop_tick: u64,
    /// Height above which the sweep stops.
    pub(super) limit: u64,
    pub(super) valid: bool,
    /// Some allocation has a home.
    pub(super) has_homes: bool,
    /// Records of this request that have yet to read a passing slot, and whether it is there.
    pub(super) readers: Vec<u32>,
    pub(super) passing: Vec<bool>,
    pub(super) traffic: Traffic,
    /// What changes, when someone asked; and the event that is being applied.
    pub(super) log: Option<Vec<Change>>,
    pub(super) at: (usize, u8),
}

/// What holds an allocation as forward made it.
#[derive(Clone, Copy)]
pub(super) enum Hold {
    Natural,
    Saved,
    Pin,
}

impl State {
    #[inline]
    pub(super) fn stopped(&self) -> bool {
        self.tick >= self.stop_tick
    }

    #[inline]
    pub(super) fn held(&self, allocation: usize) -> bool {
        self.natural[allocation] + self.saved[allocation] + self.pins[allocation] > 0
    }

    /// Does this slot occupy memory of its own in backward?
    #[inline]
    pub(super) fn occupies(&self, slot: usize) -> bool {
        let stays = self.materialised[slot] && !self.stolen[slot] && self.slot_refs[slot] > 0;
        stays || self.has_homes && self.passing[slot]
    }

    #[inline]
    pub(super) fn note(&mut self, change: impl FnOnce((usize, u8)) -> Change) {
        let at = self.at;
        if let Some(log) = &mut self.log {
            log.push(change(at));
        }
    }

    #[inline]
    pub(super) fn hold(&mut self, model: &StepModel, allocation: usize, by: Hold) {
        if !self.held(allocation) {
            self.live = self.live.saturating_add(model.bytes[allocation]);
            self.note(|at| Change::Held { at, allocation });
        }
        *self.count(allocation, by) += 1;
    }

    #[inline]
    pub(super) fn let_go(&mut self, model: &StepModel, allocation: usize, by: Hold) {
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

    #[inline]
    fn count(&mut self, allocation: usize, by: Hold) -> &mut u32 {
        match by {
            Hold::Natural => &mut self.natural[allocation],
            Hold::Saved => &mut self.saved[allocation],
            Hold::Pin => &mut self.pins[allocation],
        }
    }

    #[inline]
    pub(super) fn observe(&mut self, extra: u64, position: usize, replay: Option<usize>) {
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
    pub(super) fn record(&mut self, model: &StepModel, treatments: &[Treatment], op: usize) {
        let record = &model.records[op];
        let mut outputs = 0;
        for &slot in &record.makes {
            if treatments[model.slots[slot].allocation].is_drop() {
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
            let outdated = model.last_write[allocation].is_some_and(|write| write > op);
            match (treatments[allocation], slot) {
                (Treatment::Drop { .. }, Some(slot)) => self.add_ref(model, slot),
                (Treatment::Store { .. }, Some(slot)) => {
                    self.valid &= !outdated && model.last_slot(allocation) == Some(slot);
                    self.slot_refs[slot] += 1;
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
            if std::mem::take(&mut self.original[slot]) {
                self.drop_ref(model, treatments, slot);
            }
        }
    }

    #[inline]
    pub(super) fn add_ref(&mut self, model: &StepModel, slot: usize) {
        self.slot_refs[slot] += 1;
        if self.slot_refs[slot] == 1 {
            self.output_refs[model.slots[slot].maker] += 1;
        }
    }

    /// One more reference to a slot that is not kept. Only a dropped one keeps a record.
    #[inline]
    pub(super) fn refer(&mut self, model: &StepModel, treatment: Treatment, slot: usize) {
        if treatment.is_drop() {
            self.add_ref(model, slot);
        } else {
            self.slot_refs[slot] += 1;
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
            if self.slot_refs[slot] == 0 {
                continue;
            }
            self.slot_refs[slot] -= 1;
            if self.slot_refs[slot] > 0 {
                continue;
            }
            let Slot { allocation, maker } = model.slots[slot];
            if self.materialised[slot] {
                if !self.stolen[slot] {
                    let bytes = model.bytes[allocation];
                    self.live = self.live.saturating_sub(bytes);
                    self.note(|at| Change::Gone { at, slot, bytes });
                    self.traffic.forget(slot, bytes);
                }
                continue;
            }
            if treatments[allocation].is_store() {
                continue;
            }
            self.output_refs[maker] = self.output_refs[maker].saturating_sub(1);
            if self.pending[maker] && self.output_refs[maker] == 0 {
                self.consume(model, treatments, maker);
            }
        }
    }

    /// The record of `op` goes: its pins let go, its references to inputs are queued for dropping.
    fn consume(&mut self, model: &StepModel, treatments: &[Treatment], op: usize) {
        self.pending[op] = false;
        for &(allocation, slot) in &model.records[op].reads {
            match slot {
                Some(slot) if !treatments[allocation].is_keep() => self.stack.push(slot),
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
                match treatments[allocation] {
                    Treatment::Keep => {}
                    Treatment::Drop { .. } => {
                        let maker = model.slots[slot].maker;
                        if self.pending[maker] {
                            self.stack.push(maker);
                            if self.has_homes && self.passes(model, treatments, maker, asker) {
                                self.readers[slot] += 1;
                            }
                        }
                    }
                    Treatment::Store { .. } => {
                        let there = self.materialised[slot];
                        self.traffic.want(slot, there);
                        if !there && treatments[allocation].passes(asker) {
                            self.readers[slot] += 1;
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
    fn passes(&self, model: &StepModel, treatments: &[Treatment], op: usize, asker: usize) -> bool {
        let treatment = |&slot: &usize| treatments[model.slots[slot].allocation];
        let makes = &model.records[op].makes;
        let mut dropped = makes.iter().map(treatment).filter(|made| made.is_drop());
        self.has_homes && dropped.all(|made| made.passes(asker))
    }

    /// A record ran: what was passing and has no reader left in this request goes.
    fn let_pass(&mut self, model: &StepModel, op: usize) {
        for &(allocation, slot) in &model.records[op].reads {
            let Some(slot) = slot.filter(|&slot| self.passing[slot]) else {
                continue;
            };
            self.readers[slot] = self.readers[slot].saturating_sub(1);
            if self.readers[slot] == 0 {
                self.passing[slot] = false;
                let bytes = model.bytes[allocation];
                self.live = self.live.saturating_sub(bytes);
                self.note(|at| Change::Gone { at, slot, bytes });
            }
        }
    }

    /// Runs the record of `op` for a request for what `asker` made.
    pub(super) fn replay(
        &mut self,
        model: &StepModel,
        treatments: &[Treatment],
        op: usize,
        asker: usize,
        position: usize,
    ) {
        let record = &model.records[op];
        let passes = self.has_homes && self.passes(model, treatments, op, asker);
        let steals = record
            .takes
            .filter(|&taken| self.steals(model, treatments, taken));
        let mut made: u64 = 0;
        for &slot in &record.makes {
            let allocation = model.slots[slot].allocation;
            let dropped = treatments[allocation].is_drop();
            if !(steals.is_some() && dropped && is_next(model, steals, slot)) {
                made = made.saturating_add(model.bytes[allocation]);
            }
        }
        let ground = model.ground_between.get(position).copied().unwrap_or(0);
        let extra = made.saturating_add(record.workspace).saturating_add(ground);
        self.observe(extra, position, Some(op));
        for &slot in &record.makes {
            let allocation = model.slots[slot].allocation;
            if !treatments[allocation].is_drop() {
                continue;
            }
            if passes {
                if self.readers[slot] == 0 {
                    continue;
                }
                self.passing[slot] = true;
            } else {
                if self.slot_refs[slot] == 0 {
                    continue;
                }
                self.materialised[slot] = true;
                self.output_refs[op] = self.output_refs[op].saturating_sub(1);
            }
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
    fn steals(&self, model: &StepModel, treatments: &[Treatment], slot: usize) -> bool {
        treatments[model.slots[slot].allocation].is_drop()
            && self.materialised[slot]
            && self.slot_refs[slot] == 1
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

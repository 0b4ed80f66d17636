//! A trace laid out for evaluation.
//!
//! Responsible for deriving, once per trace and variant, what the sweep needs: which op makes which
//! version of which allocation, what a record would hold, what may be dropped at all, and (in
//! `events.rs`) the events in order. Not responsible for the sweep itself.
//!
//! Most allocations no set of drops can touch: gradients, optimizer temporaries, parameters. Their bytes
//! are summed per op once (the *ground*), and ops between two events that matter collapse into one
//! stretch of which only the highest counts.

use super::event::Event;
use super::treatment::Unstorable;
use crate::bytes::Bytes;
use crate::step::eight_bit_state::NarrowMoment;
use crate::step::variant::{EightBitState, Variant};
use crate::trace::{Allocation, AllocationId, Op, OpIndex, Phase, Trace, op_index};

/// A version of an allocation: the unit that is recomputed.
#[derive(Debug, Clone, Copy)]
pub(in crate::step) struct Slot {
    pub(in crate::step) allocation: usize,
    /// The op that makes it: the producer for version 0, otherwise the op that writes in place.
    pub(in crate::step) maker: usize,
}

/// What a record of a forward op would hold.
#[derive(Debug, Clone, Default)]
pub(in crate::step) struct Record {
    /// Mobile allocations read, distinct, with the slot where the allocation was made in forward.
    pub(in crate::step) reads: Vec<(usize, Option<usize>)>,
    /// Slots it makes.
    pub(in crate::step) makes: Vec<usize>,
    /// The slot it takes to its next version, when it writes in place.
    pub(in crate::step) takes: Option<usize>,
    /// Scratch while it runs.
    pub(in crate::step) workspace: u64,
    /// Position from which a replay would read a parameter already updated.
    pub(in crate::step) stale_from: usize,
}

/// Why an allocation cannot be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undroppable {
    /// It was not created in forward.
    NotForward,
    /// An op that makes or changes it cannot be run again.
    NotReplayable,
    /// It is alive to the end of the step.
    Output,
    /// It, or something its op reads, is overwritten later where a replay would see it.
    Overwritten,
}

/// A trace laid out for evaluation. Indices are those of the trace.
#[derive(Debug, Clone)]
pub struct StepModel {
    /// The global choices it was laid out for.
    pub variant: Variant,
    pub(in crate::step) bytes: Vec<u64>,
    /// Of each update of the trace, its temporaries where it runs alone.
    pub(in crate::step) temporary_bytes: Vec<u64>,
    pub(super) undroppable: Vec<Option<Undroppable>>,
    pub(super) unstorable: Vec<Option<Unstorable>>,
    /// Holds 32-bit floating-point numbers and nothing else.
    pub(super) is_float32: Vec<bool>,
    /// Storable allocations in the order in which backward first asks for them.
    pub(in crate::step) fetch_order: Vec<usize>,
    pub(in crate::step) slots: Vec<Slot>,
    /// Slots of each allocation, half-open: consecutive versions.
    slots_of: Vec<(u32, u32)>,
    pub(in crate::step) records: Vec<Record>,
    /// Sorted by position, then by [`Event::rank`].
    pub(in crate::step) events: Vec<(usize, Event)>,
    /// Per saved tensor: allocation, and slot when it was made in forward.
    pub(in crate::step) saved: Vec<(usize, Option<usize>)>,
    /// Per allocation: last op in forward or backward that writes to it in place.
    pub(in crate::step) last_write: Vec<Option<usize>>,
    /// Some plan changes when it is alive: it may be dropped or stored, or be pinned by what is dropped.
    pub(in crate::step) mobile: Vec<bool>,
    /// Per op: bytes of everything else while it runs, its workspace included.
    pub(in crate::step) ground: Vec<u64>,
    /// Per position: bytes of everything else just before the op, after what ends there.
    pub(in crate::step) ground_between: Vec<u64>,
    /// What everything else is alive in, for reports: ranges per allocation.
    pub(in crate::step) fixed_ranges: Vec<Vec<(usize, usize)>>,
    pub(in crate::step) forward_end: usize,
    /// Offloaded parameters hold so much all the time.
    pub(in crate::step) room_bytes: u64,
}

impl StepModel {
    /// Lays a checked trace out.
    #[must_use]
    pub fn new(trace: &Trace, variant: Variant) -> Self {
        let forward_end = trace.forward_end().index();
        let mut model = Self {
            variant,
            bytes: trace.allocations.iter().map(|a| a.bytes.0).collect(),
            temporary_bytes: trace.updates.iter().map(|u| u.temporary_bytes.0).collect(),
            undroppable: vec![None; trace.allocations.len()],
            unstorable: vec![None; trace.allocations.len()],
            is_float32: Vec::new(),
            fetch_order: Vec::new(),
            slots: Vec::new(),
            slots_of: vec![(0, 0); trace.allocations.len()],
            records: vec![Record::default(); forward_end],
            events: Vec::new(),
            saved: Vec::new(),
            last_write: last_writes(trace),
            mobile: vec![false; trace.allocations.len()],
            ground: Vec::new(),
            ground_between: Vec::new(),
            fixed_ranges: vec![Vec::new(); trace.allocations.len()],
            forward_end,
            room_bytes: 0,
        };
        model.take_parameters_away(trace);
        model.narrow_state(trace);
        model.lay_out_slots(trace);
        model.lay_out_records(trace);
        model.find_undroppable(trace);
        model.find_unstorable(trace);
        model.find_float32(trace);
        model.find_mobile(trace);
        model.lay_out_events(trace);
        model
    }

    /// Number of allocations.
    #[must_use]
    pub fn allocation_count(&self) -> usize {
        self.bytes.len()
    }

    /// Number of events a sweep touches.
    #[must_use]
    pub fn event_count(&self) -> usize {
        self.events.len()
    }

    /// Size of an allocation.
    #[must_use]
    pub fn bytes(&self, allocation: AllocationId) -> Bytes {
        Bytes(self.bytes[allocation.index()])
    }

    /// May this allocation be dropped, as far as it alone is concerned?
    #[must_use]
    pub fn is_droppable(&self, allocation: AllocationId) -> bool {
        self.undroppable[allocation.index()].is_none()
    }

    /// Why not.
    #[must_use]
    pub fn why_undroppable(&self, allocation: AllocationId) -> Option<Undroppable> {
        self.undroppable[allocation.index()]
    }

    /// The forward ops that must run to make all versions of an allocation.
    pub fn makers(&self, allocation: AllocationId) -> impl Iterator<Item = OpIndex> + '_ {
        self.slots_of(allocation.index())
            .map(|slot| OpIndex(u32::try_from(self.slots[slot].maker).unwrap_or(u32::MAX)))
    }

    /// The allocations made in forward that those ops read, the allocation itself excepted; distinct.
    #[must_use]
    pub fn inputs(&self, allocation: AllocationId) -> Vec<AllocationId> {
        let mut inputs = Vec::new();
        for slot in self.slots_of(allocation.index()) {
            for &(read, slot) in &self.records[self.slots[slot].maker].reads {
                let id = AllocationId(u32::try_from(read).unwrap_or(u32::MAX));
                if read != allocation.index() && slot.is_some() && !inputs.contains(&id) {
                    inputs.push(id);
                }
            }
        }
        inputs
    }

    /// The allocations made in forward that one op of forward reads, those it writes to excepted.
    pub fn reads(&self, op: OpIndex) -> impl Iterator<Item = AllocationId> + '_ {
        let record = &self.records[op.index()];
        let others = record.reads.iter().filter(|&&(read, slot)| {
            let makes = |&made: &usize| self.slots[made].allocation == read;
            slot.is_some() && !record.makes.iter().any(makes)
        });
        others.map(|&(read, _)| AllocationId(u32::try_from(read).unwrap_or(u32::MAX)))
    }

    /// Would `input`, kept, still hold at replay what the makers of `allocation` read in forward?
    #[must_use]
    pub fn may_pin(&self, allocation: AllocationId, input: AllocationId) -> bool {
        self.slots_of(allocation.index()).all(|slot| {
            let maker = self.slots[slot].maker;
            !self.records[maker]
                .reads
                .iter()
                .any(|&(read, _)| read == input.index())
                || self.last_write[input.index()].is_none_or(|write| write <= maker)
        })
    }

    pub(in crate::step) fn slots_of(&self, allocation: usize) -> std::ops::Range<usize> {
        let (start, end) = self.slots_of[allocation];
        start as usize..end as usize
    }

    pub(in crate::step) fn slot(&self, allocation: usize, version: u32) -> Option<usize> {
        let slots = self.slots_of(allocation);
        let slot = slots.start + version as usize;
        (slot < slots.end).then_some(slot)
    }

    /// What is offloaded takes nothing by itself: its room does, throughout.
    fn take_parameters_away(&mut self, trace: &Trace) {
        if let Some(away) = self.variant.offload_parameters {
            self.room_bytes = away.held_bytes(trace).0;
            for parameter in away.of(trace) {
                self.bytes[parameter.index()] = 0;
            }
        }
    }

    fn narrow_state(&mut self, trace: &Trace) {
        let Some(narrow) = self.variant.eight_bit_state else {
            return;
        };
        let offloaded = self.variant.offloaded_moments(trace);
        let updates = narrow.moments(trace).into_iter().zip(offloaded);
        for (update, (moments, sliced)) in updates.enumerate() {
            if !moments.is_empty() {
                let taken = EightBitState::temporary_bytes(trace, &moments);
                let sliced = sliced.into_iter().map(NarrowMoment::slice_bytes);
                self.temporary_bytes[update] = taken.0.saturating_add(sliced.sum::<Bytes>().0);
            }
            for moment in moments {
                self.bytes[moment.state.index()] = moment.bytes.0;
            }
        }
    }

    fn lay_out_slots(&mut self, trace: &Trace) {
        let mut makers: Vec<Vec<usize>> = vec![Vec::new(); trace.allocations.len()];
        for (i, op) in trace.ops[..self.forward_end].iter().enumerate() {
            for (id, allocation) in produced(trace, i, op) {
                if allocation.producer == Some(op_index(i)) && makers[id].is_empty() {
                    makers[id].push(i);
                }
            }
            for write in &op.writes {
                let id = trace.allocation_of(*write).index();
                // An op may write through several views of one allocation: still one new version.
                if !makers[id].is_empty() && makers[id].last() != Some(&i) {
                    makers[id].push(i);
                }
            }
        }
        for (allocation, makers) in makers.into_iter().enumerate() {
            let start = op_index(self.slots.len()).0;
            self.slots
                .extend(makers.into_iter().map(|maker| Slot { allocation, maker }));
            let end = op_index(self.slots.len()).0;
            self.slots_of[allocation] = (start, end);
        }
    }

    fn lay_out_records(&mut self, trace: &Trace) {
        let mut stale_from = vec![usize::MAX; trace.allocations.len()];
        if self.variant.fuse_optimizer {
            for update in &trace.updates {
                let from = &mut stale_from[update.parameter.index()];
                *from = (*from).min(update.ready.index());
            }
        }
        for i in 0..self.forward_end {
            let op = &trace.ops[i];
            let mut record = Record {
                workspace: op.workspace_bytes.0,
                ..Record::default()
            };
            record.stale_from = usize::MAX;
            let held = if op.shape_only { &[][..] } else { &op.reads };
            for read in held {
                let value = &trace.values[read.index()];
                let allocation = value.allocation.index();
                let entry = (allocation, self.slot(allocation, value.version));
                if !record.reads.contains(&entry) {
                    record.reads.push(entry);
                }
                record.stale_from = record.stale_from.min(stale_from[allocation]);
            }
            self.records[i] = record;
        }
        for slot in 0..self.slots.len() {
            let Slot { allocation, maker } = self.slots[slot];
            self.records[maker].makes.push(slot);
            if slot > 0 && self.slots[slot - 1].allocation == allocation {
                self.records[maker].takes = Some(slot - 1);
            }
        }
    }

    fn find_undroppable(&mut self, trace: &Trace) {
        let end = trace.end();
        for (i, allocation) in trace.allocations.iter().enumerate() {
            self.undroppable[i] = self.undroppable_reason(trace, i, allocation, end);
        }
        // Backward reads what a write through `.data` left, which a replay would have to know when the tensor is saved.
        for saved in &trace.saved {
            let value = &trace.values[saved.value.index()];
            let allocation = value.allocation.index();
            let slot = self.slot(allocation, value.version);
            let made_later = |slot: usize| self.slots[slot].maker >= saved.pack.index();
            if slot.is_some_and(made_later) && self.undroppable[allocation].is_none() {
                self.undroppable[allocation] = Some(Undroppable::Overwritten);
            }
        }
    }

    fn undroppable_reason(
        &self,
        trace: &Trace,
        index: usize,
        allocation: &Allocation,
        end: OpIndex,
    ) -> Option<Undroppable> {
        let slots = self.slots_of(index);
        if slots.is_empty() {
            return Some(Undroppable::NotForward);
        }
        if allocation
            .natural
            .last()
            .is_some_and(|&(_, last)| last >= end)
        {
            return Some(Undroppable::Output);
        }
        for slot in slots.clone() {
            let maker = self.slots[slot].maker;
            let op = &trace.ops[maker];
            let writes_elsewhere = op
                .writes
                .iter()
                .any(|&write| trace.allocation_of(write).index() != index);
            if !op.replayable || writes_elsewhere {
                return Some(Undroppable::NotReplayable);
            }
            for &(read, slot) in &self.records[maker].reads {
                let overwritten = self.last_write[read].is_some_and(|write| write > maker);
                if slot.is_none() && overwritten {
                    return Some(Undroppable::Overwritten);
                }
            }
        }
        let last_maker = self.slots[slots.end - 1].maker;
        if self.last_write[index].is_some_and(|write| write > last_maker) {
            return Some(Undroppable::Overwritten);
        }
        None
    }

    fn find_mobile(&mut self, trace: &Trace) {
        let throughout = |allocation: usize| {
            trace.allocations[allocation].natural.first() == Some(&(OpIndex(0), trace.end()))
        };
        for allocation in 0..self.bytes.len() {
            self.mobile[allocation] |= self.unstorable[allocation].is_none();
            if self.undroppable[allocation].is_some() {
                continue;
            }
            self.mobile[allocation] = true;
            for slot in self.slots_of(allocation) {
                for &(read, _) in &self.records[self.slots[slot].maker].reads {
                    self.mobile[read] |= !throughout(read);
                }
            }
        }
        let mobile = &self.mobile;
        for record in &mut self.records {
            record.reads.retain(|&(read, _)| mobile[read]);
        }
    }
}

fn produced<'a>(
    trace: &'a Trace,
    index: usize,
    op: &'a Op,
) -> impl Iterator<Item = (usize, &'a Allocation)> {
    op.outputs.iter().filter_map(move |&value| {
        let id = trace.allocation_of(value).index();
        let allocation = &trace.allocations[id];
        (allocation.producer == Some(op_index(index))).then_some((id, allocation))
    })
}

fn last_writes(trace: &Trace) -> Vec<Option<usize>> {
    let mut last = vec![None; trace.allocations.len()];
    for (i, op) in trace.ops.iter().enumerate() {
        if op.phase == Phase::Optimizer {
            break;
        }
        for &write in &op.writes {
            last[trace.allocation_of(write).index()] = Some(i);
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Category;
    use crate::trace::sample::Builder;

    /// `x -> a -> b`, of which `a` is written in place after that; autograd saves what the write left.
    fn saved_at(pack: u32) -> Trace {
        let mut builder = Builder::new(4);
        let shape = [4, 8];
        let input = builder.allocation(&shape, Category::Input, 0);
        let a = builder.op("aten.tanh.default", Phase::Forward, &[input], &shape);
        let b = builder.op("aten.mul.Tensor", Phase::Forward, &[a, a], &shape);
        let written = builder.op_in_place("aten.neg_.default", Phase::Forward, a, &[]);
        builder.op("aten.mean.default", Phase::Forward, &[b, written], &[]);
        builder.save(written, pack, 5, 6);
        let seed = builder.op("aten.ones.default", Phase::Backward, &[], &shape);
        let slope = builder.op("aten.mul.Tensor", Phase::Backward, &[seed, written], &shape);
        builder.op("aten.sum.default", Phase::Backward, &[slope], &[]);
        builder.finish()
    }

    #[test]
    fn what_is_written_to_after_it_was_saved_is_not_dropped() {
        let reason = |pack| {
            let model = StepModel::new(&saved_at(pack), Variant::default());
            model.why_undroppable(AllocationId(1))
        };
        assert_eq!(reason(1), Some(Undroppable::Overwritten));
        assert_eq!(reason(2), Some(Undroppable::Overwritten));
        assert_eq!(
            reason(3),
            None,
            "saved by the op that reads what was written"
        );
    }
}

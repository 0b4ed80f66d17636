//! A trace laid out for evaluation.
//!
//! Responsible for deriving, once per trace and variant, what the sweep needs: events in order, which
//! op makes which version of which allocation, and what may be dropped at all. Not responsible for the
//! sweep itself.
//!
//! Most allocations no set of drops can touch: gradients, optimizer temporaries, parameters. Their bytes
//! are summed per op once (the *ground*), and ops between two events that matter collapse into one
//! stretch of which only the highest counts. A GPT-2 step of 3,580 ops sweeps in a third of the time.

use std::collections::BTreeMap;

use crate::bytes::Bytes;
use crate::trace::{
    Allocation, AllocationId, Category, Op, OpIndex, ParameterUpdate, Phase, Trace,
};

/// The global choices that change the events themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Variant {
    /// The optimizer runs per parameter inside backward and frees each gradient.
    pub fuse_optimizer: bool,
    /// Gradients of earlier micro-batches are alive throughout.
    pub accumulate: bool,
}

/// A version of an allocation: the unit that is recomputed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub(super) allocation: usize,
    /// The op that makes it: the producer for version 0, otherwise the op that writes in place.
    pub(super) maker: usize,
}

/// What a record of a forward op would hold.
#[derive(Debug, Clone, Default)]
pub(super) struct Record {
    /// Mobile allocations read, distinct, with the slot where the allocation was made in forward.
    pub(super) reads: Vec<(usize, Option<usize>)>,
    /// Slots it makes.
    pub(super) makes: Vec<usize>,
    /// The slot it takes to its next version, when it writes in place.
    pub(super) takes: Option<usize>,
    /// Scratch while it runs.
    pub(super) workspace: u64,
    /// Position from which a replay would read a parameter already updated.
    pub(super) stale_from: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// Autograd packs saved tensor `.0`.
    Pack(usize),
    /// Natural range ends: allocation, and for a range that backward opened the slot it holds.
    End {
        allocation: usize,
        slot: Option<usize>,
    },
    /// The node of saved tensor `.0` lets go.
    Release(usize),
    /// Fused updates, of which the highest reaches `height` above what may be dropped.
    Update { height: u64 },
    /// Backward asks for saved tensor `.0`.
    Unpack(usize),
    /// Natural range starts.
    Start {
        allocation: usize,
        slot: Option<usize>,
    },
    /// Ops from here to before `until` run with no other event; `highest` is the one of most ground.
    Run { until: usize, highest: usize },
}

impl Event {
    /// Order within one position. Packs come first, so that a value handed from a variable to autograd
    /// is never without a holder; ends and releases before unpacks, as autograd frees a node's tensors
    /// before the next node asks for its own; updates between the two, as `AccumulateGrad` nodes run
    /// before any other that is ready.
    const fn rank(self) -> u8 {
        match self {
            Self::Pack(_) => 0,
            Self::End { .. } => 1,
            Self::Release(_) => 2,
            Self::Update { .. } => 3,
            Self::Unpack(_) => 4,
            Self::Start { .. } => 5,
            Self::Run { .. } => 6,
        }
    }
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
    pub(super) bytes: Vec<u64>,
    pub(super) undroppable: Vec<Option<Undroppable>>,
    pub(super) slots: Vec<Slot>,
    /// First slot of each allocation; slots of one allocation are consecutive versions.
    pub(super) first_slot: Vec<Option<usize>>,
    pub(super) records: Vec<Record>,
    /// Sorted by position, then by [`Event::rank`].
    pub(super) events: Vec<(usize, Event)>,
    /// Per saved tensor: allocation, and slot when it was made in forward.
    pub(super) saved: Vec<(usize, Option<usize>)>,
    /// Per allocation: last op in forward or backward that writes to it in place.
    pub(super) last_write: Vec<Option<usize>>,
    /// Some set of drops changes when it is alive: it may be dropped, or be pinned by what is.
    pub(super) mobile: Vec<bool>,
    /// Per op: bytes of everything else while it runs, its workspace included.
    pub(super) ground: Vec<u64>,
    /// Per position: bytes of everything else just before the op, after what ends there.
    pub(super) ground_between: Vec<u64>,
    /// What everything else is alive in, for reports: ranges per allocation.
    pub(super) fixed_ranges: Vec<Vec<(usize, usize)>>,
    pub(super) forward_end: usize,
}

impl StepModel {
    /// Lays a checked trace out.
    #[must_use]
    pub fn new(trace: &Trace, variant: Variant) -> Self {
        let forward_end = trace.forward_end().index();
        let mut model = Self {
            variant,
            bytes: trace.allocations.iter().map(|a| a.bytes.0).collect(),
            undroppable: vec![None; trace.allocations.len()],
            slots: Vec::new(),
            first_slot: vec![None; trace.allocations.len()],
            records: vec![Record::default(); forward_end],
            events: Vec::new(),
            saved: Vec::new(),
            last_write: last_writes(trace),
            mobile: vec![false; trace.allocations.len()],
            ground: Vec::new(),
            ground_between: Vec::new(),
            fixed_ranges: vec![Vec::new(); trace.allocations.len()],
            forward_end,
        };
        model.lay_out_slots(trace);
        model.lay_out_records(trace);
        model.find_undroppable(trace);
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

    pub(super) fn slots_of(&self, allocation: usize) -> std::ops::Range<usize> {
        let Some(first) = self.first_slot[allocation] else {
            return 0..0;
        };
        let count = self.slots[first..]
            .iter()
            .take_while(|slot| slot.allocation == allocation)
            .count();
        first..first + count
    }

    fn slot(&self, allocation: usize, version: u32) -> Option<usize> {
        let slots = self.slots_of(allocation);
        let slot = slots.start + version as usize;
        (slot < slots.end).then_some(slot)
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
            if !makers.is_empty() {
                self.first_slot[allocation] = Some(self.slots.len());
            }
            self.slots
                .extend(makers.into_iter().map(|maker| Slot { allocation, maker }));
        }
    }

    fn lay_out_records(&mut self, trace: &Trace) {
        let mut stale_from = vec![usize::MAX; trace.allocations.len()];
        if self.variant.fuse_optimizer {
            for update in &trace.updates {
                stale_from[update.parameter.index()] = update.ready.index();
            }
        }
        for i in 0..self.forward_end {
            let op = &trace.ops[i];
            let mut record = Record {
                workspace: op.workspace_bytes.0,
                ..Record::default()
            };
            record.stale_from = usize::MAX;
            let held = if trace.reads_only_shape(op) {
                &[][..]
            } else {
                &op.reads
            };
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

    fn lay_out_events(&mut self, trace: &Trace) {
        // With the optimizer inside backward its phase is empty, so the step ends where it would start.
        let end = if self.variant.fuse_optimizer {
            backward_end(trace)
        } else {
            trace.ops.len()
        };
        // The last gradient may be complete at the end itself: what lives on is still alive there.
        let last = end + 1;
        let cuts = self.gradient_cuts(trace);
        let mut events: Vec<(usize, Event)> = Vec::new();
        for (i, saved) in trace.saved.iter().enumerate() {
            let value = &trace.values[saved.value.index()];
            let allocation = value.allocation.index();
            self.saved
                .push((allocation, self.slot(allocation, value.version)));
            if !self.mobile[allocation] {
                self.fixed_ranges[allocation].push((saved.pack.index(), saved.release.index()));
                continue;
            }
            events.push((saved.pack.index(), Event::Pack(i)));
            events.push((saved.release.index(), Event::Release(i)));
            if let Some(unpack) = saved.unpack {
                events.push((unpack.index(), Event::Unpack(i)));
            }
        }
        for (i, allocation) in trace.allocations.iter().enumerate() {
            for &(start, stop) in &allocation.natural {
                let (start, stop) = (start.index(), stop.index().min(cuts[i]).min(last));
                if start >= stop {
                    continue;
                }
                if !self.mobile[i] {
                    self.fixed_ranges[i].push((start, stop));
                    continue;
                }
                let slot = self.backward_slot(trace, i, start);
                events.push((
                    start,
                    Event::Start {
                        allocation: i,
                        slot,
                    },
                ));
                events.push((
                    stop,
                    Event::End {
                        allocation: i,
                        slot,
                    },
                ));
            }
        }
        self.lay_out_ground(trace, end);
        if self.variant.fuse_optimizer {
            events.extend(self.update_events(trace, &cuts));
        }
        self.lay_out_runs(&mut events, end);
        events.sort_by_key(|&(position, event)| (position, event.rank(), event));
        self.events = events;
    }

    /// Where the gradient of each allocation stops being needed under this variant, if it is one.
    fn gradient_cuts(&self, trace: &Trace) -> Vec<usize> {
        let mut cuts = vec![usize::MAX; trace.allocations.len()];
        if self.variant.fuse_optimizer || self.variant.accumulate {
            for update in &trace.updates {
                let gradient = update.gradient.index();
                if trace.allocations[gradient].category == Category::Gradient {
                    cuts[gradient] = update.ready.index();
                }
            }
        }
        cuts
    }

    fn lay_out_ground(&mut self, trace: &Trace, end: usize) {
        let mut constant: u64 = 0;
        if self.variant.accumulate {
            let mut seen = vec![false; trace.allocations.len()];
            for update in &trace.updates {
                let gradient = update.gradient.index();
                let is_gradient = trace.allocations[gradient].category == Category::Gradient;
                if is_gradient && !std::mem::replace(&mut seen[gradient], true) {
                    constant = constant.saturating_add(self.bytes[gradient]);
                }
            }
        }
        let mut during = Heights::new(end);
        let mut between = Heights::new(end + 1);
        for (allocation, ranges) in self.fixed_ranges.iter_mut().enumerate() {
            merge(ranges);
            for &(start, stop) in ranges.iter() {
                during.add(start, stop, self.bytes[allocation]);
                // Just before op `p`: what started before it and has not ended.
                between.add(start + 1, stop, self.bytes[allocation]);
            }
        }
        let workspace = trace.ops.iter().map(|op| op.workspace_bytes.0);
        let during = during.sums(constant);
        self.ground = during
            .into_iter()
            .zip(workspace)
            .map(|(g, w)| g.saturating_add(w))
            .collect();
        self.ground_between = between.sums(constant);
    }

    /// One event for each position at which parameters are updated. Each update sees the gradients that
    /// still wait for theirs and its own temporaries, and frees its gradient.
    fn update_events(&self, trace: &Trace, cuts: &[usize]) -> Vec<(usize, Event)> {
        let mut due: BTreeMap<usize, Vec<&ParameterUpdate>> = BTreeMap::new();
        for update in &trace.updates {
            due.entry(update.ready.index()).or_default().push(update);
        }
        let height = |position: usize, updates: &[&ParameterUpdate]| -> u64 {
            let mut waiting: Vec<usize> = Vec::new();
            let mut highest = 0;
            for update in updates.iter().rev() {
                let gradient = update.gradient.index();
                let alive = |&(start, end): &(OpIndex, OpIndex)| {
                    start.index() < position && position <= end.index()
                };
                let held = cuts[gradient] == position
                    && trace.allocations[gradient].natural.iter().any(alive);
                if held && !waiting.contains(&gradient) {
                    waiting.push(gradient);
                }
                let gradients: u64 = waiting.iter().map(|&g| self.bytes[g]).sum();
                highest = highest.max(gradients.saturating_add(update.temporary_bytes.0));
            }
            highest.saturating_add(self.ground_between.get(position).copied().unwrap_or(0))
        };
        due.iter()
            .map(|(&position, updates)| {
                (
                    position,
                    Event::Update {
                        height: height(position, updates),
                    },
                )
            })
            .collect()
    }

    /// Ops that make no slot and have no event of their own join the stretch before them.
    fn lay_out_runs(&self, events: &mut Vec<(usize, Event)>, end: usize) {
        let mut busy = vec![false; end + 1];
        for &(position, _) in events.iter().filter(|(position, _)| *position < end) {
            busy[position] = true;
        }
        for (op, record) in self.records.iter().enumerate() {
            if !record.makes.is_empty() {
                // A record exists once its op has run, so the next op starts a stretch of its own.
                busy[op] = true;
                busy[op + 1] = true;
            }
        }
        let mut from = 0;
        while from < end {
            let until = (from + 1..end).find(|&op| busy[op]).unwrap_or(end);
            let highest = (from..until)
                .rev()
                .max_by_key(|&op| self.ground[op])
                .unwrap_or(from);
            events.push((from, Event::Run { until, highest }));
            from = until;
        }
    }

    /// A natural range that starts in backward on an allocation of forward was opened by an unpack:
    /// the slot it holds.
    fn backward_slot(&self, trace: &Trace, allocation: usize, start: usize) -> Option<usize> {
        let slots = self.slots_of(allocation);
        if slots.is_empty() || start < self.forward_end {
            return None;
        }
        let opened = trace.saved.iter().find(|saved| {
            saved.unpack == Some(op_index(start))
                && trace.allocation_of(saved.value).index() == allocation
        });
        let version = opened.map(|saved| trace.values[saved.value.index()].version);
        version
            .and_then(|version| self.slot(allocation, version))
            .or(Some(slots.end - 1))
    }
}

fn op_index(index: usize) -> OpIndex {
    OpIndex(u32::try_from(index).unwrap_or(u32::MAX))
}

/// Sums over half-open ranges, by differences.
struct Heights(Vec<i128>);

impl Heights {
    fn new(length: usize) -> Self {
        Self(vec![0; length + 1])
    }

    fn add(&mut self, start: usize, stop: usize, bytes: u64) {
        let last = self.0.len() - 1;
        if start < stop.min(last) {
            self.0[start] += i128::from(bytes);
            self.0[stop.min(last)] -= i128::from(bytes);
        }
    }

    fn sums(mut self, constant: u64) -> Vec<u64> {
        self.0.pop();
        let mut height = i128::from(constant);
        let sum = |rise: i128| {
            height += rise;
            u64::try_from(height).unwrap_or(u64::MAX)
        };
        self.0.into_iter().map(sum).collect()
    }
}

/// Sorts ranges and joins those that overlap or touch.
fn merge(ranges: &mut Vec<(usize, usize)>) {
    ranges.retain(|&(start, end)| start < end);
    ranges.sort_unstable();
    let mut merged: Vec<(usize, usize)> = Vec::with_capacity(ranges.len());
    for &(start, end) in ranges.iter() {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    *ranges = merged;
}

fn backward_end(trace: &Trace) -> usize {
    trace
        .ops
        .iter()
        .position(|op| op.phase == Phase::Optimizer)
        .unwrap_or(trace.ops.len())
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

//! What may be offloaded, what may be computed or fetched more than once, and in which order
//! what was written comes back.
//!
//! Responsible for the rules of `docs/concepts/transformed-trace.md` on stores and homes as far as one
//! allocation alone is concerned. Not responsible for what a record may read, which the sweep checks.

use super::model::StepModel;
use super::treatment::{Treatment, Unstorable};
use crate::trace::{AllocationId, OpIndex, Trace};

impl StepModel {
    /// May this allocation be stored, as far as it alone is concerned?
    #[must_use]
    pub fn is_storable(&self, allocation: AllocationId) -> bool {
        self.unstorable[allocation.index()].is_none()
    }

    /// Why not.
    #[must_use]
    pub fn why_unstorable(&self, allocation: AllocationId) -> Option<Unstorable> {
        self.unstorable[allocation.index()]
    }

    /// May this allocation be held in a narrower form, as far as it alone is concerned? It may be stored, and all of it
    /// is 32-bit floating-point numbers.
    #[must_use]
    pub fn is_shrinkable(&self, allocation: AllocationId) -> bool {
        self.is_storable(allocation) && self.is_float32[allocation.index()]
    }

    /// May this allocation, dropped or stored, have a home? It must never be written in place.
    #[must_use]
    pub fn may_have_home(&self, allocation: AllocationId) -> bool {
        let index = allocation.index();
        self.slots_of(index).len() == 1 && self.last_write[index].is_none()
    }

    /// The stored among `treatments` in the order in which they are fetched ahead.
    pub fn fetch_order<'a>(
        &'a self,
        treatments: &'a [Treatment],
    ) -> impl Iterator<Item = AllocationId> + 'a {
        let stored = |&&allocation: &&usize| treatments[allocation].is_store();
        self.fetch_order.iter().filter(stored).map(|&allocation| {
            let index = u32::try_from(allocation).unwrap_or(u32::MAX);
            AllocationId(index)
        })
    }

    /// Does the page allow this treatment of this allocation?
    pub(in crate::step) fn allows(&self, allocation: usize, treatment: Treatment) -> bool {
        let refused = match treatment {
            Treatment::Keep => return true,
            Treatment::Drop { .. } => self.undroppable[allocation].is_some(),
            Treatment::Store { .. } => self.unstorable[allocation].is_some(),
            Treatment::Shrink { .. } => {
                self.unstorable[allocation].is_some() || !self.is_float32[allocation]
            }
        };
        !refused && self.allows_home(allocation, treatment.home())
    }

    fn allows_home(&self, allocation: usize, home: OpIndex) -> bool {
        if home.index() >= self.forward_end {
            return true;
        }
        let slots = self.slots_of(allocation);
        slots.len() == 1
            && self.last_write[allocation].is_none()
            && self.slots[slots.start].maker < home.index()
    }

    /// The version that a stored allocation is written and fetched at.
    pub(in crate::step) fn last_slot(&self, allocation: usize) -> Option<usize> {
        let slots = self.slots_of(allocation);
        slots.end.checked_sub(1).filter(|_| !slots.is_empty())
    }

    pub(super) fn find_unstorable(&mut self, trace: &Trace) {
        let mut saves: Vec<Saves> = vec![Saves::default(); trace.allocations.len()];
        for saved in &trace.saved {
            let value = &trace.values[saved.value.index()];
            let allocation = value.allocation.index();
            let slot = self.slot(allocation, value.version);
            let saves = &mut saves[allocation];
            saves.first = Some(saves.first.map_or(saved.pack, |p| p.min(saved.pack)));
            saves.in_backward |= saved.pack.index() > self.forward_end;
            saves.outdated |= slot.is_none() || slot != self.last_slot(allocation);
        }
        let end = trace.end();
        for (i, allocation) in trace.allocations.iter().enumerate() {
            let outlives = allocation
                .natural
                .last()
                .is_some_and(|range| range.1 >= end);
            let Saves {
                first,
                in_backward,
                outdated,
            } = saves[i];
            let overwritten = |first: OpIndex| self.last_write[i] >= Some(first.index());
            self.unstorable[i] = match first {
                _ if self.bytes[i] == 0 => Some(Unstorable::Empty),
                _ if self.slots_of(i).is_empty() => Some(Unstorable::NotForward),
                None => Some(Unstorable::NotSaved),
                Some(_) if in_backward => Some(Unstorable::NotSaved),
                Some(_) if outlives => Some(Unstorable::Output),
                Some(first) if outdated || overwritten(first) => Some(Unstorable::Overwritten),
                Some(_) => None,
            };
        }
        self.find_fetch_order(trace);
    }

    /// Allocations that nothing looks at but as whole 32-bit floating-point numbers.
    pub(super) fn find_float32(&mut self, trace: &Trace) {
        self.is_float32 = self.bytes.iter().map(|bytes| bytes % 4 == 0).collect();
        for value in &trace.values {
            self.is_float32[value.allocation.index()] &= trace.string(value.dtype) == "float32";
        }
    }

    /// Storable allocations by their first own unpack.
    fn find_fetch_order(&mut self, trace: &Trace) {
        let mut unpacks: Vec<(OpIndex, usize)> = Vec::new();
        for (i, saved) in trace.saved.iter().enumerate() {
            unpacks.extend(saved.unpack.map(|unpack| (unpack, i)));
        }
        unpacks.sort_unstable();
        let mut listed = vec![false; trace.allocations.len()];
        for (_, saved) in unpacks {
            let allocation = trace.allocation_of(trace.saved[saved].value).index();
            let known = std::mem::replace(&mut listed[allocation], true);
            if !known && self.unstorable[allocation].is_none() {
                self.fetch_order.push(allocation);
            }
        }
    }
}

/// How autograd saves an allocation.
#[derive(Debug, Clone, Copy, Default)]
struct Saves {
    first: Option<OpIndex>,
    in_backward: bool,
    /// Some saved tensor is of an older version.
    outdated: bool,
}

//! Shrunk allocations, for the slow twin.
//!
//! Responsible for when there is a narrower form, and for its size. When a request wants what was shrunk is told with
//! what is stored (`stored.rs`): it comes back as that does.

use super::super::{Narrow, Transfer, Treatment};
use super::twin::{Reach, Twin};
use crate::trace::{AllocationId, OpIndex};

impl Twin<'_> {
    pub(super) fn is_shrunk(&self, a: usize) -> bool {
        matches!(self.treatments[a], Treatment::Shrink { .. })
    }

    /// Stored or shrunk.
    pub(super) fn comes_back(&self, a: usize) -> bool {
        self.is_stored(a) || self.is_shrunk(a)
    }

    /// Do all values of it hold numbers of that type, and nothing else?
    pub(super) fn is_float32(&self, a: usize) -> bool {
        let mut values = self.trace.values.iter();
        self.bytes(a).is_multiple_of(4)
            && values.all(|value| {
                value.allocation.index() != a || self.trace.string(value.dtype) == "float32"
            })
    }

    /// Autograd packs what is shrunk at `p`: the narrower form comes beside all that is alive during the op before.
    pub(super) fn shrink(&mut self, a: usize, p: usize) {
        let is_there = self.stored.shrunk[a] && self.is_reached(a, p);
        if is_there || self.stored.fetched[a] {
            return;
        }
        self.stored.shrunk[a] = true;
        let id = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        self.result.transfers.push(Transfer::Shrunk {
            at: OpIndex(id(p)),
            allocation: AllocationId(id(a)),
        });
        let height = self.height(p.saturating_sub(1), true, 0);
        self.see(height);
    }

    /// Bytes of the narrower forms that are there at `p`.
    pub(super) fn narrow_bytes(&self, reach: &Reach, p: usize, running: bool) -> u64 {
        let returning = self.stored.returning.iter().copied();
        let made = returning.filter(|&a| self.stored.shrunk[a]);
        let there = made.filter(|&a| {
            let referred = reach.stored[a] || self.natural(a, p, running, true);
            referred && !self.stored.fetched[a]
        });
        there.map(|a| self.narrow(a)).sum()
    }

    fn is_reached(&self, a: usize, p: usize) -> bool {
        self.reach(p, false, None).stored[a] || self.natural(a, p, false, true)
    }

    fn narrow(&self, a: usize) -> u64 {
        let numbers = self.bytes(a) / 4;
        match self.treatments[a] {
            Treatment::Shrink {
                to: Narrow::Half, ..
            } => 2 * numbers,
            Treatment::Shrink { .. } => numbers + numbers.div_ceil(256) * 4,
            _ => 0,
        }
    }
}

//! Where the mappings end that blocks are put together from.
//!
//! Responsible for remembering the addresses, so that pages are moved in runs that lie within one
//! mapping: the system moves no others. Not responsible for moving any ([`crate::remap`]).
//!
//! An address too many costs one more call; one too few makes the system refuse to move a run, which
//! then is left where it is. So what is remembered of a block that was freed past the hooks does no
//! harm. The system allows some 65 000 mappings in a process, for everybody in it, so only few of
//! them may come from here.

/// Most seams there may be.
const MOST: usize = 4096;

/// The seams of all blocks, lowest first.
#[derive(Debug)]
pub(crate) struct Seams {
    addresses: Vec<usize>,
}

impl Seams {
    pub(crate) const fn new() -> Self {
        Self {
            addresses: Vec::new(),
        }
    }

    /// Whether so many more can be remembered.
    pub(crate) fn has_room(&mut self, count: usize) -> bool {
        self.addresses.len() + count <= MOST && self.addresses.try_reserve(count).is_ok()
    }

    /// Remembers one.
    pub(crate) fn add(&mut self, address: usize) {
        if let Err(place) = self.addresses.binary_search(&address) {
            self.addresses.insert(place, address);
        }
    }

    /// Forgets all from `start` to `end`, which lie in one mapping now, or in none.
    pub(crate) fn forget(&mut self, start: usize, end: usize) {
        let first = self.addresses.partition_point(|&seam| seam < start);
        let last = self.addresses.partition_point(|&seam| seam <= end);
        self.addresses.drain(first..last);
    }

    /// The last one before `end`, but nothing before `start`.
    pub(crate) fn before(&self, end: usize, start: usize) -> usize {
        let next = self.addresses.partition_point(|&seam| seam < end);
        let seam = next.checked_sub(1).map(|last| self.addresses[last]);
        seam.map_or(start, |seam| seam.max(start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_begins_at_the_last_seam_before_its_end() {
        let mut seams = Seams::new();
        for address in [300, 100, 200, 200] {
            seams.add(address);
        }
        assert_eq!(seams.before(400, 0), 300);
        assert_eq!(seams.before(300, 0), 200);
        assert_eq!(seams.before(300, 250), 250);
        assert_eq!(seams.before(100, 40), 40);
        seams.forget(150, 200);
        assert_eq!(seams.before(300, 0), 100);
        seams.forget(0, 1000);
        assert_eq!(seams.before(300, 7), 7);
    }

    #[test]
    fn no_more_are_remembered_than_there_may_be() {
        let mut seams = Seams::new();
        for address in 1..MOST {
            assert!(seams.has_room(1));
            seams.add(address);
        }
        assert!(seams.has_room(1));
        assert!(!seams.has_room(2));
    }
}

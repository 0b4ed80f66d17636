//! Which parts of the file are in use.
//!
//! Responsible for handing out and taking back ranges of bytes. Not responsible for the file
//! ([`super::file`]).
//!
//! Invariants: free ranges are disjoint, none touches another or the end; everything starts and ends on
//! a page, so that no write has to read a page first.

use std::collections::BTreeMap;

/// Ranges start and end at multiples of this.
const PAGE_BYTES: u64 = 4096;

/// The parts of a file that are free, and where it ends.
#[derive(Debug, Default)]
pub(super) struct Extents {
    /// Free ranges below `end`: start to length.
    free: BTreeMap<u64, u64>,
    end: u64,
}

/// A range handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) offset: u64,
    /// Whether some of it has never been handed out before, so that the file has to grow.
    pub(super) is_new: bool,
}

impl Extents {
    /// Hands out `length` bytes: the smallest free range that holds them, the first among equals, or the
    /// end of the file.
    pub(super) fn take(&mut self, length: u64) -> Extent {
        let length = whole_pages(length);
        let fitting = self.free.iter().filter(|&(_, &free)| free >= length);
        if let Some((&offset, &free)) = fitting.min_by_key(|&(&offset, &free)| (free, offset)) {
            self.free.remove(&offset);
            if free > length {
                self.free.insert(offset + length, free - length);
            }
            return Extent {
                offset,
                is_new: false,
            };
        }
        let offset = self.end;
        self.end = self.end.saturating_add(length);
        Extent {
            offset,
            is_new: true,
        }
    }

    /// Takes back what [`Self::take`] handed out for the same length.
    pub(super) fn give_back(&mut self, offset: u64, length: u64) {
        let (mut start, mut length) = (offset, whole_pages(length));
        if length == 0 {
            return;
        }
        if let Some((&before, &free)) = self.free.range(..start).next_back()
            && before + free == start
        {
            self.free.remove(&before);
            (start, length) = (before, length + free);
        }
        if let Some(after) = self.free.remove(&(start + length)) {
            length += after;
        }
        if start + length == self.end {
            self.end = start;
        } else {
            self.free.insert(start, length);
        }
    }

    /// One past the last byte in use.
    pub(super) const fn end(&self) -> u64 {
        self.end
    }
}

fn whole_pages(length: u64) -> u64 {
    length
        .checked_next_multiple_of(PAGE_BYTES)
        .unwrap_or(length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn freed_ranges_are_used_again_and_grow_together() {
        let mut extents = Extents::default();
        let [a, b, c] = [1, 5000, 4096].map(|length| extents.take(length).offset);
        assert_eq!([a, b, c, extents.end()], [0, 4096, 12288, 16384]);
        extents.give_back(a, 1);
        extents.give_back(b, 5000);
        let again = extents.take(12288);
        assert_eq!((again.offset, again.is_new), (0, false));
        extents.give_back(c, 4096);
        assert_eq!(extents.end(), 12288);
    }

    proptest! {
        /// Against a set of pages: nothing is handed out twice, and nothing is lost.
        #[test]
        fn ranges_handed_out_never_overlap(steps in prop::collection::vec((0_u64..30_000, 0_usize..8), 1..120)) {
            let mut extents = Extents::default();
            let mut used = vec![false; 10_000];
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (length, action) in steps {
                if action < 3 && !taken.is_empty() {
                    let (offset, length) = taken.swap_remove(action % taken.len());
                    for page in pages(offset, length) {
                        used[page] = false;
                    }
                    extents.give_back(offset, length);
                } else {
                    let extent = extents.take(length);
                    for page in pages(extent.offset, length) {
                        prop_assert!(!std::mem::replace(&mut used[page], true));
                    }
                    taken.push((extent.offset, length));
                }
                let last = used.iter().rposition(|&used| used).map_or(0, |last| last + 1);
                prop_assert_eq!(extents.end(), last as u64 * PAGE_BYTES);
                let free: u64 = extents.free.values().sum();
                let in_use = used.iter().filter(|&&used| used).count() as u64 * PAGE_BYTES;
                prop_assert_eq!(free + in_use, extents.end());
            }
        }
    }

    fn pages(offset: u64, length: u64) -> std::ops::Range<usize> {
        let page = |bytes: u64| usize::try_from(bytes / PAGE_BYTES).unwrap();
        page(offset)..page(offset + whole_pages(length))
    }
}

//! The free blocks of one stream in one pool, ordered as the search for the best fit needs them.
//!
//! A sorted list in chunks: a search is two binary searches, an insertion moves at most one chunk. For the
//! hundreds of free blocks that real programs have, this is twice as fast as a tree.

/// Chunks are halved beyond this.
const CHUNK_ENTRIES: usize = 64;

/// A free block. Entries are ordered by size, then counter, then address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Entry {
    pub(super) size: u64,
    pub(super) counter: u64,
    pub(super) address: u64,
    pub(super) block: u32,
}

/// A place in a [`FreeSet`], valid until the set changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    chunk: usize,
    position: usize,
}

/// A sorted set of entries. No chunk is empty.
#[derive(Debug, Clone, Default)]
pub(super) struct FreeSet {
    chunks: Vec<Vec<Entry>>,
}

impl FreeSet {
    pub(super) fn insert(&mut self, entry: Entry) {
        if self.chunks.is_empty() {
            self.chunks.push(Vec::with_capacity(CHUNK_ENTRIES + 1));
        }
        let mut place = self.lower_bound(&entry);
        if place.chunk == self.chunks.len() {
            place.chunk -= 1;
            place.position = self.chunks[place.chunk].len();
        }
        let chunk = &mut self.chunks[place.chunk];
        chunk.insert(place.position, entry);
        if chunk.len() > CHUNK_ENTRIES {
            let mut upper = Vec::with_capacity(CHUNK_ENTRIES + 1);
            upper.extend(chunk.drain(CHUNK_ENTRIES / 2..));
            self.chunks.insert(place.chunk + 1, upper);
        }
    }

    /// Removes an entry; `false` when it is not there.
    pub(super) fn remove(&mut self, entry: &Entry) -> bool {
        let place = self.lower_bound(entry);
        let is_there = self.get(place) == Some(entry);
        if is_there {
            self.remove_at(place);
        }
        is_there
    }

    /// Removes what lies at a place where something lies.
    pub(super) fn remove_at(&mut self, place: Place) {
        let chunk = &mut self.chunks[place.chunk];
        chunk.remove(place.position);
        if chunk.is_empty() {
            self.chunks.remove(place.chunk);
        }
    }

    /// The first entry of at least this size, whatever its counter and address.
    pub(super) fn first_at_least(&self, size: u64) -> Place {
        self.lower_bound(&Entry {
            size,
            counter: 0,
            address: 0,
            block: 0,
        })
    }

    pub(super) fn get(&self, place: Place) -> Option<&Entry> {
        self.chunks.get(place.chunk)?.get(place.position)
    }

    pub(super) fn next(&self, place: Place) -> Place {
        let chunk_ends = self
            .chunks
            .get(place.chunk)
            .is_some_and(|chunk| place.position + 1 >= chunk.len());
        if chunk_ends {
            Place {
                chunk: place.chunk + 1,
                position: 0,
            }
        } else {
            Place {
                position: place.position + 1,
                ..place
            }
        }
    }

    /// All entries, smallest first.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Entry> {
        self.chunks.iter().flatten()
    }

    fn lower_bound(&self, entry: &Entry) -> Place {
        let chunk = self
            .chunks
            .partition_point(|chunk| chunk.last().is_some_and(|last| last < entry));
        let position = self
            .chunks
            .get(chunk)
            .map_or(0, |chunk| chunk.partition_point(|known| known < entry));
        Place { chunk, position }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_sorted_set(
            operations in prop::collection::vec((any::<bool>(), 0..40_u64, 0..4_u64, 0..8_u64), 0..600),
        ) {
            let mut set = FreeSet::default();
            let mut twin = BTreeSet::new();
            for (is_insertion, size, counter, address) in operations {
                let entry = Entry { size, counter, address, block: 7 };
                if is_insertion {
                    if twin.insert(entry) {
                        set.insert(entry);
                    }
                } else {
                    prop_assert_eq!(set.remove(&entry), twin.remove(&entry));
                }
                let place = set.first_at_least(size);
                let mut expected = twin.iter().filter(|entry| entry.size >= size);
                prop_assert_eq!(set.get(place), expected.next());
                prop_assert_eq!(set.get(set.next(place)), expected.next());
            }
            prop_assert!(set.iter().eq(&twin));
        }
    }
}

//! Blocks as neighbours: splitting one in two, merging two into one, and their places in the free sets.

use super::block::{Block, NONE};
use super::{FreeOrder, Simulator, pool};

impl Simulator {
    /// Cuts the front off a block that is in no free set; the rest goes into its free set.
    pub(super) fn split(&mut self, found: u32, size: u64) -> u32 {
        let whole = self.blocks[found];
        let mut front = self.piece(&whole, whole.address, size);
        (front.previous, front.next) = (whole.previous, found);
        let front = self.blocks.add(front);
        if whole.previous != NONE {
            self.blocks[whole.previous].next = front;
        }
        let rest = &mut self.blocks[found];
        rest.previous = front;
        rest.address += size;
        rest.size -= size;
        self.insert_into_pool(found);
        front
    }

    /// Takes a free neighbour into a block and says how large it was; 0 when it cannot be taken
    /// (`try_merge_blocks`).
    pub(super) fn merge(&mut self, index: u32, neighbour: u32) -> u64 {
        if neighbour == NONE {
            return 0;
        }
        let other = self.blocks[neighbour];
        if other.is_active() || other.is_mapped != self.blocks[index].is_mapped {
            return 0;
        }
        if other.is_mapped {
            self.remove_from_pool(neighbour);
        } else {
            self.pools[other.pool as usize]
                .unmapped_of(other.stream)
                .remove(&other.address);
        }
        let block = &mut self.blocks[index];
        block.size += other.size;
        if block.previous == neighbour {
            block.address = other.address;
            block.previous = other.previous;
            if other.previous != NONE {
                self.blocks[other.previous].next = index;
            }
        } else {
            block.next = other.next;
            if other.next != NONE {
                self.blocks[other.next].previous = index;
            }
        }
        self.blocks.remove(neighbour);
        other.size
    }

    pub(super) fn insert_into_pool(&mut self, index: u32) {
        let block = &mut self.blocks[index];
        let pool = &mut self.pools[block.pool as usize];
        block.searches_before = pool.search_count;
        let entry = pool::entry(index, block);
        pool.free_of(block.stream).insert(entry);
    }

    pub(super) fn remove_from_pool(&mut self, index: u32) {
        let block = &self.blocks[index];
        let entry = pool::entry(index, block);
        self.pools[block.pool as usize]
            .free_of(block.stream)
            .remove(&entry);
    }

    /// A free, mapped block without neighbours. `counter` is its segment's.
    pub(super) fn new_block(
        &mut self,
        pool: u32,
        stream: u32,
        address: u64,
        size: u64,
        counter: u64,
    ) -> Block {
        let counter = match self.order {
            FreeOrder::SegmentCounter => counter,
            FreeOrder::Address | FreeOrder::PrivateCounter => 0,
            FreeOrder::BlockCounter => {
                self.next_counter += 1;
                self.next_counter
            }
        };
        Block {
            address,
            size,
            requested: 0,
            counter,
            searches_before: 0,
            previous: NONE,
            next: NONE,
            pool,
            stream,
            expandable: NONE,
            event_count: 0,
            is_allocated: false,
            is_mapped: true,
            has_uses: false,
            is_live: true,
        }
    }

    /// A free, mapped part of a block, without neighbours.
    pub(super) fn piece(&mut self, whole: &Block, address: u64, size: u64) -> Block {
        let expandable = whole.expandable;
        let piece = self.new_block(whole.pool, whole.stream, address, size, whole.counter);
        Block {
            expandable,
            ..piece
        }
    }

    pub(super) fn next_segment_counter(&mut self) -> u64 {
        if self.order != FreeOrder::SegmentCounter {
            return 0;
        }
        let counter = self.next_counter;
        self.next_counter += 1;
        counter
    }
}

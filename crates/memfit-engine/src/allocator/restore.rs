//! An allocator in the middle of a program: built from a layout, and led by what a trace recorded.
//!
//! Responsible for taking segments and blocks over as they are, and for the operations that only a trace calls
//! for: a request to one pool, a segment given back at a certain address.

use super::block::{ExpandableSegment, NONE};
use super::pool::Redirection;
use super::rounding::SMALL_SEGMENT_BYTES;
use super::{BlockId, OutOfMemory, SegmentLayout, Simulator};
use crate::snapshot::{Action, BlockState};

impl Simulator {
    /// Takes segments over into an allocator that holds nothing yet, and gives the blocks in use, in address
    /// order. Ranges of one expandable segment become one again where they lie within one reservation.
    /// Segments and blocks must not overlap.
    pub(super) fn restore(&mut self, segments: &[SegmentLayout]) -> Vec<(u64, BlockId)> {
        let mut in_use = Vec::new();
        let mut segments: Vec<&SegmentLayout> = segments.iter().collect();
        segments.sort_by_key(|segment| segment.address);
        let mut open: Vec<Reservation> = Vec::new();
        for segment in segments {
            let pool = self.pool_of(segment.pool, segment.is_small);
            let stream = self.stream_index(segment.stream);
            let chain = if segment.is_expandable {
                let place = open
                    .iter()
                    .position(|known| known.takes(pool, stream, segment));
                let place = place.unwrap_or_else(|| {
                    open.push(self.reserve_at(pool, stream, segment));
                    open.len() - 1
                });
                let (before, expandable) = (open[place].last, open[place].expandable);
                let before = self.append_gap(before, segment.address, expandable);
                let last = self.append_blocks(segment, before, expandable, &mut in_use);
                open[place].last = last;
                open[place].end = segment.address + segment.total_size;
                continue;
            } else {
                NONE
            };
            self.append_blocks(segment, chain, NONE, &mut in_use);
            let is_small = segment.is_small;
            self.statistics.segment.increase(is_small, 1);
        }
        for reservation in open {
            let segment = self.expandable[reservation.expandable as usize];
            let end = segment.address.saturating_add(segment.size);
            self.append_gap(reservation.last, end, reservation.expandable);
        }
        self.rebuild_free_sets();
        in_use
    }

    fn pool_of(&mut self, id: (u64, u64), is_small: bool) -> u32 {
        let small = if id == (0, 0) {
            super::pool::SMALL_POOL
        } else {
            let number = match self.private_pool(id) {
                Some(number) => number,
                None => self.use_pool(id),
            };
            self.private[number as usize].segment_count += 1;
            self.private[number as usize].small
        };
        small + u32::from(!is_small)
    }

    fn reserve_at(&mut self, pool: u32, stream: u32, segment: &SegmentLayout) -> Reservation {
        let page_bytes = if segment.is_small {
            SMALL_SEGMENT_BYTES
        } else {
            self.settings.large_segment_bytes
        };
        let reserve = self.reserve_bytes().max(segment.total_size);
        let size = reserve
            .checked_next_multiple_of(page_bytes)
            .unwrap_or(reserve);
        let expandable = u32::try_from(self.expandable.len()).unwrap_or(NONE);
        self.expandable.push(ExpandableSegment {
            address: segment.address,
            page_bytes,
            size,
        });
        Reservation {
            pool,
            stream,
            expandable,
            last: NONE,
            end: segment.address,
            limit: segment.address.saturating_add(size),
        }
    }

    /// An unmapped block from the end of `last` to `end`; gives the new last block.
    fn append_gap(&mut self, last: u32, end: u64, expandable: u32) -> u32 {
        if last == NONE {
            return NONE;
        }
        let before = self.blocks[last];
        let start = before.address + before.size;
        if start >= end {
            return last;
        }
        let mut gap = self.piece(&before, start, end - start);
        gap.is_mapped = false;
        gap.expandable = expandable;
        gap.previous = last;
        let gap = self.blocks.add(gap);
        self.blocks[last].next = gap;
        self.pools[before.pool as usize]
            .unmapped_of(before.stream)
            .insert(start, gap);
        gap
    }

    fn append_blocks(
        &mut self,
        segment: &SegmentLayout,
        mut last: u32,
        expandable: u32,
        in_use: &mut Vec<(u64, BlockId)>,
    ) -> u32 {
        let pool = self.pool_of_known(segment.pool, segment.is_small);
        let stream = self.stream_index(segment.stream);
        let is_small = segment.is_small;
        for block in &segment.blocks {
            let is_active = block.state != BlockState::Inactive;
            let mut restored = self.new_block(pool, stream, block.address, block.size, 0);
            // Older than every segment of the trace.
            restored.counter = 0;
            restored.requested = block.requested_size;
            restored.is_allocated = block.state == BlockState::Allocated;
            restored.event_count = u32::from(block.state == BlockState::AwaitingFree);
            restored.previous = last;
            restored.expandable = expandable;
            let index = self.blocks.add(restored);
            if last != NONE {
                self.blocks[last].next = index;
            }
            last = index;
            let statistics = &mut self.statistics;
            if block.state == BlockState::Allocated {
                statistics.allocation.increase(is_small, 1);
                statistics.allocated_bytes.increase(is_small, block.size);
            }
            if block.state == BlockState::AwaitingFree {
                self.awaited.insert(index);
            }
            if is_active {
                in_use.push((block.address, BlockId(index)));
                statistics.active.increase(is_small, 1);
                statistics.active_bytes.increase(is_small, block.size);
                let requested = block.requested_size;
                statistics.requested_bytes.increase(is_small, requested);
            }
        }
        self.held_bytes = self.held_bytes.saturating_add(segment.total_size);
        self.driver.occupy(segment.total_size);
        self.statistics
            .reserved_bytes
            .increase(is_small, segment.total_size);
        last
    }

    fn pool_of_known(&self, id: (u64, u64), is_small: bool) -> u32 {
        let small = self
            .private_pool(id)
            .map_or(super::pool::SMALL_POOL, |number| {
                self.private[number as usize].small
            });
        small + u32::from(!is_small)
    }

    fn rebuild_free_sets(&mut self) {
        let idle: Vec<u32> = self
            .blocks
            .iter()
            .filter(|(_, block)| block.is_mapped && block.is_idle())
            .map(|(index, _)| index)
            .collect();
        for index in idle {
            self.insert_into_pool(index);
            let block = self.blocks[index];
            if block.is_split() && !block.is_expandable() {
                let is_small = self.pools[block.pool as usize].is_small;
                self.statistics.inactive_split.increase(is_small, 1);
                self.statistics
                    .inactive_split_bytes
                    .increase(is_small, block.size);
            }
        }
    }

    /// The device serves everything from here on.
    pub(super) fn never_refuse(&mut self) {
        self.driver.never_refuse();
    }

    /// The addresses that new segments get next.
    pub(super) fn expect_addresses(&mut self, segments: &[(Action, u64, u64)]) {
        self.driver
            .expect(segments.iter().map(|&(_, address, _)| address));
    }

    /// The next request looks at no free block.
    pub(super) fn skip_search(&mut self, skips: bool) {
        self.skips_search = skips;
    }

    /// A request to one pool, whatever pools were begun.
    pub(super) fn malloc_in(
        &mut self,
        requested: u64,
        stream: u64,
        pool: (u64, u64),
    ) -> Result<BlockId, OutOfMemory> {
        if pool == (0, 0) {
            return self.malloc(requested, stream);
        }
        let private = match self.private_pool(pool) {
            Some(number) => number,
            None => self.use_pool(pool),
        };
        self.redirections.push(Redirection {
            private,
            stream: None,
        });
        let outcome = self.malloc(requested, stream);
        self.redirections.pop();
        outcome
    }

    /// Gives back the segment at an address if it is one free block.
    pub(super) fn release_segment(&mut self, address: u64, size: u64) -> bool {
        let Some(index) = self.free_block_at(address, size) else {
            return false;
        };
        let block = self.blocks[index];
        let is_segment = block.address == address && block.size == size && !block.is_split();
        if is_segment && !block.is_expandable() {
            self.release_block(index);
        }
        is_segment
    }

    /// Gives back the whole pages of the free block at an address if they are the range named.
    pub(super) fn unmap_range(&mut self, address: u64, size: u64) -> bool {
        let Some(index) = self.free_block_at(address, size) else {
            return false;
        };
        if !self.blocks[index].is_expandable() || self.whole_pages(index) != Some((address, size)) {
            return false;
        }
        self.unmap_block(index);
        self.release_if_unmapped(index);
        true
    }

    /// The free block that holds `size` bytes from an address on.
    fn free_block_at(&self, address: u64, size: u64) -> Option<u32> {
        let end = address.checked_add(size)?;
        let sets = self.pools.iter().flat_map(|pool| &pool.free);
        // Few free blocks are as large as a segment or a page.
        sets.flat_map(|set| set.iter().rev().take_while(|entry| entry.size >= size))
            .find(|entry| entry.address <= address && end <= entry.address + entry.size)
            .map(|entry| entry.block)
    }
}

/// A reservation that is being put together from its mapped ranges.
struct Reservation {
    pool: u32,
    stream: u32,
    expandable: u32,
    last: u32,
    /// End of the last range, and of the reservation.
    end: u64,
    limit: u64,
}

impl Reservation {
    fn takes(&self, pool: u32, stream: u32, segment: &SegmentLayout) -> bool {
        let end = segment.address.saturating_add(segment.total_size);
        (self.pool, self.stream) == (pool, stream)
            && segment.address >= self.end
            && end <= self.limit
    }
}

//! Expandable segments: address space that is reserved once and gets its memory page by page.
//!
//! Responsible for finding room in them, for mapping and for unmapping. The pages of the small pool are
//! 2 MiB, those of the large pool as large as a large segment. The rules are those of
//! `find_expandable_block`, `map_block`, `try_allocate_expandable_block` and `unmap_block`.

use super::Simulator;
use super::block::{ExpandableSegment, NONE};
use super::rounding::SMALL_SEGMENT_BYTES;
use crate::snapshot::Action;

impl Simulator {
    /// A block of at least `size` bytes from an expandable segment, out of its free set; `None` when
    /// the device has not enough memory left.
    pub(super) fn allocate_expandable(&mut self, pool: u32, stream: u32, size: u64) -> Option<u32> {
        // A list of free and unmapped blocks with enough room: the first may be free, then come unmapped
        // and free ones in turn.
        let mut candidate = self.find_expandable(pool, stream, size)?;
        if !self.blocks[candidate].is_mapped {
            let room = self.blocks[candidate].size;
            if !self.map_block(candidate, room.min(size)) {
                return None;
            }
        }
        while self.blocks[candidate].size < size {
            let missing = size - self.blocks[candidate].size;
            let next = self.blocks[candidate].next;
            let room = self.blocks[next].size;
            if !self.map_block(next, missing.min(room)) {
                return None;
            }
            candidate = next;
        }
        self.remove_from_pool(candidate);
        Some(candidate)
    }

    /// The lowest place in any segment of the stream with room for `size` bytes; a new segment when there is
    /// none; `None` when a new segment would be too small.
    fn find_expandable(&mut self, pool: u32, stream: u32, size: u64) -> Option<u32> {
        self.pools[pool as usize].unmapped_of(stream);
        for &unmapped in self.pools[pool as usize].unmapped[stream as usize].values() {
            let previous = self.blocks[unmapped].previous;
            let is_free_before = previous != NONE && self.blocks[previous].is_idle();
            let first = if is_free_before { previous } else { unmapped };
            if self.has_room(first, size) {
                return Some(first);
            }
        }
        self.new_expandable(pool, stream, size)
    }

    fn has_room(&self, first: u32, size: u64) -> bool {
        let mut bytes = 0_u64;
        let mut index = first;
        while bytes < size && index != NONE && self.blocks[index].is_idle() {
            bytes = bytes.saturating_add(self.blocks[index].size);
            index = self.blocks[index].next;
        }
        bytes >= size
    }

    fn new_expandable(&mut self, pool: u32, stream: u32, size: u64) -> Option<u32> {
        let page_bytes = if self.pools[pool as usize].is_small {
            SMALL_SEGMENT_BYTES
        } else {
            self.settings.large_segment_bytes
        };
        let reserve = self.reserve_bytes();
        let reserved = reserve.checked_next_multiple_of(page_bytes)?;
        let address = self.driver.reserve(reserved)?;
        if reserved < size {
            return None;
        }
        let segment = ExpandableSegment {
            address,
            page_bytes,
            size: reserved,
        };
        let number = u32::try_from(self.expandable.len()).ok()?;
        self.expandable.push(segment);
        let counter = self.next_segment_counter();
        let mut block = self.new_block(pool, stream, segment.address, segment.size, counter);
        block.is_mapped = false;
        block.expandable = number;
        let block = self.blocks.add(block);
        self.pools[pool as usize]
            .unmapped_of(stream)
            .insert(segment.address, block);
        Some(block)
    }

    /// What a new segment reserves: 9/8 of the device, or less if the settings say so.
    pub(super) fn reserve_bytes(&self) -> u64 {
        let total = self.driver.device.total_bytes;
        let full = total.saturating_add(total / 8);
        match self.settings.expandable_segments_reserve {
            Some(reserve) => reserve.bytes(total).min(full),
            None => full,
        }
    }

    /// Maps pages for the first `size` bytes of an unmapped block; `false` when the device has too few.
    fn map_block(&mut self, index: u32, size: u64) -> bool {
        let segment = self.expandable[self.blocks[index].expandable as usize];
        let block = self.blocks[index];
        let Some(mapped) = size.checked_next_multiple_of(segment.page_bytes) else {
            return false;
        };
        // Page by page; what a failure leaves behind is given back.
        let pages = mapped / segment.page_bytes;
        let available = self.driver.free_bytes() / segment.page_bytes;
        if pages > available || !self.driver.take(mapped) {
            return false;
        }
        self.pools[block.pool as usize]
            .unmapped_of(block.stream)
            .remove(&block.address);
        self.blocks[index].is_mapped = true;
        if mapped < block.size {
            let mut rest = self.piece(&block, block.address + mapped, block.size - mapped);
            rest.is_mapped = false;
            (rest.previous, rest.next) = (index, block.next);
            let rest = self.blocks.add(rest);
            if block.next != NONE {
                self.blocks[block.next].previous = rest;
            }
            self.blocks[index].next = rest;
            self.blocks[index].size = mapped;
            self.pools[block.pool as usize]
                .unmapped_of(block.stream)
                .insert(block.address + mapped, rest);
        }
        self.merge(index, self.blocks[index].previous);
        self.merge(index, self.blocks[index].next);
        self.insert_into_pool(index);
        self.held_bytes += mapped;
        let is_small = self.pools[block.pool as usize].is_small;
        self.statistics.reserved_bytes.increase(is_small, mapped);
        self.statistics.num_device_alloc += 1;
        self.record(
            Action::SegmentMap,
            block.address,
            mapped,
            block.stream,
            block.pool,
        );
        true
    }

    /// Where the whole pages inside a block of an expandable segment begin, and their bytes.
    pub(super) fn whole_pages(&self, index: u32) -> Option<(u64, u64)> {
        let block = &self.blocks[index];
        let segment = self.expandable.get(block.expandable as usize)?;
        let offset = block.address - segment.address;
        let start = offset.checked_next_multiple_of(segment.page_bytes)?;
        let end = (offset + block.size) / segment.page_bytes * segment.page_bytes;
        (start < end).then(|| (segment.address + start, end - start))
    }

    /// Gives back the whole pages inside a free block.
    pub(super) fn unmap_block(&mut self, index: u32) {
        let block = self.blocks[index];
        let segment = self.expandable[block.expandable as usize];
        let offset = block.address - segment.address;
        let Some((start, pages)) = self.whole_pages(index) else {
            return;
        };
        let start = start - segment.address;
        let end = start + pages;
        self.remove_from_pool(index);
        self.driver.give(end - start);
        if start > offset {
            let mut before = self.piece(&block, block.address, start - offset);
            (before.previous, before.next) = (block.previous, index);
            let before = self.blocks.add(before);
            if block.previous != NONE {
                self.blocks[block.previous].next = before;
            }
            self.blocks[index].previous = before;
            self.insert_into_pool(before);
        }
        let behind = offset + block.size - end;
        if behind > 0 {
            let mut after = self.piece(&block, segment.address + end, behind);
            (after.previous, after.next) = (index, block.next);
            let after = self.blocks.add(after);
            if block.next != NONE {
                self.blocks[block.next].previous = after;
            }
            self.blocks[index].next = after;
            self.insert_into_pool(after);
        }
        let unmapped = &mut self.blocks[index];
        unmapped.address = segment.address + start;
        unmapped.size = end - start;
        unmapped.is_mapped = false;
        self.merge(index, self.blocks[index].previous);
        self.merge(index, self.blocks[index].next);
        let address = self.blocks[index].address;
        let pool = &mut self.pools[block.pool as usize];
        pool.unmapped_of(block.stream).insert(address, index);
        let (is_small, owner) = (pool.is_small, pool.owner);
        self.held_bytes -= end - start;
        self.statistics
            .reserved_bytes
            .decrease(is_small, end - start);
        if let Some(owner) = owner {
            self.private[owner as usize].segment_count -= 1;
        }
        self.statistics.num_device_free += 1;
        self.record(
            Action::SegmentUnmap,
            segment.address + start,
            end - start,
            block.stream,
            block.pool,
        );
    }

    /// Forgets a segment of which nothing is mapped any more.
    pub(super) fn release_if_unmapped(&mut self, index: u32) {
        let block = self.blocks[index];
        if block.is_split() || block.is_mapped {
            return;
        }
        self.pools[block.pool as usize]
            .unmapped_of(block.stream)
            .remove(&block.address);
        self.blocks.remove(index);
    }
}

//! Giving cached memory back to the driver.
//!
//! Responsible for the three ways: old segments above a threshold (`garbage_collect_cached_blocks`), just enough
//! oversize segments for one request (`release_available_cached_blocks`), and all that is free
//! (`release_cached_blocks`).

use super::pool::{LARGE_POOL, SMALL_POOL};
use super::request::Request;
use super::settings::UNLIMITED;
use super::simulator::Simulator;
use crate::snapshot::Action;

impl Simulator {
    /// Frees whole segments of the large pool that were not used for longer than the mean, until the
    /// threshold is met or nothing more can go.
    pub(super) fn collect_garbage(&mut self, allowed_bytes: u64) {
        let threshold = threshold_bytes(self.settings.garbage_collection_threshold, allowed_bytes);
        if self.held_bytes <= threshold {
            return;
        }
        let target = self.held_bytes - threshold;
        let mut reclaimed = 0;
        let mut candidates: Vec<(u32, u64)> = self
            .free_blocks(LARGE_POOL)
            .into_iter()
            .filter(|&index| !self.blocks[index].is_split())
            .map(|index| (index, self.age(index)))
            .collect();
        let mut total_age: u64 = candidates.iter().map(|(_, age)| age).sum();
        let mut count = candidates.len();
        let mut was_freed = true;
        while reclaimed < target && was_freed && count > 0 {
            let mean = mean_age(total_age, count);
            was_freed = false;
            candidates.retain(|&(index, age)| {
                if self.blocks[index].is_expandable() || !is_at_least(age, mean) {
                    return true;
                }
                was_freed = true;
                reclaimed += self.blocks[index].size;
                total_age -= age;
                count -= 1;
                self.release_block(index);
                false
            });
        }
    }

    /// Searches of its pool since a block became free.
    fn age(&self, index: u32) -> u64 {
        let block = self.blocks[index];
        self.pools[block.pool as usize].search_count - block.searches_before
    }

    /// With a finite `max_split_size`: frees the smallest oversize block that is large enough, or the
    /// largest ones until together they are; `false` when they are not.
    pub(super) fn release_available(&mut self, request: &Request) -> bool {
        let limit = self.settings.max_split_bytes;
        if limit == UNLIMITED {
            return false;
        }
        let size = request.block_bytes.max(limit);
        let set = self.pools[request.pool as usize].free_of(request.stream);
        let place = set.first_at_least(size);
        let found = set.get(place).map(|entry| entry.block);
        let smaller: Vec<u32> = set
            .iter()
            .rev()
            .skip_while(|entry| entry.size >= size)
            .take_while(|entry| entry.size >= limit)
            .map(|entry| entry.block)
            .collect();
        if let Some(block) = found
            && !self.blocks[block].is_expandable()
        {
            self.release_block(block);
            return true;
        }
        let mut released = 0;
        for block in smaller {
            if released >= size {
                break;
            }
            if !self.blocks[block].is_expandable() {
                released += self.blocks[block].size;
                self.release_block(block);
            }
        }
        released >= size
    }

    /// Gives back all that is free, here and in private pools that are no longer used. With a private
    /// pool named, only that one.
    pub(super) fn release_cached(&mut self, only: Option<(u64, u64)>) {
        if only.is_none() && !self.is_capturing() {
            self.synchronize_and_free_events(None);
            self.release_blocks(LARGE_POOL);
            self.release_blocks(SMALL_POOL);
        }
        for number in 0..self.private.len() {
            let private = self.private[number];
            let is_wanted = only.is_none_or(|id| id == private.id);
            if !private.is_live || private.use_count > 0 || !is_wanted {
                continue;
            }
            if only.is_some() {
                let owner = self.pools[private.small as usize].owner;
                self.synchronize_and_free_events(owner);
            }
            self.release_blocks(private.small);
            self.release_blocks(private.small + 1);
            if self.private[number].segment_count == 0 {
                self.private[number].is_live = false;
            }
        }
    }

    fn release_blocks(&mut self, pool: u32) {
        let mut to_unmap = Vec::new();
        for index in self.free_blocks(pool) {
            let block = self.blocks[index];
            if block.is_expandable() {
                // Unmapping changes the free set, so it comes after.
                to_unmap.push(index);
            } else if !block.is_split() {
                self.release_block(index);
            }
        }
        for index in to_unmap {
            self.unmap_block(index);
            self.release_if_unmapped(index);
        }
    }

    /// `cudaFree` of a segment that is one free block.
    pub(super) fn release_block(&mut self, index: u32) {
        let block = self.blocks[index];
        self.statistics.num_device_free += 1;
        self.record(
            Action::SegmentFree,
            block.address,
            block.size,
            block.stream,
            block.pool,
        );
        self.driver.free(block.address, block.size);
        self.held_bytes -= block.size;
        let pool = &self.pools[block.pool as usize];
        let is_small = pool.is_small;
        if let Some(owner) = pool.owner {
            self.private[owner as usize].segment_count -= 1;
        }
        self.statistics.segment.decrease(is_small, 1);
        self.statistics
            .reserved_bytes
            .decrease(is_small, block.size);
        if block.size >= self.settings.max_split_bytes {
            self.statistics.oversize_segments.decrease(1);
        }
        self.remove_from_pool(index);
        self.blocks.remove(index);
    }

    /// The free blocks of a pool, by stream handle, then in the order of the free set.
    pub(super) fn free_blocks(&self, pool: u32) -> Vec<u32> {
        let pool = &self.pools[pool as usize];
        let sets = self
            .streams_by_handle
            .iter()
            .filter_map(|&stream| pool.free.get(stream as usize));
        sets.flat_map(|set| set.iter().map(|entry| entry.block))
            .collect()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "PyTorch computes the threshold in double and truncates"
)]
fn threshold_bytes(threshold: f64, allowed_bytes: u64) -> u64 {
    (threshold * allowed_bytes as f64) as u64
}

#[expect(
    clippy::cast_precision_loss,
    reason = "PyTorch divides ages in double; both are far below 2^53"
)]
fn mean_age(total_age: u64, count: usize) -> f64 {
    total_age as f64 / count as f64
}

#[expect(
    clippy::cast_precision_loss,
    reason = "PyTorch compares ages in double; they are far below 2^53"
)]
fn is_at_least(age: u64, mean: f64) -> bool {
    age as f64 >= mean
}

//! The allocator itself: handing out a block, taking one back, splitting, merging.
//!
//! Responsible for the order of attempts in `DeviceCachingAllocator::malloc`, for best fit, and for the
//! statistics that follow. Not responsible for the device (`driver.rs`), other streams (`streams.rs`),
//! growing segments (`expandable.rs`) or giving memory back (`release.rs`).
//!
//! Known behaviour that is kept: after all cached memory was given back, the free blocks are not searched again, so
//! a block whose other stream has just finished stays unused and the request fails
//! (<https://github.com/pytorch/pytorch/issues/189504>).

use std::collections::{BTreeMap, BTreeSet};

use super::block::{Block, Blocks, ExpandableSegment, NONE};
use super::pool::{Pool, PrivatePool, Redirection};
use super::request::Request;
use super::stream_queue::StreamQueue;
use super::{
    BlockId, Device, FreeOrder, OutOfMemory, Settings, Statistics, TraceEvent, driver::Driver,
    rounding,
};
use crate::snapshot::Action;

/// PyTorch's CUDA caching allocator of one device.
///
/// ```
/// use memfit_engine::allocator::{Device, FreeOrder, Settings, Simulator};
///
/// let mut simulator = Simulator::new(&Settings::default(), FreeOrder::default(), Device::new(1 << 30));
/// let block = simulator.malloc(3 << 20, 0).unwrap();
/// assert_eq!(simulator.block_size(block), 3 << 20);
/// assert_eq!(simulator.statistics().reserved_bytes.all.current, 20 << 20);
/// simulator.free(block);
/// simulator.empty_cache(None);
/// assert_eq!(simulator.statistics().reserved_bytes.all.current, 0);
/// ```
#[derive(Debug, Clone)]
pub struct Simulator {
    pub(super) settings: Settings,
    pub(super) order: FreeOrder,
    pub(super) driver: Driver,
    pub(super) statistics: Statistics,
    pub(super) blocks: Blocks,
    pub(super) pools: Vec<Pool>,
    pub(super) private: Vec<PrivatePool>,
    pub(super) expandable: Vec<ExpandableSegment>,
    /// Handles by index, and indices by handle.
    pub(super) streams: Vec<u64>,
    pub(super) streams_by_handle: Vec<u32>,
    /// `total_allocated_memory`: what the allocator took from the driver.
    pub(super) held_bytes: u64,
    allowed_bytes: Option<u64>,
    pub(super) next_counter: u64,
    pub(super) redirections: Vec<Redirection>,
    is_capturing: bool,
    /// Streams that use a block and have no event yet.
    pub(super) uses: BTreeMap<u32, Vec<u64>>,
    pub(super) uses_in_capture: BTreeMap<u32, Vec<u64>>,
    pub(super) deferred: Vec<u32>,
    pub(super) queues: Vec<StreamQueue>,
    /// Blocks that await streams no one named.
    pub(super) awaited: BTreeSet<u32>,
    pub(super) are_events_ready: bool,
    trace: Option<Vec<TraceEvent>>,
    /// Whether the next request looks at no free block.
    pub(super) skips_search: bool,
}

impl Simulator {
    /// An allocator that holds nothing yet.
    #[must_use]
    pub fn new(settings: &Settings, order: FreeOrder, device: Device) -> Self {
        let mut simulator = Self {
            settings: settings.clone(),
            order,
            driver: Driver::new(device),
            statistics: Statistics::default(),
            blocks: Blocks::default(),
            pools: vec![Pool::new(true, None), Pool::new(false, None)],
            private: Vec::new(),
            expandable: Vec::new(),
            streams: vec![0],
            streams_by_handle: vec![0],
            held_bytes: 0,
            allowed_bytes: None,
            next_counter: 0,
            redirections: Vec::new(),
            is_capturing: false,
            uses: BTreeMap::new(),
            uses_in_capture: BTreeMap::new(),
            deferred: Vec::new(),
            queues: Vec::new(),
            awaited: BTreeSet::new(),
            are_events_ready: true,
            trace: None,
            skips_search: false,
        };
        simulator.set_memory_fraction(settings.per_process_memory_fraction);
        simulator
    }

    /// Hands out a block for `requested` bytes. For 0 bytes PyTorch does not ask the allocator at all;
    /// here they take the smallest block.
    ///
    /// # Errors
    ///
    /// When the device or the memory fraction is exhausted, as PyTorch would say it.
    pub fn malloc(&mut self, requested: u64, stream: u64) -> Result<BlockId, OutOfMemory> {
        if !self.is_capturing {
            self.process_events();
        }
        let block_bytes = rounding::block_bytes(&self.settings, requested);
        let request = Request {
            block_bytes,
            segment_bytes: rounding::segment_bytes(&self.settings, block_bytes),
            pool: self.pool_for(block_bytes, stream),
            stream: self.stream_index(stream),
            is_expandable: self.settings.expandable_segments,
        };
        let found = if std::mem::take(&mut self.skips_search) {
            None
        } else {
            self.find_free(&request)
        };
        let (request, block) = match found {
            Some(block) => (request, block),
            None => self.obtain(requested, request)?,
        };
        Ok(BlockId(self.hand_out(&request, block, requested)))
    }

    /// What is tried when no cached block fits, in PyTorch's order.
    fn obtain(&mut self, requested: u64, request: Request) -> Result<(Request, u32), OutOfMemory> {
        if let Some(allowed) = self.allowed_bytes
            && self.settings.garbage_collection_threshold > 0.0
        {
            self.collect_garbage(allowed);
        }
        if let Some(block) = self.allocate_segment(requested, &request, false)? {
            return Ok((request, block));
        }
        if let Some(found) = self.find_in_last_resort(&request) {
            return Ok(found);
        }
        if self.release_available(&request)
            && let Some(block) = self.allocate_segment(requested, &request, false)?
        {
            return Ok((request, block));
        }
        if !self.is_capturing {
            self.release_cached(None);
            if let Some(block) = self.allocate_segment(requested, &request, true)? {
                return Ok((request, block));
            }
        }
        let device_free = self.driver.free_bytes();
        self.record(
            Action::OutOfMemory,
            device_free,
            request.block_bytes,
            request.stream,
            request.pool,
        );
        self.statistics.num_ooms += 1;
        Err(self.out_of_memory(requested, &request, false))
    }

    /// Best fit among the free blocks; the block leaves its free set (`get_free_block`).
    pub(super) fn find_free(&mut self, request: &Request) -> Option<u32> {
        let counts_searches =
            self.allowed_bytes.is_some() && self.settings.garbage_collection_threshold > 0.0;
        let blocks = &self.blocks;
        let pool = &mut self.pools[request.pool as usize];
        if counts_searches {
            pool.search_count += 1;
        }
        let set = pool.free_of(request.stream);
        let mut place = set.first_at_least(request.block_bytes);
        let mut found = *set.get(place)?;
        if blocks[found.block].is_expandable() {
            if request.is_expandable {
                // Best fit is by the size that a block can grow to.
                while blocks[found.block].is_expandable() {
                    let next_place = set.next(place);
                    let Some(next) = set.get(next_place) else {
                        break;
                    };
                    if growable_bytes(blocks, next.block) >= growable_bytes(blocks, found.block) {
                        break;
                    }
                    (place, found) = (next_place, *next);
                }
            } else {
                // Left over from when expandable segments were on.
                while blocks[found.block].is_expandable() {
                    place = set.next(place);
                    found = *set.get(place)?;
                }
            }
        }
        let size = blocks[found.block].size;
        let limit = self.settings.max_split_bytes;
        let is_refused = if request.block_bytes < limit {
            size >= limit
        } else {
            let slack = self.settings.max_non_split_rounding_bytes;
            size >= request.block_bytes.saturating_add(slack)
        };
        if is_refused {
            return None;
        }
        set.remove_at(place);
        Some(found.block)
    }

    /// A new segment's block, `None` if there is no memory for it (`alloc_block`).
    fn allocate_segment(
        &mut self,
        requested: u64,
        request: &Request,
        is_retry: bool,
    ) -> Result<Option<u32>, OutOfMemory> {
        if is_retry {
            self.statistics.num_alloc_retries += 1;
        }
        let size = request.segment_bytes;
        let after = self.held_bytes.saturating_add(size);
        if self.allowed_bytes.is_some_and(|allowed| after > allowed) {
            return Ok(None);
        }
        if self.settings.throw_on_cudamalloc_oom {
            let fraction = self.settings.per_process_memory_fraction;
            if after > share(fraction, self.driver.device.total_bytes) {
                self.statistics.num_oom_rejections += 1;
                return Err(self.out_of_memory(requested, request, true));
            }
        }
        let owner = self.pools[request.pool as usize].owner;
        if request.is_expandable {
            let block = self.allocate_expandable(request.pool, request.stream, request.block_bytes);
            if let (Some(_), Some(owner)) = (block, owner) {
                self.private[owner as usize].segment_count += 1;
            }
            return Ok(block);
        }
        let Some(address) = self.driver.allocate(size) else {
            return Ok(None);
        };
        if let Some(owner) = owner {
            self.private[owner as usize].segment_count += 1;
        }
        self.held_bytes = after;
        let counter = self.next_segment_counter();
        let block = self.new_block(request.pool, request.stream, address, size, counter);
        let index = self.blocks.add(block);
        let is_small = self.pools[request.pool as usize].is_small;
        self.statistics.segment.increase(is_small, 1);
        self.statistics.reserved_bytes.increase(is_small, size);
        if size >= self.settings.max_split_bytes {
            self.statistics.oversize_segments.increase(1);
        }
        self.statistics.num_device_alloc += 1;
        self.record(
            Action::SegmentAlloc,
            address,
            size,
            request.stream,
            request.pool,
        );
        Ok(Some(index))
    }

    /// Marks a block as held, splitting it first where that is worth it (`alloc_found_block`).
    fn hand_out(&mut self, request: &Request, found: u32, requested: u64) -> u32 {
        let was_split = self.blocks[found].is_split();
        let whole = self.blocks[found];
        let is_small = self.pools[whole.pool as usize].is_small;
        let index = if self.should_split(request, &whole) {
            let front = self.split(found, request.block_bytes);
            if !whole.is_expandable() {
                let rest = self.blocks[found].size;
                if was_split {
                    let used = self.blocks[front].size;
                    self.statistics
                        .inactive_split_bytes
                        .decrease(is_small, used);
                } else {
                    self.statistics
                        .inactive_split_bytes
                        .increase(is_small, rest);
                    self.statistics.inactive_split.increase(is_small, 1);
                }
            }
            front
        } else {
            if was_split && !whole.is_expandable() {
                self.statistics
                    .inactive_split_bytes
                    .decrease(is_small, whole.size);
                self.statistics.inactive_split.decrease(is_small, 1);
            }
            found
        };
        let block = &mut self.blocks[index];
        block.is_allocated = true;
        block.requested = requested;
        let block = *block;
        self.record(
            Action::Alloc,
            block.address,
            requested,
            block.stream,
            block.pool,
        );
        let statistics = &mut self.statistics;
        statistics.allocation.increase(is_small, 1);
        statistics.allocated_bytes.increase(is_small, block.size);
        statistics.active.increase(is_small, 1);
        statistics.active_bytes.increase(is_small, block.size);
        statistics.requested_bytes.increase(is_small, requested);
        if block.size >= self.settings.max_split_bytes {
            statistics.oversize_allocations.increase(1);
        }
        index
    }

    fn should_split(&self, request: &Request, block: &Block) -> bool {
        let pool = &self.pools[block.pool as usize];
        if pool
            .owner
            .is_some_and(|owner| self.private[owner as usize].is_whole)
        {
            return false;
        }
        let rest = block.size - request.block_bytes;
        if pool.is_small || request.is_expandable {
            rest >= rounding::MIN_BLOCK_BYTES
        } else {
            request.block_bytes < self.settings.max_split_bytes && rest > rounding::SMALL_BYTES
        }
    }

    /// Takes a block back; it is free at once, or when the other streams that use it are done. A block that
    /// is not allocated is left alone.
    pub fn free(&mut self, block: BlockId) {
        self.take_back(block.0, false);
    }

    /// `is_awaited` when other streams, not named, still use the block.
    pub(super) fn take_back(&mut self, index: u32, is_awaited: bool) {
        if !self.is_allocated(index) {
            return;
        }
        self.blocks[index].is_allocated = false;
        let block = self.blocks[index];
        let is_small = self.pools[block.pool as usize].is_small;
        self.statistics.allocation.decrease(is_small, 1);
        self.statistics
            .allocated_bytes
            .decrease(is_small, block.size);
        self.record(
            Action::FreeRequested,
            block.address,
            block.requested,
            block.stream,
            block.pool,
        );
        if block.size >= self.settings.max_split_bytes {
            self.statistics.oversize_allocations.decrease(1);
        }
        if is_awaited {
            self.blocks[index].event_count += 1;
            self.awaited.insert(index);
        } else if !block.has_uses {
            self.free_block(index);
        } else if self.is_capturing {
            self.deferred.push(index);
        } else {
            self.insert_events(index);
        }
    }

    /// Puts an idle block into its free set, merged with its free neighbours.
    pub(super) fn free_block(&mut self, index: u32) {
        let block = self.blocks[index];
        self.record(
            Action::FreeCompleted,
            block.address,
            block.requested,
            block.stream,
            block.pool,
        );
        let mut merged = 0;
        let mut merged_bytes = 0;
        for neighbour in [block.previous, block.next] {
            let bytes = self.merge(index, neighbour);
            if bytes > 0 {
                merged += 1;
                merged_bytes += bytes;
            }
        }
        self.insert_into_pool(index);
        let is_small = self.pools[block.pool as usize].is_small;
        let statistics = &mut self.statistics;
        let whole = &self.blocks[index];
        if !whole.is_expandable() {
            // The change is one step, so that the peak is that of the outcome.
            let (after, bytes_after) = if whole.is_split() {
                (1, whole.size)
            } else {
                (0, 0)
            };
            change(&mut statistics.inactive_split, is_small, merged, after);
            change(
                &mut statistics.inactive_split_bytes,
                is_small,
                merged_bytes,
                bytes_after,
            );
        }
        statistics.active.decrease(is_small, 1);
        statistics.active_bytes.decrease(is_small, block.size);
        statistics
            .requested_bytes
            .decrease(is_small, block.requested);
    }

    pub(super) fn stream_index(&mut self, stream: u64) -> u32 {
        // Streams are few.
        let known = self.streams.iter().position(|&known| known == stream);
        let index = known.unwrap_or_else(|| {
            self.streams.push(stream);
            self.streams.len() - 1
        });
        let index = u32::try_from(index).expect("each stream came with a request of its own");
        if known.is_none() {
            let streams = &self.streams;
            let place = self
                .streams_by_handle
                .partition_point(|&other| streams[other as usize] < stream);
            self.streams_by_handle.insert(place, index);
        }
        index
    }

    pub(super) fn is_allocated(&self, index: u32) -> bool {
        self.blocks.contains(index) && self.blocks[index].is_allocated
    }

    pub(super) fn is_capturing(&self) -> bool {
        self.is_capturing
    }

    fn out_of_memory(&self, requested: u64, request: &Request, is_rejection: bool) -> OutOfMemory {
        let private_free = |private: &PrivatePool| -> u64 {
            let pools = &self.pools[private.small as usize..][..2];
            let sets = pools.iter().flat_map(|pool| &pool.free);
            sets.flat_map(|set| set.iter().map(|entry| entry.size))
                .sum()
        };
        OutOfMemory {
            requested_bytes: requested,
            block_bytes: request.block_bytes,
            segment_bytes: request.segment_bytes,
            total_bytes: self.driver.device.total_bytes,
            free_bytes: self.driver.free_bytes(),
            allowed_bytes: self.allowed_bytes,
            allocated_bytes: self.statistics.allocated_bytes.all.current,
            reserved_bytes: self.statistics.reserved_bytes.all.current,
            private_free_bytes: self
                .private
                .iter()
                .filter(|private| private.is_live)
                .map(private_free)
                .sum(),
            expandable_reserve_bytes: request.is_expandable.then(|| self.reserve_bytes()),
            is_rejection,
        }
    }

    pub(super) fn record(
        &mut self,
        action: Action,
        address: u64,
        size: u64,
        stream: u32,
        pool: u32,
    ) {
        if let Some(trace) = &mut self.trace {
            let owner = self.pools[pool as usize].owner;
            trace.push(TraceEvent {
                action,
                address,
                size,
                stream: self.streams[stream as usize],
                pool: owner.map_or((0, 0), |owner| self.private[owner as usize].id),
            });
        }
    }

    /// Starts or stops recording what [`Simulator::take_trace`] gives.
    pub fn record_trace(&mut self, is_on: bool) {
        self.trace = is_on.then(Vec::new);
    }

    /// What happened since recording started or the last call.
    pub fn take_trace(&mut self) -> Vec<TraceEvent> {
        self.trace.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Where a block starts.
    ///
    /// # Panics
    ///
    /// With the id of another simulator.
    #[must_use]
    pub fn address(&self, block: BlockId) -> u64 {
        self.blocks[block.0].address
    }

    /// A block's bytes, after rounding.
    ///
    /// # Panics
    ///
    /// With the id of another simulator.
    #[must_use]
    pub fn block_size(&self, block: BlockId) -> u64 {
        self.blocks[block.0].size
    }

    /// The counters of `torch.cuda.memory_stats()`.
    #[must_use]
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// `torch.cuda.reset_peak_memory_stats()`.
    pub fn reset_peaks(&mut self) {
        self.statistics.reset_peaks();
    }

    /// `torch.cuda.reset_accumulated_memory_stats()`.
    pub fn reset_accumulated(&mut self) {
        self.statistics.reset_accumulated();
    }

    /// The settings in force.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Changes the settings, as `torch.cuda.memory._set_allocator_settings` does; the memory fraction in
    /// force stays.
    pub fn set_settings(&mut self, settings: &Settings) {
        self.settings = settings.clone();
    }

    /// Changes what others hold on the device.
    pub fn set_other_bytes(&mut self, other_bytes: u64) {
        self.driver.device.other_bytes = other_bytes;
    }

    /// Limits what the allocator may take (`torch.cuda.set_per_process_memory_fraction`); a fraction of 1
    /// or more, or one that is no number, limits nothing.
    pub fn set_memory_fraction(&mut self, fraction: f64) {
        let total = self.driver.device.total_bytes;
        self.allowed_bytes = (fraction < 1.0).then(|| share(fraction, total));
    }

    /// Gives back all cached memory that can go (`torch.cuda.empty_cache`); with a private pool, only
    /// that pool's.
    pub fn empty_cache(&mut self, pool: Option<(u64, u64)>) {
        self.release_cached(pool);
    }

    /// Waits for all events, as a synchronisation of the device does, without freeing their blocks yet.
    pub fn synchronize(&mut self) {
        let streams: Vec<u64> = self.queues.iter().map(StreamQueue::stream).collect();
        for stream in streams {
            self.complete_events(stream, u64::MAX);
        }
    }

    /// Whether a CUDA graph is being captured: no event can be asked for then, so frees that await other streams wait
    /// for the end of the capture.
    pub fn set_capturing(&mut self, is_capturing: bool) {
        self.is_capturing = is_capturing;
    }
}

/// One step from `before` to `after`, as one call of `increase` or `decrease`.
fn change(statistic: &mut super::PoolStat, is_small: bool, before: u64, after: u64) {
    if after > before {
        statistic.increase(is_small, after - before);
    } else if before > after {
        statistic.decrease(is_small, before - after);
    }
}

/// The size a block can grow to: its own and that of the unmapped range behind it.
fn growable_bytes(blocks: &Blocks, index: u32) -> u64 {
    let block = blocks[index];
    if block.next == NONE || blocks[block.next].is_mapped {
        return block.size;
    }
    block.size + blocks[block.next].size
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "PyTorch computes the limit in double and truncates"
)]
fn share(fraction: f64, total_bytes: u64) -> u64 {
    (fraction * total_bytes as f64) as u64
}

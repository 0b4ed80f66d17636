//! The counters of `torch.cuda.memory_stats()` (`DeviceStats` in `c10/core/CachingDeviceAllocator.h`).

/// One counter over time (`c10::CachingAllocator::Stat`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The most since the start or the last reset.
    pub peak: u64,
    /// All that was ever added.
    pub allocated: u64,
    /// All that was ever taken away.
    pub freed: u64,
}

impl Stat {
    pub(super) fn increase(&mut self, amount: u64) {
        self.current = self.current.saturating_add(amount);
        self.peak = self.peak.max(self.current);
        self.allocated = self.allocated.saturating_add(amount);
    }

    pub(super) fn decrease(&mut self, amount: u64) {
        self.current = self.current.saturating_sub(amount);
        self.freed = self.freed.saturating_add(amount);
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    fn reset_accumulated(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }
}

/// A counter for all pools, for the small ones and for the large ones (`StatArray`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStat {
    /// All pools (`all` in `memory_stats()`).
    pub all: Stat,
    /// Small pools, private ones included (`small_pool`).
    pub small: Stat,
    /// Large pools, private ones included (`large_pool`).
    pub large: Stat,
}

impl PoolStat {
    pub(super) fn increase(&mut self, is_small: bool, amount: u64) {
        self.all.increase(amount);
        self.of(is_small).increase(amount);
    }

    pub(super) fn decrease(&mut self, is_small: bool, amount: u64) {
        self.all.decrease(amount);
        self.of(is_small).decrease(amount);
    }

    fn of(&mut self, is_small: bool) -> &mut Stat {
        if is_small {
            &mut self.small
        } else {
            &mut self.large
        }
    }

    fn each(&mut self, change: fn(&mut Stat)) {
        change(&mut self.all);
        change(&mut self.small);
        change(&mut self.large);
    }
}

/// What the allocator counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Blocks held by tensors.
    pub allocation: PoolStat,
    /// `cudaMalloc`ed segments; expandable ones are not counted.
    pub segment: PoolStat,
    /// Blocks held by tensors or awaiting other streams.
    pub active: PoolStat,
    /// Free parts of segments that are partly in use; expandable segments left out.
    pub inactive_split: PoolStat,
    /// Bytes of the blocks held by tensors.
    pub allocated_bytes: PoolStat,
    /// Bytes taken from the driver.
    pub reserved_bytes: PoolStat,
    /// Bytes of the blocks held by tensors or awaiting other streams.
    pub active_bytes: PoolStat,
    /// Bytes of [`Statistics::inactive_split`].
    pub inactive_split_bytes: PoolStat,
    /// Bytes asked for by the blocks in [`Statistics::active`].
    pub requested_bytes: PoolStat,
    /// Times that all cached memory was given back to serve one request.
    pub num_alloc_retries: u64,
    /// Requests refused with an out-of-memory error, early rejections not counted.
    pub num_ooms: u64,
    /// Requests refused by `throw_on_cudamalloc_oom` before the driver was asked.
    pub num_oom_rejections: u64,
    /// Times that all events were waited for.
    pub num_sync_all_streams: u64,
    /// Calls that took memory from the driver.
    pub num_device_alloc: u64,
    /// Calls that gave memory back.
    pub num_device_free: u64,
    /// Blocks of `max_split_size_mb` or more, held by tensors.
    pub oversize_allocations: Stat,
    /// Segments of `max_split_size_mb` or more.
    pub oversize_segments: Stat,
}

impl Statistics {
    fn each(&mut self, change: fn(&mut Stat)) {
        for pools in [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ] {
            pools.each(change);
        }
        change(&mut self.oversize_allocations);
        change(&mut self.oversize_segments);
    }

    /// `torch.cuda.reset_peak_memory_stats()`.
    pub(super) fn reset_peaks(&mut self) {
        self.each(Stat::reset_peak);
    }

    /// `torch.cuda.reset_accumulated_memory_stats()`.
    pub(super) fn reset_accumulated(&mut self) {
        self.each(Stat::reset_accumulated);
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_oom_rejections = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
    }
}

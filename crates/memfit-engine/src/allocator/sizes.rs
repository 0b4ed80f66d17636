//! The sizes that the allocator is built on.
//!
//! Those of `c10/core/AllocatorConfig.h` and `c10/cuda/CUDACachingAllocator.cpp`.

/// Blocks are multiples of this (`kMinBlockSize`).
pub const MIN_BLOCK_BYTES: u64 = 512;
/// The largest block of the small pool (`kSmallSize`).
pub const SMALL_BYTES: u64 = 1 << 20;
/// The segments of the small pool (`kSmallBuffer`).
pub const SMALL_SEGMENT_BYTES: u64 = 2 << 20;
/// From here on a request gets a segment of its own size (`kMinLargeAlloc`).
pub const MIN_LARGE_BYTES: u64 = 10 << 20;
/// Segments of their own size are multiples of this (`kRoundLarge`).
pub const LARGE_GRANULE_BYTES: u64 = 2 << 20;
/// The segments that serve large blocks below [`MIN_LARGE_BYTES`], unless `large_segment_size_mb` says
/// otherwise.
pub const LARGE_SEGMENT_BYTES: u64 = 20 << 20;

/// Intervals of `roundup_power2_divisions`: the first begins at 1 MiB, each next at twice the last.
pub const DIVISION_INTERVALS: usize = 16;

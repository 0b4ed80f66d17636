//! PyTorch's CUDA caching allocator, simulated: the same requests give the same addresses, segments,
//! statistics and errors.
//!
//! Responsible for the decisions of torch 2.15's `DeviceCachingAllocator`
//! (`c10/cuda/CUDACachingAllocator.cpp`) on one device, for its settings, and for the order of its free
//! list in other versions. Not responsible for other backends (`cudaMallocAsync`), other devices, host memory,
//! pools with an allocator of the user's own, or checkpoints of pools. `tests/oracle` drives the real
//! allocator and this one with the same operations and compares everything either of them tells.
//!
//! Words: a *segment* is memory taken from the driver; it is cut into *blocks*; free blocks of up to
//! 1 MiB live in the *small* pool, others in the *large* one; a free block is handed out by best fit.
//!
//! Invariants: blocks of a segment cover it without gap or overlap; two free neighbours never stay apart; a
//! free block is in exactly one free set; bytes allocated <= active <= reserved.

mod block;
mod driver;
mod expandable;
mod free_set;
mod layout;
mod merging;
mod out_of_memory;
mod pool;
mod private;
mod release;
pub mod replay;
mod request;
mod restore;
pub mod rounding;
mod settings;
mod settings_error;
mod simulator;
mod sizes;
mod statistics;
mod stream_queue;
mod streams;
mod tokens;

pub use driver::{AddressOrder, Device};
pub use layout::{BlockLayout, SegmentLayout};
pub use out_of_memory::OutOfMemory;
pub use settings::{Backend, Reserve, Settings, UNLIMITED};
pub use settings_error::SettingsError;
pub use simulator::Simulator;
pub use statistics::{PoolStat, Stat, Statistics};

use crate::snapshot::Action;

/// A block that was handed out. Valid until it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

/// Which of several free blocks of one size is handed out first. It changed between versions of PyTorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FreeOrder {
    /// The lowest address: up to about torch 2.11.
    Address,
    /// The block made first: the main branch from March to May 2026
    /// (<https://github.com/pytorch/pytorch/issues/178362>). Not compared with a binary.
    BlockCounter,
    /// The block made first in pools with an allocator of their own, which are not simulated, else the
    /// lowest address: the main branch in May 2026.
    PrivateCounter,
    /// The block of the segment taken first, then the lowest address: torch 2.15.
    #[default]
    SegmentCounter,
}

/// What the allocator did, as PyTorch's traces record it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEvent {
    /// What happened.
    pub action: Action,
    /// Where; for [`Action::OutOfMemory`] the free bytes of the device.
    pub address: u64,
    /// Bytes; see [`Action`] for whose.
    pub size: u64,
    /// The stream's handle.
    pub stream: u64,
    /// The private pool; `(0, 0)` for the default one.
    pub pool: (u64, u64),
}

//! A pool: the free blocks and the unmapped ranges of one kind, by stream (`BlockPool`), and the private ones.
//!
//! Responsible for what a pool is. Not responsible for who is sent to a private one (`private.rs`).

use std::collections::BTreeMap;

use super::block::Block;
use super::free_set::{Entry, FreeSet};

/// The default pools, small and large.
pub(super) const SMALL_POOL: u32 = 0;
pub(super) const LARGE_POOL: u32 = 1;

/// Free blocks of one size class. Streams are indices into the simulator's table.
#[derive(Debug, Clone, Default)]
pub(super) struct Pool {
    pub(super) is_small: bool,
    /// Which private pool it belongs to; `None` for the default pools.
    pub(super) owner: Option<u32>,
    /// By stream.
    pub(super) free: Vec<FreeSet>,
    /// By stream: address to block.
    pub(super) unmapped: Vec<BTreeMap<u64, u32>>,
    /// How often it was searched, counted while garbage collection is on.
    pub(super) search_count: u64,
}

impl Pool {
    pub(super) fn new(is_small: bool, owner: Option<u32>) -> Self {
        Self {
            is_small,
            owner,
            ..Self::default()
        }
    }

    /// The free blocks of a stream.
    pub(super) fn free_of(&mut self, stream: u32) -> &mut FreeSet {
        let stream = stream as usize;
        if stream >= self.free.len() {
            self.free.resize_with(stream + 1, FreeSet::default);
        }
        &mut self.free[stream]
    }

    /// The unmapped ranges of a stream.
    pub(super) fn unmapped_of(&mut self, stream: u32) -> &mut BTreeMap<u64, u32> {
        let stream = stream as usize;
        if stream >= self.unmapped.len() {
            self.unmapped.resize_with(stream + 1, BTreeMap::new);
        }
        &mut self.unmapped[stream]
    }
}

/// The entry of a block in its free set.
pub(super) fn entry(index: u32, block: &Block) -> Entry {
    Entry {
        size: block.size,
        counter: block.counter,
        address: block.address,
        block: index,
    }
}

/// A pool that requests go to instead of the default one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Redirection {
    pub(super) private: u32,
    /// Only requests of this stream; all when `None`.
    pub(super) stream: Option<u64>,
}

/// A private pool: a pair of pools of its own (`PrivatePool`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PrivatePool {
    pub(super) id: (u64, u64),
    /// Its small pool; its large one is the next.
    pub(super) small: u32,
    /// Graphs and contexts that use it.
    pub(super) use_count: u64,
    /// Segments it holds; as PyTorch counts them, which for expandable segments is not exact.
    pub(super) segment_count: i64,
    /// Whether blocks of it are never split.
    pub(super) is_whole: bool,
    /// Whether it serves others before memory runs out.
    pub(super) is_last_resort: bool,
    /// Whether it still exists.
    pub(super) is_live: bool,
}

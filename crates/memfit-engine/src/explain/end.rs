//! The device when the snapshot was taken: what is held, and what `torch.cuda.empty_cache()` gives back.
//!
//! Responsible for what the segments alone show; it needs no history. Not responsible for any moment before.
//!
//! `empty_cache()` waits for other streams first, so a block that awaits one holds nothing back here.

use super::fragmentation::{MAX_PINNED, PinnedSegment, told};
use super::history::History;
use super::moment::{self, Filled};
use super::owners::{self, Judge, Owner};
use super::peak::Totals;
use super::private::{self, PrivatePool};
use crate::bytes::Bytes;
use crate::snapshot::PoolIndex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What becomes of the memory when the snapshot was taken.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct End {
    /// What `torch.cuda.empty_cache()` gives back to the driver.
    pub releasable_bytes: Bytes,
    /// Held by no tensor, yet not given back: segments of it hold tensors too.
    pub stuck_bytes: Bytes,
    /// Held by no tensor, in private pools, which give nothing back while they are in use.
    pub private_pools: Vec<PrivatePool>,
    /// Who holds the allocated bytes; they sum to them. The largest first.
    pub owners: Vec<Owner>,
    /// The segments that keep `stuck_bytes`, those with the most first; at most 50.
    pub pinned_segments: Vec<PinnedSegment>,
    /// Number of them, those not told included.
    pub pinned_segment_count: u64,
    /// Bytes of the blocks in them.
    pub pinning_bytes: Bytes,
    /// The same in a sentence.
    pub summary: String,
}

impl End {
    /// The end of a device; `totals` are those of its last state.
    pub(super) fn of(history: &History, totals: Totals, judge: &Judge<'_>) -> Self {
        let state = last_state(history);
        let filled = moment::at(judge.device, history, state);
        let is_held = |block: &super::life::Allocation| block.is_allocated_at(state);
        let pools = &judge.snapshot.pools;
        let private_pools = private::inactive(&filled, pools, PoolIndex::DEFAULT, is_held);
        let held = |it: &Filled<'_>| {
            let blocks = it.blocks.iter().filter(|block| is_held(block));
            Bytes(blocks.fold(0, |sum, block| sum.saturating_add(block.size)))
        };
        let (mut releasable, mut pinning) = (Bytes::ZERO, Bytes::ZERO);
        let mut pinned: Vec<(Bytes, &Filled<'_>)> = Vec::new();
        for it in &filled {
            if private::is_foreign(it, PoolIndex::DEFAULT) {
                continue;
            }
            let back = Bytes(it.releasable_bytes(is_held));
            let stuck = Bytes(it.region.size) - held(it) - back;
            releasable += back;
            if stuck > Bytes::ZERO {
                pinning += held(it);
                pinned.push((stuck, it));
            }
        }
        pinned.sort_by_key(|(stuck, it)| (std::cmp::Reverse(*stuck), it.address));
        let unused = totals.reserved_bytes - totals.allocated_bytes;
        let mut end = Self {
            releasable_bytes: releasable,
            stuck_bytes: unused - releasable - private::total(&private_pools),
            private_pools,
            owners: owners::limited(judge.owners(history, state)),
            pinned_segments: pinned
                .iter()
                .take(MAX_PINNED)
                .map(|(_, it)| told(it, judge, is_held))
                .collect(),
            pinned_segment_count: pinned.len() as u64,
            pinning_bytes: pinning,
            summary: String::new(),
        };
        end.summary = end.sentence(totals);
        end
    }

    fn sentence(&self, totals: Totals) -> String {
        let Totals {
            allocated_bytes: held,
            reserved_bytes: reserved,
            ..
        } = totals;
        let back = match self.releasable_bytes {
            Bytes::ZERO => "nothing back".to_owned(),
            bytes => format!("{bytes} back now"),
        };
        let mut text = format!(
            "tensors hold {held} of {reserved} reserved; `torch.cuda.empty_cache()` gives {back}"
        );
        if self.stuck_bytes > Bytes::ZERO {
            let segments = match self.pinned_segment_count {
                1 => "1 segment".to_owned(),
                count => format!("{count} segments"),
            };
            let stuck = format!(
                ", but not {} that blocks of {} keep in {segments}",
                self.stuck_bytes, self.pinning_bytes
            );
            text.push_str(&stuck);
        }
        text.push_str(&private::clause(&self.private_pools));
        if !self.private_pools.is_empty() {
            text.push_str(" while it is in use");
        }
        text
    }
}

/// The state when the snapshot was taken.
pub(super) fn last_state(history: &History) -> u32 {
    // States beyond what the type counts share the last one.
    u32::try_from(history.states() - 1).unwrap_or(super::life::NEVER - 1)
}

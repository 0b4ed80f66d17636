//! The device when the snapshot was taken: what is held, and what `torch.cuda.empty_cache()` gives back.
//!
//! Responsible for what the segments alone show; it needs no history. Not responsible for any moment before.
//!
//! `empty_cache()` waits for other streams first, so a block that awaits one holds nothing back here.

use super::history::History;
use super::moment;
use super::peak::Totals;
use super::private::{self, PrivatePool};
use crate::bytes::Bytes;
use crate::snapshot::{DeviceRecord, PoolIndex, Pools};
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
    /// The same in a sentence.
    pub summary: String,
}

impl End {
    /// The end of a device; `totals` are those of its last state.
    pub(super) fn of(
        device: &DeviceRecord,
        history: &History,
        totals: Totals,
        pools: &Pools,
    ) -> Self {
        let state = last_state(history);
        let filled = moment::at(device, history, state);
        let is_held = |block: &super::life::Allocation| block.is_allocated_at(state);
        let shared = filled
            .iter()
            .filter(|it| !private::is_foreign(it, PoolIndex::DEFAULT));
        let releasable: Bytes = shared.map(|it| Bytes(it.releasable_bytes(is_held))).sum();
        let private_pools = private::inactive(&filled, pools, PoolIndex::DEFAULT, is_held);
        let unused = totals.reserved_bytes - totals.allocated_bytes;
        let mut end = Self {
            releasable_bytes: releasable,
            stuck_bytes: unused - releasable - private::total(&private_pools),
            private_pools,
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
            let stuck = format!(
                ", but not {} that are unused in segments with tensors",
                self.stuck_bytes
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

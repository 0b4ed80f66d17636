//! A device at one moment: its segments and the blocks in them.
//!
//! Responsible for putting blocks into their segments and for measuring the gaps. Not responsible for
//! judging them (`fragmentation.rs`, `oom.rs`).

use super::history::History;
use super::life::Allocation;
use super::regions::{Region, Regions};
use crate::snapshot::{Action, DeviceRecord};

/// Bytes of a page of an expandable segment of the large pool, and the smallest unit that its free parts
/// are given back in (`large_segment_size_mb`).
const LARGE_PAGE_BYTES: u64 = 20 << 20;
/// The same of the small pool.
const SMALL_PAGE_BYTES: u64 = 2 << 20;

/// One segment with the blocks that are not free.
#[derive(Debug)]
pub(super) struct Filled<'a> {
    pub(super) address: u64,
    pub(super) region: Region,
    /// In address order.
    pub(super) blocks: Vec<&'a Allocation>,
}

impl Filled<'_> {
    pub(super) fn active_bytes(&self) -> u64 {
        let sizes = self.blocks.iter().map(|block| block.size);
        sizes.fold(0, u64::saturating_add)
    }

    pub(super) fn inactive_bytes(&self) -> u64 {
        self.region.size.saturating_sub(self.active_bytes())
    }

    /// Runs of bytes that no block for which `counts` holds covers, as half-open ranges.
    pub(super) fn gaps(&self, counts: impl Fn(&Allocation) -> bool) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut at = self.address;
        let end = self.address.saturating_add(self.region.size);
        for block in self.blocks.iter().filter(|block| counts(block)) {
            if at < block.address {
                gaps.push((at, block.address));
            }
            at = at.max(block.address.saturating_add(block.size));
        }
        if at < end {
            gaps.push((at, end));
        }
        gaps
    }

    /// Bytes in no block for which `counts` holds.
    pub(super) fn unheld_bytes(&self, counts: impl Fn(&Allocation) -> bool) -> u64 {
        let gaps = self.gaps(counts);
        gaps.iter().map(|(start, end)| end - start).sum()
    }

    /// Bytes that go back to the driver when the cache is emptied and the blocks for which `counts` holds
    /// stay: a segment without such blocks, or the whole pages inside free parts of an expandable one.
    pub(super) fn releasable_bytes(&self, counts: impl Fn(&Allocation) -> bool) -> u64 {
        if !self.region.is_expandable {
            return if self.blocks.iter().any(|block| counts(block)) {
                0
            } else {
                self.region.size
            };
        }
        let page = if self.region.is_small {
            SMALL_PAGE_BYTES
        } else {
            LARGE_PAGE_BYTES
        };
        let whole = |(start, end): (u64, u64)| {
            let first = (start - self.address).div_ceil(page);
            let last = (end - self.address) / page;
            last.saturating_sub(first) * page
        };
        self.gaps(counts).into_iter().map(whole).sum()
    }
}

/// All segments at a state, in address order.
pub(super) fn at<'a>(device: &DeviceRecord, history: &'a History, state: u32) -> Vec<Filled<'a>> {
    let regions = regions_at(device, history, state);
    let mut filled: Vec<Filled<'a>> = regions
        .iter()
        .map(|(address, region)| Filled {
            address,
            region: *region,
            blocks: Vec::new(),
        })
        .collect();
    for allocation in history.active_at(state) {
        let after = filled.partition_point(|it| it.address <= allocation.address);
        let holder = after.checked_sub(1).map(|index| &mut filled[index]);
        if let Some(holder) = holder
            && allocation.address - holder.address < holder.region.size
        {
            holder.blocks.push(allocation);
        }
    }
    filled
}

fn regions_at(device: &DeviceRecord, history: &History, state: u32) -> Regions {
    let mut regions = history.first_regions.clone();
    let until = device.events.iter().take(state as usize);
    for (position, event) in until.enumerate() {
        let grown = |is_expandable| Region {
            pool: history.pool_of_growth(position, &event),
            ..Region::of_event(&event, is_expandable)
        };
        // What contradicts was reported when the trace was rolled back.
        let _contradicting = match event.action {
            Action::SegmentAlloc => regions.add(event.address, grown(false)),
            Action::SegmentMap => regions.add(event.address, grown(true)),
            Action::SegmentFree => regions.remove(event.address, event.size, false).map(drop),
            Action::SegmentUnmap => regions.remove(event.address, event.size, true).map(drop),
            _ => continue,
        };
    }
    regions
}

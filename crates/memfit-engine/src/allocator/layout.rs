//! What the allocator holds, segment by segment, as a snapshot shows it.

use super::Simulator;
use super::block::NONE;
use crate::snapshot::BlockState;

/// One block of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockLayout {
    /// Where it starts.
    pub address: u64,
    /// Its bytes.
    pub size: u64,
    /// What was asked for; 0 for a free block, of which PyTorch's snapshots tell a stale number.
    pub requested_size: u64,
    /// Free or not.
    pub state: BlockState,
}

/// A segment, or one contiguous mapped range of an expandable segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentLayout {
    /// Where it starts.
    pub address: u64,
    /// Its bytes.
    pub total_size: u64,
    /// The stream it serves.
    pub stream: u64,
    /// Its private pool; `(0, 0)` for the default one.
    pub pool: (u64, u64),
    /// Whether it serves blocks of up to 1 MiB.
    pub is_small: bool,
    /// Whether it can grow.
    pub is_expandable: bool,
    /// The order in which segments were taken (`registration_counter`), where the free order keeps it.
    pub counter: u64,
    /// Its blocks in address order.
    pub blocks: Vec<BlockLayout>,
}

impl Simulator {
    /// All segments in address order.
    #[must_use]
    pub fn segments(&self) -> Vec<SegmentLayout> {
        let is_head = |previous: u32| previous == NONE || !self.blocks[previous].is_mapped;
        let mut segments: Vec<SegmentLayout> = self
            .blocks
            .iter()
            .filter(|(_, block)| block.is_mapped && is_head(block.previous))
            .map(|(index, _)| self.segment_from(index))
            .collect();
        segments.sort_by_key(|segment| segment.address);
        segments
    }

    fn segment_from(&self, head: u32) -> SegmentLayout {
        let first = self.blocks[head];
        let pool = &self.pools[first.pool as usize];
        let mut segment = SegmentLayout {
            address: first.address,
            total_size: 0,
            stream: self.streams[first.stream as usize],
            pool: pool
                .owner
                .map_or((0, 0), |owner| self.private[owner as usize].id),
            is_small: pool.is_small,
            is_expandable: first.is_expandable(),
            counter: first.counter,
            blocks: Vec::new(),
        };
        let mut index = head;
        while index != NONE && self.blocks[index].is_mapped {
            let block = self.blocks[index];
            segment.total_size += block.size;
            segment.blocks.push(BlockLayout {
                address: block.address,
                size: block.size,
                requested_size: if block.is_active() {
                    block.requested
                } else {
                    0
                },
                state: if block.is_allocated {
                    BlockState::Allocated
                } else if block.is_active() {
                    BlockState::AwaitingFree
                } else {
                    BlockState::Inactive
                },
            });
            index = block.next;
        }
        segment
    }
}

//! One block: a piece of a segment, linked to its neighbours; and the segment that grows under it.

/// The index that stands for no block.
pub(super) const NONE: u32 = u32::MAX;

/// A block, free or not. Blocks of one segment form a list in address order.
#[derive(Debug, Clone, Copy)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "PyTorch's blocks have these states independently of each other"
)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size: u64,
    /// What was asked for; stale once the block is free.
    pub(super) requested: u64,
    /// Breaks ties between free blocks of one size; see [`super::FreeOrder`].
    pub(super) counter: u64,
    /// Searches its pool had seen when it was last put there.
    pub(super) searches_before: u64,
    pub(super) previous: u32,
    pub(super) next: u32,
    /// Index of its pool, of its stream, and of its expandable segment or [`NONE`].
    pub(super) pool: u32,
    pub(super) stream: u32,
    pub(super) expandable: u32,
    /// Events that have not completed.
    pub(super) event_count: u32,
    pub(super) is_allocated: bool,
    /// Whether memory lies behind its addresses.
    pub(super) is_mapped: bool,
    /// Whether another stream uses it, recorded but not yet an event.
    pub(super) has_uses: bool,
    /// Whether the index is in use at all.
    pub(super) is_live: bool,
}

impl Block {
    pub(super) fn is_split(&self) -> bool {
        self.previous != NONE || self.next != NONE
    }

    pub(super) fn is_expandable(&self) -> bool {
        self.expandable != NONE
    }

    /// Neither held nor awaited: it may merge and be handed out.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_allocated && self.event_count == 0 && !self.has_uses
    }

    /// Held by a tensor or awaiting other streams.
    pub(super) fn is_active(&self) -> bool {
        !self.is_idle()
    }
}

/// All blocks, by index; indices of blocks that are gone are used again.
#[derive(Debug, Clone, Default)]
pub(super) struct Blocks {
    blocks: Vec<Block>,
    vacant: Vec<u32>,
}

impl Blocks {
    /// Adds a block and says where.
    ///
    /// # Panics
    ///
    /// With more than `u32::MAX` blocks at a time, which would need 300 GB of memory to hold.
    pub(super) fn add(&mut self, block: Block) -> u32 {
        if let Some(index) = self.vacant.pop() {
            self.blocks[index as usize] = block;
            return index;
        }
        let index = u32::try_from(self.blocks.len()).expect("memory ends long before 2^32 blocks");
        assert!(index != NONE, "memory ends long before 2^32 blocks");
        self.blocks.push(block);
        index
    }

    pub(super) fn remove(&mut self, index: u32) {
        self[index].is_live = false;
        self.vacant.push(index);
    }

    pub(super) fn contains(&self, index: u32) -> bool {
        self.blocks
            .get(index as usize)
            .is_some_and(|block| block.is_live)
    }

    /// All blocks with their indices, in index order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Block)> {
        (0..).zip(&self.blocks).filter(|(_, block)| block.is_live)
    }
}

impl std::ops::Index<u32> for Blocks {
    type Output = Block;

    fn index(&self, index: u32) -> &Block {
        &self.blocks[index as usize]
    }
}

impl std::ops::IndexMut<u32> for Blocks {
    fn index_mut(&mut self, index: u32) -> &mut Block {
        &mut self.blocks[index as usize]
    }
}

/// One reservation.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpandableSegment {
    pub(super) address: u64,
    pub(super) page_bytes: u64,
    pub(super) size: u64,
}

//! Blocks that torch has freed and may soon ask for again.
//!
//! Responsible for finding one that serves a request and for choosing which goes. Not responsible
//! for how many bytes may be kept ([`crate::budget`]) nor for freeing any.
//!
//! While a budget is on, every large block is a mapping of its own, and the system clears its pages
//! when they are first touched. That takes longer than most ops on them, so what a training step
//! frees is kept for the next: for a request of the same size as it is, for others its pages
//! ([`crate::remap`]).

/// Most blocks that are kept. They are looked through one by one: that is still much less than
/// touching the pages of one.
const MOST: usize = 2048;

/// One kept block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeptBlock {
    pub(crate) address: usize,
    /// As asked for.
    pub(crate) bytes: usize,
    pub(crate) taken_bytes: u64,
}

/// The kept blocks, oldest first.
#[derive(Debug)]
pub(crate) struct Kept {
    blocks: Vec<KeptBlock>,
}

impl Kept {
    pub(crate) const fn new() -> Self {
        Self { blocks: Vec::new() }
    }

    /// Keeps a block; whether there was room to write it down.
    pub(crate) fn keep(&mut self, block: KeptBlock) -> bool {
        let has_room = self.blocks.len() < MOST && self.blocks.try_reserve(1).is_ok();
        if has_room {
            self.blocks.push(block);
        }
        has_room
    }

    /// The newest block of exactly that many bytes, asked for and taken, aligned so.
    pub(crate) fn take(
        &mut self,
        bytes: usize,
        alignment: usize,
        taken_bytes: u64,
    ) -> Option<KeptBlock> {
        let serves = |block: &KeptBlock| {
            block.bytes == bytes
                && block.taken_bytes == taken_bytes
                && block.address & alignment.wrapping_sub(1) == 0
        };
        let newest = self.blocks.iter().rposition(serves)?;
        Some(self.blocks.remove(newest))
    }

    /// The oldest block.
    pub(crate) fn oldest(&mut self) -> Option<KeptBlock> {
        (!self.blocks.is_empty()).then(|| self.blocks.remove(0))
    }

    /// Puts back what is left of the oldest block; whether there was room to write it down.
    pub(crate) fn put_back(&mut self, block: KeptBlock) -> bool {
        let has_room = self.blocks.len() < MOST && self.blocks.try_reserve(1).is_ok();
        if has_room {
            self.blocks.insert(0, block);
        }
        has_room
    }

    /// The block that takes most nearly so many bytes, the oldest of those that do equally.
    pub(crate) fn nearest(&mut self, taken_bytes: u64) -> Option<KeptBlock> {
        let nearest = (0..self.blocks.len())
            .min_by_key(|&place| self.blocks[place].taken_bytes.abs_diff(taken_bytes))?;
        Some(self.blocks.remove(nearest))
    }

    /// All of them; empty where there is no memory for the list.
    pub(crate) fn all(&self) -> Vec<KeptBlock> {
        let mut all = Vec::new();
        if all.try_reserve_exact(self.blocks.len()).is_ok() {
            all.extend_from_slice(&self.blocks);
        }
        all
    }

    pub(crate) fn taken_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.taken_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(address: usize, bytes: usize) -> KeptBlock {
        KeptBlock {
            address,
            bytes,
            taken_bytes: bytes as u64 + 16,
        }
    }

    #[test]
    fn the_newest_block_that_serves_is_taken() {
        let mut kept = Kept::new();
        for (address, bytes) in [(64, 100), (128, 200), (192, 100)] {
            assert!(kept.keep(block(address, bytes)));
        }
        assert_eq!(kept.taken_bytes(), 400 + 3 * 16);
        assert_eq!(kept.take(100, 64, 116), Some(block(192, 100)));
        assert_eq!(kept.take(100, 64, 116), Some(block(64, 100)));
        assert_eq!(kept.take(100, 64, 116), None);
    }

    #[test]
    fn a_block_of_other_size_or_alignment_does_not_serve() {
        let mut kept = Kept::new();
        assert!(kept.keep(block(64, 100)));
        assert_eq!(kept.take(99, 64, 115), None);
        assert_eq!(kept.take(100, 128, 116), None);
        assert_eq!(kept.take(100, 64, 132), None);
    }

    #[test]
    fn the_nearest_in_size_is_the_oldest_of_those_equally_near() {
        let mut kept = Kept::new();
        for (address, bytes) in [(64, 100), (128, 300), (192, 300), (256, 500)] {
            assert!(kept.keep(block(address, bytes)));
        }
        assert_eq!(kept.nearest(350), Some(block(128, 300)));
        assert_eq!(kept.nearest(416), Some(block(192, 300)));
        assert_eq!(kept.nearest(0), Some(block(64, 100)));
        assert_eq!(kept.nearest(u64::MAX), Some(block(256, 500)));
        assert_eq!(kept.nearest(0), None);
    }

    #[test]
    fn the_oldest_goes_first_and_no_more_are_kept_than_can_be_looked_through() {
        let mut kept = Kept::new();
        for address in 1..=MOST {
            assert!(kept.keep(block(address * 64, 100)));
        }
        assert!(!kept.keep(block(64 * (MOST + 1), 100)));
        assert_eq!(kept.oldest(), Some(block(64, 100)));
        assert!(kept.put_back(block(64, 50)));
        assert!(!kept.put_back(block(64, 50)));
        assert_eq!(kept.oldest(), Some(block(64, 50)));
        assert!(kept.keep(block(64 * (MOST + 1), 100)));
        assert_eq!(kept.oldest(), Some(block(128, 100)));
    }
}

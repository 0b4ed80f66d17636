//! Private pools: requests that are sent there find their blocks there alone.
//!
//! CUDA graphs and `torch.cuda.MemPool` use them. Responsible for sending requests to them, for counting who uses
//! them and for serving others from them as a last resort.

use super::pool::{LARGE_POOL, Pool, PrivatePool, Redirection, SMALL_POOL};
use super::request::Request;
use super::{Simulator, rounding};

impl Simulator {
    /// Sends requests to a private pool until [`Simulator::end_pool`]: all of them, or those of one stream. The
    /// pool is made if it does not exist, and used once more if it does (`beginAllocateToPool`).
    pub fn begin_pool(&mut self, id: (u64, u64), stream: Option<u64>) {
        let private = self.use_pool(id);
        self.redirections.push(Redirection { private, stream });
    }

    /// Ends what [`Simulator::begin_pool`] began.
    pub fn end_pool(&mut self, id: (u64, u64)) {
        let private = &self.private;
        let place = self
            .redirections
            .iter()
            .position(|redirection| private[redirection.private as usize].id == id);
        if let Some(place) = place {
            self.redirections.remove(place);
        }
    }

    /// Uses a private pool once more, making it if needed (`createOrIncrefPool`).
    pub fn retain_pool(&mut self, id: (u64, u64)) {
        self.use_pool(id);
    }

    /// Uses a private pool once less; when no user is left, its memory can go (`releasePool`).
    pub fn release_pool(&mut self, id: (u64, u64)) {
        if let Some(number) = self.private_pool(id) {
            let pool = &mut self.private[number as usize];
            pool.use_count = pool.use_count.saturating_sub(1);
        }
    }

    /// Whether a private pool serves others before memory runs out (`setUseOnOOM`).
    pub fn set_last_resort(&mut self, id: (u64, u64), is_last_resort: bool) {
        if let Some(number) = self.private_pool(id) {
            self.private[number as usize].is_last_resort = is_last_resort;
        }
    }

    /// Never splits the blocks of a private pool (`setNoSplit`).
    pub fn set_no_split(&mut self, id: (u64, u64)) {
        if let Some(number) = self.private_pool(id) {
            self.private[number as usize].is_whole = true;
        }
    }

    /// Free blocks of private pools that are there for this (`try_mempool_fallback`).
    pub(super) fn find_in_last_resort(&mut self, request: &Request) -> Option<(Request, u32)> {
        if self.pools[request.pool as usize].owner.is_some() {
            return None;
        }
        let is_small = request.block_bytes <= rounding::SMALL_BYTES;
        for number in 0..self.private.len() {
            let private = self.private[number];
            if !private.is_live || !private.is_last_resort {
                continue;
            }
            let request = Request {
                pool: private.small + u32::from(!is_small),
                is_expandable: false,
                ..*request
            };
            if let Some(block) = self.find_free(&request) {
                return Some((request, block));
            }
        }
        None
    }

    pub(super) fn pool_for(&self, block_bytes: u64, stream: u64) -> u32 {
        let is_small = block_bytes <= rounding::SMALL_BYTES;
        let redirection = self
            .redirections
            .iter()
            .rev()
            .find(|redirection| redirection.stream.is_none_or(|only| only == stream));
        match redirection {
            Some(redirection) => {
                self.private[redirection.private as usize].small + u32::from(!is_small)
            }
            None if is_small => SMALL_POOL,
            None => LARGE_POOL,
        }
    }

    pub(super) fn use_pool(&mut self, id: (u64, u64)) -> u32 {
        if let Some(number) = self.private_pool(id) {
            self.private[number as usize].use_count += 1;
            return number;
        }
        let number = u32::try_from(self.private.len()).expect("pools are made one call at a time");
        let small = u32::try_from(self.pools.len()).expect("pools are made one call at a time");
        self.pools.push(Pool::new(true, Some(number)));
        self.pools.push(Pool::new(false, Some(number)));
        self.private.push(PrivatePool {
            id,
            small,
            use_count: 1,
            segment_count: 0,
            is_whole: false,
            is_last_resort: false,
            is_live: true,
        });
        number
    }

    pub(super) fn private_pool(&self, id: (u64, u64)) -> Option<u32> {
        let place = self
            .private
            .iter()
            .position(|private| private.is_live && private.id == id);
        place.and_then(|place| u32::try_from(place).ok())
    }
}

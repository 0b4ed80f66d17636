//! Blocks and transfers as values: what waits, what is under way, what is there.
//!
//! Responsible for the life of a block, the queue, and the numbers. Everything here happens under one
//! lock ([`super::Store`]) and nothing here waits, reads or writes.
//!
//! Life of a block: queued, being written, then written or failed. A written block can be fetched ahead:
//! queued, being read, then read or failed. Forgotten at any time, its transfer that has not begun is
//! taken out of the queue, and its room is given back once none is under way.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::error::StoreError;
use super::extents::Extents;

/// Names a block; never used again.
pub(super) type BlockId = u64;

/// Memory to write from.
pub type Source = Box<dyn AsRef<[u8]> + Send>;

/// Memory to read into.
pub type Target = Box<dyn AsMut<[u8]> + Send>;

/// What a store did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Statistics {
    /// Bytes written.
    pub bytes_written: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// What callers waited: for the window, for a transfer, for their own reads.
    pub seconds_waited: f64,
    /// What the threads worked.
    pub seconds_busy: f64,
    /// Most bytes on their way at a time, out and back.
    pub peak_in_flight_bytes: u64,
    /// Largest the file was.
    pub file_bytes: u64,
}

/// Where a transfer is.
#[derive(Debug)]
pub(super) enum Transfer<T> {
    Waiting,
    Running,
    Ended(Result<T, StoreError>),
}

/// One block.
pub(super) struct Block {
    pub(super) offset: u64,
    pub(super) length: u64,
    /// Its way out, with the checksum of what was written.
    pub(super) write: Transfer<u32>,
    /// Its way back, with the memory it was read into.
    pub(super) read: Option<Transfer<Target>>,
    is_forgotten: bool,
}

/// Something for a thread to do.
pub(super) enum Job {
    Write {
        id: BlockId,
        offset: u64,
        is_new: bool,
        source: Source,
    },
    Read {
        id: BlockId,
        offset: u64,
        checksum: u32,
        target: Target,
    },
}

/// Everything behind the lock.
#[derive(Default)]
pub(super) struct Blocks {
    known: BTreeMap<BlockId, Block>,
    queue: VecDeque<Job>,
    extents: Extents,
    next: BlockId,
    length: FileLength,
    /// Bytes on their way out.
    outgoing: u64,
    /// Bytes on their way in.
    incoming: u64,
    pub(super) is_closing: bool,
    pub(super) statistics: Statistics,
}

/// Times in a row after which a file that is too long is cut.
const SHORT_TURNS: u32 = 8;

/// How long the file is, and how much of it is of use.
///
/// A file that was long once would stay so; one that is cut whenever nothing is in it would grow again in every step.
#[derive(Debug, Default)]
struct FileLength {
    bytes: u64,
    /// The most since the file held nothing.
    reached: u64,
    /// The most in the short turns up to now.
    enough: u64,
    /// Times in a row that at most half was of use between two moments in which it held nothing.
    short_turns: u32,
}

impl FileLength {
    fn reach(&mut self, end: u64) {
        self.reached = self.reached.max(end);
        self.bytes = self.bytes.max(end);
    }

    /// The file holds nothing; how long it is from now on, if that changes.
    fn rest(&mut self) -> Option<u64> {
        let reached = std::mem::take(&mut self.reached);
        if reached == 0 {
            return None;
        }
        if reached > self.bytes / 2 {
            (self.enough, self.short_turns) = (0, 0);
            return None;
        }
        self.enough = self.enough.max(reached);
        self.short_turns += 1;
        if self.short_turns < SHORT_TURNS {
            return None;
        }
        self.short_turns = 0;
        self.bytes = std::mem::take(&mut self.enough);
        Some(self.bytes)
    }
}

impl Blocks {
    /// Whether a block of this length may go out now: alone, or within the window.
    pub(super) const fn has_room(&self, length: u64, window: u64) -> bool {
        self.outgoing == 0 || self.outgoing.saturating_add(length) <= window
    }

    pub(super) fn get(&self, id: BlockId) -> Result<&Block, StoreError> {
        let block = self.known.get(&id).filter(|block| !block.is_forgotten);
        block.ok_or(StoreError::State {
            state: "was forgotten",
        })
    }

    /// Puts a block on its way out.
    pub(super) fn send_out(&mut self, source: Source) -> BlockId {
        let length = source.as_ref().as_ref().len() as u64;
        let extent = self.extents.take(length);
        let id = self.next;
        self.next += 1;
        let block = Block {
            offset: extent.offset,
            length,
            write: Transfer::Waiting,
            read: None,
            is_forgotten: false,
        };
        self.known.insert(id, block);
        self.queue.push_back(Job::Write {
            id,
            offset: extent.offset,
            is_new: extent.is_new,
            source,
        });
        self.outgoing = self.outgoing.saturating_add(length);
        self.length.reach(self.extents.end());
        self.statistics.file_bytes = self.statistics.file_bytes.max(self.extents.end());
        self.note_in_flight();
        id
    }

    /// Puts a written block on its way back.
    pub(super) fn bring_in(&mut self, id: BlockId, target: Target) {
        let Some(block) = self.known.get_mut(&id) else {
            return;
        };
        let Transfer::Ended(Ok(checksum)) = block.write else {
            return;
        };
        block.read = Some(Transfer::Waiting);
        let (offset, length) = (block.offset, block.length);
        self.queue.push_back(Job::Read {
            id,
            offset,
            checksum,
            target,
        });
        self.incoming = self.incoming.saturating_add(length);
        self.note_in_flight();
    }

    /// What was fetched ahead, once it is there; the block can be fetched again then.
    pub(super) fn take_read(&mut self, id: BlockId) -> Option<Result<Target, StoreError>> {
        let read = &mut self.known.get_mut(&id)?.read;
        match read.take() {
            Some(Transfer::Ended(ended)) => Some(ended),
            other => {
                *read = other;
                None
            }
        }
    }

    /// The next thing to do, which is under way from here.
    pub(super) fn begin(&mut self) -> Option<Job> {
        let job = self.queue.pop_front()?;
        let (Job::Write { id, .. } | Job::Read { id, .. }) = &job;
        if let Some(block) = self.known.get_mut(id) {
            match &job {
                Job::Write { .. } => block.write = Transfer::Running,
                Job::Read { .. } => block.read = Some(Transfer::Running),
            }
        }
        Some(job)
    }

    /// A write came to its end; its source is gone.
    pub(super) fn written(&mut self, id: BlockId, ended: Result<u32, StoreError>) {
        let Some(block) = self.known.get_mut(&id) else {
            return;
        };
        if ended.is_ok() {
            self.statistics.bytes_written += block.length;
        }
        self.outgoing = self.outgoing.saturating_sub(block.length);
        block.write = Transfer::Ended(ended);
        self.remove_if_done(id);
    }

    /// A read came to its end.
    pub(super) fn read(&mut self, id: BlockId, ended: Result<Target, StoreError>) {
        let Some(block) = self.known.get_mut(&id) else {
            return;
        };
        if ended.is_ok() {
            self.statistics.bytes_read += block.length;
        }
        self.incoming = self.incoming.saturating_sub(block.length);
        block.read = Some(Transfer::Ended(ended));
        self.remove_if_done(id);
    }

    /// The block will not be asked for again. What is handed back is to be dropped outside the lock.
    pub(super) fn forget(&mut self, id: BlockId) -> Option<Job> {
        let block = self.known.get_mut(&id)?;
        block.is_forgotten = true;
        let is_of = |job: &Job| match job {
            Job::Write { id: of, .. } | Job::Read { id: of, .. } => *of == id,
        };
        let waiting = self.queue.iter().position(is_of);
        let taken_back = waiting.and_then(|place| self.queue.remove(place));
        match &taken_back {
            Some(Job::Write { .. }) => {
                self.outgoing = self.outgoing.saturating_sub(block.length);
                block.write = Transfer::Ended(Ok(0));
            }
            Some(Job::Read { .. }) => {
                self.incoming = self.incoming.saturating_sub(block.length);
                block.read = None;
            }
            None => {}
        }
        self.remove_if_done(id);
        taken_back
    }

    /// Whether a thread is at work on the block.
    pub(super) fn is_under_way(&self, id: BlockId) -> bool {
        self.known.get(&id).is_some_and(Block::is_under_way)
    }

    /// How many bytes the file may be cut to, if it holds nothing; no transfer can begin while this is asked.
    pub(super) fn shorter(&mut self) -> Option<u64> {
        self.known.is_empty().then(|| self.length.rest()).flatten()
    }

    /// Blocks, bytes on their way and the end of the file: all zero when everything was forgotten.
    #[cfg(test)]
    pub(super) fn blocks_left(&self) -> (usize, u64, u64) {
        let in_flight = self.outgoing + self.incoming;
        (self.known.len(), in_flight, self.extents.end())
    }

    fn remove_if_done(&mut self, id: BlockId) {
        if let Some(block) = self.known.get(&id)
            && block.is_forgotten
            && !block.is_under_way()
        {
            self.extents.give_back(block.offset, block.length);
            self.known.remove(&id);
        }
    }

    fn note_in_flight(&mut self) {
        let in_flight = self.outgoing.saturating_add(self.incoming);
        let peak = &mut self.statistics.peak_in_flight_bytes;
        *peak = (*peak).max(in_flight);
    }
}

impl Block {
    const fn is_under_way(&self) -> bool {
        let is_writing = matches!(self.write, Transfer::Running);
        is_writing || matches!(self.read, Some(Transfer::Running))
    }
}

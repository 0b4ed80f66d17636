//! A store: blocks of bytes that are written to a file, and read back.
//!
//! Responsible for moving bytes in the background, within a window, and for telling when that failed.
//! `error.rs` says why, `file.rs` is the file, `extents.rs` its free parts, `blocks.rs` the queue. Not
//! responsible for what the bytes mean, nor for when they go out or come back: the executor decides
//! (`python/memfit/apply/offload/activations.py`).
//!
//! Invariants:
//!
//! - Memory handed over is used until its transfer has ended and never after. Dropping a
//!   [`StoredBlock`] waits for a transfer that is under way; one that has not begun never begins.
//! - What comes back is what went out, byte for byte (length and CRC-32), or an error. An error of a write
//!   is told at every later question about its block, so it cannot be missed.
//! - Nothing is left on the disk when the process ends, however it ends: the file has no name.
//! - In a forked child nothing is transferred: the threads and the file are the parent's.

mod blocks;
mod error;
mod extents;
mod file;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blocks::{BlockId, Blocks, Job, Transfer};

pub use blocks::{Source, Statistics, Target};
pub use error::{Purpose, StoreError};
pub(crate) use file::StoreFile;

/// Asked now and then while waiting: whether to give up.
pub type Interrupted<'a> = &'a mut dyn FnMut() -> bool;

/// One to write while another reads ahead.
const THREADS: usize = 2;

/// Between two questions whether to give up.
const PATIENCE: Duration = Duration::from_millis(50);

/// How a store works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreOptions {
    /// Most bytes on their way out at a time; a larger block goes out alone.
    pub window_bytes: u64,
    /// Let go of the system's copies in memory as soon as they are on the disk, not when it wants to.
    pub drop_cache: bool,
    /// Accept a folder whose files are kept in memory.
    pub allow_memory: bool,
}

/// Writes blocks of bytes to a file and reads them back.
pub struct Store {
    inner: Arc<Inner>,
}

/// A block; dropping it forgets it.
pub struct StoredBlock {
    inner: Arc<Inner>,
    id: BlockId,
    length: u64,
}

/// The threads, which live as long as the store or a block of it.
struct Inner {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What threads and callers share.
struct Shared {
    file: StoreFile,
    options: StoreOptions,
    process: u32,
    blocks: Mutex<Blocks>,
    /// There is something to do.
    work: Condvar,
    /// Something is done.
    done: Condvar,
}

impl Store {
    /// Opens a file without a name in `folder`.
    ///
    /// # Errors
    ///
    /// [`StoreError`]: the folder is not there, not a folder, not writable, or memory.
    pub fn create(folder: &Path, options: StoreOptions) -> Result<Self, StoreError> {
        let shared = Arc::new(Shared {
            file: StoreFile::create(folder, Purpose::OFFLOAD, options.allow_memory)?,
            options,
            process: std::process::id(),
            blocks: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let mut inner = Inner {
            shared,
            threads: Vec::new(),
        };
        for _ in 0..THREADS {
            let shared = Arc::clone(&inner.shared);
            let named = std::thread::Builder::new().name("memfit-store".to_owned());
            let thread = named.spawn(move || shared.work_until_closed());
            // On an error `inner` is dropped, which ends the threads there are.
            inner
                .threads
                .push(thread.map_err(|error| StoreError::Thread {
                    reason: error.to_string(),
                })?);
        }
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Sends a block out; waits while the window is full.
    ///
    /// # Errors
    ///
    /// [`StoreError::Interrupted`] and [`StoreError::Forked`]; nothing has begun then. Errors of the
    /// transfer are told by [`StoredBlock::settle`].
    pub fn write(
        &self,
        source: Source,
        interrupted: Interrupted<'_>,
    ) -> Result<StoredBlock, StoreError> {
        let shared = &self.inner.shared;
        let length = source.as_ref().as_ref().len() as u64;
        let window = shared.options.window_bytes;
        let mut source = Some(source);
        let id = shared.wait_until(interrupted, |blocks| {
            let has_room = blocks.has_room(length, window);
            let source = has_room.then(|| source.take()).flatten()?;
            Some(Ok(blocks.send_out(source)))
        })?;
        shared.work.notify_one();
        Ok(StoredBlock {
            inner: Arc::clone(&self.inner),
            id,
            length,
        })
    }

    /// What it did so far; nothing in a forked child.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let shared = &self.inner.shared;
        let blocks = shared.lock_here();
        blocks.map_or_else(|_| Statistics::default(), |blocks| blocks.statistics)
    }
}

impl StoredBlock {
    /// Its size.
    #[must_use]
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// Waits until it is written and its source is no longer used.
    ///
    /// # Errors
    ///
    /// The error of the write, every time; [`StoreError::Interrupted`].
    pub fn settle(&self, interrupted: Interrupted<'_>) -> Result<(), StoreError> {
        self.checksum(interrupted).map(drop)
    }

    /// Reads it into `target`, on this thread.
    ///
    /// # Errors
    ///
    /// The error of the write or of the read, after which `target` holds nothing of use.
    pub fn fetch(&self, target: &mut [u8], interrupted: Interrupted<'_>) -> Result<(), StoreError> {
        self.check_length(target.len() as u64)?;
        let checksum = self.checksum(interrupted)?;
        let shared = &self.inner.shared;
        let offset = shared.lock_here()?.get(self.id)?.offset;
        let start = Instant::now();
        let read = shared.file.read(offset, target, checksum);
        shared.let_go_of_cache(offset, self.length);
        let mut blocks = shared.lock();
        blocks.statistics.seconds_waited += start.elapsed().as_secs_f64();
        if read.is_ok() {
            blocks.statistics.bytes_read += self.length;
        }
        read
    }

    /// Has it read into `target` in the background; [`Self::wait`] gives that back.
    ///
    /// # Errors
    ///
    /// The error of the write; [`StoreError::State`] while it is fetched ahead already.
    pub fn prefetch(
        &self,
        mut target: Target,
        interrupted: Interrupted<'_>,
    ) -> Result<(), StoreError> {
        self.check_length(target.as_mut().as_mut().len() as u64)?;
        self.checksum(interrupted)?;
        let shared = &self.inner.shared;
        let mut blocks = shared.lock_here()?;
        if blocks.get(self.id)?.read.is_some() {
            return Err(StoreError::State {
                state: "is being fetched ahead already",
            });
        }
        blocks.bring_in(self.id, target);
        drop(blocks);
        shared.work.notify_one();
        Ok(())
    }

    /// Waits for [`Self::prefetch`] and gives back the memory, filled.
    ///
    /// # Errors
    ///
    /// The error of the read, once; [`StoreError::State`] without a prefetch.
    pub fn wait(&self, interrupted: Interrupted<'_>) -> Result<Target, StoreError> {
        self.inner.shared.wait_until(interrupted, |blocks| {
            match blocks.get(self.id).map(|block| block.read.is_some()) {
                Ok(true) => blocks.take_read(self.id),
                Ok(false) => Some(Err(StoreError::State {
                    state: "was not fetched ahead",
                })),
                Err(error) => Some(Err(error)),
            }
        })
    }

    /// Forgets it. Waits for a transfer under way; after this no memory handed over is used.
    pub fn forget(&self) {
        let shared = &self.inner.shared;
        let Ok(mut blocks) = shared.lock_here() else {
            return; // the parent's; this process has no thread that uses memory
        };
        let unused = blocks.forget(self.id);
        while blocks.is_under_way(self.id) {
            blocks = shared.rest(blocks, None);
        }
        if let Some(length) = blocks.shorter() {
            shared.file.shorten(length); // before anybody else can have a range of it
        }
        drop(blocks);
        drop(unused);
        shared.done.notify_all();
    }

    fn check_length(&self, given: u64) -> Result<(), StoreError> {
        if given == self.length {
            return Ok(());
        }
        Err(StoreError::Length {
            stored: self.length,
            given,
        })
    }

    fn checksum(&self, interrupted: Interrupted<'_>) -> Result<u32, StoreError> {
        let shared = &self.inner.shared;
        shared.wait_until(interrupted, |blocks| match blocks.get(self.id) {
            Ok(block) => match &block.write {
                Transfer::Ended(ended) => Some(ended.clone()),
                Transfer::Waiting | Transfer::Running => None,
            },
            Err(error) => Some(Err(error)),
        })
    }
}

impl Drop for StoredBlock {
    fn drop(&mut self) {
        self.forget();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        let Ok(mut blocks) = self.shared.lock_here() else {
            // A child has the parent's handles but not its threads.
            std::mem::forget(threads);
            return;
        };
        blocks.is_closing = true;
        drop(blocks);
        self.shared.work.notify_all();
        for thread in threads {
            // It cannot panic on its own, and memory that does when asked for its bytes is the caller's.
            let _panicked = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Blocks> {
        // Every change under the lock is whole before anything in it can panic.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, unless this is a forked child, where a thread that is not there may hold it for ever.
    fn lock_here(&self) -> Result<MutexGuard<'_, Blocks>, StoreError> {
        if std::process::id() == self.process {
            Ok(self.lock())
        } else {
            Err(StoreError::Forked)
        }
    }

    fn rest<'a>(
        &self,
        blocks: MutexGuard<'a, Blocks>,
        limit: Option<Duration>,
    ) -> MutexGuard<'a, Blocks> {
        let rested = if let Some(limit) = limit {
            let rested = self.done.wait_timeout(blocks, limit);
            rested
                .map(|(blocks, _)| blocks)
                .map_err(|error| error.into_inner().0)
        } else {
            self.done.wait(blocks).map_err(PoisonError::into_inner)
        };
        rested.unwrap_or_else(|blocks| blocks)
    }

    /// Waits until `ready` has an answer; counts what that took.
    fn wait_until<T>(
        &self,
        interrupted: Interrupted<'_>,
        mut ready: impl FnMut(&mut Blocks) -> Option<Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let mut blocks = self.lock_here()?;
        let mut start = None;
        loop {
            if let Some(answer) = ready(&mut blocks) {
                let waited = start.map_or(0.0, |start: Instant| start.elapsed().as_secs_f64());
                blocks.statistics.seconds_waited += waited;
                return answer;
            }
            start.get_or_insert_with(Instant::now);
            blocks = self.rest(blocks, Some(PATIENCE));
            drop(blocks);
            if interrupted() {
                return Err(StoreError::Interrupted);
            }
            blocks = self.lock();
        }
    }

    fn work_until_closed(&self) {
        let mut blocks = self.lock();
        loop {
            let Some(job) = blocks.begin() else {
                if blocks.is_closing {
                    return;
                }
                let rested = self.work.wait(blocks);
                blocks = rested.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(blocks);
            let start = Instant::now();
            blocks = self.carry_out(job);
            blocks.statistics.seconds_busy += start.elapsed().as_secs_f64();
            self.done.notify_all();
        }
    }

    /// Does one transfer. Its memory is let go before anyone is told that it has ended.
    fn carry_out(&self, job: Job) -> MutexGuard<'_, Blocks> {
        match job {
            Job::Write {
                id,
                offset,
                is_new,
                source,
            } => {
                let bytes = source.as_ref().as_ref();
                let length = bytes.len() as u64;
                let reserved = if is_new && length > 0 {
                    self.file.reserve(offset, length)
                } else {
                    Ok(())
                };
                let written = reserved.and_then(|()| self.file.write(offset, bytes));
                self.let_go_of_cache(offset, length);
                drop(source);
                let mut blocks = self.lock();
                blocks.written(id, written);
                blocks
            }
            Job::Read {
                id,
                offset,
                checksum,
                mut target,
            } => {
                let bytes = target.as_mut().as_mut();
                let length = bytes.len() as u64;
                let read = self.file.read(offset, bytes, checksum);
                self.let_go_of_cache(offset, length);
                let read = read.map(|()| target);
                let mut blocks = self.lock();
                blocks.read(id, read);
                blocks
            }
        }
    }

    fn let_go_of_cache(&self, offset: u64, length: u64) {
        if self.options.drop_cache {
            self.file.drop_cache(offset, length);
        }
    }
}

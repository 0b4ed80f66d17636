//! Parking: a model's memory without its pages, and back at the same address.
//!
//! Responsible for a model's bytes on their way out of memory and in again, whole or not at all.
//! `layout.rs` cuts the memory into pieces, `copy.rs` keeps them and has them back, `arriving.rs` knows which
//! are still to come, `spill.rs` is the files they are in, `parallel.rs` several threads at it, `weights.rs`
//! reads the file that a model was loaded from, `error.rs` says why not. Not responsible for the mapping
//! ([`crate::arena::host`]), for which tensors lie in it (`python/memfit/share/park`), nor for when to park
//! (`python/memfit/pool`).
//!
//! Invariants:
//!
//! - [`Parking::park`] gives pages back only when every byte is kept; if it fails the memory is as before.
//! - [`Parking::wake`] returns when every byte is back, and every one that may have come from a disk compared
//!   with the hash it was kept under; if it fails no page is held, the copy is untouched, and it can be
//!   tried again.
//! - [`Parking::begin_wake`] returns before that. A user of the memory then asks [`Parking::bring_in`]
//!   for each part first, which returns when that part is back and compared.
//! - Nothing is left on the disk when the process ends: the files have no names.
//! - A forked child has its own copy of an open memory, whatever its parent does, but neither parks nor
//!   wakes: the files are its parent's.
//!
//! Damage is found before it would be handed out, at a wake or in [`Parking::bring_in`]. Between two wakes
//! an open memory is as safe as any other that the system may drop and read again, by swapping it or
//! because a file has it: what a disk then damages is handed out, and compared at the next wake.

mod arriving;
mod copy;
mod error;
mod layout;
mod parallel;
mod spill;
mod statistics;
#[cfg(test)]
mod tests;
mod weights;

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use memfit_engine::bytes::Bytes;

use arriving::Arriving;
use copy::{Copy, Woken};
use error::no_memory;

use crate::arena::host::Arena;
use crate::store::Interrupted;

pub use error::ParkError;
pub use layout::Tensor;
pub use statistics::Statistics;

/// A model's memory and the copy that it is parked in.
pub struct Parking {
    process: u32,
    address: usize,
    length: u64,
    is_parked: AtomicBool,
    is_arriving: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// While not all of an awake model is back; it goes before the memory that it brings pages into.
    arriving: Option<Arriving>,
    arena: Arena,
    /// `None` once it is given up.
    copy: Option<Copy>,
    statistics: Statistics,
}

impl Parking {
    /// Maps `length` bytes and makes them parkable; the rest as for [`Parking::new`].
    ///
    /// # Errors
    ///
    /// As there, or the system gives no memory.
    ///
    /// # Safety
    ///
    /// The memory at [`Parking::address`] is used only while this lives and is awake, and not while any
    /// method of it runs.
    #[expect(unsafe_code, reason = "maps memory")]
    pub unsafe fn map(
        length: usize,
        tensors: Vec<Tensor>,
        folder: &Path,
        source: Option<&Path>,
        allow_memory: bool,
    ) -> Result<Self, ParkError> {
        // SAFETY: by the caller's word. Files that are shown in it have no name and are never written to again.
        let arena = unsafe { Arena::new(length) };
        let arena = arena.map_err(|error| ParkError::NotMapped {
            length,
            reason: error.to_string(),
        })?;
        Self::new(arena, tensors, folder, source, allow_memory)
    }

    /// Makes `arena` parkable; `tensors` lie in it in order. Parked bytes go to a file without a name in
    /// `folder`, but for those that the safetensors file `source` has.
    ///
    /// # Errors
    ///
    /// [`ParkError`]: the folder or the weights file cannot be used, the tensors overlap.
    pub fn new(
        arena: Arena,
        tensors: Vec<Tensor>,
        folder: &Path,
        source: Option<&Path>,
        allow_memory: bool,
    ) -> Result<Self, ParkError> {
        let length = arena.length() as u64;
        let copy = Copy::new(&arena, tensors, folder, source, allow_memory)?;
        Ok(Self {
            process: std::process::id(),
            address: arena.address(),
            length,
            is_parked: AtomicBool::new(false),
            is_arriving: AtomicBool::new(false),
            state: Mutex::new(State {
                arena,
                arriving: None,
                copy: Some(copy),
                statistics: Statistics::default(),
            }),
        })
    }

    /// Where the memory is, parked or not.
    #[must_use]
    pub const fn address(&self) -> usize {
        self.address
    }

    /// Length of the memory in bytes, whole pages.
    #[must_use]
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// Whether its pages are given back.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        self.is_parked.load(Ordering::Acquire)
    }

    /// Whether it is awake and some of it still has to be brought in.
    #[must_use]
    pub fn is_arriving(&self) -> bool {
        self.is_arriving.load(Ordering::Acquire)
    }

    /// What it did so far; nothing in a forked child.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let state = self.lock_here();
        state.map_or_else(|_| Statistics::default(), |state| state.statistics)
    }

    /// Gives the pages back, once every byte is kept. Does nothing when it is parked.
    ///
    /// # Errors
    ///
    /// [`ParkError`]; the memory is as before.
    pub fn park(&self, interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        let mut state = self.lock_here()?;
        if self.is_parked() {
            return Ok(());
        }
        let start = Instant::now();
        state.park(self.length, interrupted)?;
        self.is_parked.store(true, Ordering::Release);
        self.is_arriving.store(false, Ordering::Release);
        state.statistics.parks += 1;
        state.statistics.park_seconds += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// Has the bytes back at their address, all of them. Does nothing when they are.
    ///
    /// # Errors
    ///
    /// [`ParkError`]; it stays parked, with no page of it in memory, or arriving.
    pub fn wake(&self, interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        let mut state = self.lock_here()?;
        if !self.is_parked() {
            return self.bring_all_in(&mut state, interrupted);
        }
        self.have_back(&mut state, false, interrupted)
    }

    /// Begins to have the bytes back at their address, and reads on while they are used: nothing may use a
    /// part before [`Self::bring_in`] has returned for it. Where the files cannot be mapped, all of
    /// them are back when it returns. Does nothing when it is not parked.
    ///
    /// # Errors
    ///
    /// [`ParkError`]; it stays parked, with no page of it in memory.
    pub fn begin_wake(&self, interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        let mut state = self.lock_here()?;
        if !self.is_parked() {
            return Ok(());
        }
        self.have_back(&mut state, true, interrupted)
    }

    fn have_back(
        &self,
        state: &mut State,
        streams: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        if interrupted() {
            return Err(ParkError::Interrupted);
        }
        let start = Instant::now();
        state.wake(self.length, streams, interrupted)?;
        self.is_arriving
            .store(state.arriving.is_some(), Ordering::Release);
        self.is_parked.store(false, Ordering::Release);
        state.statistics.wakes += 1;
        state.statistics.wake_seconds += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// Has parts of an arriving memory back, compared. Does nothing for those that are, nor where it does
    /// not arrive.
    ///
    /// # Errors
    ///
    /// [`ParkError`]; the parts may not be used, and it can be tried again.
    pub fn bring_in(
        &self,
        parts: &[Range<u64>],
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let mut state = self.lock_here()?;
        self.bring_parts_in(&mut state, parts, interrupted)
    }

    fn bring_all_in(
        &self,
        state: &mut State,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        self.bring_parts_in(state, std::slice::from_ref(&(0..self.length)), interrupted)
    }

    fn bring_parts_in(
        &self,
        state: &mut State,
        parts: &[Range<u64>],
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let start = Instant::now();
        let done = state.bring_in(parts, interrupted);
        if state.arriving.is_none() {
            self.is_arriving.store(false, Ordering::Release);
        }
        state.statistics.wake_seconds += start.elapsed().as_secs_f64();
        done
    }

    /// Gives the copy up and closes its files; the memory stays, with nothing of them in it. A parked one
    /// is woken first. It may be read meanwhile, but not written to.
    ///
    /// # Errors
    ///
    /// As [`Self::wake`]; it is awake or parked then, and the copy still there.
    pub fn give_up(&self, interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        self.wake(interrupted)?;
        let mut state = self.lock_here()?;
        let taken_over = state.arena.take_over();
        taken_over.map_err(|error| no_memory(self.length, &error))?;
        state.copy = None;
        Ok(())
    }

    /// The lock, unless this is a forked child, where a thread that is not there may hold it for ever.
    fn lock_here(&self) -> Result<MutexGuard<'_, State>, ParkError> {
        if std::process::id() == self.process {
            // Every change under the lock is whole before anything in it can panic.
            Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
        } else {
            Err(ParkError::Forked)
        }
    }
}

impl State {
    fn park(&mut self, length: u64, interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        let copy = self.copy.as_mut().ok_or(ParkError::GivenUp)?;
        let Some(bytes) = self.arena.bytes() else {
            return Ok(());
        };
        if let Some(arriving) = &mut self.arriving {
            arriving.stop_reading();
        }
        let written = self.arena.written();
        let is_here = self.arriving.as_ref().map(Arriving::is_here);
        let (written, statistics) = (written.as_deref(), &mut self.statistics);
        copy.keep(bytes, written, is_here, statistics, interrupted)?;
        self.arena.close().map_err(|error| ParkError::NotReleased {
            length: Bytes(length),
            reason: error.to_string(),
        })?;
        self.arriving = None;
        Ok(())
    }

    fn bring_in(
        &mut self,
        parts: &[Range<u64>],
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let Some(arriving) = &mut self.arriving else {
            return Ok(());
        };
        let copy = self.copy.as_ref().ok_or(ParkError::GivenUp)?;
        let bytes = copy.compare_in(&self.arena, arriving, parts, interrupted)?;
        self.statistics.bytes_read += bytes;
        if arriving.is_over() {
            self.arriving = None;
        }
        Ok(())
    }

    fn wake(
        &mut self,
        length: u64,
        streams: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let copy = self.copy.as_mut().ok_or(ParkError::GivenUp)?;
        match copy.show(&mut self.arena, streams, interrupted)? {
            Woken::Whole(read) => {
                self.statistics.bytes_read += read;
                return Ok(());
            }
            Woken::Arriving(arriving) => {
                self.arriving = Some(arriving);
                return Ok(());
            }
            Woken::NotMapped => {}
        }
        let opened = self.arena.open();
        let bytes = opened.map_err(|error| no_memory(length, &error))?;
        copy.restore(bytes, interrupted).inspect_err(|_| {
            // Should the system refuse even this, the memory holds half a model that is still known as
            // parked: Python lets nothing touch it, and the next try fills it anew.
            let _refused = self.arena.close();
        })?;
        self.statistics.bytes_read += length;
        Ok(())
    }
}

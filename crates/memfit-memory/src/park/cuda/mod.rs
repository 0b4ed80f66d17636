//! Parking on a CUDA device: a model's memory without anything behind it, and back at the same address.
//!
//! Responsible for a model's bytes on their way out of the device and in again, whole or not at all.
//! `copy.rs` keeps them, in the host's memory as far as there is room and else on a disk. Not responsible
//! for the device's memory itself ([`crate::arena::cuda`]), for which tensors lie in it nor for how much room
//! the host has (`python/memfit/share/park`), nor for when to park.
//!
//! Invariants, as those of [`crate::park::host`]:
//!
//! - [`CudaParking::park`] gives memory back only when every byte is kept; if it fails all of it is as before.
//! - [`CudaParking::wake`] returns when every byte is back, each piece compared with the hash it was kept
//!   under; if it fails nothing of the device is held, the copy is untouched, and it can be tried again.
//! - A forked child neither parks nor wakes: device and file are its parent's.

mod copy;
#[cfg(test)]
mod histories;
mod statistics;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use memfit_engine::bytes::Bytes;

use copy::Copy;

pub use statistics::CudaStatistics;

use crate::arena::cuda::{Arena, Device, ManagedTensor, TensorPlace, VmmError, lend};
use crate::park::host::ParkError;
use crate::pressure;
use crate::store::Interrupted;

/// A model's memory on a device and the copy that it is parked in.
pub struct CudaParking {
    process: u32,
    number: u32,
    place: TensorPlace,
    address: u64,
    length: u64,
    is_parked: AtomicBool,
    state: Mutex<State>,
}

struct State {
    arena: Arena,
    /// `None` once it is given up.
    copy: Option<Copy>,
    statistics: CudaStatistics,
}

impl CudaParking {
    /// Reserves addresses for `length` bytes of a device, without memory behind them. Parked bytes for which
    /// the host has no room go to a file without a name in `folder`.
    ///
    /// # Errors
    ///
    /// [`ParkError`]: the folder cannot be used, or the driver refuses.
    pub fn new(
        device: Arc<Device>,
        length: u64,
        folder: &Path,
        allow_memory: bool,
    ) -> Result<Self, ParkError> {
        let (number, place) = (device.number(), device.place());
        let arena = Arena::reserve(device, length)?;
        let copy = Copy::new(length, folder, allow_memory)?;
        Ok(Self {
            process: std::process::id(),
            number,
            place,
            address: arena.address(),
            length: arena.length(),
            is_parked: AtomicBool::new(false),
            state: Mutex::new(State {
                arena,
                copy: Some(copy),
                statistics: CudaStatistics::default(),
            }),
        })
    }

    /// As [`CudaParking::new`], of the device of that number; `driver` is a library that stands in for CUDA's in tests.
    ///
    /// # Errors
    ///
    /// As there, or there is no such device.
    pub fn open(
        driver: Option<&str>,
        number: u32,
        length: u64,
        folder: &Path,
        allow_memory: bool,
    ) -> Result<Self, ParkError> {
        let device = match driver {
            Some(library) => Device::open_with(library, number)?,
            None => Device::open(number)?,
        };
        Self::new(Arc::new(device), length, folder, allow_memory)
    }

    /// Describes `length` bytes from `start` on as a tensor, which holds the memory until it is let go.
    ///
    /// # Errors
    ///
    /// There are no such bytes.
    pub fn lend(
        this: &Arc<Self>,
        start: u64,
        length: u64,
    ) -> Result<NonNull<ManagedTensor>, ParkError> {
        if start
            .checked_add(length)
            .is_none_or(|end| end > this.length)
        {
            return Err(ParkError::Range { start, length });
        }
        let owner = Box::new(Arc::clone(this));
        let address = this.address + start;
        Ok(lend(address, length, this.place, this.number, owner))
    }

    /// Where the memory is, parked or not.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Length of the memory in bytes, in whole units of the device.
    #[must_use]
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// Whether its memory is given back.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        self.is_parked.load(Ordering::Acquire)
    }

    /// Bytes of the device that it holds.
    ///
    /// # Errors
    ///
    /// [`ParkError::Forked`].
    pub fn held_bytes(&self) -> Result<u64, ParkError> {
        Ok(self.lock_here()?.arena.held_bytes())
    }

    /// Bytes of the host's memory that its copy takes.
    ///
    /// # Errors
    ///
    /// [`ParkError::Forked`].
    pub fn host_bytes(&self) -> Result<u64, ParkError> {
        let state = self.lock_here()?;
        Ok(state.copy.as_ref().map_or(0, Copy::host_bytes))
    }

    /// What it did so far; nothing in a forked child.
    #[must_use]
    pub fn statistics(&self) -> CudaStatistics {
        let state = self.lock_here();
        state.map_or_else(|_| CudaStatistics::default(), |state| state.statistics)
    }

    /// Has memory behind the first `end` bytes, for tensors that move in; what is there stays.
    ///
    /// # Errors
    ///
    /// [`ParkError`]: the device has no room, the model is parked. It is as before.
    pub fn open_to(&self, end: u64) -> Result<(), ParkError> {
        let mut state = self.lock_here()?;
        if self.is_parked() {
            return Err(VmmError::Range { start: 0, end }.into());
        }
        Ok(state.arena.open_to(end)?)
    }

    /// Gives the memory back, once every byte is kept: up to `host_bytes` in the host's memory, by default
    /// half of what is free there, and the rest in the file. Does nothing when it is parked.
    ///
    /// # Errors
    ///
    /// [`ParkError`]; the memory is as before.
    pub fn park(
        &self,
        host_bytes: Option<u64>,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let mut state = self.lock_here()?;
        if self.is_parked() {
            return Ok(());
        }
        let host_bytes = host_bytes.unwrap_or_else(half_of_free_host_bytes);
        let start = Instant::now();
        state.park(host_bytes, interrupted)?;
        self.is_parked.store(true, Ordering::Release);
        state.statistics.parks += 1;
        state.statistics.park_seconds += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// Moves what is kept in the host's memory to the file. Does nothing where nothing is.
    ///
    /// # Errors
    ///
    /// [`ParkError`]; the copy is as before.
    pub fn to_disk(&self, interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        let mut state = self.lock_here()?;
        let State {
            copy, statistics, ..
        } = &mut *state;
        let copy = copy.as_mut().ok_or(ParkError::GivenUp)?;
        copy.move_to_disk(statistics, interrupted)
    }

    /// Has the bytes back at their address. Does nothing when it is not parked.
    ///
    /// # Errors
    ///
    /// [`ParkError`]; it stays parked, and holds nothing of the device.
    pub fn wake(&self, interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        let mut state = self.lock_here()?;
        if !self.is_parked() {
            return Ok(());
        }
        let start = Instant::now();
        state.wake(interrupted)?;
        self.is_parked.store(false, Ordering::Release);
        state.statistics.wakes += 1;
        state.statistics.wake_seconds += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// Gives the copy up and closes its file; the memory stays. A parked one is woken first.
    ///
    /// # Errors
    ///
    /// As [`Self::wake`]; the copy is still there then.
    pub fn give_up(&self, interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        self.wake(interrupted)?;
        self.lock_here()?.copy = None;
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
    fn park(&mut self, host_bytes: u64, interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        let copy = self.copy.as_mut().ok_or(ParkError::GivenUp)?;
        // What kernels still write shall be in the copy.
        self.arena.device().synchronize()?;
        copy.keep(&self.arena, host_bytes, &mut self.statistics, interrupted)?;
        close(&mut self.arena).map_err(|error| {
            copy.let_host_go();
            ParkError::NotReleased {
                length: Bytes(self.arena.length()),
                reason: error.to_string(),
            }
        })
    }

    fn wake(&mut self, interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        let copy = self.copy.as_mut().ok_or(ParkError::GivenUp)?;
        self.arena.open().map_err(|error| ParkError::NoMemory {
            wanted: Bytes(self.arena.length()),
            reason: error.to_string(),
        })?;
        let restored = copy.restore(&mut self.arena, &mut self.statistics, interrupted);
        if restored.is_ok() {
            copy.let_host_go();
        } else {
            // Should the driver refuse even this, the memory holds half a model that is still known as
            // parked: Python lets nothing touch it, and the next try fills it anew.
            let _refused = close(&mut self.arena);
        }
        restored
    }
}

/// Gives an arena's memory back; what the driver refused to release, once more: it is no longer counted.
fn close(arena: &mut Arena) -> Result<(), VmmError> {
    arena.close()?;
    if arena.held_bytes() > 0 {
        let _refused = arena.close();
    }
    Ok(())
}

/// What a parked copy may take of the host's memory unless it is said: the other half is for the rest of the
/// machine, and for the next model. Nothing where the system does not tell.
#[must_use]
pub fn half_of_free_host_bytes() -> u64 {
    pressure::meminfo("MemAvailable").map_or(0, |bytes| bytes.0 / 2)
}

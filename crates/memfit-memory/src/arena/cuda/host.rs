//! Memory of the host for copies from and to a device.
//!
//! Responsible for a mapping of exactly the size that is needed, page-locked where the driver does that:
//! copies then run at the speed of the bus. PyTorch's own pinned memory comes in powers of two.
//! Not responsible for what lies in it.

#![expect(unsafe_code, reason = "maps memory and makes slices of it")]

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::Device;
use super::error::VmmError;

/// An anonymous mapping, zero at first.
pub struct HostMemory {
    device: Arc<Device>,
    start: NonNull<u8>,
    length: usize,
    is_pinned: bool,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for HostMemory {}
// SAFETY: shared, it can only be read.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Maps `length` bytes and pins them if the driver lets it.
    ///
    /// # Errors
    ///
    /// [`VmmError::NoHostMemory`]; also for a length of zero.
    pub fn new(device: Arc<Device>, length: u64) -> Result<Self, VmmError> {
        let refused = |error: &io::Error| VmmError::NoHostMemory {
            wanted: length,
            reason: error.to_string(),
        };
        let size =
            usize::try_from(length).map_err(|_| refused(&io::ErrorKind::OutOfMemory.into()))?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the system chooses a place where nothing is.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), size, rights, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(refused(&io::Error::last_os_error()));
        }
        let Some(mapped) = NonNull::new(start.cast()) else {
            return Err(refused(&io::ErrorKind::OutOfMemory.into()));
        };
        // Without it copies are slower, and as right.
        let is_pinned = device.within(|driver| driver.pin(start, size)).is_ok();
        Ok(Self {
            device,
            start: mapped,
            length: size,
            is_pinned,
        })
    }

    /// Whether it is page-locked.
    #[must_use]
    pub const fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    /// All of it.
    #[must_use]
    pub const fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is this object's own, readable and initialised by the system.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    /// All of it, to be filled.
    #[must_use]
    pub const fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and writable; nothing else has it while this borrow lasts.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let start = self.start.as_ptr().cast();
        let unpin = || self.device.within(|driver| driver.unpin(start)).is_ok();
        // Again if it is refused: an address that the driver takes for pinned can never be pinned again.
        if self.is_pinned && !unpin() && !unpin() {
            // The driver is gone with the process, or broken: these addresses are never given out again.
            return;
        }
        // SAFETY: the mapping is this object's own, and no slice of it outlives the object.
        let _kept = unsafe { libc::munmap(start, self.length) };
    }
}

//! A device of the driver's, with the context that PyTorch uses.
//!
//! Responsible for finding it, for asking whether it can do what is needed, and for the current context
//! around calls. Not responsible for memory.

use std::ffi::c_int;

use super::dlpack::TensorPlace;
use super::driver::{Context, Driver, LIBRARY};
use super::error::VmmError;

/// A CUDA device that can map memory at addresses.
pub struct Device {
    driver: Driver,
    number: u32,
    place: TensorPlace,
    ordinal: c_int,
    context: Context,
    granularity: u64,
}

impl Device {
    /// Finds the device of that number, as `CUDA_VISIBLE_DEVICES` numbers them and PyTorch does.
    ///
    /// # Errors
    ///
    /// [`VmmError`]: there is no driver, no such device, or it lacks virtual memory management.
    pub fn open(number: u32) -> Result<Self, VmmError> {
        Self::load(LIBRARY, number, TensorPlace::Cuda)
    }

    /// The same by another library than the driver's: one that stands in for it in tests.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub fn open_with(library: &str, number: u32) -> Result<Self, VmmError> {
        Self::load(library, number, TensorPlace::Host)
    }

    fn load(library: &str, number: u32, place: TensorPlace) -> Result<Self, VmmError> {
        let driver = Driver::open(library)?;
        let wanted = c_int::try_from(number).unwrap_or(c_int::MAX);
        let ordinal = driver.device(wanted)?;
        if !driver.manages_virtual_memory(ordinal)? {
            return Err(VmmError::Unsupported { device: number });
        }
        let granularity = driver.granularity(ordinal)?;
        if granularity == 0 {
            return Err(VmmError::Unsupported { device: number });
        }
        // Last, so that nothing has to be undone.
        let context = driver.retain_context(ordinal)?;
        Ok(Self {
            driver,
            number,
            place,
            ordinal,
            context,
            granularity,
        })
    }

    /// Its number.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// Where tensors made of its memory are; a stand-in's memory is the host's.
    #[must_use]
    pub const fn place(&self) -> TensorPlace {
        self.place
    }

    /// Its number at the driver.
    pub(crate) const fn ordinal(&self) -> c_int {
        self.ordinal
    }

    /// Of what its memory comes in multiples.
    #[must_use]
    pub const fn granularity(&self) -> u64 {
        self.granularity
    }

    /// Waits for all that the device was told to do by this process.
    ///
    /// # Errors
    ///
    /// [`VmmError::Refused`]; also for an error of a kernel from before.
    pub fn synchronize(&self) -> Result<(), VmmError> {
        self.within(Driver::synchronize)
    }

    /// Works with the device's context as the thread's current one, and puts back the one before.
    pub(crate) fn within<T>(
        &self,
        work: impl FnOnce(&Driver) -> Result<T, VmmError>,
    ) -> Result<T, VmmError> {
        self.driver.push(self.context)?;
        let done = work(&self.driver);
        // Refused only where the context is destroyed, and then by every other call too.
        let _refused = self.driver.pop();
        done
    }

    /// The error for memory that the device does not have; in its context.
    pub(crate) fn no_room(&self, wanted: u64) -> VmmError {
        VmmError::NoRoom {
            device: self.number,
            wanted,
            free: self.driver.free_bytes().ok(),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Once more if it is refused; for good it is when the process ends and the driver has gone before.
        let release = || self.driver.release_context(self.ordinal);
        let _refused = release().or_else(|_| release());
    }
}

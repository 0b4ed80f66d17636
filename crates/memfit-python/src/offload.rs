//! The store of the program crate, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding: an address and a length become memory lent to
//! a transfer, the tensor's owner is held until that has ended, and a pending Ctrl-C ends a wait.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use memfit_memory::arena::host::{LentBytes, LentBytesMut};
use memfit_memory::store::{self, StoreError, StoreOptions};
use pyo3::prelude::*;

use crate::errors::{OffloadError, UsageError};
use crate::signals::waiting;
use crate::value::Value;

/// Writes blocks of memory to a file without a name in a folder, and reads them back.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct Store {
    store: store::Store,
}

#[pymethods]
impl Store {
    /// Opens the file; `window_bytes` are on their way out at most.
    #[new]
    #[pyo3(signature = (folder, window_bytes, *, drop_cache=false, allow_memory=false))]
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        window_bytes: u64,
        drop_cache: bool,
        allow_memory: bool,
    ) -> PyResult<Self> {
        let options = StoreOptions {
            window_bytes,
            drop_cache,
            allow_memory,
        };
        let store = py
            .detach(move || store::Store::create(&folder, options))
            .map_err(offload_error)?;
        Ok(Self { store })
    }

    /// Sends `length` bytes at `address` out; waits while the window is full. `owner` is held meanwhile.
    fn write(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        owner: Py<PyAny>,
    ) -> PyResult<StoredBlock> {
        #[expect(unsafe_code, reason = "an address is the caller's word")]
        // SAFETY: the executor passes the memory of a tensor and as `owner` its storage, which the block
        // returned holds until the transfer has ended; it lets nothing be written there meanwhile
        // without settling first, but for writes it cannot see, which it refuses afterwards.
        let source = unsafe { LentBytes::new(address, length) }.ok_or_else(no_memory)?;
        let block = waiting(py, offload_error, |interrupted| {
            self.store.write(Box::new(source), interrupted)
        })?;
        Ok(StoredBlock {
            block,
            owner: Mutex::new(Some(owner)),
        })
    }

    /// What it did so far.
    fn statistics(&self) -> Value<store::Statistics> {
        Value(self.store.statistics())
    }
}

/// A block of a store; dropping it forgets it, after the transfer under way.
// The block comes first: it is dropped first, and waits.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct StoredBlock {
    block: store::StoredBlock,
    /// What keeps the memory of the transfer under way alive.
    owner: Mutex<Option<Py<PyAny>>>,
}

#[pymethods]
impl StoredBlock {
    /// Waits until it is written, and lets its owner go.
    fn settle(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, offload_error, |interrupted| {
            self.block.settle(interrupted)
        })?;
        self.hold(None);
        Ok(())
    }

    /// Reads it to `address`.
    fn fetch(&self, py: Python<'_>, address: usize, length: usize) -> PyResult<()> {
        #[expect(unsafe_code, reason = "an address is the caller's word")]
        // SAFETY: the executor passes the memory of a tensor that it holds during this call and that
        // nobody else has yet.
        let target = unsafe { LentBytesMut::new(address, length) };
        let mut target = target.ok_or_else(no_memory)?;
        waiting(py, offload_error, |interrupted| {
            self.block.fetch(target.as_mut(), interrupted)
        })
    }

    /// Has it read to `address` in the background; `owner` is held until [`Self::wait`].
    fn prefetch(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        owner: Py<PyAny>,
    ) -> PyResult<()> {
        #[expect(unsafe_code, reason = "an address is the caller's word")]
        // SAFETY: the executor passes the memory of a tensor that nobody else has before `wait` has
        // returned, and as `owner` its storage, which this block holds until then or its own end.
        let target = unsafe { LentBytesMut::new(address, length) };
        let target = target.ok_or_else(no_memory)?;
        waiting(py, offload_error, |interrupted| {
            self.block.prefetch(Box::new(target), interrupted)
        })?;
        self.hold(Some(owner));
        Ok(())
    }

    /// Waits for what is fetched ahead.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, offload_error, |interrupted| {
            self.block.wait(interrupted).map(drop)
        })?;
        self.hold(None);
        Ok(())
    }

    /// Forgets it now: waits for the transfer under way and gives its room in the file back.
    fn forget(&self, py: Python<'_>) {
        py.detach(|| self.block.forget());
        self.hold(None);
    }
}

impl StoredBlock {
    /// Holds another owner; the one before is let go once the lock is.
    fn hold(&self, owner: Option<Py<PyAny>>) {
        let mut held = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *held, owner);
        drop(held);
        drop(before);
    }
}

fn offload_error(error: StoreError) -> PyErr {
    OffloadError::new_err(error.to_string())
}

fn no_memory() -> PyErr {
    UsageError::new_err("there is no memory at that address")
}

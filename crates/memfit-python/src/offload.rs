//! Blocks of bytes in a file, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding, and for holding a tensor's owner until a transfer has ended.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use memfit_memory::store::{self, Statistics, StoreOptions};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::lent::{Read, Written};
use crate::signals::waiting;
use crate::value::Value;

/// Writes blocks of memory to a file without a name in a folder, and reads them back.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct Store(store::Store);

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (folder, window_bytes, *, drop_cache=false, allow_memory=false))]
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        window_bytes: u64,
        drop_cache: bool,
        allow_memory: bool,
    ) -> Result<Self> {
        let options = StoreOptions {
            window_bytes,
            drop_cache,
            allow_memory,
        };
        Ok(Self(py.detach(|| store::Store::create(&folder, options))?))
    }

    fn write(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        owner: Py<PyAny>,
    ) -> Result<StoredBlock> {
        let source = Box::new(Read::at(address, length)?.0);
        let block = waiting(py, |stop| self.0.write(source, stop))?;
        let owner = Mutex::new(Some(owner));
        Ok(StoredBlock { block, owner })
    }

    fn statistics(&self) -> Value<Statistics> {
        Value(self.0.statistics())
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
    fn settle(&self, py: Python<'_>) -> Result<()> {
        waiting(py, |stop| self.block.settle(stop))?;
        self.hold(None);
        Ok(())
    }

    fn fetch(&self, py: Python<'_>, address: usize, length: usize) -> Result<()> {
        let mut target = Written::at(address, length)?.0;
        waiting(py, |stop| self.block.fetch(target.as_mut(), stop))
    }

    fn prefetch(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        owner: Py<PyAny>,
    ) -> Result<()> {
        let target = Box::new(Written::at(address, length)?.0);
        waiting(py, |stop| self.block.prefetch(target, stop))?;
        self.hold(Some(owner));
        Ok(())
    }

    fn wait(&self, py: Python<'_>) -> Result<()> {
        waiting(py, |stop| self.block.wait(stop).map(drop))?;
        self.hold(None);
        Ok(())
    }

    fn forget(&self, py: Python<'_>) {
        py.detach(|| self.block.forget());
        self.hold(None);
    }
}

impl StoredBlock {
    fn hold(&self, owner: Option<Py<PyAny>>) {
        let mut held = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *held, owner);
        drop(held);
        drop(before);
    }
}

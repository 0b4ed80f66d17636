//! Memory of the host that models are parked in, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding.

use std::path::PathBuf;

use memfit_memory::park::host::{Parking, Statistics, Tensor};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::signals::waiting;
use crate::value::Value;

/// Memory whose pages can be given back, and the copy of them.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct ParkedMemory(Parking);

#[pymethods]
impl ParkedMemory {
    /// Maps `length` bytes; `tensors` are names, start and length of each that will lie there.
    #[new]
    #[pyo3(signature = (length, tensors, folder, source=None, *, allow_memory=false))]
    fn new(
        py: Python<'_>,
        length: usize,
        tensors: Vec<(Vec<String>, u64, u64)>,
        folder: PathBuf,
        source: Option<PathBuf>,
        allow_memory: bool,
    ) -> Result<Self> {
        let tensors = tensors.into_iter().map(Tensor::from).collect();
        #[expect(unsafe_code, reason = "an address is the caller's word")]
        // SAFETY: storages made of the address hold this object, so the memory outlives them. While `park` and `wake`
        // run, Python lets nobody reach those storages: it has put classes before the tensors that refuse every use, and
        // counted that there are no others. `Parking` shows files that have no name and that it never writes to again.
        py.detach(|| unsafe {
            Parking::map(length, tensors, &folder, source.as_deref(), allow_memory)
        })
        .map(Self)
        .map_err(Into::into)
    }

    /// Where it is.
    #[getter]
    const fn address(&self) -> usize {
        self.0.address()
    }

    /// Its length in bytes: whole pages.
    #[getter]
    const fn length(&self) -> u64 {
        self.0.length()
    }

    /// Whether its pages are given back.
    #[getter]
    fn is_parked(&self) -> bool {
        self.0.is_parked()
    }

    /// Whether it is awake and some of it still has to be brought in.
    #[getter]
    fn is_arriving(&self) -> bool {
        self.0.is_arriving()
    }

    /// Keeps every byte and gives the pages back.
    fn park(&self, py: Python<'_>) -> Result<()> {
        waiting(py, |stop| self.0.park(stop))
    }

    /// Has every byte back at its address.
    fn wake(&self, py: Python<'_>) -> Result<()> {
        waiting(py, |stop| self.0.wake(stop))
    }

    /// Begins to have every byte back; each is to be brought in before it is used.
    fn begin_wake(&self, py: Python<'_>) -> Result<()> {
        waiting(py, |stop| self.0.begin_wake(stop))
    }

    /// Has some bytes back, from the start of each part to its end, and compared.
    fn bring_in(&self, py: Python<'_>, parts: Vec<(u64, u64)>) -> Result<()> {
        let parts: Vec<_> = parts.into_iter().map(|(start, end)| start..end).collect();
        waiting(py, |stop| self.0.bring_in(&parts, stop))
    }

    /// Wakes it and closes its files: it cannot be parked any more.
    fn give_up(&self, py: Python<'_>) -> Result<()> {
        waiting(py, |stop| self.0.give_up(stop))
    }

    /// What it did so far.
    fn statistics(&self, py: Python<'_>) -> Value<Statistics> {
        Value(py.detach(|| self.0.statistics()))
    }
}

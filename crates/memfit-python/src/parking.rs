//! Memory that models are parked in, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding.

use std::path::PathBuf;

use memfit_memory::arena::host::Arena;
use memfit_memory::park::host::{self, Parking, Tensor};
use pyo3::prelude::*;

use crate::errors::ParkError;
use crate::signals::waiting;
use crate::value::Value;

/// Memory whose pages can be given back, and the copy of them.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct ParkedMemory {
    parking: Parking,
}

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
    ) -> PyResult<Self> {
        let tensors = tensors.into_iter().map(|(names, start, length)| Tensor {
            names,
            start,
            length,
        });
        let tensors = tensors.collect();
        #[expect(unsafe_code, reason = "an address is the caller's word")]
        // SAFETY: storages made of the address hold this object, so the memory outlives them. While
        // the two calls below run, Python lets nobody reach those storages: it has put classes before
        // the tensors that refuse every use, and counted that there are no others. `Parking` shows files
        // that have no name and that it never writes to again.
        let arena = unsafe { Arena::new(length) };
        let arena = arena.map_err(|error| no_memory(length, &error))?;
        let parking = py
            .detach(move || Parking::new(arena, tensors, &folder, source.as_deref(), allow_memory))
            .map_err(park_error)?;
        Ok(Self { parking })
    }

    /// Where it is.
    #[getter]
    const fn address(&self) -> usize {
        self.parking.address()
    }

    /// Its length in bytes: whole pages.
    #[getter]
    const fn length(&self) -> u64 {
        self.parking.length()
    }

    /// Whether its pages are given back.
    #[getter]
    fn is_parked(&self) -> bool {
        self.parking.is_parked()
    }

    /// Whether it is awake and some of it still has to be brought in.
    #[getter]
    fn is_arriving(&self) -> bool {
        self.parking.is_arriving()
    }

    /// Keeps every byte and gives the pages back.
    fn park(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, park_error, |interrupted| self.parking.park(interrupted))
    }

    /// Has every byte back at its address.
    fn wake(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, park_error, |interrupted| self.parking.wake(interrupted))
    }

    /// Begins to have every byte back; each is to be brought in before it is used.
    fn begin_wake(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, park_error, |interrupted| {
            self.parking.begin_wake(interrupted)
        })
    }

    /// Has some bytes back, from the start of each part to its end, and compared.
    fn bring_in(&self, py: Python<'_>, parts: Vec<(u64, u64)>) -> PyResult<()> {
        let parts: Vec<_> = parts.into_iter().map(|(start, end)| start..end).collect();
        waiting(py, park_error, |interrupted| {
            self.parking.bring_in(&parts, interrupted)
        })
    }

    /// Wakes it and closes its files: it cannot be parked any more.
    fn give_up(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, park_error, |interrupted| {
            self.parking.give_up(interrupted)
        })
    }

    /// What it did so far.
    fn statistics(&self, py: Python<'_>) -> Value<host::Statistics> {
        Value(py.detach(|| self.parking.statistics()))
    }
}

pub(crate) fn park_error(error: host::ParkError) -> PyErr {
    ParkError::new_err((error.to_string(), error.reason()))
}

fn no_memory(length: usize, error: &std::io::Error) -> PyErr {
    let message = format!("no memory of {length} bytes to park a model in: {error}");
    ParkError::new_err((message, "no_memory"))
}

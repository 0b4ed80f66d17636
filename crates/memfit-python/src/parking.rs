//! Memory of the host that models are parked in, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding.

use std::path::PathBuf;

use memfit_memory::park::host::{Parking, Statistics, Tensor};
use pyo3::prelude::*;

use crate::functions::methods;

/// Memory whose pages can be given back, and the copy of them.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct ParkedMemory(Parking);

methods! { impl ParkedMemory {
    #[pyo3(signature = (length, tensors, folder, source=None, *, allow_memory=false))]
    #[new]
    make fn new(
        length: usize, tensors: Vec<(Vec<String>, u64, u64)>, folder: PathBuf, source: Option<PathBuf>, allow_memory: bool
    ) = {
        let tensors = tensors.into_iter().map(Tensor::from).collect();
        #[expect(unsafe_code, reason = "an address is the caller's word")]
        // SAFETY: storages made of the address hold this object, so the memory outlives them. While `park` and `wake`
        // run, Python lets nobody reach those storages: it has put classes before the tensors that refuse every use, and
        // counted that there are no others. `Parking` shows files that have no name and that it never writes to again.
        Self(unsafe { Parking::map(length, tensors, &folder, source.as_deref(), allow_memory) }?)
    };
    #[getter]
    quick fn address(self) -> usize = self.0.address();
    #[getter]
    quick fn length(self) -> u64 = self.0.length();
    #[getter]
    quick fn is_parked(self) -> bool = self.0.is_parked();
    #[getter]
    quick fn is_arriving(self) -> bool = self.0.is_arriving();
    waiting fn park(self, stop) -> () = self.0.park(stop);
    waiting fn wake(self, stop) -> () = self.0.wake(stop);
    waiting fn begin_wake(self, stop) -> () = self.0.begin_wake(stop);
    waiting fn bring_in(self, stop; parts: Vec<(u64, u64)>) -> () = {
        let parts: Vec<_> = parts.into_iter().map(|(start, end)| start..end).collect();
        self.0.bring_in(&parts, stop)
    };
    waiting fn give_up(self, stop) -> () = self.0.give_up(stop);
    fn statistics(self) -> Statistics = self.0.statistics();
}}

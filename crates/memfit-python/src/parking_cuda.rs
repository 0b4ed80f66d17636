//! Memory of a CUDA device that models are parked in, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding, and for the capsules in which tensors are made.

use std::ffi::CStr;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

use memfit_memory::arena::cuda::{ManagedTensor, held_bytes};
use memfit_memory::park::cuda::{self, CudaParking, CudaStatistics};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::errors::Result;
use crate::functions::functions;
use crate::signals::waiting;
use crate::value::Value;

/// What `DLPack` calls a capsule whose tensor nobody has taken yet.
const NOT_TAKEN: &CStr = c"dltensor";

functions! {
    /// What parked copies may take of the host's memory unless it is said.
    quick fn half_of_free_host_bytes() -> u64 = cuda::half_of_free_host_bytes();

    /// What this process holds of a GPU by all such memory; torch's statistics lack it.
    quick fn held_cuda_bytes(device: u32) -> u64 = held_bytes(device);
}

/// Memory of a device that can be given back, and the copy of it. Tensors made of it hold it too.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct ParkedCudaMemory(Arc<CudaParking>);

#[pymethods]
impl ParkedCudaMemory {
    /// Reserves `length` bytes of a device. `driver` stands in for CUDA's in tests; its memory is the host's.
    #[new]
    #[pyo3(signature = (length, device, folder, *, allow_memory=false, driver=None))]
    fn new(
        py: Python<'_>,
        length: u64,
        device: u32,
        folder: PathBuf,
        allow_memory: bool,
        driver: Option<&str>,
    ) -> Result<Self> {
        let open = || CudaParking::open(driver, device, length, &folder, allow_memory);
        Ok(Self(Arc::new(py.detach(open)?)))
    }

    /// Where it is.
    #[getter]
    fn address(&self) -> u64 {
        self.0.address()
    }

    /// Its length in bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.0.length()
    }

    /// Whether it is given back.
    #[getter]
    fn is_parked(&self) -> bool {
        self.0.is_parked()
    }

    /// Bytes of the device that it holds.
    #[getter]
    fn held_bytes(&self, py: Python<'_>) -> Result<u64> {
        Ok(py.detach(|| self.0.held_bytes())?)
    }

    /// Bytes of the host's memory that its copy takes.
    #[getter]
    fn host_bytes(&self, py: Python<'_>) -> Result<u64> {
        Ok(py.detach(|| self.0.host_bytes())?)
    }

    /// Has memory behind the first `end` bytes.
    fn open_to(&self, py: Python<'_>, end: u64) -> Result<()> {
        Ok(py.detach(|| self.0.open_to(end))?)
    }

    /// A range of it as a tensor of bytes, in a capsule of `DLPack`.
    fn tensor<'py>(
        &self,
        py: Python<'py>,
        start: u64,
        length: u64,
    ) -> Result<Bound<'py, PyCapsule>> {
        let tensor = CudaParking::lend(&self.0, start, length)?.cast();
        let let_go = Some(let_go_unless_taken as ffi::PyCapsule_Destructor);
        #[expect(unsafe_code, reason = "a capsule around a C structure")]
        // SAFETY: the structure is DLPack's, as the name says; it is let go by whoever takes it, who gives
        // the capsule another name, or else by the capsule's destructor.
        Ok(unsafe { PyCapsule::new_with_pointer_and_destructor(py, tensor, NOT_TAKEN, let_go) }?)
    }

    /// Keeps every byte, up to `host_bytes` of them in the host's memory, and gives the memory back.
    #[pyo3(signature = (host_bytes=None))]
    fn park(&self, py: Python<'_>, host_bytes: Option<u64>) -> Result<()> {
        waiting(py, |stop| self.0.park(host_bytes, stop))
    }

    /// Moves what the host's memory keeps to the file.
    fn to_disk(&self, py: Python<'_>) -> Result<()> {
        waiting(py, |stop| self.0.to_disk(stop))
    }

    /// Has every byte back at its address.
    fn wake(&self, py: Python<'_>) -> Result<()> {
        waiting(py, |stop| self.0.wake(stop))
    }

    /// Wakes it and closes its file: it cannot be parked any more.
    fn give_up(&self, py: Python<'_>) -> Result<()> {
        waiting(py, |stop| self.0.give_up(stop))
    }

    /// What it did so far.
    fn statistics(&self, py: Python<'_>) -> Value<CudaStatistics> {
        Value(py.detach(|| self.0.statistics()))
    }
}

#[expect(unsafe_code, reason = "what Python calls when a capsule goes")]
/// # Safety
///
/// `capsule` is one of [`ParkedCudaMemory::tensor`], on its way out, and the interpreter is held.
unsafe extern "C" fn let_go_unless_taken(capsule: *mut ffi::PyObject) {
    // SAFETY: by the caller's word; a capsule that was taken has another name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NOT_TAKEN.as_ptr()) == 0 {
            return;
        }
        let tensor = ffi::PyCapsule_GetPointer(capsule, NOT_TAKEN.as_ptr());
        if let Some(tensor) = NonNull::new(tensor.cast()) {
            ManagedTensor::let_go(tensor);
        }
    }
}

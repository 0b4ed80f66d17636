//! Memory of a CUDA device that models are parked in, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding, and for the capsules in which tensors are made.

use std::path::PathBuf;
use std::sync::Arc;

use memfit_memory::arena::cuda::{Device, ManagedTensor, TensorPlace, held_bytes, lend};
use memfit_memory::park::cuda::{self, CudaParking};
use memfit_memory::park::host;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::errors::ParkError;
use crate::parking::park_error;
use crate::signals::waiting;
use crate::value::Value;

/// What `DLPack` calls a capsule whose tensor nobody has taken yet.
const NOT_TAKEN: &std::ffi::CStr = c"dltensor";

/// What parked copies may take of the host's memory unless it is said.
#[pyfunction]
pub(crate) fn half_of_free_host_bytes() -> u64 {
    cuda::half_of_free_host_bytes()
}

/// What this process holds of a GPU by all such memory; torch's statistics lack it.
#[pyfunction]
pub(crate) fn held_cuda_bytes(device: u32) -> u64 {
    held_bytes(device)
}

/// Memory of a device that can be given back, and the copy of it.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct ParkedCudaMemory {
    /// Tensors made of it hold it too.
    parking: Arc<CudaParking>,
    device: u32,
    place: TensorPlace,
}

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
        driver: Option<String>,
    ) -> PyResult<Self> {
        let place = match driver {
            Some(_) => TensorPlace::Host,
            None => TensorPlace::Cuda,
        };
        let parking = py.detach(move || {
            let opened = match driver {
                Some(library) => Device::open_with(&library, device),
                None => Device::open(device),
            };
            let opened = Arc::new(opened.map_err(host::ParkError::from)?);
            CudaParking::new(opened, length, &folder, allow_memory)
        });
        let parking = Arc::new(parking.map_err(park_error)?);
        Ok(Self {
            parking,
            device,
            place,
        })
    }

    /// Where it is.
    #[getter]
    fn address(&self) -> u64 {
        self.parking.address()
    }

    /// Its length in bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.parking.length()
    }

    /// Whether it is given back.
    #[getter]
    fn is_parked(&self) -> bool {
        self.parking.is_parked()
    }

    /// Bytes of the device that it holds.
    #[getter]
    fn held_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        let held = py.detach(|| self.parking.held_bytes());
        held.map_err(park_error)
    }

    /// Bytes of the host's memory that its copy takes.
    #[getter]
    fn host_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        let held = py.detach(|| self.parking.host_bytes());
        held.map_err(park_error)
    }

    /// Has memory behind the first `end` bytes.
    fn open_to(&self, py: Python<'_>, end: u64) -> PyResult<()> {
        let opened = py.detach(|| self.parking.open_to(end));
        opened.map_err(park_error)
    }

    /// A range of it as a tensor of bytes, in a capsule of `DLPack`.
    fn tensor<'py>(
        &self,
        py: Python<'py>,
        start: u64,
        length: u64,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let end = start.checked_add(length);
        if end.is_none_or(|end| end > self.parking.length()) {
            let message =
                format!("there are no {length} bytes at {start} in a parked model's memory");
            return Err(ParkError::new_err((message, "layout")));
        }
        let owner = Box::new(Arc::clone(&self.parking));
        let address = self.parking.address() + start;
        let tensor = lend(address, length, self.place, self.device, owner);
        #[expect(unsafe_code, reason = "a capsule around a C structure")]
        // SAFETY: the structure is DLPack's, as the name says; it is let go by whoever takes it, who gives
        // the capsule another name, or else by the capsule's destructor.
        unsafe {
            PyCapsule::new_with_pointer_and_destructor(
                py,
                tensor.cast(),
                NOT_TAKEN,
                Some(let_go_unless_taken),
            )
        }
    }

    /// Keeps every byte, up to `host_bytes` of them in the host's memory, and gives the memory back.
    #[pyo3(signature = (host_bytes=None))]
    fn park(&self, py: Python<'_>, host_bytes: Option<u64>) -> PyResult<()> {
        waiting(py, park_error, |interrupted| {
            self.parking.park(host_bytes, interrupted)
        })
    }

    /// Moves what the host's memory keeps to the file.
    fn to_disk(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, park_error, |interrupted| {
            self.parking.to_disk(interrupted)
        })
    }

    /// Has every byte back at its address.
    fn wake(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, park_error, |interrupted| self.parking.wake(interrupted))
    }

    /// Wakes it and closes its file: it cannot be parked any more.
    fn give_up(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, park_error, |interrupted| {
            self.parking.give_up(interrupted)
        })
    }

    /// What it did so far.
    fn statistics(&self, py: Python<'_>) -> Value<cuda::CudaStatistics> {
        Value(py.detach(|| self.parking.statistics()))
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
        if let Some(tensor) = std::ptr::NonNull::new(tensor.cast::<ManagedTensor>()) {
            ManagedTensor::let_go(tensor);
        }
    }
}

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
use crate::functions::{functions, methods};

/// What `DLPack` calls a capsule whose tensor nobody has taken yet.
const NOT_TAKEN: &CStr = c"dltensor";

functions! {
    quick fn half_of_free_host_bytes() -> u64 = cuda::half_of_free_host_bytes();

    quick fn held_cuda_bytes(device: u32) -> u64 = held_bytes(device);
}

/// Memory of a device that can be given back, and the copy of it. Tensors made of it hold it too.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct ParkedCudaMemory(Arc<CudaParking>);

methods! { impl ParkedCudaMemory {
    #[pyo3(signature = (length, device, folder, *, allow_memory=false, driver=None))]
    #[new]
    make fn new(length: u64, device: u32, folder: PathBuf, allow_memory: bool, driver: Option<&str>) =
        Self(Arc::new(CudaParking::open(driver, device, length, &folder, allow_memory)?));
    #[getter]
    quick fn address(self) -> u64 = self.0.address();
    #[getter]
    quick fn length(self) -> u64 = self.0.length();
    #[getter]
    quick fn is_parked(self) -> bool = self.0.is_parked();
    #[getter]
    fn held_bytes(self) -> u64 = self.0.held_bytes()?;
    #[getter]
    fn host_bytes(self) -> u64 = self.0.host_bytes()?;
    fn open_to(self, end: u64) -> () = self.0.open_to(end)?;
    {
        fn tensor<'py>(&self, py: Python<'py>, start: u64, length: u64) -> Result<Bound<'py, PyCapsule>> {
            let tensor = CudaParking::lend(&self.0, start, length)?.cast();
            let let_go = Some(let_go_unless_taken as ffi::PyCapsule_Destructor);
            #[expect(unsafe_code, reason = "a capsule around a C structure")]
            // SAFETY: the structure is DLPack's, as the name says; it is let go by whoever takes it, who gives
            // the capsule another name, or else by the capsule's destructor.
            Ok(unsafe { PyCapsule::new_with_pointer_and_destructor(py, tensor, NOT_TAKEN, let_go) }?)
        }
    }
    #[pyo3(signature = (host_bytes=None))]
    waiting fn park(self, stop; host_bytes: Option<u64>) -> () = self.0.park(host_bytes, stop);
    waiting fn to_disk(self, stop) -> () = self.0.to_disk(stop);
    waiting fn wake(self, stop) -> () = self.0.wake(stop);
    waiting fn give_up(self, stop) -> () = self.0.give_up(stop);
    fn statistics(self) -> CudaStatistics = self.0.statistics();
}}

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

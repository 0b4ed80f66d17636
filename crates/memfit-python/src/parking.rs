//! Memory that models are parked in, for tensors of Python: the host's, and that of a CUDA device.
//!
//! Responsible for conversion, as the rest of the binding, and for the capsules in which tensors are made.

use std::ffi::CStr;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

use memfit_memory::arena::cuda::{self as arena, ManagedTensor};
use memfit_memory::park::cuda::{self, CudaParking, CudaStatistics};
use memfit_memory::park::host::{Parking, Statistics, Tensor};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::functions::{functions, methods};
use crate::signals::waiting;

/// What `DLPack` calls a capsule whose tensor has not been taken yet.
const NOT_TAKEN: &CStr = c"dltensor";

functions! {
    quick fn half_of_free_host_bytes() -> u64 = cuda::half_of_free_host_bytes();
    quick fn held_cuda_bytes(device: u32) -> u64 = arena::held_bytes(device);
}

/// Memory whose pages can be given back, and the copy of them.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct ParkedMemory(Parking);

methods! { impl ParkedMemory {
    #[pyo3(signature = (length, tensors, folder, source=None, *, allow_memory=false))]
    #[new]
    object fn new(
        length: usize, tensors: Vec<(Vec<String>, u64, u64)>, folder: PathBuf, source: Option<PathBuf>,
        allow_memory: bool
    ) -> Self = {
        let tensors = tensors.into_iter().map(Tensor::from).collect();
        #[expect(unsafe_code, reason = "an address is the caller's word")]
        // SAFETY: storages made of the address hold this object, so the memory outlives them. While `park` and `wake`
        // run, Python lets nothing reach those storages: it has put classes before the tensors that refuse every use,
        // and counted that there are no others. `Parking` shows files that have no name and that it never writes to
        // again.
        Self(unsafe { Parking::map(length, tensors, &folder, source.as_deref(), allow_memory) }?)
    };
    #[getter]
    quick fn address(&self) -> usize = self.0.address();
    #[getter]
    quick fn length(&self) -> u64 = self.0.length();
    #[getter]
    quick fn is_parked(&self) -> bool = self.0.is_parked();
    #[getter]
    quick fn is_arriving(&self) -> bool = self.0.is_arriving();
    free fn park(&self) -> () = waiting(|stop| self.0.park(stop))?;
    free fn wake(&self) -> () = waiting(|stop| self.0.wake(stop))?;
    free fn begin_wake(&self) -> () = waiting(|stop| self.0.begin_wake(stop))?;
    free fn bring_in(&self, parts: Vec<(u64, u64)>) -> () = {
        let parts: Vec<_> = parts.into_iter().map(|(start, end)| start..end).collect();
        waiting(|stop| self.0.bring_in(&parts, stop))?;
    };
    free fn give_up(&self) -> () = waiting(|stop| self.0.give_up(stop))?;
    free fn statistics(&self) -> Statistics = self.0.statistics();
}}

/// Memory of a device that can be given back, and the copy of it. Tensors made of it hold it too.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct ParkedCudaMemory(Arc<CudaParking>);

methods! { impl ParkedCudaMemory {
    #[pyo3(signature = (length, device, folder, *, allow_memory=false, driver=None))]
    #[new]
    object fn new(length: u64, device: u32, folder: PathBuf, allow_memory: bool, driver: Option<&str>) -> Self =
        Self(Arc::new(CudaParking::open(driver, device, length, &folder, allow_memory)?));
    object fn tensor(&self, start: u64, length: u64) -> Py<PyCapsule> = {
        let tensor = CudaParking::lend(&self.0, start, length)?;
        Python::attach(|py| in_capsule(py, tensor))?
    };
    #[getter]
    quick fn address(&self) -> u64 = self.0.address();
    #[getter]
    quick fn length(&self) -> u64 = self.0.length();
    #[getter]
    quick fn is_parked(&self) -> bool = self.0.is_parked();
    #[getter]
    free fn held_bytes(&self) -> u64 = self.0.held_bytes()?;
    #[getter]
    free fn host_bytes(&self) -> u64 = self.0.host_bytes()?;
    free fn open_to(&self, end: u64) -> () = self.0.open_to(end)?;
    #[pyo3(signature = (host_bytes=None))]
    free fn park(&self, host_bytes: Option<u64>) -> () = waiting(|stop| self.0.park(host_bytes, stop))?;
    free fn to_disk(&self) -> () = waiting(|stop| self.0.to_disk(stop))?;
    free fn wake(&self) -> () = waiting(|stop| self.0.wake(stop))?;
    free fn give_up(&self) -> () = waiting(|stop| self.0.give_up(stop))?;
    free fn statistics(&self) -> CudaStatistics = self.0.statistics();
}}

/// A tensor as `DLPack` passes it on.
#[expect(unsafe_code, reason = "a capsule around a C structure")]
fn in_capsule(py: Python<'_>, tensor: NonNull<ManagedTensor>) -> PyResult<Py<PyCapsule>> {
    let let_go = Some(let_go_unless_taken as ffi::PyCapsule_Destructor);
    // SAFETY: the structure is DLPack's, as the name says; it is let go by its taker, which gives the capsule another
    // name, or else by the capsule's destructor.
    let capsule =
        unsafe { PyCapsule::new_with_pointer_and_destructor(py, tensor.cast(), NOT_TAKEN, let_go) };
    capsule.map(Bound::unbind)
}

#[expect(unsafe_code, reason = "what Python calls when a capsule goes")]
/// # Safety
///
/// `capsule` is one of [`in_capsule`], on its way out, and the interpreter is held.
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

//! The binding: module `memfit._native`.
//!
//! Responsible for conversion and error mapping, nothing else: no decision about memory is made here.
//! Answers and requests cross as values (`value.rs`), traces as JSON text or encoded files, so that neither side holds
//! the other's objects; which exception an error becomes is one table (`errors.rs`). The interpreter is released around
//! every call into the engine.

#![expect(
    clippy::needless_pass_by_value,
    reason = "what Python passes is made anew for the call"
)]

mod answers;
mod errors;
mod functions;
mod guard;
mod host;
mod leases;
mod machines;
mod objects;
mod parking;
mod recordings;
mod signals;
mod tensors;
mod value;

use pyo3::prelude::*;

/// The native half of memfit; private to the `memfit` package.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::{
        guard::{AllocationBudget, AllocationWindow},
        leases::LeaseClient,
        machines::{PlanSession, PoolMachine, Room},
        objects::instances,
        parking::{ParkedCudaMemory, ParkedMemory},
        recordings::{Separation, Snapshot, Trace},
        tensors::{Store, StoredBlock},
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::answers::add_functions(module)?;
        super::guard::add_functions(module)?;
        super::host::add_functions(module)?;
        super::leases::add_functions(module)?;
        super::parking::add_functions(module)?;
        super::tensors::add_functions(module)
    }
}

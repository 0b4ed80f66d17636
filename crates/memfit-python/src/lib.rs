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
mod parking;
mod recordings;
mod signals;
mod tensors;
mod value;

use pyo3::prelude::*;

/// The native half of memfit; private to the `memfit` package.
#[pymodule]
mod _native {
    use std::ffi::OsString;

    use pyo3::prelude::*;

    use super::host::PythonHost;
    #[pymodule_export]
    use super::{
        guard::{AllocationBudget, AllocationWindow},
        leases::LeaseClient,
        machines::{PlanSession, PoolMachine, Room},
        parking::{ParkedCudaMemory, ParkedMemory},
        recordings::{Separation, Snapshot, Trace},
        tensors::{Store, StoredBlock},
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::answers::add_functions(module)?;
        super::guard::add_functions(module)?;
        super::leases::add_functions(module)?;
        super::parking::add_functions(module)?;
        super::tensors::add_functions(module)
    }

    /// Runs the program with `argv` and returns its exit code.
    #[pyfunction]
    fn run(py: Python<'_>, argv: Vec<OsString>, host: Py<PyAny>) -> u8 {
        py.detach(|| {
            let mut host = PythonHost(host);
            let (mut stdout, mut stderr) = (std::io::stdout(), std::io::stderr());
            let streams = memfit::Streams::process(&mut stdout, &mut stderr);
            memfit::run(argv, &mut host, streams)
        })
    }
}

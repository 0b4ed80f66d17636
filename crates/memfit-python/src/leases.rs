//! The broker's client, for Python.
//!
//! Responsible for conversion and for Ctrl-C while waiting, as the rest of the binding.

use std::path::PathBuf;

use memfit::device::{self, Room};
use memfit::lease::amounts::Amounts;
use memfit::lease::protocol::Held;
use memfit::lease::status::Status;
use memfit::lease::{Client, GoesOn, LeaseError, LeaseRequest, seconds, usual_path};
use pyo3::prelude::*;

use crate::errors::{Failure, Result};
use crate::functions::{functions, methods};

/// What is called now and then while something waits, with the number of requests that go first, where that is known.
type Waits = Option<Py<PyAny>>;
/// A lease as `(number, revision, bytes by device)`.
type Told = (u64, u64, Amounts);

functions! {
    free fn gpu_memory() -> Vec<(String, u64, u64)> = device::gpu_memory();
    free fn rooms() -> Vec<Room> = device::rooms(&usual_path())?;
    object fn broker_path() -> PathBuf = usual_path();
}

/// A connection to the broker; one line of work.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct LeaseClient(Client);

methods! { impl LeaseClient {
    #[new]
    object fn new(path: PathBuf, name: &str) -> Self = Self(Client::connect(&path, name)?);
    #[pyo3(signature = (path, name, wait_seconds, waits=None))]
    #[staticmethod]
    object fn within(path: PathBuf, name: &str, wait_seconds: Option<f64>, waits: Waits) -> Self = {
        let wait = seconds(wait_seconds)?;
        Self(telling(waits, |goes_on| Client::connect_within(&path, name, wait, goes_on))?)
    };
    quick fn devices(&self) -> Amounts = self.0.devices()?;
    quick fn held(&self, lease: u64) -> Option<Told> = self.0.held(lease)?.map(Held::told);
    quick fn asked_to_shrink(&self, lease: u64) -> Option<Amounts> = self.0.asked_to_shrink(lease)?;
    #[pyo3(signature = (claims, floor, priority, wait_seconds, time_to_live_seconds, label, waits=None))]
    #[expect(clippy::too_many_arguments, reason = "the fields of one request")]
    free fn acquire(
        &self, claims: Amounts, floor: Option<Amounts>, priority: i8, wait_seconds: Option<f64>,
        time_to_live_seconds: Option<f64>, label: Option<String>, waits: Waits
    ) -> Told = {
        let (wait, time_to_live) = (seconds(wait_seconds)?, seconds(time_to_live_seconds)?);
        let request = LeaseRequest { claims, floor, priority, wait, time_to_live, label };
        telling(waits, |goes_on| self.0.acquire(&request, goes_on))?.told()
    };
    #[pyo3(signature = (lease, claims, wait_seconds, waits=None))]
    free fn resize(&self, lease: u64, claims: Amounts, wait_seconds: Option<f64>, waits: Waits) -> Told = {
        let wait = seconds(wait_seconds)?;
        telling(waits, |goes_on| self.0.resize(lease, &claims, wait, goes_on))?.told()
    };
    free fn release(&self, lease: u64) -> () = telling(None, |goes_on| self.0.release(lease, goes_on))?;
    free fn decline(&self, lease: u64) -> () = self.0.decline(lease)?;
    free fn status(&self) -> Status = self.0.status()?;
}}

/// Does something that waits, telling `waits` of it, and ends it when that or a signal handler raises.
fn telling<T>(
    waits: Waits,
    work: impl FnOnce(GoesOn<'_>) -> std::result::Result<T, LeaseError>,
) -> Result<T> {
    let mut raised = None;
    let mut tell = |ahead: Option<u64>| {
        let told = Python::attach(|py| {
            py.check_signals()?;
            let waits = waits.as_ref();
            waits.map_or(Ok(()), |waits| waits.call1(py, (ahead,)).map(drop))
        });
        raised = told.err();
        raised.is_none()
    };
    let result = work(&mut tell);
    raised.map_or_else(|| result.map_err(Failure::from), |error| Err(error.into()))
}

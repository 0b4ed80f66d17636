//! The broker's client, for Python.
//!
//! Responsible for conversion and for Ctrl-C while waiting, as the rest of the binding.

use std::path::PathBuf;
use std::time::Duration;

use memfit::lease::{Client, LeaseError as Failure, LeaseRequest, SocketError};
use pyo3::prelude::*;
use serde::Serialize;

use crate::{LeaseError, UsageError};

type Amounts = std::collections::BTreeMap<String, u64>;
/// A lease as `(number, revision, bytes by device)`.
type Held = (u64, u64, Amounts);

/// Where the broker listens, unless told otherwise.
#[pyfunction]
pub(crate) fn broker_path() -> PathBuf {
    memfit::lease::usual_path()
}

/// The GPUs that NVML sees, as `(device, total bytes, used bytes)`; none where it cannot be used.
#[pyfunction]
pub(crate) fn gpu_memory(py: Python<'_>) -> Vec<(String, u64, u64)> {
    let found = py.detach(memfit::device::gpus).unwrap_or_default();
    let told = found
        .into_iter()
        .map(|gpu| (gpu.device, gpu.total_bytes, gpu.used_bytes));
    told.collect()
}

/// The memories of this machine with what the broker still has of each, as JSON.
#[pyfunction]
pub(crate) fn rooms(py: Python<'_>) -> PyResult<String> {
    let found = py.detach(|| memfit::device::rooms(&memfit::lease::usual_path()));
    to_json(&found.map_err(failure)?)
}

/// What a process takes on a GPU besides tensors, as predictions have it.
#[pyfunction]
pub(crate) const fn context_bytes() -> u64 {
    memfit_engine::cost::devices::CONTEXT_BYTES.0
}

/// A connection to the broker; one line of work.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct LeaseClient {
    client: Client,
}

#[pymethods]
impl LeaseClient {
    #[new]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "made from a Python path for this call"
    )]
    fn new(py: Python<'_>, path: PathBuf, name: &str) -> PyResult<Self> {
        let client = py
            .detach(|| Client::connect(&path, name))
            .map_err(failure)?;
        Ok(Self { client })
    }

    /// Capacity by device.
    fn devices(&self) -> PyResult<Amounts> {
        self.client.devices().map_err(failure)
    }

    /// Takes a lease; `wait_seconds` of nothing waits without end. `waits` is called now and then meanwhile
    /// with the number of requests that go first, where that is known.
    #[pyo3(signature = (claims, floor, priority, wait_seconds, time_to_live_seconds, label, waits=None))]
    #[expect(clippy::too_many_arguments, reason = "the fields of one request")]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "a Python function for this call"
    )]
    fn acquire(
        &self,
        py: Python<'_>,
        claims: Amounts,
        floor: Option<Amounts>,
        priority: i8,
        wait_seconds: Option<f64>,
        time_to_live_seconds: Option<f64>,
        label: Option<String>,
        waits: Option<Py<PyAny>>,
    ) -> PyResult<Held> {
        let request = LeaseRequest {
            claims,
            floor,
            priority,
            wait: seconds(wait_seconds)?,
            time_to_live: seconds(time_to_live_seconds)?,
            label,
        };
        let held = waiting(py, waits.as_ref(), |goes_on| {
            self.client.acquire(&request, goes_on)
        })?;
        Ok((held.lease, held.revision, held.claims))
    }

    /// Makes a lease larger or smaller.
    #[pyo3(signature = (lease, claims, wait_seconds, waits=None))]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "made from a Python dict for this call"
    )]
    fn resize(
        &self,
        py: Python<'_>,
        lease: u64,
        claims: Amounts,
        wait_seconds: Option<f64>,
        waits: Option<Py<PyAny>>,
    ) -> PyResult<Held> {
        let wait = seconds(wait_seconds)?;
        let held = waiting(py, waits.as_ref(), |goes_on| {
            self.client.resize(lease, &claims, wait, goes_on)
        })?;
        Ok((held.lease, held.revision, held.claims))
    }

    /// Gives a lease back.
    fn release(&self, py: Python<'_>, lease: u64) -> PyResult<()> {
        py.detach(|| self.client.release(lease)).map_err(failure)
    }

    /// A lease as it stands, or nothing when it has ended.
    fn held(&self, lease: u64) -> PyResult<Option<Held>> {
        let held = self.client.held(lease).map_err(failure)?;
        Ok(held.map(|held| (held.lease, held.revision, held.claims)))
    }

    /// What the broker asked to shrink a lease to.
    fn asked_to_shrink(&self, lease: u64) -> PyResult<Option<Amounts>> {
        self.client.asked_to_shrink(lease).map_err(failure)
    }

    /// Answers a shrink request with no.
    fn decline(&self, py: Python<'_>, lease: u64) -> PyResult<()> {
        py.detach(|| self.client.decline(lease)).map_err(failure)
    }

    /// Who holds what, as JSON.
    fn status(&self, py: Python<'_>) -> PyResult<String> {
        let status = py.detach(|| self.client.status()).map_err(failure)?;
        to_json(&status)
    }
}

/// Does something that waits, telling `waits` of it, and ends it when that or a signal handler raises.
fn waiting<T: Send>(
    py: Python<'_>,
    waits: Option<&Py<PyAny>>,
    work: impl FnOnce(&mut dyn FnMut(Option<u64>) -> bool) -> Result<T, Failure> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let result = py.detach(|| {
        work(
            &mut |ahead| match Python::attach(|py| tell(py, waits, ahead)) {
                Ok(()) => true,
                Err(error) => {
                    raised = Some(error);
                    false
                }
            },
        )
    });
    match raised {
        Some(error) => Err(error),
        None => result.map_err(failure),
    }
}

fn tell(py: Python<'_>, waits: Option<&Py<PyAny>>, ahead: Option<u64>) -> PyResult<()> {
    py.check_signals()?;
    waits.map_or(Ok(()), |waits| waits.call1(py, (ahead,)).map(drop))
}

fn seconds(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let duration = seconds.map(Duration::try_from_secs_f64).transpose();
    duration.map_err(|error| UsageError::new_err(format!("cannot wait so long: {error}")))
}

fn to_json<T: Serialize>(value: &T) -> PyResult<String> {
    serde_json::to_string(value)
        .map_err(|error| UsageError::new_err(format!("cannot write JSON: {error}")))
}

fn failure(error: Failure) -> PyErr {
    let message = error.to_string();
    let plain = |reason: &str| LeaseError::new_err((message.clone(), reason.to_owned()));
    match error {
        Failure::Refused(refused) => {
            let reason = serde_json::to_value(refused.reason).unwrap_or_default();
            let reason = reason.as_str().unwrap_or_default().to_owned();
            let numbers = (refused.device, refused.asked_bytes, refused.largest_bytes);
            LeaseError::new_err((message, reason, numbers.0, numbers.1, numbers.2))
        }
        Failure::Socket(SocketError::NoBroker(_)) => plain("no_broker"),
        Failure::Socket(_) => plain("socket"),
        Failure::Rejected(_) => plain("rejected"),
        Failure::Broken(_) => plain("broken"),
        Failure::Ended { .. } => plain("ended"),
        Failure::GaveUp => plain("gave_up"),
        Failure::Forked => plain("forked"),
    }
}

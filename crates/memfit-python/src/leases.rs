//! The broker's client, for Python.
//!
//! Responsible for conversion and for Ctrl-C while waiting, as the rest of the binding.

use std::path::PathBuf;
use std::time::Duration;

use memfit::device::Room;
use memfit::lease::protocol;
use memfit::lease::status::Status;
use memfit::lease::{Client, LeaseError as Failure, LeaseRequest};
use pyo3::prelude::*;

use crate::errors::{LeaseError, UsageError};
use crate::value::Value;

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

/// The memories of this machine with what the broker still has of each.
#[pyfunction]
pub(crate) fn rooms(py: Python<'_>) -> PyResult<Value<Vec<Room>>> {
    let found = py.detach(|| memfit::device::rooms(&memfit::lease::usual_path()));
    found.map(Value).map_err(failure)
}

/// A connection to the broker; one line of work.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct LeaseClient {
    client: Client,
}

#[pymethods]
impl LeaseClient {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, name: &str) -> PyResult<Self> {
        let client = py
            .detach(|| Client::connect(&path, name))
            .map_err(failure)?;
        Ok(Self { client })
    }

    /// The same, waiting for a broker that is away; `wait_seconds` of nothing waits without end.
    #[staticmethod]
    #[pyo3(signature = (path, name, wait_seconds, waits=None))]
    fn within(
        py: Python<'_>,
        path: PathBuf,
        name: &str,
        wait_seconds: Option<f64>,
        waits: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let wait = seconds(wait_seconds)?;
        let client = waiting(py, waits.as_ref(), |goes_on| {
            Client::connect_within(&path, name, wait, goes_on)
        })?;
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
        Ok(told(held))
    }

    /// Makes a lease larger or smaller.
    #[pyo3(signature = (lease, claims, wait_seconds, waits=None))]
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
        Ok(told(held))
    }

    /// Gives a lease back.
    fn release(&self, py: Python<'_>, lease: u64) -> PyResult<()> {
        waiting(py, None, |goes_on| self.client.release(lease, goes_on))
    }

    /// A lease as it stands, or nothing when it has ended.
    fn held(&self, lease: u64) -> PyResult<Option<Held>> {
        let held = self.client.held(lease).map_err(failure)?;
        Ok(held.map(told))
    }

    /// What the broker asked to shrink a lease to.
    fn asked_to_shrink(&self, lease: u64) -> PyResult<Option<Amounts>> {
        self.client.asked_to_shrink(lease).map_err(failure)
    }

    /// Answers a shrink request with no.
    fn decline(&self, py: Python<'_>, lease: u64) -> PyResult<()> {
        py.detach(|| self.client.decline(lease)).map_err(failure)
    }

    /// Who holds what.
    fn status(&self, py: Python<'_>) -> PyResult<Value<Status>> {
        let status = py.detach(|| self.client.status());
        status.map(Value).map_err(failure)
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

fn told(held: protocol::Held) -> Held {
    (held.lease, held.revision, held.claims)
}

fn tell(py: Python<'_>, waits: Option<&Py<PyAny>>, ahead: Option<u64>) -> PyResult<()> {
    py.check_signals()?;
    waits.map_or(Ok(()), |waits| waits.call1(py, (ahead,)).map(drop))
}

fn seconds(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let duration = seconds.map(Duration::try_from_secs_f64).transpose();
    duration.map_err(|error| UsageError::new_err(format!("cannot wait so long: {error}")))
}

fn failure(error: Failure) -> PyErr {
    let (message, reason) = (error.to_string(), error.reason());
    let Failure::Refused(refused) = error else {
        return LeaseError::new_err((message, reason));
    };
    let (device, asked, largest) = (refused.device, refused.asked_bytes, refused.largest_bytes);
    LeaseError::new_err((message, reason, device, asked, largest))
}

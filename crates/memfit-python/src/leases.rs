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

    /// Takes a lease; `wait_seconds` of nothing waits without end.
    #[pyo3(signature = (claims, floor, priority, wait_seconds, time_to_live_seconds, label))]
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
    ) -> PyResult<Held> {
        let request = LeaseRequest {
            claims,
            floor,
            priority,
            wait: seconds(wait_seconds)?,
            time_to_live: seconds(time_to_live_seconds)?,
            label,
        };
        let held = waiting(py, |goes_on| self.client.acquire(&request, goes_on))?;
        Ok((held.lease, held.revision, held.claims))
    }

    /// Makes a lease larger or smaller.
    #[pyo3(signature = (lease, claims, wait_seconds))]
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
    ) -> PyResult<Held> {
        let wait = seconds(wait_seconds)?;
        let held = waiting(py, |goes_on| {
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

/// Does something that waits, and ends it when a signal handler raises.
fn waiting<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut dyn FnMut(Option<u64>) -> bool) -> Result<T, Failure> + Send,
) -> PyResult<T> {
    let mut raised = None;
    #[expect(
        clippy::redundant_closure_for_method_calls,
        reason = "the method itself is for one lifetime, and any is needed"
    )]
    let result = py.detach(|| {
        work(&mut |_| match Python::attach(|py| py.check_signals()) {
            Ok(()) => true,
            Err(error) => {
                raised = Some(error);
                false
            }
        })
    });
    match raised {
        Some(error) => Err(error),
        None => result.map_err(failure),
    }
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

//! The program's questions, asked of a Python object.
//!
//! Responsible for calling `memfit.program.host.Host` and for turning its exceptions into [`HostError`]. Which
//! exception means what is decided there, by `Host.explain`.

use std::path::{Path, PathBuf};

use memfit::{Calibration, Host, HostError, HostErrorKind, Pruning, Script, Settings};
use pyo3::call::PyCallArgs;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;

use crate::value::Value;

/// A `memfit.program.host.Host`.
pub(crate) struct PythonHost {
    host: Py<PyAny>,
}

/// `(kind, message, traceback, hint)` as `Host.explain` returns it.
type Explanation = (Value<HostErrorKind>, String, Option<String>, Option<String>);

impl PythonHost {
    pub(crate) const fn new(host: Py<PyAny>) -> Self {
        Self { host }
    }

    /// Calls the method of that name.
    fn ask<T>(
        &self,
        question: &str,
        arguments: impl for<'py> PyCallArgs<'py>,
    ) -> Result<T, HostError>
    where
        T: for<'py> FromPyObjectOwned<'py>,
    {
        Python::attach(|py| {
            let host = self.host.bind(py);
            let answer = host.call_method1(question, arguments);
            let answer = answer.and_then(|answer| answer.extract().map_err(Into::into));
            answer.map_err(|error| explain(host, &error))
        })
    }
}

fn explain(host: &Bound<'_, PyAny>, error: &PyErr) -> HostError {
    let explained = host
        .call_method1("explain", (error.value(host.py()),))
        .and_then(|answer| answer.extract::<Explanation>());
    match explained {
        Ok((Value(kind), message, traceback, hint)) => HostError {
            kind,
            message,
            traceback,
            hint,
        },
        Err(second) => HostError::new(HostErrorKind::Internal, format!("{error}; then {second}")),
    }
}

impl Host for PythonHost {
    fn insist_on_weights(&mut self) -> Result<(), HostError> {
        self.ask::<Py<PyAny>>("insist_on_weights", ()).map(drop)
    }

    fn build(
        &mut self,
        target: &str,
        settings: &Settings,
        device: Option<&str>,
    ) -> Result<(), HostError> {
        self.ask::<Py<PyAny>>("build", (target, settings, device))
            .map(drop)
    }

    fn capture(
        &mut self,
        target: &str,
        settings: &Settings,
        device: Option<&str>,
    ) -> Result<Vec<u8>, HostError> {
        self.ask("capture", (target, settings, device))
    }

    fn alternatives(
        &mut self,
        target: &str,
        settings: &Settings,
        device: Option<&str>,
        trace: &[u8],
        ways: &str,
    ) -> Result<Vec<u8>, HostError> {
        self.ask("alternatives", (target, settings, device, trace, ways))
    }

    fn op_seconds(
        &mut self,
        target: &str,
        settings: &Settings,
        trace: &[u8],
    ) -> Result<String, HostError> {
        self.ask("op_seconds", (target, settings, trace))
    }

    fn device_profile(
        &mut self,
        device_kind: &str,
        file: Option<&Path>,
    ) -> Result<String, HostError> {
        self.ask("device_profile", (device_kind, file))
    }

    fn offer(
        &mut self,
        device_kind: &str,
        place: &str,
        profile: Option<&str>,
    ) -> Result<String, HostError> {
        self.ask("offer", (device_kind, place, profile))
    }

    fn overhead_bytes(&mut self, device: &str) -> Result<u64, HostError> {
        self.ask("overhead_bytes", (device,))
    }

    fn examine(&mut self, offload: Option<&str>) -> Result<String, HostError> {
        self.ask("examine", (offload,))
    }

    fn profile_path(&mut self, device_kind: &str) -> Result<PathBuf, HostError> {
        self.ask("profile_path", (device_kind,))
    }

    fn calibrate(&mut self, calibration: &Calibration) -> Result<String, HostError> {
        let folder = calibration.folder.as_ref();
        let arguments = (&calibration.device_kind, calibration.seconds, folder);
        self.ask("calibrate", arguments)
    }

    fn prune(
        &mut self,
        target: &str,
        settings: &Settings,
        request: &Pruning,
    ) -> Result<String, HostError> {
        let request = serde_json::to_string(request).map_err(|error| {
            HostError::new(
                HostErrorKind::Internal,
                format!("cannot write JSON: {error}"),
            )
        })?;
        self.ask("prune", (target, settings, request))
    }

    fn verify(
        &mut self,
        target: &str,
        settings: &Settings,
        plan_json: &str,
    ) -> Result<String, HostError> {
        self.ask("verify", (target, settings, plan_json))
    }

    fn verify_compiled(
        &mut self,
        target: &str,
        settings: &Settings,
        trace: &[u8],
        budget_bytes: u64,
        request_json: &str,
    ) -> Result<String, HostError> {
        let arguments = (target, settings, trace, budget_bytes, request_json);
        self.ask("verify_compiled", arguments)
    }

    fn run_script(&mut self, script: &Script) -> Result<String, HostError> {
        let lease = script.lease.as_ref().map(|lease| {
            let device = lease.device.as_deref();
            let (is_wanted, wait) = (lease.is_wanted, lease.wait_seconds);
            (
                is_wanted,
                wait,
                lease.priority,
                device,
                lease.is_alone_allowed,
            )
        });
        let fitting = script.fitting.as_ref().map(serde_json::to_string);
        let fitting = fitting
            .transpose()
            .map_err(|error| HostError::new(HostErrorKind::Internal, error.to_string()))?;
        let arguments = (
            &script.command,
            script.is_module,
            &script.snapshot,
            fitting,
            lease,
            script.announce,
        );
        self.ask("run_script", arguments)
    }

    fn interrupted(&mut self) -> bool {
        // The handler raises KeyboardInterrupt; asking takes the signal off the list.
        Python::attach(|py| py.check_signals().is_err())
    }
}

//! The program's questions, asked of a Python object.
//!
//! Responsible for calling `memfit.program.host.Host` and for turning its exceptions into [`HostError`]. Which
//! exception means what is decided there, by `Host.explain`.

use std::path::{Path, PathBuf};

use memfit::{Calibration, Host, HostError, HostErrorKind, Script, Settings};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A `memfit.program.host.Host`.
pub(crate) struct PythonHost {
    host: Py<PyAny>,
}

/// `(kind, message, traceback, hint)` as `Host.explain` returns it.
type Explanation = (String, String, Option<String>, Option<String>);

impl PythonHost {
    pub(crate) const fn new(host: Py<PyAny>) -> Self {
        Self { host }
    }

    fn ask<T>(
        &self,
        question: impl for<'py> FnOnce(&Bound<'py, PyAny>) -> PyResult<T>,
    ) -> Result<T, HostError> {
        Python::attach(|py| {
            let host = self.host.bind(py);
            question(host).map_err(|error| explain(host, &error))
        })
    }
}

fn explain(host: &Bound<'_, PyAny>, error: &PyErr) -> HostError {
    let explained = host
        .call_method1("explain", (error.value(host.py()),))
        .and_then(|answer| answer.extract::<Explanation>());
    match explained {
        Ok((kind, message, traceback, hint)) => HostError {
            kind: kind_of(&kind),
            message,
            traceback,
            hint,
        },
        Err(second) => HostError::new(HostErrorKind::Internal, format!("{error}; then {second}")),
    }
}

fn kind_of(name: &str) -> HostErrorKind {
    match name {
        "usage" => HostErrorKind::Usage,
        "workload" => HostErrorKind::Workload,
        "capture" => HostErrorKind::Capture,
        "does_not_fit" => HostErrorKind::DoesNotFit,
        "no_room" => HostErrorKind::NoRoom,
        "interrupted" => HostErrorKind::Interrupted,
        _ => HostErrorKind::Internal,
    }
}

impl Host for PythonHost {
    fn build(&mut self, target: &str, settings: &Settings) -> Result<(), HostError> {
        self.ask(|host| {
            host.call_method1("build", (target, settings.to_vec()))
                .map(drop)
        })
    }

    fn capture(
        &mut self,
        target: &str,
        settings: &Settings,
        device: Option<&str>,
    ) -> Result<Vec<u8>, HostError> {
        self.ask(|host| {
            host.call_method1("capture", (target, settings.to_vec(), device))?
                .extract()
        })
    }

    fn alternatives(
        &mut self,
        target: &str,
        settings: &Settings,
        device: Option<&str>,
        trace: &[u8],
    ) -> Result<Vec<u8>, HostError> {
        self.ask(|host| {
            let trace = PyBytes::new(host.py(), trace);
            let arguments = (target, settings.to_vec(), device, trace);
            host.call_method1("alternatives", arguments)?.extract()
        })
    }

    fn op_seconds(
        &mut self,
        target: &str,
        settings: &Settings,
        trace: &[u8],
    ) -> Result<String, HostError> {
        self.ask(|host| {
            let trace = PyBytes::new(host.py(), trace);
            host.call_method1("op_seconds", (target, settings.to_vec(), trace))?
                .extract()
        })
    }

    fn device_profile(
        &mut self,
        device_kind: &str,
        file: Option<&Path>,
    ) -> Result<String, HostError> {
        self.ask(|host| {
            host.call_method1("device_profile", (device_kind, file))?
                .extract()
        })
    }

    fn offer(
        &mut self,
        device_kind: &str,
        place: &str,
        profile: Option<&str>,
    ) -> Result<String, HostError> {
        self.ask(|host| {
            host.call_method1("offer", (device_kind, place, profile))?
                .extract()
        })
    }

    fn overhead_bytes(&mut self, device: &str) -> Result<u64, HostError> {
        self.ask(|host| host.call_method1("overhead_bytes", (device,))?.extract())
    }

    fn examine(&mut self, offload: Option<&str>) -> Result<String, HostError> {
        self.ask(|host| host.call_method1("examine", (offload,))?.extract())
    }

    fn profile_path(&mut self, device_kind: &str) -> Result<PathBuf, HostError> {
        self.ask(|host| host.call_method1("profile_path", (device_kind,))?.extract())
    }

    fn calibrate(&mut self, calibration: &Calibration) -> Result<String, HostError> {
        self.ask(|host| {
            let folder = calibration.folder.as_ref();
            let arguments = (&calibration.device_kind, calibration.seconds, folder);
            host.call_method1("calibrate", arguments)?.extract()
        })
    }

    fn verify(
        &mut self,
        target: &str,
        settings: &Settings,
        plan_json: &str,
    ) -> Result<String, HostError> {
        self.ask(|host| {
            host.call_method1("verify", (target, settings.to_vec(), plan_json))?
                .extract()
        })
    }

    fn verify_compiled(
        &mut self,
        target: &str,
        settings: &Settings,
        trace: &[u8],
        budget_bytes: u64,
        request_json: &str,
    ) -> Result<String, HostError> {
        self.ask(|host| {
            let trace = PyBytes::new(host.py(), trace);
            let arguments = (target, settings.to_vec(), trace, budget_bytes, request_json);
            host.call_method1("verify_compiled", arguments)?.extract()
        })
    }

    fn run_script(&mut self, script: &Script) -> Result<String, HostError> {
        self.ask(|host| {
            let command = script.command.clone();
            let lease = script.lease.as_ref().map(|lease| {
                let device = lease.device.as_deref();
                (lease.is_wanted, lease.wait_seconds, lease.priority, device)
            });
            let arguments = (
                command,
                script.is_module,
                script.snapshot.clone(),
                script.budget.clone(),
                lease,
                script.offload.clone(),
                script.announce,
            );
            host.call_method1("run_script", arguments)?.extract()
        })
    }

    fn interrupted(&mut self) -> bool {
        // The handler raises KeyboardInterrupt; asking takes the signal off the list.
        Python::attach(|py| py.check_signals().is_err())
    }
}

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
pub(crate) struct PythonHost(pub(crate) Py<PyAny>);

/// `(kind, message, traceback, hint)` as `Host.explain` returns it.
type Explanation = (Value<HostErrorKind>, String, Option<String>, Option<String>);

impl PythonHost {
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
            let host = self.0.bind(py);
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

/// Questions that are methods of the same name, with the same arguments.
macro_rules! ask {
    ($(fn $question:ident($($argument:ident: $type:ty),+) -> $answer:ty;)+) => {$(
        fn $question(&mut self, $($argument: $type),+) -> Result<$answer, HostError> {
            self.ask(stringify!($question), ($($argument,)+))
        }
    )+};
}

impl Host for PythonHost {
    ask! {
        fn capture(target: &str, settings: &Settings, device: Option<&str>) -> Vec<u8>;
        fn alternatives(
            target: &str, settings: &Settings, device: Option<&str>, trace: &[u8], ways: &str
        ) -> Vec<u8>;
        fn op_seconds(target: &str, settings: &Settings, trace: &[u8]) -> String;
        fn device_profile(device_kind: &str, file: Option<&Path>) -> String;
        fn offer(device_kind: &str, place: &str, profile: Option<&str>) -> String;
        fn overhead_bytes(device: &str) -> u64;
        fn examine(offload: Option<&str>) -> String;
        fn profile_path(device_kind: &str) -> PathBuf;
        fn verify(target: &str, settings: &Settings, plan_json: &str) -> String;
        fn verify_compiled(
            target: &str, settings: &Settings, trace: &[u8], budget_bytes: u64, request_json: &str
        ) -> String;
    }

    fn insist_on_weights(&mut self) -> Result<(), HostError> {
        self.ask::<Py<PyAny>>("insist_on_weights", ()).map(drop)
    }

    fn build(
        &mut self,
        target: &str,
        settings: &Settings,
        device: Option<&str>,
    ) -> Result<(), HostError> {
        let arguments = (target, settings, device);
        self.ask::<Py<PyAny>>("build", arguments).map(drop)
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
        self.ask("prune", (target, settings, Value(request)))
    }

    fn run_script(&mut self, script: &Script) -> Result<String, HostError> {
        let arguments = (
            &script.command,
            script.is_module,
            &script.snapshot,
            Value(&script.fitting),
            Value(&script.lease),
            script.announce,
        );
        self.ask("run_script", arguments)
    }

    fn interrupted(&mut self) -> bool {
        // The handler raises KeyboardInterrupt; asking takes the signal off the list.
        Python::attach(|py| py.check_signals().is_err())
    }
}

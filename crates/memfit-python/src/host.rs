//! The program, and its questions asked of a Python object.
//!
//! Responsible for calling `memfit.program.host.Host` and for turning its exceptions into [`HostError`]. Which
//! exception means what is decided there, by `Host.explain`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use memfit::{Host, HostError, HostErrorKind, Pruning, Script, Settings};
use memfit_engine::cost::DeviceProfile;
use memfit_engine::plan::{Asked, Plan, PlanRequest};
use pyo3::call::PyCallArgs;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;
use serde_json::Value as Json;

use crate::functions::functions;
use crate::value::Value;

functions! {
    /// Runs the program with `argv` and returns its exit code.
    free fn run(argv: Vec<OsString>, host: Py<PyAny>) -> u8 = {
        let (mut stdout, mut stderr) = (std::io::stdout(), std::io::stderr());
        let streams = memfit::Streams::process(&mut stdout, &mut stderr);
        memfit::run(argv, &mut PythonHost(host), streams)
    };
}

/// A `memfit.program.host.Host`.
struct PythonHost(Py<PyAny>);

impl PythonHost {
    /// Calls the method of that name.
    fn ask<T: for<'py> FromPyObjectOwned<'py>>(
        &self,
        question: &str,
        arguments: impl for<'py> PyCallArgs<'py>,
    ) -> Result<T, HostError> {
        Python::attach(|py| {
            let host = self.0.bind(py);
            let answer = host.call_method1(question, arguments);
            let answer = answer.map_err(|error| explain(host, &error))?;
            let answer: PyResult<T> = answer.extract().map_err(Into::into);
            answer.map_err(|error| HostError::bad_answer(question, error))
        })
    }
}

fn explain(host: &Bound<'_, PyAny>, error: &PyErr) -> HostError {
    let explained = host
        .call_method1("explain", (error.value(host.py()),))
        .and_then(|answer| answer.extract());
    match explained {
        Ok(Value(explained)) => explained,
        Err(second) => HostError::new(HostErrorKind::Internal, format!("{error}; then {second}")),
    }
}

/// Questions that are methods of the same name, with the same arguments. What is marked so crosses as a `Value`.
macro_rules! ask {
    ($(fn $name:ident($($argument:ident: $type:ty $(= $as:ident)?),*) -> $answer:ty $(= $by:ident)?;)+) => {$(
        fn $name(&mut self, $($argument: $type),*) -> Result<$answer, HostError> {
            let answer = self.ask(stringify!($name), ($($($as)?($argument),)*));
            answer.map(|$($by)?(answer)| answer)
        }
    )+};
}

#[expect(unused_parens, reason = "around what crosses as it is")]
impl Host for PythonHost {
    ask! {
        fn insist_on_weights() -> () = Value;
        fn build(target: &str, settings: &Settings, device: Option<&str>) -> () = Value;
        fn capture(target: &str, settings: &Settings, device: Option<&str>) -> Vec<u8>;
        fn alternatives(
            target: &str, settings: &Settings, device: Option<&str>, trace: &[u8], ways: &[Asked] = Value
        ) -> Vec<u8>;
        fn op_seconds(target: &str, settings: &Settings, trace: &[u8]) -> Json = Value;
        fn device_profile(device_kind: &str, file: Option<&Path>) -> Json = Value;
        fn offer(device_kind: &str, place: &str, profile: Option<&DeviceProfile> = Value) -> Json = Value;
        fn overhead_bytes(device: &str) -> u64;
        fn examine(offload: Option<&str>) -> Json = Value;
        fn profile_path(device_kind: &str) -> PathBuf;
        fn calibrate(device_kind: &str, seconds: f64, folder: Option<&Path>) -> String;
        fn verify(target: &str, settings: &Settings, plan: &Plan = Value) -> Json = Value;
        fn verify_compiled(
            target: &str, settings: &Settings, trace: &[u8], budget_bytes: u64, request: &PlanRequest = Value
        ) -> Json = Value;
        fn prune(target: &str, settings: &Settings, request: &Pruning = Value) -> Json = Value;
    }

    fn run_script(&mut self, script: &Script) -> Result<Json, HostError> {
        let arguments = (
            &script.command,
            script.is_module,
            &script.snapshot,
            Value(&script.fitting),
            Value(&script.lease),
            script.announce,
        );
        self.ask("run_script", arguments).map(|Value(seen)| seen)
    }

    fn interrupted(&mut self) -> bool {
        // The handler raises KeyboardInterrupt; asking takes the signal off the list.
        Python::attach(|py| py.check_signals().is_err())
    }
}

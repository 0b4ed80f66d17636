//! Running the program on byte vectors with a host that answers from memory.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use memfit::{Host, HostError, HostErrorKind, Pruning, Script, Settings, Streams};
use memfit_engine::cost::DeviceProfile;
use memfit_engine::file::{decode, encode};
use memfit_engine::plan::{Asked, Plan, PlanRequest};
use memfit_engine::trace::Alternatives;
use serde_json::{Value, json};

use crate::sample;

/// What a run left behind.
pub(crate) struct Outcome {
    pub(crate) code: u8,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap()
    }
}

/// A host with fixed answers; each can be replaced by a failure.
pub(crate) struct FakeHost {
    pub(crate) capture_failure: Option<HostError>,
    /// Planned peak that a verification measures, relative to the one predicted.
    pub(crate) measured_ratio: f64,
    pub(crate) gradients: &'static str,
    /// Why the step is not compiled; empty where it is.
    pub(crate) not_compiled: &'static str,
    pub(crate) buffers: &'static str,
    pub(crate) interrupted: bool,
    pub(crate) settings_seen: Vec<(String, String)>,
    pub(crate) device_seen: Option<String>,
    pub(crate) verifications: u32,
    pub(crate) script_seen: Option<Script>,
    /// What a script is said to have taken, if not the sample.
    pub(crate) summary: Option<Value>,
    pub(crate) calibration_seen: Option<(String, f64, Option<PathBuf>)>,
    pub(crate) cache: Option<PathBuf>,
    /// What is said to be installed, if not the sample.
    pub(crate) examined: Option<Value>,
}

impl Default for FakeHost {
    fn default() -> Self {
        Self {
            capture_failure: None,
            measured_ratio: 1.0,
            gradients: "bitwise",
            not_compiled: "",
            buffers: "bitwise",
            interrupted: false,
            settings_seen: Vec::new(),
            device_seen: None,
            verifications: 0,
            script_seen: None,
            summary: None,
            calibration_seen: None,
            cache: None,
            examined: None,
        }
    }
}

impl Host for FakeHost {
    fn insist_on_weights(&mut self) -> Result<(), HostError> {
        Ok(())
    }

    fn build(&mut self, _: &str, _: &Settings, _: Option<&str>) -> Result<(), HostError> {
        Ok(())
    }

    fn capture(
        &mut self,
        target: &str,
        settings: &Settings,
        device: Option<&str>,
    ) -> Result<Vec<u8>, HostError> {
        if let Some(failure) = &self.capture_failure {
            return Err(failure.clone());
        }
        self.settings_seen = settings.to_vec();
        self.device_seen = device.map(str::to_owned);
        let mut trace = sample::trace();
        target.clone_into(&mut trace.meta.target);
        Ok(encode(&trace))
    }

    fn alternatives(
        &mut self,
        _: &str,
        _: &Settings,
        _: Option<&str>,
        trace: &[u8],
        _: &[Asked],
    ) -> Result<Vec<u8>, HostError> {
        let none = Alternatives::default();
        let trace = decode(trace).unwrap();
        Ok(encode(&trace.with_alternatives(none).unwrap()))
    }

    fn op_seconds(&mut self, _: &str, _: &Settings, _: &[u8]) -> Result<Value, HostError> {
        let seconds = vec![0.001; sample::trace().ops.len()];
        Ok(json!({ "kind": "profile", "op_seconds": seconds }))
    }

    fn device_profile(&mut self, _: &str, _: Option<&Path>) -> Result<Value, HostError> {
        Ok(json!({
            "name": "a test machine", "flops_per_second": { "float32": 1e11 },
            "bytes_per_second": 1e10, "op_overhead_seconds": 1e-6,
        }))
    }

    fn offer(
        &mut self,
        _device_kind: &str,
        place: &str,
        _profile: Option<&DeviceProfile>,
    ) -> Result<Value, HostError> {
        Ok(json!({
            "tier": "disk", "folder": place,
            "write_bytes_per_second": 1e9, "read_bytes_per_second": 2e9,
        }))
    }

    fn overhead_bytes(&mut self, _: &str) -> Result<u64, HostError> {
        Ok(1 << 20)
    }

    fn examine(&mut self, offload: Option<&str>) -> Result<Value, HostError> {
        let mut examined = self.examined.clone().unwrap_or_else(sample::examined);
        if let Some(place) = offload {
            examined["offload"] = json!({
                "place": place, "write_bytes_per_second": 1e9, "read_bytes_per_second": 2e9,
                "why_not": null,
            });
        }
        Ok(examined)
    }

    fn profile_path(&mut self, device_kind: &str) -> Result<PathBuf, HostError> {
        let folder = self.cache.clone().unwrap();
        Ok(folder.join("memfit").join(format!("{device_kind}.json")))
    }

    fn prune(&mut self, _: &str, _: &Settings, request: &Pruning) -> Result<Value, HostError> {
        let facts = |peak: u64, parameters: u64| {
            json!({ "predicted_peak_bytes": peak,
            "parameters": parameters, "parameter_bytes": 4 * parameters })
        };
        let group = |layer: u32| {
            json!({ "channels": 3072, "kept": 1536,
            "parameters": [format!("h.{layer}.fc.weight"), format!("h.{layer}.out.weight")] })
        };
        let answer = json!({
            "budget_bytes": null, "scores": request.scores, "share": 0.5,
            "before": facts(300 << 20, 12_345_678), "after": facts(200 << 20, 6_172_839),
            "groups": [group(0), group(1)],
            "stays": [{ "why": "the model returns it", "parameters": ["head.weight", "head.bias"] }],
            "trials": 1,
        });
        Ok(answer)
    }

    fn calibrate(
        &mut self,
        device_kind: &str,
        seconds: f64,
        folder: Option<&Path>,
    ) -> Result<String, HostError> {
        let folder = folder.map(Path::to_owned);
        self.calibration_seen = Some((device_kind.to_owned(), seconds, folder));
        let point = json!([{ "work": 1e6, "seconds": 1e-5 }]);
        Ok(json!({
            "schema_version": 1, "kind": "device_profile", "device_kind": "cpu",
            "device_name": "a test processor", "torch_version": "2.15.0", "threads": 2,
            "date": "2026-01-02", "seconds": 1.5, "median_spread": 0.25,
            "disk": { "folder": "/scratch", "method": "direct" },
            "warnings": ["the machine is busy"],
            "samples": [
                { "what": "matmul.float32", "flops": 1_000_000, "seconds": 1e-5, "per_second": 1e11,
                  "spread": 0.1, "runs": 9 },
                { "what": "gelu", "bytes": 1_000_000, "seconds": 1e-5, "per_second": 1e11,
                  "spread": 0.1, "runs": 9 },
            ],
            "profile": {
                "name": "a test machine", "flops_per_second": { "float32": 1e11 },
                "bytes_per_second": 1e10, "op_overhead_seconds": 1e-6,
                "curves": { "compute": { "matmul": { "float32": point } }, "memory": {} },
                "transfers": { "disk_write": 1e9, "disk_read": 2e9 },
            },
        })
        .to_string())
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a made-up measurement"
    )]
    fn verify(&mut self, _: &str, _: &Settings, plan: &Plan) -> Result<Value, HostError> {
        self.verifications += 1;
        let plan: Value = serde_json::to_value(plan).unwrap();
        let predicted = |way: &str| plan[way]["predicted_peak_bytes"].as_u64().unwrap();
        let planned = (predicted("planned") as f64 * self.measured_ratio) as u64;
        Ok(json!({
            "unplanned": { "measured_peak_bytes": predicted("unplanned"), "step_cpu_seconds": 0.5 },
            "planned": { "measured_peak_bytes": planned, "step_cpu_seconds": 0.55 },
            "gradients": { "agreement": self.gradients, "max_relative_error": 0.0 },
            "loss": { "agreement": "bitwise", "max_relative_error": 0.0 },
            "buffers": { "agreement": self.buffers, "max_relative_error": 0.0 },
            "divergence": "", "kept_drops": [],
        }))
    }

    fn verify_compiled(
        &mut self,
        _: &str,
        _: &Settings,
        trace: &[u8],
        budget_bytes: u64,
        request: &PlanRequest,
    ) -> Result<Value, HostError> {
        assert!(!trace.is_empty());
        let request: Value = serde_json::to_value(request).unwrap();
        assert_eq!(request["own_loop"], false);
        if !self.not_compiled.is_empty() {
            return Ok(json!({ "not_compiled": self.not_compiled }));
        }
        let step = |bytes: u64, seconds: f64| json!({ "measured_peak_bytes": bytes, "step_cpu_seconds": seconds });
        let exact = json!({ "agreement": "bitwise", "max_relative_error": 0.0 });
        let rounded = json!({ "agreement": self.gradients, "max_relative_error": 2e-7 });
        let mut alone = step(2 * budget_bytes, 0.4);
        alone["max_relative_error"] = json!(3e-7);
        Ok(json!({
            "unplanned": step(3 * budget_bytes, 0.5),
            "planned": step(budget_bytes / 10 * 9, 0.44),
            "gradients": rounded, "loss": exact, "parameters": exact, "buffers": exact,
            "predicted_peak_bytes": budget_bytes,
            "compiled": {
                "reference": "eager", "tolerance": 1e-5, "corrections": 0, "torch_compile": alone,
                "actions": [{ "kind": "remat", "promise": "equivalent", "count": 7 }],
                "graphs": [{
                    "ops": 90, "saved_bytes": 100, "offloaded_bytes": 0, "recomputed_ops": 7, "reason": "",
                    "predicted_peak_bytes": budget_bytes, "unplanned_peak_bytes": 2 * budget_bytes,
                }],
            },
        }))
    }

    fn run_script(&mut self, script: &Script) -> Result<Value, HostError> {
        self.script_seen = Some(script.clone());
        let sample = || sample::run(&script.command[0].to_string_lossy());
        Ok(self.summary.take().unwrap_or_else(sample))
    }

    fn interrupted(&mut self) -> bool {
        self.interrupted
    }
}

impl FakeHost {
    pub(crate) fn failing(kind: HostErrorKind, message: &str) -> Self {
        Self {
            capture_failure: Some(HostError::new(kind, message)),
            ..Self::default()
        }
    }

    /// Runs `memfit ARGUMENTS` (split at spaces) with no terminal in sight.
    pub(crate) fn run(&mut self, arguments: &str) -> Outcome {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let code = memfit::run(
            words(arguments),
            self,
            Streams {
                stdout: &mut stdout,
                stderr: &mut stderr,
                stdout_is_terminal: false,
                stderr_is_terminal: false,
                no_color: false,
            },
        );
        Outcome {
            code,
            stdout: String::from_utf8(stdout).unwrap(),
            stderr: String::from_utf8(stderr).unwrap(),
        }
    }
}

/// `memfit` and the words of `arguments`.
pub(crate) fn words(arguments: &str) -> Vec<OsString> {
    std::iter::once("memfit")
        .chain(arguments.split_whitespace())
        .map(OsString::from)
        .collect()
}

/// Runs with the default host.
pub(crate) fn run(arguments: &str) -> Outcome {
    FakeHost::default().run(arguments)
}

/// A stream whose reader has gone.
pub(crate) struct ClosedPipe;

impl Write for ClosedPipe {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::Error::from(io::ErrorKind::BrokenPipe))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

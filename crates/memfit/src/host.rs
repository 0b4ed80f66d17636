//! What the program asks of the Python side.
//!
//! Responsible for the questions and for the kinds of failure. Not responsible for the answers: only
//! the Python package imports torch. Tests answer with a fake.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use memfit_engine::cost::DeviceProfile;
use memfit_engine::plan::{ActionKind, Asked, Class, Plan, PlanRequest};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Settings of a target's function, as `--set name=value` gave them.
pub type Settings = [(String, String)];

/// A script to run.
#[derive(Debug, Clone, PartialEq)]
pub struct Script {
    /// The script or module, and its arguments.
    pub command: Vec<OsString>,
    /// Whether the command names a module, as with `python -m`.
    pub is_module: bool,
    /// Where to write a snapshot of CUDA memory.
    pub snapshot: Option<PathBuf>,
    /// How its training steps shall be fitted; absent to leave them alone.
    pub fitting: Option<ScriptFitting>,
    /// How to lease the budget from the broker; absent to lease nothing.
    pub lease: Option<ScriptLease>,
    /// Whether to say on standard error what is planned, when it is.
    pub announce: bool,
}

/// What the training steps of a script shall stay within, and by which means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ScriptFitting {
    /// The budget, as written.
    pub budget: String,
    /// Loosest class of action.
    pub allow: Class,
    /// Techniques that are allowed by name, whatever their class.
    pub allow_kinds: Vec<ActionKind>,
    /// Techniques to leave out.
    pub forbid: Vec<ActionKind>,
    /// Folder, or `host`, where to offload to; absent for one that memfit chooses, if it may.
    pub offload: Option<String>,
    /// Whether memfit may choose a folder where nothing else fits.
    pub may_choose_folder: bool,
    /// Whether to stop the script before the first step that would exceed the budget.
    pub is_strict: bool,
}

/// How a script leases its budget.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScriptLease {
    /// Whether the user asked for it, so that no broker is worth saying.
    pub is_wanted: bool,
    /// How long to wait for room; absent for as long as it takes.
    pub wait_seconds: Option<f64>,
    /// Who goes first.
    pub priority: i8,
    /// `host` or `cuda:0`; absent for the broker's first GPU, else the host.
    pub device: Option<String>,
    /// Whether to go on without a lease where the broker is away.
    pub is_alone_allowed: bool,
}

/// How a model shall be pruned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pruning {
    /// The budget of the step, as written; absent where parameters are counted.
    pub budget: Option<String>,
    /// How many parameters may be left, as written.
    pub parameters: Option<String>,
    /// What channels are chosen by: `magnitude` or `taylor`.
    pub scores: String,
    /// Whether channels may go that a norm takes its mean over.
    pub through_norms: bool,
    /// Where to write the smaller model.
    pub save: Option<PathBuf>,
}

/// The side that can build a model and run it.
///
/// What it answers as a [`Value`] is read by the caller: an answer that cannot be read is a bug in memfit.
pub trait Host {
    /// Has every build from now on make the weights for real, however much memory there is.
    ///
    /// # Errors
    ///
    /// A bug in memfit.
    fn insist_on_weights(&mut self) -> Result<(), HostError>;

    /// Imports what the target needs and builds its workload for a kind of device, so that neither counts
    /// as capture.
    ///
    /// # Errors
    ///
    /// The target is wrong or fails by itself while it is built.
    fn build(
        &mut self,
        target: &str,
        settings: &Settings,
        device: Option<&str>,
    ) -> Result<(), HostError>;

    /// Records one step of the target and returns the encoded trace.
    ///
    /// # Errors
    ///
    /// The target is wrong, fails by itself, or cannot be recorded.
    fn capture(
        &mut self,
        target: &str,
        settings: &Settings,
        device: Option<&str>,
    ) -> Result<Vec<u8>, HostError>;

    /// Records the step of an encoded trace in other ways, and returns the trace with what came of it.
    ///
    /// # Errors
    ///
    /// As [`Self::capture`].
    fn alternatives(
        &mut self,
        target: &str,
        settings: &Settings,
        device: Option<&str>,
        trace: &[u8],
        ways: &[Asked],
    ) -> Result<Vec<u8>, HostError>;

    /// Times the ops of one real step and returns the engine's cost source.
    ///
    /// # Errors
    ///
    /// The step fails, or is not the one in the trace.
    fn op_seconds(
        &mut self,
        target: &str,
        settings: &Settings,
        trace: &[u8],
    ) -> Result<Value, HostError>;

    /// Finds or measures the profile of a device for the roofline.
    ///
    /// `device_kind` is that of the trace, `cpu` or `cuda`; `file` is a profile that the user named. The
    /// profile's name says what it is.
    ///
    /// # Errors
    ///
    /// The measurement fails, or the file is no profile of such a device.
    fn device_profile(
        &mut self,
        device_kind: &str,
        file: Option<&Path>,
    ) -> Result<Value, HostError>;

    /// Finds or measures how fast bytes move to and from a place, and returns the engine's offer of it.
    ///
    /// `place` is a folder, or `host` for the host's memory; `profile` is the device profile that plans use.
    ///
    /// # Errors
    ///
    /// The folder cannot be written to, or how fast it is is not known.
    fn offer(
        &mut self,
        device_kind: &str,
        place: &str,
        profile: Option<&DeviceProfile>,
    ) -> Result<Value, HostError>;

    /// Measures what a process with torch takes on a device apart from tensors, once, and keeps it.
    ///
    /// # Errors
    ///
    /// There is no such device, or torch is not there.
    fn overhead_bytes(&mut self, device: &str) -> Result<u64, HostError>;

    /// Says what is installed, and which features work with it; torch is looked at, not needed.
    ///
    /// `offload` is a place whose speed is measured, a folder or `host`.
    ///
    /// # Errors
    ///
    /// A bug in memfit: what is wrong with the machine is part of the answer.
    fn examine(&mut self, offload: Option<&str>) -> Result<Value, HostError>;

    /// Where the calibrated profile of this machine's device is kept.
    ///
    /// # Errors
    ///
    /// There is no such place.
    fn profile_path(&mut self, device_kind: &str) -> Result<PathBuf, HostError>;

    /// Measures a device of this machine for about so many seconds and returns the profile file's text.
    ///
    /// `folder` is whose disk is measured; the one for temporary files when absent.
    ///
    /// # Errors
    ///
    /// There is no such device, or the folder cannot be written to.
    fn calibrate(
        &mut self,
        device_kind: &str,
        seconds: f64,
        folder: Option<&Path>,
    ) -> Result<String, HostError>;

    /// Runs real steps with and without the plan, compares them, and returns the comparison.
    ///
    /// # Errors
    ///
    /// A step fails.
    fn verify(
        &mut self,
        target: &str,
        settings: &Settings,
        plan: &Plan,
    ) -> Result<Value, HostError>;

    /// Runs real steps eager, compiled by torch alone and compiled by a plan for a budget, and returns the
    /// comparison, or why the step is not compiled.
    ///
    /// # Errors
    ///
    /// A step fails.
    fn verify_compiled(
        &mut self,
        target: &str,
        settings: &Settings,
        trace: &[u8],
        budget_bytes: u64,
        request: &PlanRequest,
    ) -> Result<Value, HostError>;

    /// Prunes a target's model, writes it where the request says so, and returns the report.
    ///
    /// # Errors
    ///
    /// The target is wrong or fails, nothing can be pruned, or not enough.
    fn prune(
        &mut self,
        target: &str,
        settings: &Settings,
        request: &Pruning,
    ) -> Result<Value, HostError>;

    /// Runs an unmodified script under the count and returns what was seen.
    ///
    /// The script's own output, exceptions and exit are as without memfit.
    ///
    /// # Errors
    ///
    /// There is no such script; a script that fails is an answer, not an error.
    fn run_script(&mut self, script: &Script) -> Result<Value, HostError>;

    /// Whether the user has asked to stop since the last question. Asked often while the engine works.
    fn interrupted(&mut self) -> bool;
}

/// What kind of failure a host reports; decides the exit code and the words around the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostErrorKind {
    /// The request is wrong: target, settings, a missing dependency.
    Usage,
    /// The user's own code failed.
    Workload,
    /// The step ran but could not be recorded.
    Capture,
    /// The step does not fit.
    DoesNotFit,
    /// The broker has no room now.
    NoRoom,
    /// The user interrupted.
    Interrupted,
    /// A bug in memfit.
    #[serde(other)]
    Internal,
}

/// A failure of the host.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct HostError {
    /// What kind.
    pub kind: HostErrorKind,
    /// One sentence that names the thing.
    pub message: String,
    /// The user's own traceback, where their code failed, or memfit's, where memfit did.
    pub traceback: Option<String>,
    /// What to do next.
    pub hint: Option<String>,
}

impl HostError {
    /// A failure with only a message.
    pub fn new(kind: HostErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            traceback: None,
            hint: None,
        }
    }

    /// An answer that is none: a bug in memfit.
    pub fn bad_answer(question: &str, error: impl std::fmt::Display) -> Self {
        let message = format!("the Python side's answer to `{question}` is not valid: {error}");
        Self::new(HostErrorKind::Internal, message)
    }
}

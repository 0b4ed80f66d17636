//! What was counted while code ran, as structs: a track's record and the summary of `memfit run`.
//!
//! Responsible for the shapes, which the Python side fills: fields are added, never renamed. Integers
//! are bytes unless the name says otherwise. Not responsible for any number in them.

use std::collections::BTreeMap;

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::ActionKind;
use serde::{Deserialize, Serialize};

/// Bytes by category, under the names of [`crate::report::text::tracked::CATEGORIES`].
pub(crate) type ByCategory = BTreeMap<String, Bytes>;

/// Bytes that somebody held at a peak.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OwnedBytes {
    pub(crate) category: String,
    /// A variable and the line at which it was seen, or an op that took memory for itself.
    pub(crate) owner: String,
    pub(crate) blocks: u64,
    pub(crate) bytes: Bytes,
}

/// What `memfit.track` has seen.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct TrackDocument {
    pub(crate) name: String,
    pub(crate) devices: Vec<TrackedDevice>,
    pub(crate) seconds: f64,
    /// Class of the exception that ended it.
    pub(crate) exception: Option<String>,
    pub(crate) notes: Vec<String>,
}

/// One device of a track.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct TrackedDevice {
    pub(crate) device: String,
    pub(crate) before_bytes: Bytes,
    pub(crate) after_bytes: Bytes,
    pub(crate) peak_bytes: Bytes,
    pub(crate) before_by_category: ByCategory,
    pub(crate) after_by_category: ByCategory,
    /// Of `peak_told_bytes`. Absent on CUDA, whose allocator does not tell.
    pub(crate) peak_by_category: Option<ByCategory>,
    /// The peak, or a little less where that moment was not seen. Absent on CUDA.
    #[serde(default)]
    pub(crate) peak_told_bytes: Option<Bytes>,
    /// Who held it, the largest first.
    #[serde(default)]
    pub(crate) peak_owners: Vec<OwnedBytes>,
    pub(crate) reserved_before_bytes: Option<Bytes>,
    pub(crate) reserved_after_bytes: Option<Bytes>,
    pub(crate) reserved_peak_bytes: Option<Bytes>,
}

/// `memfit run`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunDocument {
    pub(crate) schema_version: u32,
    /// The script or module, as named on the command line.
    pub(crate) script: String,
    pub(crate) ended: Ended,
    /// The script's own.
    pub(crate) exit_code: u8,
    pub(crate) elapsed_seconds: f64,
    /// Whether the script imported torch at all.
    pub(crate) torch_imported: bool,
    pub(crate) devices: Vec<RunDevice>,
    pub(crate) steps: Steps,
    /// Memory past torch; absent where the system does not tell.
    #[serde(default)]
    pub(crate) process: Option<ProcessMemory>,
    pub(crate) oom: Option<OutOfMemory>,
    /// What `--budget` did; absent without it.
    #[serde(default)]
    pub(crate) fitting: Option<Fitting>,
    /// What was leased for it from the broker; absent where nothing was.
    #[serde(default)]
    pub(crate) lease: Option<RunLease>,
    /// File with the CUDA memory snapshot, where one was asked for and written.
    pub(crate) snapshot: Option<String>,
    pub(crate) notes: Vec<String>,
    /// Whether this process is one that the script forked off: the summary is its parent's.
    #[serde(default, skip_serializing)]
    pub(crate) quiet: bool,
}

/// What the system says of a script's process and its children.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessMemory {
    /// Most bytes resident at once.
    pub(crate) resident_peak_bytes: Bytes,
    /// Bytes shared with no file and no other process, when they were most.
    pub(crate) private_bytes: Bytes,
    /// Bytes of tensors then.
    pub(crate) tensor_bytes: Bytes,
    /// Child processes, when their private bytes were most.
    pub(crate) children: u64,
    /// Their names, each once.
    pub(crate) children_names: Vec<String>,
    /// Their private bytes together.
    pub(crate) children_bytes: Bytes,
    /// What the C library kept after frees, and gave back when asked at the end.
    pub(crate) trimmed_bytes: Bytes,
}

/// How a script came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ended {
    /// It ran to its last line.
    Finished,
    /// It called `sys.exit`.
    Exited,
    /// An exception that nothing caught.
    Exception,
    /// The same, because memory was refused.
    OutOfMemory,
    /// Ctrl-C.
    Interrupted,
}

/// One device of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunDevice {
    pub(crate) device: String,
    pub(crate) peak_bytes: Bytes,
    pub(crate) after_bytes: Bytes,
    /// Of `peak_told_bytes`. Absent on CUDA.
    pub(crate) peak_by_category: Option<ByCategory>,
    /// The peak, or a little less where that moment was not seen. Absent on CUDA.
    #[serde(default)]
    pub(crate) peak_told_bytes: Option<Bytes>,
    /// Who held it, the largest first.
    #[serde(default)]
    pub(crate) peak_owners: Vec<OwnedBytes>,
    /// On CUDA.
    pub(crate) reserved_peak_bytes: Option<Bytes>,
    /// When the peak was reached; absent on CUDA.
    pub(crate) peak: Option<Moment>,
}

/// A point of a script.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Moment {
    /// Since the script began.
    pub(crate) seconds: f64,
    pub(crate) phase: RunPhase,
    /// Optimizer steps done by then.
    pub(crate) steps_done: u64,
}

/// Where in a step a script is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RunPhase {
    /// Outside backward and the optimizer, and a backward follows or came before.
    Forward,
    /// In autograd's engine.
    Backward,
    /// In an optimizer's `step`.
    Optimizer,
}

/// The optimizer steps of a script.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Steps {
    pub(crate) count: u64,
    /// Iterations whose blocks were looked for when growth was seen last; 0 where they are not known.
    pub(crate) growing: u64,
    /// What each of them has kept, on average; 0 where nothing grows.
    pub(crate) growth_bytes_per_step: Bytes,
    /// What they have kept together.
    #[serde(default)]
    pub(crate) growth_bytes: Bytes,
    /// What an iteration is; absent where nothing grows.
    #[serde(default)]
    pub(crate) growth_rhythm: Option<Rhythm>,
    /// What keeps the bytes, where that was found.
    pub(crate) growth_cause: Option<String>,
    pub(crate) growth_advice: Option<String>,
}

/// What an iteration of a script is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Rhythm {
    /// An optimizer's step.
    Step,
    /// A run of autograd's engine, where no optimizer steps.
    Backward,
    /// A part of the run, where neither is.
    Time,
}

/// The request that was refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct OutOfMemory {
    pub(crate) device: String,
    /// Absent where the message does not say.
    pub(crate) requested_bytes: Option<Bytes>,
    /// Live tensors when it was refused.
    pub(crate) live_bytes: Bytes,
    pub(crate) live_by_category: Option<ByCategory>,
    pub(crate) at: Moment,
}

/// What `memfit run --budget` found and did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fitting {
    /// As written.
    pub(crate) budget: String,
    /// Whether it was kept; absent where it is a percentage and no step was planned.
    #[serde(default)]
    pub(crate) verdict: Option<BudgetVerdict>,
    /// Whether the script was to be held to it (`--strict`) and would not keep it.
    #[serde(default)]
    pub(crate) stopped: bool,
    /// Why the whole script ran unplanned, from some point on.
    pub(crate) refusal: Option<String>,
    /// The training loops, in the order they began.
    pub(crate) loops: Vec<FittedLoop>,
}

/// Whether a script stayed within its budget.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BudgetVerdict {
    pub(crate) budget_bytes: Bytes,
    /// The highest peak of the whole script, in its training steps and between them.
    pub(crate) peak_bytes: Bytes,
    pub(crate) kept: bool,
    /// What was furthest above the budget, as a clause; absent where it was kept.
    pub(crate) why: Option<String>,
    /// What would keep it; absent where it was kept.
    pub(crate) remedy: Option<String>,
}

/// The memory that a script leased.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunLease {
    /// `host` or `cuda:0`.
    pub(crate) device: String,
    /// Leased before the script started: the budget and `besides_bytes`.
    pub(crate) leased_bytes: Bytes,
    /// What torch takes apart from tensors, as measured in a process of its own.
    pub(crate) besides_bytes: Bytes,
    /// How long the script waited for it to be granted.
    pub(crate) waited_seconds: f64,
    /// Leased at the end.
    pub(crate) kept_bytes: Bytes,
    /// How often the lease changed for a plan.
    pub(crate) changes: u64,
}

/// One training loop of a script.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct FittedLoop {
    /// Classes of the models called in a forward, the one that begins it first.
    pub(crate) models: Vec<String>,
    /// Elements of the first model's parameters.
    pub(crate) parameters: u64,
    /// Classes of the optimizers; empty where the script updates parameters by itself.
    pub(crate) optimizers: Vec<String>,
    pub(crate) device: String,
    /// Why its steps ran unplanned, from some point on.
    pub(crate) refusal: Option<String>,
    /// Steps recorded, with what autograd saves in a file.
    pub(crate) observed: LoopSteps,
    pub(crate) planned: LoopSteps,
    pub(crate) unplanned: LoopSteps,
    /// The latest plan; absent where none was made.
    pub(crate) plan: Option<LoopPlan>,
    /// Plans made after the first.
    pub(crate) replans: u64,
    /// Where a step first left its plan.
    pub(crate) divergence: Option<String>,
    pub(crate) notes: Vec<String>,
}

/// Steps that ran in the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LoopSteps {
    pub(crate) steps: u64,
    /// Measured: most bytes live at once on the loop's device, whatever they were for.
    pub(crate) peak_bytes: Bytes,
}

/// The plan of a loop, in short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoopPlan {
    pub(crate) budget_bytes: Bytes,
    pub(crate) fits: bool,
    /// Predicted peak of the step without a plan, all else that the script holds included; absent if every recorded
    /// step ran in pieces of the batch.
    pub(crate) unplanned_peak_bytes: Option<Bytes>,
    pub(crate) predicted_peak_bytes: Bytes,
    /// Smallest peak over all plans that work inside the script's own loop; sought only where none fits.
    pub(crate) minimum_peak_bytes: Option<Bytes>,
    /// Smallest budget by which that one fits.
    pub(crate) minimum_budget_bytes: Option<Bytes>,
    pub(crate) predicted_step_ratio: f64,
    /// Whether large ops ran in pieces, which may change rounding, whatever the actions are.
    #[serde(default)]
    pub(crate) may_round: bool,
    pub(crate) actions: Vec<LoopAction>,
    /// What plans that other steps ran by have, and this one has not.
    #[serde(default)]
    pub(crate) other_kinds: Vec<ActionKind>,
}

/// One technique of a loop's plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LoopAction {
    pub(crate) kind: ActionKind,
    pub(crate) count: u64,
    pub(crate) bytes: Bytes,
}

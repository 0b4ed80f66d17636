//! What to do so that a step fits, and the promise that comes with it.
//!
//! Responsible for the plan's types (this file and `action.rs`), for the techniques (`technique/`), for the choice among
//! them (`choose.rs`, `combinations.rs`), the search within one combination of them (`search/`), the lower bound
//! (`bound/`), the front over all budgets (`front.rs`), the conversation in which planning asks for what it needs
//! (`session.rs`, `trace_requests.rs`) and the check every plan passes before anyone sees it (`validate.rs`). Not responsible for what a plan
//! does to memory ([`crate::step`]) or for carrying it out (the Python package).

mod action;
mod actions;
mod arena;
mod bottleneck;
mod bound;
mod choose;
mod combinations;
mod context;
mod front;
mod outcomes;
mod search;
mod session;
mod technique;
mod trace_requests;
mod validate;
mod ways;

pub use action::{Action, ActionSummary};
pub use choose::{plan, plan_within};
pub use context::PlanError;
pub use front::{Front, FrontBound, FrontPoint, FrontRequest, FrontStop, front};
pub use search::limits::{Limit, TimeLimit};
pub use search::transfers::Offer;
pub use session::{Answer, AnswerError, Made, Need, PlanSession, Search};
pub use technique::micro_batch::{CallInPieces, LossOfPieces, MicroBatch, mixed_items};
pub use technique::offload::Offload;
pub use technique::offload_optimizer::OffloadOptimizer;
pub use technique::offload_parameters::OffloadParameters;
pub use technique::optimizer_bits::OptimizerBits;
pub use technique::remat::Remat;
pub use technique::shrink::Shrink;
pub use technique::{ActionKind, Details, TECHNIQUES, Technique, counted};
pub use trace_requests::{Asked, Sizes};
pub use validate::InvalidPlan;
pub use ways::{ways, ways_without_leave};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bytes::{Budget, Bytes};
use crate::predict::reserved::Reserved;
use crate::trace::{OpIndex, Way};

/// What a user asks for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PlanRequest {
    /// The budget.
    pub budget: Budget,
    /// The widest class the user allows beyond what is needed.
    pub allow: Class,
    /// Kinds of action that the user allows by name, whatever their class.
    pub allow_kinds: Vec<ActionKind>,
    /// The user drives forward, backward and optimizer: only actions that live in forward.
    pub own_loop: bool,
    /// The user drives backward: updates inside it take more than a step of ours would where parameters are offloaded
    /// too, so one of the two has to do.
    pub own_backward: bool,
    /// Kinds of action the user forbids.
    pub forbid: Vec<ActionKind>,
    /// Paths of modules that compute in their own types, with parameters as they are, whatever else is cast.
    pub keep: Vec<String>,
    /// A place for what is offloaded; nothing is without one.
    pub offload: Option<Offer>,
}

impl Default for PlanRequest {
    fn default() -> Self {
        Self {
            budget: Budget::Percent(100.0),
            allow: Class::Exact,
            allow_kinds: Vec::new(),
            own_loop: false,
            own_backward: false,
            forbid: Vec::new(),
            keep: Vec::new(),
            offload: None,
        }
    }
}

impl PlanRequest {
    /// Does the user want actions of a kind that changes numbers?
    #[must_use]
    pub fn asks_for(&self, kind: ActionKind) -> bool {
        self.allow >= kind.technique().promise || self.allow_kinds.contains(&kind)
    }
}

/// Version of the shapes of plans and fronts. 2: `class` became `promise`; version 1 is read too.
pub const SCHEMA_VERSION: u32 = 2;

/// The promise an action makes about numbers. Ordered from strict to loose.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    JsonSchema,
    Serialize,
    Deserialize,
    Default,
)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "Promise")]
pub enum Class {
    /// Loss and every gradient bitwise equal to the unplanned step.
    #[default]
    Exact,
    /// Same mathematics; rounding may differ.
    Equivalent,
    /// Numerics change.
    Approximate,
}

/// Where bytes go that leave a device.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// The host's memory: for devices that have one of their own.
    Host,
    /// Files.
    Disk,
}

/// One dropped or stored allocation.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Dropped {
    /// Index of the forward op that creates it.
    pub op: OpIndex,
    /// Position among the tensors that op returns.
    pub output: u32,
    /// Shape of that tensor, for the executor's check.
    pub shape: Vec<u64>,
    /// Its size.
    pub bytes: Bytes,
    /// Module path, for people.
    pub module: String,
    /// Forward op from which on requests for other values let it pass: it is computed or fetched for them
    /// and let go. Absent: it stays once it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<OpIndex>,
}

/// A module call that the executor watches.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize)]
pub struct ActiveRegion {
    /// Module path; empty for the whole forward.
    pub module: String,
    /// How many times the module had been entered before in the step.
    pub call: u32,
    /// Index of its first op in forward.
    pub start: OpIndex,
    /// One past its last.
    pub end: OpIndex,
}

/// Does the planned step fit?
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Predicted peak plus margin is within the budget.
    Fits,
    /// No allowed plan found fits.
    DoesNotFit,
}

/// Why the search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The unplanned step fits: nothing to do.
    NothingToDo,
    /// The plan's time meets the lower bound.
    ProvedOptimal,
    /// The plan adds no more than a thousandth of forward above the lower bound.
    NearBound,
    /// No move of the neighbourhood improves the plan.
    LocalOptimum,
    /// The limit on the work of the search was reached.
    MoveLimit,
    /// The time limit was reached.
    TimeLimit,
    /// No plan fits, shown by the lower bound on the peak.
    ProvedInfeasible,
    /// No plan that fits was found.
    NotFound,
}

/// A predicted step.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Estimate {
    /// Peak of allocated bytes.
    pub predicted_peak_bytes: Bytes,
    /// Time under the plan's cost source; meaningful as a ratio.
    pub predicted_step_seconds: f64,
}

/// One block of memory for all that a step allocates.
///
/// Each allocation has an offset known beforehand: no fragmentation. What is there before the step, such as
/// parameters, lies outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Arena {
    /// Bytes of the smallest block found, sizes rounded as the device's allocator does.
    pub bytes: Bytes,
    /// No allocator can do with less: the largest sum of rounded sizes alive at once.
    pub lower_bound_bytes: Bytes,
}

/// Why an action is not in the plan.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Refusal {
    /// The action.
    pub kind: ActionKind,
    /// The reason, as a sentence without full stop.
    pub reason: String,
}

/// What a looser class would gain.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct NextClass {
    /// The class.
    #[serde(alias = "class")]
    pub promise: Class,
    /// Peak under its best plan for the same budget.
    pub predicted_peak_bytes: Bytes,
    /// Its step time over the unplanned one.
    pub predicted_step_ratio: f64,
    /// Kinds of action it uses.
    pub kinds: Vec<ActionKind>,
}

/// What is alive at the moment that stops the peak from going lower.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Bottleneck {
    /// The op, `aten.addmm.default`.
    pub op: String,
    /// Its module path.
    pub module: String,
    /// Its source line.
    pub source: String,
    /// `forward`, `backward` or `optimizer`.
    pub phase: crate::trace::Phase,
    /// Bytes there by category, largest first.
    pub breakdown: Vec<(crate::trace::Category, Bytes)>,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Plan {
    /// Version of this shape.
    pub schema_version: u32,
    /// The trace's target.
    pub target: String,
    /// Digest of the trace the plan was made for.
    pub trace_digest: String,
    /// Batch size of the step it was made for.
    pub batch: u64,
    /// The budget.
    pub budget_bytes: Bytes,
    /// Kept free below the budget for what the prediction is not sure of.
    pub margin_bytes: Bytes,
    /// Does it fit?
    pub verdict: Verdict,
    /// Loosest class among the actions.
    #[serde(alias = "class")]
    pub promise: Class,
    /// Without a plan.
    pub unplanned: Estimate,
    /// With it. Where nothing fits: the plan with the smallest peak found.
    pub planned: Estimate,
    /// What the caching allocator holds for the planned step; absent where there is none.
    #[serde(default)]
    pub reserved: Option<Reserved>,
    /// Smallest peak found over all allowed plans; where work is limited, it is sought only if none fits.
    pub minimum_peak_bytes: Bytes,
    /// One block that could hold all that the planned step allocates; absent in plans saved before this
    /// was known, and where work is limited and the plan fits.
    #[serde(default)]
    pub arena: Option<Arena>,
    /// Planned over unplanned step time.
    pub predicted_step_ratio: f64,
    /// No allowed plan within the budget can be faster than this ratio; 1 where none was found to fit.
    pub lower_bound_ratio: f64,
    /// Where the costs come from: `roofline (...)` or `profile (...)`.
    pub cost_source: String,
    /// Why the search ended.
    pub stop_reason: StopReason,
    /// Candidates evaluated.
    pub evaluations: u64,
    /// What to do, in the order optimizer, batch, activations.
    pub actions: Vec<Action>,
    /// What was not possible, and why.
    pub refusals: Vec<Refusal>,
    /// What the next class would gain; absent when it gains nothing or is used already.
    pub next_class: Option<NextClass>,
    /// What stops the peak from going lower.
    pub bottleneck: Option<Bottleneck>,
    /// How the loss reduces over the batch, see [`crate::trace::Meta::loss_reduction`].
    #[serde(default)]
    pub loss_reduction: String,
    /// Words to the user: fallbacks, warnings (dropout under micro-batches).
    pub notes: Vec<String>,
}

impl Plan {
    /// Pieces that it cuts the batch into; `None` where the batch stays whole.
    pub(crate) fn pieces(&self) -> Option<u64> {
        let mut actions = self.actions.iter();
        let cut = actions.find(|action| action.kind() == ActionKind::MicroBatch)?;
        Some(cut.count)
    }

    /// The way in which it runs the step.
    pub(crate) fn way(&self) -> Way {
        let mut way = Way::default();
        for action in &self.actions {
            match &action.details {
                Details::Chunk { chunk } => way.chunk = Some(chunk.clone()),
                Details::Autocast { autocast }
                | Details::AutocastFp16 {
                    autocast_fp16: autocast,
                } => way.autocast = Some(autocast.clone()),
                Details::HalfParameters { half_parameters } => {
                    way.half_parameters = Some(half_parameters.clone());
                }
                Details::Int8Weights { int8_weights }
                | Details::Int8Dynamic {
                    int8_dynamic: int8_weights,
                } => {
                    way.int8_weights = Some(int8_weights.clone());
                }
                Details::NoGraph {} => way.no_graph = true,
                Details::UndoCheckpoints {} => way.undo_checkpoints = true,
                _ => {}
            }
        }
        way
    }

    /// The budget to ask for where this one was too small: the smallest peak found, and what is kept free.
    ///
    /// Where a caching allocator serves the step it may take more than that, as it refuses what finds no room
    /// in one piece.
    #[must_use]
    pub fn minimum_budget_bytes(&self) -> Bytes {
        self.minimum_peak_bytes + self.margin_bytes
    }
}

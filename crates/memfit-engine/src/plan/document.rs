//! The plan as an answer: one shape for the report, the JSON and Python.
//!
//! Responsible for the types, and for what follows from a plan alone. Not responsible for its actions (`action.rs`), nor
//! for making it (`choose.rs`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::action::Action;
use super::promise::Class;
use super::technique::kinds::{ActionKind, Details};
use crate::bytes::Bytes;
use crate::predict::reserved::Reserved;
use crate::trace::Way;

/// Version of the shapes of plans and fronts. 2: `class` became `promise`; version 1 is read too.
pub const SCHEMA_VERSION: u32 = 2;

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

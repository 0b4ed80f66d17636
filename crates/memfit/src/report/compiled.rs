//! What `memfit verify --compile` adds, and the host's answer to it.
//!
//! Responsible for the shapes, as `document.rs` is for all others.

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::{ActionKind, Class};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::measured::{MeasuredStep, Measurement};

/// The host's answer to `verify_compiled`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum CompiledAnswer {
    /// The step runs eager.
    NotCompiled {
        /// Why, as a clause.
        not_compiled: String,
    },
    /// The step ran compiled.
    Ran(Box<CompiledMeasurement>),
}

/// A compiled plan beside the eager step.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct CompiledMeasurement {
    #[serde(flatten)]
    pub(crate) measurement: Measurement,
    pub(crate) predicted_peak_bytes: Bytes,
    pub(crate) compiled: CompiledFacts,
}

/// What there is to say about a step that ran compiled.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub(crate) struct CompiledFacts {
    /// What loss and gradients are held against.
    pub(crate) reference: Reference,
    /// Largest relative error of theirs that counts as rounding.
    pub(crate) tolerance: f64,
    /// The same loss under `torch.compile` without memfit.
    pub(crate) torch_compile: TorchCompile,
    /// Times the graphs were cut again because a step was measured above the budget.
    pub(crate) corrections: u32,
    pub(crate) actions: Vec<CompiledAction>,
    /// The joint graphs, in the order of forward.
    pub(crate) graphs: Vec<CompiledGraph>,
}

/// What a compiled step is held against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reference {
    /// The eager step.
    Eager,
    /// The step under `torch.compile` alone: it draws the same random numbers, and eager steps do not.
    TorchCompile,
}

/// The step under `torch.compile` without memfit.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub(crate) struct TorchCompile {
    #[serde(flatten)]
    pub(crate) step: MeasuredStep,
    /// How far loss and gradients are from eager on the same random numbers; absent when not a number.
    pub(crate) max_relative_error: Option<f64>,
}

/// One technique of a compiled plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub(crate) struct CompiledAction {
    pub(crate) kind: ActionKind,
    #[serde(alias = "class")]
    pub(crate) promise: Class,
    /// Ops recomputed, saved tensors offloaded, or parameters with offloaded state.
    pub(crate) count: u64,
}

/// What was done to one joint graph.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub(crate) struct CompiledGraph {
    /// Calls in it.
    pub(crate) ops: u64,
    /// What forward hands to backward in memory.
    pub(crate) saved_bytes: Bytes,
    /// What it hands over offloaded.
    pub(crate) offloaded_bytes: Bytes,
    /// Calls that run again in backward, each as often as it does.
    pub(crate) recomputed_ops: u64,
    /// Peak of the step while it runs.
    pub(crate) predicted_peak_bytes: Bytes,
    /// The same with everything saved.
    pub(crate) unplanned_peak_bytes: Bytes,
    /// Why torch's own partition was used; empty where memfit's was.
    pub(crate) reason: String,
}

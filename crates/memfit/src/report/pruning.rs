//! The JSON document of `memfit prune`.
//!
//! Responsible for the shape, a contract as that of `document.rs`. Not responsible for the facts, which the host has.

use memfit_engine::bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Error, Value};

use super::document::SCHEMA_VERSION;

/// `memfit prune --format json`.
#[derive(Debug, Clone, PartialEq, JsonSchema, Deserialize, Serialize)]
#[schemars(rename = "Pruning")]
pub(crate) struct PruneDocument {
    #[serde(default)]
    pub(crate) schema_version: u32,
    /// Most that the step may take; absent where a number of parameters was asked for.
    pub(crate) budget_bytes: Option<Bytes>,
    /// What channels were chosen by.
    pub(crate) scores: String,
    /// Which part of each group went, rounded down to whole channels.
    pub(crate) share: f64,
    pub(crate) before: ModelFacts,
    pub(crate) after: ModelFacts,
    pub(crate) groups: Vec<PrunedGroup>,
    pub(crate) stays: Vec<StayingParameters>,
    /// Steps of pruned copies that were recorded to find which sizes are written in code.
    pub(crate) trials: u32,
}

/// What a model is, and takes in a step.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Deserialize, Serialize)]
pub(crate) struct ModelFacts {
    pub(crate) predicted_peak_bytes: Bytes,
    /// Elements of its parameters.
    pub(crate) parameters: u64,
    pub(crate) parameter_bytes: Bytes,
}

/// Channels of one kind.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Deserialize, Serialize)]
pub(crate) struct PrunedGroup {
    /// How many there were.
    pub(crate) channels: u64,
    /// How many are left.
    pub(crate) kept: u64,
    /// Parameters and buffers that have something of each.
    pub(crate) parameters: Vec<String>,
}

/// Parameters with dimensions that stay, for one reason.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Deserialize, Serialize)]
pub(crate) struct StayingParameters {
    /// The reason, as a clause.
    pub(crate) why: String,
    pub(crate) parameters: Vec<String>,
}

impl PruneDocument {
    /// The document of the facts that a host gave.
    pub(crate) fn of(facts: Value) -> Result<Self, Error> {
        let mut document: Self = serde_json::from_value(facts)?;
        document.schema_version = SCHEMA_VERSION;
        Ok(document)
    }
}

//! What an action promises about numbers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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

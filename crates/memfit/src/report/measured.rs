//! What the host measured of real steps.
//!
//! Responsible for the shapes of its answers. Not responsible for the documents that they become part of (`document.rs`,
//! `compiled.rs`).

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::Class;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::approximation::Approximation;
use super::comparison::Comparison;
use super::output_error::OutputError;

/// The host's answer to `verify`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Measurement {
    pub(crate) unplanned: MeasuredStep,
    pub(crate) planned: MeasuredStep,
    pub(crate) gradients: Comparison,
    pub(crate) loss: Comparison,
    /// Module buffers after the step: running statistics must not move twice.
    #[serde(default)]
    pub(crate) buffers: Option<Comparison>,
    /// How far gradients are off, for a plan that changes them.
    #[serde(default)]
    pub(crate) approximation: Option<Approximation>,
    /// How far outputs are off, for a plan of inference that changes them.
    #[serde(default)]
    pub(crate) outputs: Option<OutputError>,
    /// Where the running model left the plan; empty when it did not.
    #[serde(default)]
    pub(crate) divergence: String,
    /// Drops that were not carried out, each with its reason.
    #[serde(default)]
    pub(crate) kept_drops: Vec<String>,
}

impl Measurement {
    /// Whether the module buffers are what a plan of `class` promises.
    pub(crate) fn keeps_buffers(&self, class: Class) -> bool {
        self.buffers
            .is_none_or(|comparison| comparison.keeps(class))
    }

    /// What a person should know beyond the numbers.
    pub(crate) fn notes(&self, class: Class) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.divergence.is_empty() {
            notes.push(format!(
                "the running model left the plan: {}",
                self.divergence
            ));
        }
        notes.extend(
            self.kept_drops
                .iter()
                .map(|reason| format!("kept instead of dropped: {reason}")),
        );
        if !self.keeps_buffers(class) {
            notes.push("the module buffers differ after the planned step".to_owned());
        }
        notes
    }
}

/// One way to run the step, measured.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub(crate) struct MeasuredStep {
    pub(crate) measured_peak_bytes: Bytes,
    pub(crate) step_cpu_seconds: f64,
}

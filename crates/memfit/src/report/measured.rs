//! What the host measured of real steps, and how two runs agree.
//!
//! Responsible for the shapes of its answers. Not responsible for the documents that they become part of (`document.rs`,
//! `compiled.rs`).

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::Class;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::approximation::Approximation;
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

/// How two runs agree.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub(crate) struct Comparison {
    #[serde(alias = "class")]
    pub(crate) agreement: Agreement,
    /// Absent when it is not a number.
    pub(crate) max_relative_error: Option<f64>,
}

/// The words for agreement, from strict to none.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Agreement {
    /// Every bit is the same.
    Bitwise,
    /// The same up to rounding.
    Equivalent,
    /// Not the same.
    Different,
}

impl Comparison {
    /// Whether this is what a plan of `class` promised. What is not a number is no approximation of anything.
    pub(crate) fn keeps(self, class: Class) -> bool {
        match class {
            Class::Exact => self.agreement == Agreement::Bitwise,
            Class::Equivalent => self.agreement != Agreement::Different,
            Class::Approximate => self.max_relative_error.is_some_and(f64::is_finite),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_number_keeps_no_promise() {
        let off = |agreement, max_relative_error| Comparison {
            agreement,
            max_relative_error,
        };
        let classes = [Class::Exact, Class::Equivalent, Class::Approximate];
        let kept = |it: Comparison| classes.map(|class| it.keeps(class));
        assert_eq!(kept(off(Agreement::Bitwise, Some(0.0))), [true; 3]);
        assert_eq!(
            kept(off(Agreement::Equivalent, Some(1e-7))),
            [false, true, true]
        );
        assert_eq!(
            kept(off(Agreement::Different, Some(0.3))),
            [false, false, true]
        );
        for lost in [None, Some(f64::NAN), Some(f64::INFINITY)] {
            assert_eq!(kept(off(Agreement::Different, lost)), [false; 3]);
        }
    }
}

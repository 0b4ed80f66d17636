//! Recorded traces on the simulator: does it do what the recording says, and what would other settings have done?
//!
//! Responsible for [`check`], which predicts every address and every segment of a trace, and for [`under`],
//! which runs the same requests under other settings. Not responsible for what the outcome means.
//!
//! A trace does not say how large blocks were that lived before it began, nor which streams used a block.
//! The first is rebuilt from the end of the trace (`start.rs`); the second shows in frees that complete
//! late.

mod counterfactual;
mod forward;
pub mod ranking;
mod start;

pub use counterfactual::{Outcome, Refusal, under};
pub use forward::{Count, Mismatch, ReplayReport, check};

use super::{FreeOrder, Settings, UNLIMITED};
use crate::snapshot::Snapshot;

/// The settings a snapshot was recorded under: its `PYTORCH_CUDA_ALLOC_CONF`, or the single values where that text
/// is missing or wrong.
#[must_use]
pub fn recorded_settings(snapshot: &Snapshot) -> Settings {
    let value = |name: &str| {
        let found = snapshot.settings.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    };
    if let Some(Ok(settings)) = value("PYTORCH_CUDA_ALLOC_CONF").map(Settings::parse)
        && settings != Settings::default()
    {
        return settings;
    }
    let mut settings = Settings::default();
    if let Some(bytes) = value("max_split_size").and_then(|text| text.parse().ok()) {
        settings.max_split_bytes = bytes;
    }
    if settings.max_split_bytes == 0 {
        settings.max_split_bytes = UNLIMITED;
    }
    if let Some(threshold) =
        value("garbage_collection_threshold").and_then(|text| text.parse().ok())
    {
        settings.garbage_collection_threshold = threshold;
    }
    settings.expandable_segments =
        value("expandable_segments").is_some_and(|text| text.eq_ignore_ascii_case("true"));
    settings
}

/// The orders of the free list that a recording may come from, the newest first.
const ORDERS: [FreeOrder; 2] = [FreeOrder::SegmentCounter, FreeOrder::Address];

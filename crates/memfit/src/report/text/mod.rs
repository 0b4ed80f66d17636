//! The reports as text, one file each.
//!
//! Responsible for what a person reads on standard output. Each is a function from a struct and a
//! palette to text: no I/O, no width of the terminal, the same text every time.

mod calibration;
mod devices;
mod doctor;
mod explanation;
mod front;
mod largest;
mod oom_message;
mod placement;
mod plan;
mod prediction;
mod pruning;
mod ps;
mod replay;
mod sections;
mod trace;
mod tracked;
mod verify;

pub(crate) use calibration::calibration;
pub(crate) use devices::devices;
pub(crate) use doctor::doctor;
pub(crate) use explanation::explanation;
pub(crate) use front::front;
pub(crate) use largest::largest;
pub(crate) use oom_message::oom_messages;
pub(crate) use placement::placement;
pub(crate) use plan::plan;
pub(crate) use prediction::prediction;
pub(crate) use pruning::pruning;
pub(crate) use ps::ps;
pub(crate) use replay::replay;
pub(crate) use trace::trace;
pub(crate) use tracked::{run, track};
pub(crate) use verify::verify;

use memfit_engine::explain::Explanation;
use memfit_engine::plan::{Front, Plan};
use memfit_engine::predict::Prediction;
use memfit_engine::trace::Trace;

use crate::printer::Palette;
use crate::report::document::{PlanDocument, TraceDocument};
use crate::report::tracked::TrackDocument;

/// The text of a prediction, as `memfit predict` prints it without a budget.
#[must_use]
pub fn of_prediction(value: &Prediction) -> String {
    prediction(value, None, Palette::PLAIN)
}

/// The text of a plan, as `memfit plan` prints it.
#[must_use]
pub fn of_plan(value: &Plan) -> String {
    plan(&PlanDocument::of(value), Palette::PLAIN)
}

/// The text of a front, as `memfit plan --pareto` prints it.
#[must_use]
pub fn of_front(value: &Front) -> String {
    front(value, Palette::PLAIN)
}

/// The text of a trace, as `memfit show` prints it.
#[must_use]
pub fn of_trace(value: &Trace) -> String {
    trace(&TraceDocument::of(value), Palette::PLAIN)
}

/// The text of an explanation, as `memfit explain` prints it.
#[must_use]
pub fn of_explanation(value: &Explanation) -> String {
    explanation(value, Palette::PLAIN)
}

/// The text of a track's record, from its JSON.
///
/// # Errors
///
/// The JSON is no such record.
pub fn of_track(json: &str) -> Result<String, String> {
    let document: TrackDocument =
        serde_json::from_str(json).map_err(|error| format!("the record is not valid: {error}"))?;
    Ok(track(&document, Palette::PLAIN))
}

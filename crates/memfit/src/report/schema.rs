//! The JSON Schema of every answer, from the types that answer.
//!
//! Responsible for the list of answers. Python's types are made from it (`tests/schema`).

use memfit_engine::explain::Explanation;
use memfit_engine::oom_message::OomMessages;
use memfit_engine::plan::{Front, Plan};
use memfit_engine::predict::Prediction;
use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

use super::calibration::CalibrateDocument;
use super::document::{ReplayDocument, VerifyDocument};
use super::pruning::PruneDocument;

/// The answers by name under `properties`, and what they consist of under `$defs`.
#[must_use]
pub fn schema() -> Value {
    let settings = SchemaSettings::draft2020_12();
    let mut generator = settings.for_serialize().into_generator();
    let properties = json!({
        "Calibration": generator.subschema_for::<CalibrateDocument>(),
        "Explanation": generator.subschema_for::<Explanation>(),
        "Front": generator.subschema_for::<Front>(),
        "OomMessages": generator.subschema_for::<OomMessages>(),
        "Plan": generator.subschema_for::<Plan>(),
        "Prediction": generator.subschema_for::<Prediction>(),
        "Pruning": generator.subschema_for::<PruneDocument>(),
        "Replay": generator.subschema_for::<ReplayDocument>(),
        "Verification": generator.subschema_for::<VerifyDocument>(),
    });
    json!({ "properties": properties, "$defs": generator.take_definitions(true) })
}

//! Answers of commands that the Python API gives too: each the document of `--format json`, and the text.
//!
//! Responsible for the way there from what the API has. Not responsible for documents (`report/`) nor for measuring.

use std::time::{Duration, Instant};

use memfit_engine::bytes::Bytes;
use memfit_engine::placement::{self, Goal};
use memfit_engine::plan::Plan;
use memfit_engine::snapshot::Snapshot;
use serde::Serialize;
use serde_json::{Error, Value};

use crate::commands::{oom_message, replay, verify};
use crate::printer::Palette;
use crate::report::calibration::CalibrateDocument;
use crate::report::compiled::CompiledAnswer;
use crate::report::measured::Measurement;
use crate::report::pruning::PruneDocument;
use crate::report::text;

/// A document and its text.
pub type Answer = (Value, String);

/// What `memfit verify` says of a plan and of what the host measured, `compiled` where that are compiled steps;
/// without a measurement, that nothing ran.
///
/// # Errors
///
/// The measurement is not one.
pub fn verification(
    plan: &Plan,
    measured: Option<Value>,
    compiled: bool,
    capture_seconds: f64,
    plan_seconds: f64,
) -> Result<Answer, Error> {
    let mut document = verify::document(plan, capture_seconds, plan_seconds);
    match measured {
        Some(measured) if compiled => match serde_json::from_value(measured)? {
            CompiledAnswer::Ran(ran) => {
                verify::take_in_compiled(&mut document, *ran);
            }
            CompiledAnswer::NotCompiled { not_compiled } => {
                document.not_compiled = Some(not_compiled);
            }
        },
        Some(measured) => {
            let measured: Measurement = serde_json::from_value(measured)?;
            verify::take_in(&mut document, &measured);
        }
        None => {}
    }
    answer(&document, text::verify(&document, Palette::PLAIN))
}

/// What `memfit replay` says of a snapshot; `settings` as in `PYTORCH_CUDA_ALLOC_CONF`, none for those worth trying.
///
/// # Errors
///
/// The settings cannot be read.
pub fn replay(
    snapshot: &Snapshot,
    source: String,
    settings: &str,
    device_memory: Option<Bytes>,
) -> Result<Answer, String> {
    let document = replay::document(snapshot, source, settings, device_memory)?;
    let text = text::replay(&document, Palette::PLAIN);
    answer(&document, text).map_err(|error| error.to_string())
}

/// What `memfit explain` says of the OOM messages in a text; `None` where it holds none.
///
/// # Errors
///
/// The document cannot be written.
pub fn oom_messages(text: &[u8], source: &str) -> Result<Option<Answer>, Error> {
    let messages = oom_message::of_bytes(text, source);
    let told = messages.map(|it| answer(&it, text::oom_messages(&it, Palette::PLAIN)));
    told.transpose()
}

/// Places the allocations of a CSV, within so many seconds if that is said: their ids, and the placement.
///
/// # Errors
///
/// The CSV cannot be read, or the time limit is no number of seconds.
pub fn place(
    csv: &[u8],
    capacity: Option<u64>,
    alignment: u64,
    threads: usize,
    time_limit: Option<f64>,
) -> Result<(Vec<String>, placement::Answer), String> {
    let limit = time_limit.map(Duration::try_from_secs_f64).transpose();
    let limit = limit.map_err(|error| error.to_string())?;
    let table = placement::csv::parse(csv, alignment).map_err(|error| error.to_string())?;
    let request = placement::Request {
        threads,
        ..placement::Request::new(capacity.map_or(Goal::Lowest, Goal::Within))
    };
    let start = Instant::now();
    let stop = || limit.is_some_and(|limit| start.elapsed() >= limit);
    let answer = placement::place(&table.problem, &request, &stop);
    Ok((table.ids, answer.map_err(|error| error.to_string())?))
}

/// What `memfit calibrate` says of a profile that was written to a file.
///
/// # Errors
///
/// The profile is not one.
pub fn calibration(profile: Value, path: String) -> Result<Answer, Error> {
    let mut document: CalibrateDocument = serde_json::from_value(profile)?;
    document.path = path;
    answer(&document, text::calibration(&document, Palette::PLAIN))
}

/// What `memfit prune` says of a pruned model.
///
/// # Errors
///
/// The facts are not those of one.
pub fn pruning(facts: Value) -> Result<Answer, Error> {
    let document = PruneDocument::of(facts)?;
    answer(&document, text::pruning(&document, Palette::PLAIN))
}

fn answer(document: &impl Serialize, text: String) -> Result<Answer, Error> {
    Ok((serde_json::to_value(document)?, text))
}

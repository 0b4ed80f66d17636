//! `memfit predict`: how much memory a step takes, and what takes it.

use memfit_engine::bytes::Budget;
use memfit_engine::plan::Verdict;
use memfit_engine::predict::PredictRequest;

use super::largest;
use crate::args::{DeviceChoice, Format, PredictArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::report::document::{PredictDocument, PredictedPeak};
use crate::report::{json, text};
use crate::request::Target;
use crate::save::PendingFile;
use crate::session::Session;

pub(crate) fn run(
    arguments: &PredictArguments,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let target = Target::parse(&arguments.target)?;
    let budget = arguments
        .budget
        .as_deref()
        .map(Budget::of_step)
        .transpose()?;
    if let (Some(name), Some(budget)) = (&arguments.largest, budget) {
        let device = arguments.device.map(DeviceChoice::name);
        return largest::predict(&target, name, budget, device, session);
    }
    let save = arguments
        .save
        .as_deref()
        .map(PendingFile::create)
        .transpose()?;

    let mut recorded = session.record(&target, arguments.device.map(DeviceChoice::name))?;
    let request = PredictRequest {
        batch: arguments.batch,
        budget,
    };
    let prediction = session.predict(&recorded.trace, request)?;
    if let Some(file) = save {
        // A saved trace builds no model: it has to hold all that a plan may ask for.
        session.slices_for_any_plan(&target, &mut recorded)?;
        file.commit(&recorded.file)?;
    }

    let peak = prediction.predicted_peak_bytes;
    let answer = budget.map(|budget| {
        let budget = budget.resolve(peak);
        (
            budget,
            if prediction.needed_bytes() <= budget {
                Verdict::Fits
            } else {
                Verdict::DoesNotFit
            },
        )
    });
    let report = match session.format {
        Format::Text => text::prediction(&prediction, answer, session.printer.report_palette()),
        Format::Json => json(&PredictDocument {
            budget_bytes: answer.map(|(budget, _)| budget),
            verdict: answer.map(|(_, verdict)| verdict),
            unplanned: PredictedPeak {
                predicted_peak_bytes: peak,
            },
            capture_seconds: recorded.capture_seconds,
            prediction,
        })?,
    };
    session.printer.data(&report)?;
    match answer {
        Some((_, Verdict::DoesNotFit)) => Ok(Exit::No),
        _ => Ok(Exit::Done),
    }
}

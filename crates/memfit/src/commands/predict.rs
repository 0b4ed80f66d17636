//! `memfit predict`: how much memory a step takes, and what takes it.

use memfit_engine::plan::Verdict;
use memfit_engine::predict::PredictRequest;

use super::largest;
use crate::args::{DeviceChoice, Format, PredictArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::report::document::{PredictDocument, PredictedPeak};
use crate::report::{json, text};
use crate::request::{Limit, Target};
use crate::save::PendingFile;
use crate::session::Session;

pub(crate) fn run(
    arguments: &PredictArguments,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let target = Target::parse(&arguments.target)?;
    let limit = Limit::parse(arguments)?;
    if arguments.real_weights {
        session.insist_on_weights(&arguments.target)?;
    }
    let device = match (limit, &target) {
        // A saved trace is of one kind; where that is another, predicting says so.
        (Some(Limit::Gpu(_)), Target::Live(_)) => Some("cuda"),
        _ => arguments.device.map(DeviceChoice::name),
    };
    if let Some(name) = &arguments.largest {
        let Some(limit) = limit else {
            let message = format!("`--largest {name}` needs to know what the step may take");
            return Err(Failure::usage(message).hint("give `--budget 3GiB` or `--gpu rtx4090`"));
        };
        return largest::predict(&target, name, limit.budget(), device, session);
    }
    let save = arguments
        .save
        .as_deref()
        .map(PendingFile::create)
        .transpose()?;

    let mut recorded = session.record(&target, device)?;
    let request = PredictRequest {
        batch: arguments.batch,
        ..match limit {
            None => PredictRequest::default(),
            Some(Limit::Budget(budget)) => PredictRequest {
                budget: Some(budget),
                ..PredictRequest::default()
            },
            Some(Limit::Gpu(gpu)) => PredictRequest {
                gpu: Some(gpu.name.to_owned()),
                ..PredictRequest::default()
            },
        }
    };
    let prediction = session.predict(&recorded.trace, request)?;
    if let Some(file) = save {
        // A saved trace builds no model: it has to hold all that a plan may ask for.
        session.slices_for_any_plan(&target, &mut recorded)?;
        file.commit(&recorded.file)?;
    }

    let peak = prediction.predicted_peak_bytes;
    let answer = limit.map(|limit| {
        let budget = limit.budget().resolve(peak);
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

//! `memfit plan`: the fastest way found to make a step fit.

use memfit_engine::bytes::Budget;
use memfit_engine::file;
use memfit_engine::plan::Verdict;
use memfit_engine::predict::PredictRequest;

use super::{largest, pareto};
use crate::args::{DeviceChoice, Format, PlanArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::report::document::PlanDocument;
use crate::report::{json, text};
use crate::request::{PlanChoice, Target};
use crate::save::PendingFile;
use crate::session::Session;

pub(crate) fn run(arguments: &PlanArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    if arguments.real_weights {
        session.insist_on_weights(&arguments.target)?;
    }
    if let Some(path) = &arguments.pareto {
        return pareto::run(arguments, path, session);
    }
    let target = Target::parse(&arguments.target)?;
    // Without `--pareto`, the command line requires it.
    let budget = Budget::of_step(arguments.budget.as_deref().unwrap_or_default())?;
    let choice = PlanChoice::parse(&arguments.choice, budget)?;
    if let Some(name) = &arguments.largest {
        let device = arguments.device.map(DeviceChoice::name);
        return largest::plan(&target, name, choice, device, session);
    }
    let save = arguments
        .save
        .as_deref()
        .map(PendingFile::create)
        .transpose()?;

    let mut recorded = session.record(&target, arguments.device.map(DeviceChoice::name))?;
    session.tell_notes(&recorded.trace.meta.notes)?;
    let planned = session.plan(&target, &mut recorded, &choice)?;
    let fits = planned.plan.verdict == Verdict::Fits;
    // A plan that does not fit is no plan to apply: it is shown, not saved.
    if let Some(file) = save.filter(|_| fits) {
        file.commit(&file::encode_plan(&planned.plan))?;
    }

    let mut document = PlanDocument::of(&planned.plan);
    document.capture_seconds = recorded.capture_seconds;
    document.plan_seconds = Some(planned.plan_seconds);
    let report = match session.format {
        Format::Text => text::plan(&document, session.printer.report_palette()),
        Format::Json => {
            let prediction = session.predict(&recorded.trace, PredictRequest::default())?;
            document.breakdown = Some(prediction.breakdown);
            json(&document)?
        }
    };
    session.printer.data(&report)?;
    if fits {
        return Ok(Exit::Done);
    }
    if let Some(path) = &arguments.save {
        session
            .printer
            .note(&format!("note: `{}` was not written", path.display()))?;
    }
    Ok(Exit::No)
}

//! `memfit plan --pareto`: step time against peak over all budgets, drawn and told.
//!
//! Responsible for the kind of file and for the order of the work. Not responsible for the front (the engine) nor
//! for how it looks (`report/front/`).

use std::path::Path;

use memfit_engine::bytes::Budget;
use memfit_engine::plan::Front;

use crate::args::{DeviceChoice, Format, PlanArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::report::document::FrontDocument;
use crate::report::{front, json, text};
use crate::request::{PlanChoice, Target};
use crate::save::PendingFile;
use crate::session::Session;

pub(super) fn run(
    arguments: &PlanArguments,
    path: &Path,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let target = Target::parse(&arguments.target)?;
    let budget = arguments
        .budget
        .as_deref()
        .map(Budget::of_step)
        .transpose()?;
    // A front has no budget of its own.
    let choice = PlanChoice::parse(&arguments.choice, Budget::Percent(100.0))?;
    if choice.time_limit.is_some() {
        return Err(Failure::usage(
            "`--time-limit` is for one plan, and `--pareto` makes many",
        ));
    }
    let draw = drawing(path)?;
    let file = PendingFile::create(path)?;

    let mut recorded = session.record(&target, arguments.device.map(DeviceChoice::name))?;
    session.tell_notes(&recorded.trace.meta.notes)?;
    let (front, plan_seconds) = session.front(&target, &mut recorded, &choice, budget)?;
    file.commit(draw(&front).as_bytes())?;
    let report = match session.format {
        Format::Text => text::front(&front, session.printer.report_palette()),
        Format::Json => json(&FrontDocument {
            front,
            capture_seconds: recorded.capture_seconds,
            plan_seconds,
        })?,
    };
    session.printer.data(&report)?;
    session
        .printer
        .note(&format!("wrote `{}`", path.display()))?;
    Ok(Exit::Done)
}

/// What a file's ending asks for.
fn drawing(path: &Path) -> Result<fn(&Front) -> String, Failure> {
    let ending = path.extension().unwrap_or_default().to_string_lossy();
    match ending.to_ascii_lowercase().as_str() {
        "html" | "htm" => Ok(front::page),
        "svg" => Ok(front::image),
        "png" => Err(Failure::usage(format!(
            "cannot write `{}`: images are written as SVG",
            path.display()
        ))
        .hint("write FILE.html: the page has a button that saves the plot as PNG")),
        _ => Err(Failure::usage(format!(
            "cannot tell what to write from `{}`",
            path.display()
        ))
        .hint("write FILE.html or FILE.svg")),
    }
}

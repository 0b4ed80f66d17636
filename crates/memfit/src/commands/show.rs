//! `memfit show`: what is in a saved trace or plan.

use memfit_engine::file::{self, FileKind};

use crate::args::{Format, ShowArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::report::document::{PlanDocument, TraceDocument};
use crate::report::{json, text};
use crate::session::{Session, read};

pub(crate) fn run(arguments: &ShowArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let path = arguments.file.as_path();
    let file = read(path)?;
    let fail = |error| Failure::file(path, &error);
    let palette = session.printer.report_palette();
    let report = match file::peek_kind(&file).map_err(fail)? {
        FileKind::Trace => {
            let document = TraceDocument::of(&file::decode(&file).map_err(fail)?);
            match session.format {
                Format::Text => text::trace(&document, palette),
                Format::Json => json(&document)?,
            }
        }
        FileKind::Plan => {
            let document = PlanDocument::of(&file::decode_plan(&file).map_err(fail)?);
            match session.format {
                Format::Text => text::plan(&document, palette),
                Format::Json => json(&document)?,
            }
        }
    };
    session.printer.data(&report)?;
    Ok(Exit::Done)
}

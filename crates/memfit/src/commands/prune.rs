//! `memfit prune`: a smaller model.
//!
//! Responsible for the request and for the report. Not responsible for pruning, which the host does.

use memfit_engine::bytes::Budget;

use crate::args::{Format, PruneArguments, ScoresChoice};
use crate::error::Failure;
use crate::exit::Exit;
use crate::host::Pruning;
use crate::report::pruning::PruneDocument;
use crate::report::{json, text};
use crate::request::Target;
use crate::save::PendingFile;
use crate::session::Session;

pub(crate) fn run(arguments: &PruneArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let live = Target::parse(&arguments.target)?.live("prune")?;
    let size = &arguments.size;
    size.budget.as_deref().map(Budget::of_step).transpose()?;
    if let Some(path) = &arguments.save {
        // Before anything is pruned, so that a path that cannot be written is found first.
        drop(PendingFile::create(path)?);
    }
    let request = Pruning {
        budget: size.budget.clone(),
        parameters: size.parameters.clone(),
        scores: match arguments.scores {
            ScoresChoice::Magnitude => "magnitude".to_owned(),
            ScoresChoice::Taylor => "taylor".to_owned(),
        },
        through_norms: arguments.through_norms,
        save: arguments.save.clone(),
    };
    let what = format!("pruning {}", live.name);
    let (facts, _) = session.slow(&what, |host| {
        Ok(host.prune(&live.name, &live.settings, &request)?)
    })?;
    let facts = PruneDocument::of(facts);
    let document = facts.map_err(|error| Failure::bad_answer("prune", error))?;
    let report = match session.format {
        Format::Text => text::pruning(&document, session.printer.report_palette()),
        Format::Json => json(&document)?,
    };
    session.printer.data(&report)?;
    Ok(Exit::Done)
}

//! `memfit place`: offsets for allocations whose live ranges are known.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use memfit_engine::bytes::{Budget, Bytes};
use memfit_engine::placement::csv::{self, Table};
use memfit_engine::placement::{self, Answer, Goal, Request, Status};

use crate::args::{Format, PlaceArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::interrupt::interruptible;
use crate::planning::cores;
use crate::report::document::{Asked, PlaceDocument, SCHEMA_VERSION};
use crate::report::{json, text};
use crate::save::PendingFile;
use crate::session::{Session, read};

pub(crate) fn run(arguments: &PlaceArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let path = arguments.file.display();
    let goal = goal(arguments)?;
    let deadline = deadline(arguments.time_limit)?;
    let bytes = read(&arguments.file)?;
    let table = csv::parse(&bytes, arguments.alignment)
        .map_err(|error| Failure::usage(format!("cannot read `{path}`: {error}")))?;
    let output = arguments
        .output
        .as_deref()
        .map(PendingFile::create)
        .transpose()?;

    let request = Request {
        threads: arguments.threads.map_or_else(cores, NonZeroUsize::get),
        ..Request::new(goal)
    };
    let problem = table.problem.clone();
    let start = Instant::now();
    let (answer, _) = session.slow("placing", |host| {
        interruptible(host, move || {
            placement::place(&problem, &request, &|| {
                deadline.is_some_and(|deadline| Instant::now() >= deadline)
            })
        })
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let answer = answer.map_err(|error| Failure::Internal(error.to_string()))?;

    if let Some(file) = output.filter(|_| is_solved(&answer)) {
        file.commit(csv::write(&table, &answer.placement).as_bytes())?;
    }
    let asked = Asked {
        file: path.to_string(),
        capacity: match goal {
            Goal::Within(capacity) => Some(Bytes(capacity)),
            Goal::Lowest => None,
        },
    };
    let document = document(&table, &answer, seconds);
    let report = match session.format {
        Format::Text => text::placement(&document, &asked, session.printer.report_palette()),
        Format::Json => json(&document)?,
    };
    session.printer.data(&report)?;
    if is_solved(&answer) {
        return Ok(Exit::Done);
    }
    if let Some(path) = &arguments.output {
        let note = format!("note: `{}` was not written", path.display());
        session.printer.note(&note)?;
    }
    Ok(Exit::No)
}

fn goal(arguments: &PlaceArguments) -> Result<Goal, Failure> {
    let Some(text) = &arguments.goal.capacity else {
        return Ok(Goal::Lowest);
    };
    match Budget::parse(text)? {
        Budget::Absolute(bytes) => Ok(Goal::Within(bytes.0)),
        Budget::Percent(_) => Err(Failure::usage(format!(
            "`--capacity {text}` is a part of nothing here"
        ))
        .hint("give bytes: 1048576, 1MiB")),
    }
}

fn deadline(seconds: Option<f64>) -> Result<Option<Instant>, Failure> {
    let Some(seconds) = seconds else {
        return Ok(None);
    };
    let duration = Duration::try_from_secs_f64(seconds)
        .map_err(|_| Failure::usage(format!("`--time-limit {seconds}` is no number of seconds")))?;
    Ok(Instant::now().checked_add(duration))
}

const fn is_solved(answer: &Answer) -> bool {
    matches!(answer.status, Status::Optimal | Status::Feasible)
}

fn document(table: &Table, answer: &Answer, seconds: f64) -> PlaceDocument {
    let offsets = answer.placement.offsets.iter().copied();
    PlaceDocument {
        schema_version: SCHEMA_VERSION,
        status: answer.status,
        height: Bytes(answer.placement.height),
        lower_bound: Bytes(answer.lower_bound),
        seconds,
        stop_reason: answer.stop_reason,
        offsets: table.ids.iter().cloned().zip(offsets).collect(),
    }
}

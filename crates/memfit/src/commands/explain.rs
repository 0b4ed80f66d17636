//! `memfit explain`: what happened in a CUDA memory snapshot; what an OOM message decides ([`super::oom_message`]).
//!
//! Responsible for reading the files and for the exit code. Not responsible for what is found in them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memfit_engine::bytes::{Budget, Bytes};
use memfit_engine::explain::{self, Explanation, Request};
use memfit_engine::snapshot::{self, ReadOptions, Snapshot, SnapshotError};

use super::oom_message::{self, Input};
use crate::args::{ExplainArguments, Format};
use crate::error::Failure;
use crate::exit::Exit;
use crate::interrupt::interruptible;
use crate::report::{html, json, text};
use crate::save::PendingFile;
use crate::session::Session;

pub(crate) fn run(
    arguments: &ExplainArguments,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let page = arguments.html.as_deref().map(PendingFile::create);
    let page = page.transpose()?;
    let first = match oom_message::read(&arguments.snapshot, session)? {
        Input::Text(messages) => return oom_message::report(&messages, arguments, session),
        Input::Snapshot(snapshot) => snapshot,
    };
    let (snapshot, explanation) = load(first, arguments, session)?;
    if let Some(page) = page {
        write(page, snapshot, &explanation, session)?;
    }
    let report = match session.format {
        Format::Text => text::explanation(&explanation, session.printer.report_palette()),
        Format::Json => json(&*explanation)?,
    };
    session.printer.data(&report)?;
    Ok(exit(&explanation))
}

/// Writes the page; an interruption leaves nothing behind.
fn write(
    page: PendingFile,
    snapshot: Arc<Snapshot>,
    explanation: &Arc<Explanation>,
    session: &mut Session<'_>,
) -> Result<(), Failure> {
    let explanation = Arc::clone(explanation);
    let (html, _) = session.slow("drawing", |host| {
        interruptible(host, move || html::explanation(&snapshot, &explanation))
    })?;
    page.commit(html.as_bytes())
}

/// Explains what was asked for: the snapshot, the later one of two, with its explanation.
fn load(
    first: Arc<Snapshot>,
    arguments: &ExplainArguments,
    session: &mut Session<'_>,
) -> Result<(Arc<Snapshot>, Arc<Explanation>), Failure> {
    let device_memory = arguments
        .device_memory
        .as_deref()
        .map(device_memory)
        .transpose()?;
    let (path, subject, before) = match &arguments.later {
        None => (&arguments.snapshot, first, None),
        Some(later) => {
            let before = (arguments.snapshot.clone(), first);
            (later, read(later, session)?, Some(before))
        }
    };
    let source = path.display().to_string();
    let (steps, snapshot) = (arguments.steps, Arc::clone(&subject));
    let (explanation, _) = session.slow("explaining", |host| {
        interruptible(host, move || {
            let before = before.map(|(path, before)| (path.display().to_string(), before));
            let request = Request {
                source: &source,
                before: before
                    .as_ref()
                    .map(|(name, before)| (name.as_str(), &**before)),
                steps,
                device_memory,
            };
            explain::explain(&snapshot, &request)
        })
    })?;
    Ok((subject, Arc::new(explanation)))
}

/// Reads a snapshot; nothing in it is executed.
pub(super) fn read(path: &Path, session: &mut Session<'_>) -> Result<Arc<Snapshot>, Failure> {
    let what = format!("reading {}", path.display());
    let opened: PathBuf = path.to_owned();
    let (snapshot, _) = session.slow(&what, |host| {
        interruptible(host, move || {
            let file =
                File::open(opened).map_err(|error| SnapshotError::Source { position: 0, error })?;
            snapshot::read(file, ReadOptions::default())
        })
    })?;
    let snapshot = snapshot.map_err(|error| match error {
        SnapshotError::Source { error, .. } => {
            Failure::usage(format!("cannot read `{}`: {error}", path.display()))
        }
        error => Failure::usage(format!("cannot read `{}`: {error}", path.display())),
    })?;
    Ok(Arc::new(snapshot))
}

pub(super) fn device_memory(text: &str) -> Result<Bytes, Failure> {
    match Budget::parse(text) {
        Ok(Budget::Absolute(bytes)) => Ok(bytes),
        Ok(Budget::Percent(_)) | Err(_) => Err(Failure::usage(format!(
            "cannot read `--device-memory {text}`: write 80GiB, 24GB or plain bytes"
        ))),
    }
}

fn exit(explanation: &Explanation) -> Exit {
    let found = |it: &explain::DeviceExplanation| !it.oom.is_empty() || !it.growth.is_empty();
    if explanation.devices.iter().any(found) {
        Exit::No
    } else {
        Exit::Done
    }
}

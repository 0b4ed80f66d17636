//! `memfit calibrate`: what ops cost on this machine, kept for plans.
//!
//! Responsible for where the profile goes and for the report. Not responsible for measuring (the host does)
//! nor for whether a kept profile is used later (the host again).

use std::fs;

use crate::args::{CalibrateArguments, DeviceChoice, Format};
use crate::error::Failure;
use crate::exit::Exit;
use crate::report::calibration::CalibrateDocument;
use crate::report::{json, text};
use crate::save::PendingFile;
use crate::session::Session;

pub(crate) fn run(
    arguments: &CalibrateArguments,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let device_kind = DeviceChoice::name(arguments.device);
    let path = if let Some(path) = &arguments.output {
        path.clone()
    } else {
        let path = session.host.profile_path(device_kind)?;
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|error| {
                Failure::usage(format!("cannot make `{}`: {error}", folder.display()))
                    .hint("name a file with --output, and give it to plans with --costs")
            })?;
        }
        path
    };
    // Before anything is measured, so that a path that cannot be written is found first.
    let file = PendingFile::create(&path)?;
    let (seconds, folder) = (arguments.seconds, arguments.folder.as_deref());
    let what = format!("measuring for about {seconds} s");
    let (profile, _) = session.slow(&what, |host| {
        Ok(host.calibrate(device_kind, seconds, folder)?)
    })?;
    let mut document: CalibrateDocument =
        serde_json::from_str(&profile).map_err(|error| Failure::bad_answer("calibrate", error))?;
    document
        .profile
        .check()
        .map_err(|error| Failure::bad_answer("calibrate", error))?;
    file.commit(profile.as_bytes())?;

    document.path = path.display().to_string();
    let report = match session.format {
        Format::Text => text::calibration(&document, session.printer.report_palette()),
        Format::Json => json(&document)?,
    };
    session.printer.data(&report)?;
    for warning in &document.warnings {
        session.printer.note(&format!("warning: {warning}"))?;
    }
    Ok(Exit::Done)
}

//! `memfit devices`: the memories of this machine, and which of them has room for a step.

use memfit_engine::bytes::Bytes;
use memfit_engine::cost::devices::CONTEXT_BYTES;
use memfit_engine::predict::PredictRequest;

use crate::args::{DevicesArguments, Format, TargetArguments};
use crate::device::{Room, rooms};
use crate::error::Failure;
use crate::exit::Exit;
use crate::lease::usual_path;
use crate::report::sharing::{DeviceRoom, DevicesDocument};
use crate::report::{json, text};
use crate::request::Target;
use crate::session::Session;

pub(crate) fn run(
    arguments: &DevicesArguments,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let target = arguments.fit.as_ref().map(|target| {
        Target::parse(&TargetArguments {
            target: target.clone(),
            settings: arguments.settings.clone(),
        })
    });
    let target = target.transpose()?;
    let socket = arguments.socket.clone().unwrap_or_else(usual_path);
    let found = rooms(&socket).map_err(|error| Failure::usage(error.to_string()))?;
    let needs = match &target {
        None => Vec::new(),
        Some(target) => needs(target, &found, session)?,
    };
    let devices = found.into_iter().map(|room| {
        let need = needs.iter().find(|need| need.kind == kind(&room));
        DeviceRoom::new(room, need.map(|need| need.bytes))
    });
    let document = DevicesDocument::new(arguments.fit.clone(), devices.collect());
    let report = match session.format {
        Format::Text => text::devices(&document, session.printer.report_palette()),
        Format::Json => json(&document)?,
    };
    session.printer.data(&report)?;
    Ok(if target.is_some() && document.best.is_none() {
        Exit::No
    } else {
        Exit::Done
    })
}

/// What a step takes on one kind of device, in a process of its own.
struct Need {
    kind: &'static str,
    bytes: Bytes,
}

fn needs(target: &Target, found: &[Room], session: &mut Session<'_>) -> Result<Vec<Need>, Failure> {
    let kinds = ["cpu", "cuda"].into_iter();
    let kinds: Vec<&'static str> = kinds
        .filter(|wanted| found.iter().any(|room| kind(room) == *wanted))
        .collect();
    let mut needs = Vec::new();
    for kind in kinds {
        let asked = matches!(target, Target::Live(_)).then_some(kind);
        let recorded = session.record(target, asked)?;
        if recorded.trace.meta.device_kind != kind {
            // A saved trace is of one kind.
            continue;
        }
        let prediction = session.predict(&recorded.trace, PredictRequest::default())?;
        let overhead = if kind == "cpu" {
            let what = "measuring what torch takes apart from tensors";
            Bytes(
                session
                    .slow(what, |host| Ok(host.overhead_bytes("host")?))?
                    .0,
            )
        } else {
            CONTEXT_BYTES
        };
        needs.push(Need {
            kind,
            bytes: prediction.needed_bytes() + overhead,
        });
    }
    Ok(needs)
}

fn kind(room: &Room) -> &'static str {
    if room.device == "host" { "cpu" } else { "cuda" }
}

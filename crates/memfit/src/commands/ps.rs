//! `memfit ps`: who holds what, who waits, and for how long.

use crate::args::{Format, PsArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::lease::{Client, LeaseError, SocketError, usual_path};
use crate::report::sharing::PsDocument;
use crate::report::{json, text};
use crate::session::Session;

pub(crate) fn run(arguments: &PsArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let socket = arguments.socket.clone().unwrap_or_else(usual_path);
    let status = Client::connect(&socket, "memfit ps").and_then(|client| client.status());
    let document = match status {
        Ok(status) => PsDocument::new(&socket, Some(status)),
        Err(LeaseError::Socket(SocketError::NoBroker(_) | SocketError::Away(_))) => {
            PsDocument::new(&socket, None)
        }
        Err(error) => return Err(Failure::usage(error.to_string())),
    };
    let report = match session.format {
        Format::Text => text::ps(&document, session.printer.report_palette()),
        Format::Json => json(&document)?,
    };
    session.printer.data(&report)?;
    if document.broker.is_some() {
        return Ok(Exit::Done);
    }
    session
        .printer
        .note("hint: start one with `memfit broker --memory host=16GiB`, or `memfit broker`")?;
    Ok(Exit::No)
}

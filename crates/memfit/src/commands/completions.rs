//! `memfit completions`: a script that teaches a shell the options.

use clap::CommandFactory as _;

use crate::args::{Arguments, CompletionsArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::session::Session;

pub(crate) fn run(
    arguments: &CompletionsArguments,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(
        arguments.shell,
        &mut Arguments::command(),
        "memfit",
        &mut script,
    );
    session.printer.bytes(&script)?;
    Ok(Exit::Done)
}

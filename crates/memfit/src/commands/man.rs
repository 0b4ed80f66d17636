//! `memfit man`: the manual page, as roff.

use clap::CommandFactory as _;
use clap_mangen::Man;

use crate::args::{Arguments, ManArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::session::Session;

pub(crate) fn run(arguments: &ManArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let mut program = Arguments::command();
    // Hands the global options down and gives each command its full name.
    program.build();
    let command = match &arguments.command {
        None => program,
        Some(name) => {
            let found = program
                .find_subcommand(name)
                .cloned()
                .ok_or_else(|| unknown(name))?;
            let full = format!("memfit-{name}");
            found.display_name(full)
        }
    };
    let mut page = Vec::new();
    Man::new(command).render(&mut page)?;
    session.printer.bytes(&page)?;
    Ok(Exit::Done)
}

fn unknown(name: &str) -> Failure {
    let program = Arguments::command();
    let names: Vec<&str> = program
        .get_subcommands()
        .map(clap::Command::get_name)
        .collect();
    Failure::usage(format!("memfit has no command `{name}`"))
        .hint(format!("the commands are {}", names.join(", ")))
}

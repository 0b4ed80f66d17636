//! The memfit program: arguments in, reports and an exit code out.
//!
//! Responsible for the command line, the reports, saving files, progress and exit codes. Not responsible
//! for any number in a report (the engine, `memfit_engine`, computes them) nor for building or running a
//! model (the [`Host`] does, on the Python side).
//!
//! Invariants: data goes to standard output and everything else to standard error; colour and
//! progress appear only on a terminal; a file is written whole or not at all; a broken pipe is no
//! failure; nothing here exits the process.

mod answer;
mod args;
mod boot;
mod broker;
mod commands;
pub mod device;
mod error;
mod exit;
mod host;
mod interrupt;
pub mod lease;
mod monitor;
mod planning;
mod printer;
mod progress;
mod report;
mod request;
mod save;
mod session;

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use clap::Parser as _;

pub use answer::{Answer, calibration, oom_messages, place, pruning, replay, verification};
pub use exit::Exit;
pub use host::{Host, HostError, HostErrorKind, Pruning, Script, ScriptLease, Settings};
pub use planning::{cores, within};
pub use printer::Streams;
pub use report::front::page_of_front;
pub use report::schema::schema;
pub use report::text::{of_explanation, of_front, of_plan, of_prediction, of_trace, of_track};

use args::{Arguments, ColorChoice};
use error::Failure;
use interrupt::panic_message;
use printer::Printer;
use session::Session;

/// Runs the program once. `arguments` starts with the program's name, as `argv` does.
pub fn run<'a>(
    arguments: impl IntoIterator<Item = OsString>,
    host: &'a mut dyn Host,
    streams: Streams<'a>,
) -> u8 {
    let mut printer = Printer::new(streams);
    let typed = match Arguments::try_parse_from(arguments) {
        Ok(typed) => typed,
        Err(error) => return explain(&error, &mut printer).code(),
    };
    let output = &typed.output;
    printer.configure(output.color, output.quiet, output.verbose);
    let mut session = Session {
        host,
        printer,
        format: output.format,
    };
    let result = catch_unwind(AssertUnwindSafe(|| {
        commands::run(&typed.command, &mut session)
    }));
    let result =
        result.unwrap_or_else(|panic| Err(Failure::Internal(panic_message(Some(panic.as_ref())))));
    match result {
        Ok(exit) => exit.code(),
        Err(failure) => {
            session.printer.failure(&failure);
            failure.exit().code()
        }
    }
}

/// Prints help, the version or what is wrong with the arguments.
fn explain(error: &clap::Error, printer: &mut Printer<'_>) -> Exit {
    // The arguments could not be read, so `--color` is not known.
    printer.configure(ColorChoice::Auto, false, false);
    let rendered = error.render();
    let written = if error.use_stderr() {
        let plain = printer.message_palette().is_plain();
        let text = if plain {
            rendered.to_string()
        } else {
            rendered.ansi().to_string()
        };
        printer.stderr(&text)
    } else {
        let plain = printer.report_palette().is_plain();
        let text = if plain {
            rendered.to_string()
        } else {
            rendered.ansi().to_string()
        };
        printer.data(&text)
    };
    match written {
        Err(failure) => failure.exit(),
        Ok(()) if error.use_stderr() => Exit::Usage,
        Ok(()) => Exit::Done,
    }
}

//! The commands, one file each: typed arguments in, a report and an exit code out.

mod broker;
mod calibrate;
mod completions;
mod devices;
mod doctor;
mod explain;
mod largest;
mod man;
pub(crate) mod oom_message;
mod pareto;
mod place;
mod plan;
mod predict;
mod prune;
mod ps;
pub(crate) mod replay;
mod run;
mod show;
mod top;
pub(crate) mod verify;

use crate::args::Command;
use crate::error::Failure;
use crate::exit::Exit;
use crate::session::Session;

/// Runs the command that was typed.
pub(crate) fn run(command: &Command, session: &mut Session<'_>) -> Result<Exit, Failure> {
    match command {
        Command::Predict(arguments) => predict::run(arguments, session),
        Command::Plan(arguments) => plan::run(arguments, session),
        Command::Verify(arguments) => verify::run(arguments, session),
        Command::Prune(arguments) => prune::run(arguments, session),
        Command::Place(arguments) => place::run(arguments, session),
        Command::Calibrate(arguments) => calibrate::run(arguments, session),
        Command::Run(arguments) => run::run(arguments, session),
        Command::Broker(arguments) => broker::run(arguments, session),
        Command::Ps(arguments) => ps::run(arguments, session),
        Command::Devices(arguments) => devices::run(arguments, session),
        Command::Doctor(arguments) => doctor::run(arguments, session),
        Command::Top(arguments) => top::run(arguments, session),
        Command::Show(arguments) => show::run(arguments, session),
        Command::Explain(arguments) => explain::run(arguments, session),
        Command::Replay(arguments) => replay::run(arguments, session),
        Command::Completions(arguments) => completions::run(arguments, session),
        Command::Man(arguments) => man::run(arguments, session),
    }
}

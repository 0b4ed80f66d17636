//! The program from the outside: arguments in; streams, files and exit codes out.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod calibrate;
mod doctor;
mod explain;
mod files;
mod html;
mod output;
mod pareto;
mod pickle;
mod place;
mod program;
mod replay;
mod reports;
mod sample;
mod usage;

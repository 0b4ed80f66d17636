//! What a command works on, as typed.
//!
//! Responsible for names and help. Not responsible for what the words mean ([`crate::request`]).

use clap::{Args, ValueEnum};

/// What to work on.
#[derive(Debug, Args)]
pub(crate) struct TargetArguments {
    /// `FILE.py:FUNCTION`, `package.module:FUNCTION` or a saved `FILE.memfit`
    ///
    /// The function returns a `memfit.Workload`.
    #[arg(value_name = "TARGET")]
    pub(crate) target: String,

    /// Pass an argument to the target's function (repeatable)
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub(crate) settings: Vec<String>,
}

/// Kinds of devices to capture for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceChoice {
    /// The processor's memory
    Cpu,
    /// A CUDA device
    Cuda,
}

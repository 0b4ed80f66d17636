//! The commands about sharing a machine, as typed: the broker, and who holds what.
//!
//! Responsible for names and help of what they take. Not responsible for which commands there are.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct BrokerArguments {
    /// Memory to grant on a device, or `auto` for what is found (repeatable) [default: auto]
    #[arg(long, value_name = "DEVICE=BYTES")]
    pub(crate) memory: Vec<String>,

    /// Grant no more than is free at the moment: what processes without a lease have taken is waited for
    #[arg(long)]
    pub(crate) only_free: bool,

    /// Where to listen [default: the variable `MEMFIT_BROKER`, or memfit/broker.sock in the user's runtime folder]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Serve /metrics for Prometheus at this address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) metrics: Option<String>,

    /// How long to hold grants back after a restart, so that earlier clients can reconnect
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=3600))]
    pub(crate) grace: u32,
}

#[derive(Debug, Args)]
pub(crate) struct PsArguments {
    /// Where the broker listens [default: the variable `MEMFIT_BROKER`, or memfit/broker.sock in the user's runtime folder]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct DevicesArguments {
    /// The step: `FILE.py:FUNCTION`, `package.module:FUNCTION` or a saved `FILE.memfit`
    #[arg(long, value_name = "TARGET")]
    pub(crate) fit: Option<String>,

    /// Pass an argument to the target's function (repeatable)
    #[arg(long = "set", value_name = "NAME=VALUE", requires = "fit")]
    pub(crate) settings: Vec<String>,

    /// Where the broker listens [default: the variable `MEMFIT_BROKER`, or memfit/broker.sock in the user's runtime folder]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct TopArguments {
    /// Print one frame and end
    #[arg(long)]
    pub(crate) once: bool,

    /// Time between two frames
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub(crate) interval: f64,

    /// Where the broker listens [default: the variable `MEMFIT_BROKER`, or memfit/broker.sock in the user's runtime folder]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

//! `memfit broker`: leases for all processes of one user.

use std::net::SocketAddr;

use crate::args::BrokerArguments;
use crate::broker::{self, Log, Options};
use crate::error::Failure;
use crate::exit::Exit;
use crate::lease::usual_path;
use crate::session::Session;

pub(crate) fn run(arguments: &BrokerArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let capacities = broker::read_capacities(&arguments.memory)?;
    for note in &capacities.notes {
        session.printer.note(&format!("note: {note}"))?;
    }
    let metrics = arguments.metrics.as_deref().map(address).transpose()?;
    let options = Options {
        socket: arguments.socket.clone().unwrap_or_else(usual_path),
        devices: capacities.devices,
        metrics,
        only_free: arguments.only_free,
        grace_ms: u64::from(arguments.grace) * 1000,
    };
    let log = Log {
        is_quiet: session.printer.is_quiet(),
        is_verbose: session.printer.is_verbose(),
    };
    broker::run(&options, log)?;
    Ok(Exit::Done)
}

fn address(text: &str) -> Result<SocketAddr, Failure> {
    text.parse().map_err(|_| {
        Failure::usage(format!("cannot read `--metrics {text}` as an address"))
            .hint("write an IP address and a port: `--metrics 127.0.0.1:9464`")
    })
}

//! The broker: leases for all processes of one user, over a Unix socket.
//!
//! Responsible for clients, liveness, the state that survives a restart, the log and the metrics. Not responsible for who gets
//! what: `memfit_engine::share::lease` decides, and the broker is the only one that asks it.
//!
//! One thread. Each message is carried through to the end (decided, written down, answered) before the
//! next one, so there is one order of events, and no lock. A client that does not read stops only itself, and
//! a driver that does not answer has a thread of its own.
//!
//! Invariants: nothing is granted that is not written down first; what a living process may hold is never
//! granted to another; the sums are counted anew after each event, and a broker that finds them wrong stops
//! before anyone hears of it; only processes of the broker's own user are let in.

mod alarm;
mod capacity;
mod connection;
mod counters;
mod devices;
mod effects;
mod journal;
mod log;
mod metrics;
mod occupancy;
mod options;
mod outbox;
mod process;
mod refusal;
mod server;
mod start;
mod status;
mod stream;
mod usage;

use std::cell::RefCell;
use std::future::pending;
use std::rc::Rc;
use std::time::Duration;

use memfit_engine::share::lease::ClientId;
use serde_json::json;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{LocalSet, spawn_local};

use crate::error::Failure;
pub(crate) use capacity::read as read_capacities;
pub(crate) use log::Log;
pub(crate) use options::Options;
use server::Server;

/// Serves until it is told to stop.
pub(crate) fn run(options: &Options, log: Log) -> Result<(), Failure> {
    let _lock = start::lock(&options.socket)?;
    if let Err(error) = process::allow_many_files() {
        log.warn("few_files", json!({ "reason": error.to_string() }));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime
        .map_err(|error| Failure::Internal(format!("cannot start the event loop: {error}")))?;
    LocalSet::new().block_on(&runtime, serve(options, log))
}

async fn serve(options: &Options, log: Log) -> Result<(), Failure> {
    let stop = |kind| {
        signal(kind).map_err(|error| Failure::Internal(format!("cannot wait for signals: {error}")))
    };
    let (mut terminate, mut interrupt) = (
        stop(SignalKind::terminate())?,
        stop(SignalKind::interrupt())?,
    );
    // A file that may grow no more is a journal that cannot be written, and not the end.
    let _too_large = stop(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?;
    let scrapes = match options.metrics {
        None => None,
        Some(address) => Some(metrics::listen(address).await.map_err(|error| {
            Failure::usage(format!(
                "cannot listen at `{address}` for `--metrics`: {error}"
            ))
        })?),
    };
    let server = Rc::new(RefCell::new(start::restore(options, log)?));
    watch_the_absent(&server);
    let listener = start::listen(&options.socket)?;
    let devices = options
        .devices
        .iter()
        .map(|(name, bytes)| (name.clone(), bytes.0.into()));
    log.info(
        "listening",
        json!({
            "socket": options.socket, "pid": std::process::id(), "version": env!("CARGO_PKG_VERSION"),
            "memory": devices.collect::<serde_json::Map<_, _>>(), "metrics": options.metrics,
            "only_free": options.only_free,
        }),
    );
    if let Some(scrapes) = scrapes {
        spawn_local(metrics::serve(scrapes, Rc::clone(&server)));
    }
    let last = Rc::clone(&server);
    let has_fault = Rc::clone(&server.borrow().has_fault);
    let looking = keep_looking(Rc::clone(&server), options.only_free);
    tokio::select! {
        () = looking => {}
        () = accept(listener, Rc::clone(&server), log) => {}
        () = keep_time(server) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = has_fault.notified() => {}
    }
    // Clients find no socket until the next broker, and wait for it.
    let _gone_already = std::fs::remove_file(&options.socket);
    if let Some(imbalance) = &last.borrow().fault {
        return Err(Failure::Internal(format!("stopped: {imbalance}")));
    }
    log.info("stopped", json!({}));
    last.borrow_mut().close();
    Ok(())
}

async fn accept(listener: UnixListener, server: Rc<RefCell<Server>>, log: Log) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                spawn_local(connection::serve(stream, Rc::clone(&server)));
            }
            Err(error) => {
                // Too many open files: those that wait are served when others leave.
                log.warn("not_accepted", json!({ "reason": error.to_string() }));
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Wakes the machine when something happens by itself.
async fn keep_time(server: Rc<RefCell<Server>>) {
    let changed = Rc::clone(&server.borrow().deadline_changed);
    loop {
        let sleep = server.borrow_mut().sleep_milliseconds();
        let slept = async {
            match sleep {
                Some(milliseconds) => tokio::time::sleep(Duration::from_millis(milliseconds)).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = slept => server.borrow_mut().tick(),
            () = changed.notified() => {}
        }
    }
}

/// Looks at what others take, where grants depend on it.
async fn keep_looking(server: Rc<RefCell<Server>>, only_free: bool) {
    if !only_free {
        return pending().await;
    }
    loop {
        server.borrow_mut().look();
        tokio::time::sleep(occupancy::EVERY).await;
    }
}

/// Ends what clients of before the restart hold when their processes end, or have ended.
fn watch_the_absent(server: &Rc<RefCell<Server>>) {
    let absent: Vec<(ClientId, process::Process)> = server.borrow().absent().collect();
    for (client, process) in absent {
        let death = process.open().and_then(connection::watch_death);
        if death.is_none() && process.is_seen() {
            server.borrow_mut().leave(client, "process_ended");
            continue;
        }
        let server = Rc::clone(server);
        spawn_local(async move {
            connection::leave_unless_back(&server, client, death.as_ref()).await;
        });
    }
}

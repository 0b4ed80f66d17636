//! From nothing to a broker that listens: lock, state of another run, socket.
//!
//! Responsible for there being one broker for a socket, for what a dead one left, and for letting no other user
//! else in. Not responsible for serving.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use memfit_engine::bytes::Bytes;
use memfit_engine::share::lease::{
    Claims, ClientId, LeaseId, Machine, Millis, Priority, Record, Records, RestoreError, Revision,
    Settings,
};
use rustix::fs::{FlockOperation, flock};
use serde_json::json;
use tokio::net::UnixListener;

use super::devices::Devices;
use super::journal::{Found, Journal, Known};
use super::log::Log;
use super::options::Options;
use super::server::{Client, Server};
use crate::boot::{self, milliseconds};
use crate::error::Failure;
use crate::lease::socket::{SocketError, check_path, private_folder};

/// Makes sure that no other broker serves this socket, as long as the file is held.
pub(super) fn lock(socket: &Path) -> Result<File, Failure> {
    private_folder(socket).map_err(|error| refuse(&error))?;
    check_path(socket).map_err(|error| refuse(&error))?;
    let path = socket.with_extension("lock");
    let mut options = OpenOptions::new();
    let file = options
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path);
    let file =
        file.map_err(|error| Failure::usage(format!("cannot open `{}`: {error}", path.display())))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(_) => Err(
            Failure::usage(format!("a broker serves `{}` already", socket.display()))
                .hint("see it with `memfit ps`, or choose another with `--socket PATH`"),
        ),
    }
}

fn refuse(error: &SocketError) -> Failure {
    let failure = Failure::usage(error.to_string());
    match error {
        SocketError::Open { path, .. } => failure.hint(format!("chmod 700 {}", path.display())),
        _ => failure.hint("choose another place with `--socket PATH`"),
    }
}

/// Where a broker that knows of no other begins to count clients and leases: above what any other can have
/// given out since the boot, at a thousand a millisecond.
const fn first_number(now: u64) -> u64 {
    now.saturating_mul(1 << 10).saturating_add(1)
}

/// A server that goes on where the last one stopped, if there was one.
pub(super) fn restore(options: &Options, log: Log) -> Result<Server, Failure> {
    let path = options.socket.with_extension("state");
    let now = milliseconds();
    let number = first_number(now);
    let fresh = Known {
        boot: boot::name(),
        next_client: number,
        next_lease: number,
        ..Known::default()
    };
    let (known, is_held_back) = match Journal::find(&path) {
        Found::Nothing => (fresh, false),
        // No process of an earlier boot lives.
        Found::Known(known) if known.boot != fresh.boot => (fresh, false),
        Found::Known(known) => {
            let is_held_back = known.is_incomplete || !known.leases.is_empty();
            // Clients may have been let in whose entries were not written.
            let next_client = known.next_client.max(number);
            (
                Known {
                    next_client,
                    ..known
                },
                is_held_back,
            )
        }
        Found::Damaged(reason) => {
            let kept = path.with_extension("state.damaged");
            // It stays in place too until another takes its place: without one, it would go unnoticed that a file was
            // lost. What cannot be kept is lost either way, and the log says so.
            let _not_there = fs::remove_file(&kept);
            let _not_kept =
                fs::hard_link(&path, &kept).or_else(|_| fs::copy(&path, &kept).map(drop));
            log.warn(
                "state_damaged",
                json!({ "file": path, "kept_as": kept, "reason": reason }),
            );
            let is_incomplete = true;
            (
                Known {
                    is_incomplete,
                    ..fresh
                },
                true,
            )
        }
    };
    let opens = if is_held_back {
        now.saturating_add(options.grace_ms)
    } else {
        now
    };
    let devices = Devices::new(
        options
            .devices
            .iter()
            .map(|(name, _)| name.clone())
            .collect(),
    );
    let capacities: Vec<Bytes> = options.devices.iter().map(|(_, bytes)| *bytes).collect();
    let machine = machine(&known, &devices, &capacities, (now, opens))?;
    let clients = known.clients.values().map(|entry| {
        let leases = known
            .leases
            .values()
            .filter(|lease| lease.client == entry.client)
            .count();
        let client = Client {
            process: entry.process,
            name: entry.name.clone(),
            outbox: None,
            leases,
        };
        (ClientId(entry.client), client)
    });
    let clients: BTreeMap<_, _> = clients.collect();
    log.info(
        "restored",
        json!({ "leases": known.leases.len(), "clients": clients.len(), "held_back_ms": opens - now }),
    );
    let journal = Journal::begin(path, known);
    let mut server = Server::new(machine, devices, (journal, log), clients);
    server.only_free = options.only_free;
    server.grace = Duration::from_millis(options.grace_ms);
    if server.journal.error.is_some() {
        server.stop_granting();
    }
    Ok(server)
}

fn machine(
    known: &Known,
    devices: &Devices,
    capacities: &[Bytes],
    (now, opens): (u64, u64),
) -> Result<Machine, Failure> {
    let named = |amounts| -> Result<Claims, Failure> {
        devices.claims(amounts).map_err(|refused| {
            Failure::usage(format!(
                "leases of before the restart cannot be kept: {}",
                refused.message
            ))
            .hint("name the same devices as before, or end the processes that hold them")
        })
    };
    let records = known.leases.values().map(|entry| {
        Ok(Record {
            lease: LeaseId(entry.lease),
            client: ClientId(entry.client),
            revision: Revision(entry.revision),
            claims: named(&entry.claims)?,
            floor: named(&entry.floor)?,
            priority: Priority(entry.priority),
            since: Millis(entry.since),
            is_committed: entry.is_committed,
            time_to_live: entry.time_to_live,
        })
    });
    let records = Records {
        leases: records.collect::<Result<_, Failure>>()?,
        next_lease: LeaseId(known.next_lease),
        are_incomplete: known.is_incomplete,
    };
    let times = (Millis(now), Millis(opens));
    Machine::restore(Settings::default(), capacities, records, times).map_err(|error| {
        let name = match &error {
            RestoreError::AboveCapacity { device, .. } => {
                devices.names().find(|(known, _)| known == device)
            }
            _ => None,
        };
        let at = name
            .map(|(_, name)| format!(" on `{name}`"))
            .unwrap_or_default();
        Failure::usage(format!(
            "leases of before the restart do not fit{at}: {error}"
        ))
        .hint(
            "give the broker at least as much memory as before, or end the processes that hold it",
        )
    })
}

/// Listens at the path; the socket appears there ready and private, in place of one that a dead broker left.
pub(super) fn listen(socket: &Path) -> Result<UnixListener, Failure> {
    let fail = |error: &dyn std::fmt::Display| {
        Failure::usage(format!("cannot listen at `{}`: {error}", socket.display()))
            .hint("choose a shorter or another path with `--socket PATH`")
    };
    let new: PathBuf = socket.with_extension("new");
    // The lock is ours, so this is no other broker's.
    let _not_there = fs::remove_file(&new);
    let listener = UnixListener::bind(&new).map_err(|error| fail(&error))?;
    fs::set_permissions(&new, Permissions::from_mode(0o600)).map_err(|error| fail(&error))?;
    fs::rename(&new, socket).map_err(|error| fail(&error))?;
    Ok(listener)
}

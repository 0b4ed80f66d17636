//! One client's connection.
//!
//! Responsible for reading lines, for noticing that the client is gone (its socket ended or its process died,
//! whichever is first) and for ending the connection when what it sends cannot be read. Not responsible
//! for what the lines ask.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use memfit_engine::share::lease::ClientId;
use serde_json::json;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

use super::outbox::Outbox;
use super::process::Process;
use super::server::{Fault, Server};
use super::stream::{Stream, watch};
use crate::lease::frame::Lines;
use crate::lease::protocol::{REQUEST_BYTES, Reply, Request};
use crate::lease::socket::own_user;

/// More than a client that waits for its answers sends at once.
const FLOOD_BYTES: usize = 2 << 10;
/// A client that says nothing at all is not kept.
const HELLO_WITHIN: std::time::Duration = std::time::Duration::from_secs(10);

/// Serves a client until it is gone.
pub(crate) async fn serve(stream: UnixStream, server: Rc<RefCell<Server>>) {
    let stream = match stream.into_std().and_then(Stream::new) {
        Ok(stream) => Rc::new(stream),
        Err(error) => {
            let reason = json!({ "reason": error.to_string() });
            server.borrow().log.warn("not_served", reason);
            return;
        }
    };
    let outbox = Rc::new(Outbox::new(Rc::clone(&stream)));
    let process = match peer(&stream) {
        Ok(process) => process,
        Err(fault) => {
            end_with(&outbox, &server, fault);
            return;
        }
    };
    let mut connection = Connection {
        lines: Lines::new(REQUEST_BYTES),
        client: None,
        death: process.open().and_then(watch_death),
        stream,
        outbox,
        process,
        server,
    };
    let how = match connection.run().await {
        Ok(how) => how,
        Err(fault) => {
            end_with(&connection.outbox, &connection.server, fault);
            "fault"
        }
    };
    if let Some(client) = connection.client {
        connection.server.borrow_mut().leave(client, how);
    }
}

/// The process on the other side, if it is one of ours.
fn peer(stream: &Stream) -> Result<Process, Fault> {
    let (user, pid) = stream
        .peer()
        .map_err(|error| format!("who are you? {error}"))?;
    if user != own_user() {
        return Err("this broker serves its own user only".to_owned());
    }
    Ok(Process::now(pid.unwrap_or(0)))
}

/// Becomes readable when the process ends.
pub(super) fn watch_death(descriptor: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    watch(descriptor, Interest::READABLE).ok()
}

fn end_with(outbox: &Outbox, server: &RefCell<Server>, fault: Fault) {
    let mut server = server.borrow_mut();
    server.count_fault(&fault);
    outbox.put(&Reply::Error { message: fault });
    outbox.flush();
}

struct Connection {
    stream: Rc<Stream>,
    outbox: Rc<Outbox>,
    process: Process,
    server: Rc<RefCell<Server>>,
    lines: Lines,
    client: Option<ClientId>,
    death: Option<AsyncFd<OwnedFd>>,
}

impl Connection {
    /// Until the client is gone (how) or has sent what cannot be read (what).
    async fn run(&mut self) -> Result<&'static str, Fault> {
        let patience = tokio::time::sleep(HELLO_WITHIN);
        tokio::pin!(patience);
        loop {
            let has_answered = self.answer()?;
            if self.outbox.is_closed() {
                return Ok("closed");
            }
            if has_answered {
                // Whoever was answered may run now, and its next request is often there when this looks again:
                // neither of the two has to be woken for it.
                std::thread::yield_now();
            }
            tokio::select! {
                biased;
                () = ended(self.death.as_ref()) => return Ok("process_ended"),
                count = self.stream.read(&mut self.lines), if !self.outbox.is_full() => {
                    match count {
                        Err(_) | Ok(0) => return Ok("socket_ended"),
                        // Others first.
                        Ok(count) if count > FLOOD_BYTES => tokio::task::yield_now().await,
                        Ok(_) => {}
                    }
                }
                ready = self.stream.writable(), if !self.outbox.is_empty() => {
                    if ready.is_err() {
                        return Ok("socket_ended");
                    }
                    self.outbox.flush();
                }
                () = self.outbox.changed.notified() => {}
                () = &mut patience, if self.client.is_none() => {
                    return Err("no `hello` came".to_owned());
                }
            }
        }
    }

    /// Answers the lines that are whole, as long as the client reads the answers; says whether there were any.
    fn answer(&mut self) -> Result<bool, Fault> {
        let mut has_answered = false;
        while !self.outbox.is_full() {
            let Some(line) = self.lines.next().map_err(|error| error.to_string())? else {
                break;
            };
            has_answered = true;
            let request: Request =
                serde_json::from_slice(line).map_err(|error| unreadable(&error))?;
            let mut server = self.server.borrow_mut();
            match self.client {
                Some(client) => server.handle(client, request)?,
                None => self.client = Some(server.hello(request, self.process, &self.outbox)?),
            }
        }
        Ok(has_answered)
    }
}

fn unreadable(error: &serde_json::Error) -> Fault {
    // The words may quote what was sent, which may be long.
    let words: String = error.to_string().chars().take(300).collect();
    format!("a message cannot be read: {words}")
}

/// Returns when the process has ended; never, when that cannot be seen.
pub(super) async fn ended(death: Option<&AsyncFd<OwnedFd>>) {
    match death {
        Some(death) => drop(death.readable().await),
        None => std::future::pending().await,
    }
}

impl Server {
    fn count_fault(&mut self, fault: &str) {
        self.counters.faults += 1;
        self.log
            .warn("connection_refused", json!({ "fault": fault }));
    }
}

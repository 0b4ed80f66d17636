//! One client's connection.
//!
//! Responsible for reading lines, for noticing that the client is gone (its socket ended or its process died,
//! whichever is first) and for ending the connection when what it sends cannot be read. Not responsible
//! for what the lines ask.
//!
//! A client that is cut off keeps what it holds for as long as its process can be seen to live: it does not know
//! yet, and may come back. Of one in another pid namespace that cannot be seen: it has as long as after a restart of
//! the broker. One that closes the connection itself gives back what it held.

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
use crate::lease::protocol::{HELLO_BYTES, REQUEST_BYTES, Reply, Request};
use crate::lease::socket::own_user;

/// More than a client that waits for its answers sends at once.
const FLOOD_BYTES: usize = 2 << 10;
/// A client that says nothing at all is not kept.
const HELLO_WITHIN: std::time::Duration = std::time::Duration::from_secs(10);

/// Serves a client until it is gone.
pub(crate) async fn serve(stream: UnixStream, server: Rc<RefCell<Server>>) {
    let peer = peer(&stream);
    let stream = match stream.into_std().and_then(Stream::new) {
        Ok(stream) => Rc::new(stream),
        Err(error) => {
            let reason = json!({ "reason": error.to_string() });
            server.borrow().log.warn("not_served", reason);
            return;
        }
    };
    let outbox = Rc::new(Outbox::new(Rc::clone(&stream)));
    let process = match peer {
        Ok(process) => process,
        Err(fault) => {
            end_with(&outbox, &server, fault);
            return;
        }
    };
    let mut connection = Connection {
        lines: Lines::new(HELLO_BYTES),
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
    let Connection {
        client,
        death,
        server,
        stream,
        outbox,
        process,
        ..
    } = connection;
    let of_the_socket = (stream, outbox);
    let Some(client) = client else { return };
    let may_live = death.is_some() || !process.is_seen();
    if how == "fault" && may_live && server.borrow_mut().cut_off(client) {
        drop(of_the_socket);
        leave_unless_back(&server, client, death.as_ref()).await;
    } else {
        server.borrow_mut().leave(client, how);
    }
}

/// The process on the other side, if it is one of ours.
fn peer(stream: &UnixStream) -> Result<Process, Fault> {
    let peer = stream
        .peer_cred()
        .map_err(|error| format!("who are you? {error}"))?;
    if peer.uid() != own_user() {
        return Err("this broker serves its own user only".to_owned());
    }
    let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok());
    Ok(Process::now(pid.unwrap_or(0)))
}

/// Takes back what a client holds that is away, once its process ends, unless it is back by then; where its process
/// cannot be seen, once the time for coming back is over.
pub(super) async fn leave_unless_back(
    server: &RefCell<Server>,
    client: ClientId,
    death: Option<&AsyncFd<OwnedFd>>,
) {
    let how = if death.is_some() {
        ended(death).await;
        "process_ended"
    } else {
        let grace = server.borrow().grace;
        tokio::time::sleep(grace).await;
        "not_back"
    };
    if server.borrow().is_away(client) {
        server.borrow_mut().leave(client, how);
    }
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
                // The client that was answered may run now, and its next request is often there when this looks again:
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
                () = self.stream.writable(), if !self.outbox.is_empty() => self.outbox.flush(),
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
            let read: Result<Request, _> = serde_json::from_slice(line);
            let mut server = self.server.borrow_mut();
            match (read, self.client) {
                (Ok(request), Some(client)) => server.handle(client, request)?,
                (Ok(request), None) => {
                    self.client = Some(server.hello(request, self.process, &self.outbox)?);
                    self.lines.limit(REQUEST_BYTES);
                }
                (Err(error), client) => match client.zip(number(line)) {
                    Some((client, number)) => server.refuse(client, number, unreadable(&error)),
                    None => return Err(unreadable(&error)),
                },
            }
        }
        Ok(has_answered)
    }
}

/// The number of a request that cannot be read otherwise.
fn number(line: &[u8]) -> Option<u64> {
    let message: serde_json::Value = serde_json::from_slice(line).ok()?;
    let (_, request) = message.as_object()?.iter().next()?;
    request.get("request")?.as_u64()
}

fn unreadable(error: &serde_json::Error) -> Fault {
    // The words may quote what was sent, which may be long.
    let words: String = error.to_string().chars().take(300).collect();
    format!("a message cannot be read: {words}")
}

/// Returns when the process has ended; never, when that cannot be seen.
async fn ended(death: Option<&AsyncFd<OwnedFd>>) {
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

//! The broker's one state: the machine, the names around it, and who is connected.
//!
//! Responsible for carrying a client's request to the machine and the effects to the clients, after they are
//! written down. Not responsible for any rule about memory (`memfit_engine::share::lease`) nor for waiting on
//! sockets (`connection.rs`).

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use memfit_engine::share::lease::{
    Ask, ClientId, Effect, Event, Imbalance, LeaseId, Machine, Millis, Presented, Priority,
    RequestId, Revision, Wait,
};
use serde_json::json;
use tokio::sync::Notify;

use super::alarm::Alarm;
use super::counters::Counters;
use super::devices::Devices;
use super::journal::{Change, ClientEntry, Journal};
use super::log::Log;
use super::outbox::Outbox;
use super::process::Process;
use super::refusal::refused;
use super::usage::Usage;
use crate::boot::milliseconds;
use crate::lease::amounts::Amounts;
use crate::lease::protocol::{NAME_BYTES, Reason, Refused, Reply, Request, Resume, VERSION};

/// Leases and requests of one client.
const MOST_LEASES: usize = 256;
/// How long until a journal that could not be written is tried again.
const WRITE_AGAIN_MS: u64 = 200;
/// Connected clients.
const MOST_CLIENTS: usize = 4096;

/// A client that is connected, or away since the restart.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) process: Process,
    pub(super) name: String,
    /// Absent while it is away.
    pub(super) outbox: Option<Rc<Outbox>>,
    pub(super) leases: usize,
}

/// What the broker knows.
#[derive(Debug)]
pub(crate) struct Server {
    pub(super) machine: Machine,
    pub(super) devices: Devices,
    pub(super) clients: BTreeMap<ClientId, Client>,
    /// What a request that waits is for.
    pub(super) waiting_labels: BTreeMap<(ClientId, RequestId), String>,
    pub(super) labels: BTreeMap<LeaseId, String>,
    pub(super) journal: Journal,
    pub(super) counters: Counters,
    pub(super) log: Log,
    /// What is in use of the GPUs.
    pub(super) usage: Usage,
    pub(super) began: u64,
    next_client: u64,
    /// Whether grants depend on what others have taken.
    pub(super) only_free: bool,
    /// When that was looked at last.
    pub(super) looked: Option<Instant>,
    /// How long clients have to come back.
    pub(super) grace: Duration,
    /// Why nothing is decided any longer, and who waits to hear it.
    pub(super) fault: Option<Imbalance>,
    pub(super) has_fault: Rc<Notify>,
    /// The next deadline is earlier than the clock looks.
    pub(crate) deadline_changed: Rc<Notify>,
    /// When the clock looks next.
    alarm: Alarm,
    /// Who has something to read.
    touched: Vec<ClientId>,
}

/// Why a connection has to end.
pub(crate) type Fault = String;

impl Server {
    pub(super) fn new(
        machine: Machine,
        devices: Devices,
        (journal, log): (Journal, Log),
        clients: BTreeMap<ClientId, Client>,
    ) -> Self {
        let known = &journal.known;
        let labels = known
            .leases
            .values()
            .filter_map(|entry| Some((LeaseId(entry.lease), entry.label.clone()?)));
        Self {
            labels: labels.collect(),
            usage: Usage::of(devices.names().map(|(_, name)| name), log),
            next_client: known.next_client.max(1),
            machine,
            devices,
            clients,
            waiting_labels: BTreeMap::new(),
            journal,
            counters: Counters::default(),
            log,
            began: milliseconds(),
            only_free: false,
            looked: None,
            grace: Duration::ZERO,
            fault: None,
            has_fault: Rc::new(Notify::new()),
            deadline_changed: Rc::new(Notify::new()),
            alarm: Alarm::default(),
            touched: Vec::new(),
        }
    }

    /// A connection's first message. The client's number, or why it is not let in.
    pub(crate) fn hello(
        &mut self,
        request: Request,
        process: Process,
        outbox: &Rc<Outbox>,
    ) -> Result<ClientId, Fault> {
        let Request::Hello {
            version,
            name,
            resume,
        } = request
        else {
            return Err("the first message must be `hello`".to_owned());
        };
        if version != VERSION {
            return Err(format!(
                "protocol version {version} is not spoken here, {VERSION} is: use the same memfit on both sides"
            ));
        }
        if name.len() > NAME_BYTES {
            return Err(format!("a name is longer than {NAME_BYTES} bytes"));
        }
        let connected = self
            .clients
            .values()
            .filter(|client| client.outbox.is_some())
            .count();
        if connected >= MOST_CLIENTS {
            return Err(format!(
                "{MOST_CLIENTS} clients are connected, and no more are let in"
            ));
        }
        match resume {
            None => {
                let client = self.enter(process, name, Some(outbox));
                self.let_in(client, outbox);
                Ok(client)
            }
            Some(resume) => self.resume(&resume, (process, name), outbox),
        }
    }

    fn enter(&mut self, process: Process, name: String, outbox: Option<&Rc<Outbox>>) -> ClientId {
        let client = ClientId(self.next_client);
        self.next_client = self.next_client.saturating_add(1);
        self.journal.client(ClientEntry {
            client: client.0,
            process,
            name: name.clone(),
        });
        let entry = Client {
            process,
            name,
            outbox: outbox.map(Rc::clone),
            leases: 0,
        };
        self.clients.insert(client, entry);
        client
    }

    /// Lets a client go on where it was, if it is the same process.
    fn resume(
        &mut self,
        resume: &Resume,
        (process, name): (Process, String),
        outbox: &Rc<Outbox>,
    ) -> Result<ClientId, Fault> {
        if resume.leases.len() > MOST_LEASES {
            return Err(format!("more than {MOST_LEASES} leases are presented"));
        }
        let presented = self.presented(resume)?;
        let mut client = ClientId(resume.client);
        let known = self.clients.get(&client);
        if !known.is_some_and(|known| known.outbox.is_none() && known.process == process) {
            // Its entry is lost, or it never was that client: somebody new, whose leases are adopted if
            // no other client's are meant.
            client = self.enter(process, name, None);
        }
        self.log.info(
            "client_back",
            json!({ "client": client.0, "pid": process.pid }),
        );
        // What ends now is not told: its first word is the welcome, which says what is held.
        self.apply(Event::Resume { client, presented });
        if let Some(entry) = self.clients.get_mut(&client) {
            entry.outbox = Some(Rc::clone(outbox));
        }
        self.open_if_complete();
        self.let_in(client, outbox);
        Ok(client)
    }

    fn presented(&self, resume: &Resume) -> Result<Vec<Presented>, Fault> {
        let presented = resume.leases.iter().map(|held| {
            let claims = self
                .devices
                .claims(&held.claims)
                .map_err(|refused| refused.message)?;
            Ok(Presented {
                lease: LeaseId(held.lease),
                revision: Revision(held.revision),
                claims,
            })
        });
        presented.collect()
    }

    /// Tells a client who it is and what it holds.
    fn let_in(&mut self, client: ClientId, outbox: &Outbox) {
        let mine = self
            .machine
            .leases()
            .filter(|(_, lease)| lease.client == client);
        let leases = mine
            .map(|(id, lease)| self.devices.held(id, lease))
            .collect();
        outbox.put(&Reply::Welcome {
            version: VERSION,
            client: client.0,
            devices: self.devices.capacities(&self.machine),
            leases,
        });
        self.touched.push(client);
        self.settle();
    }

    /// A message after the first.
    pub(crate) fn handle(&mut self, client: ClientId, request: Request) -> Result<(), Fault> {
        self.counters.requests += 1;
        self.write_again();
        match self.event(client, request) {
            Ok(Some(event)) => {
                if matches!(event, Event::Reserve { .. } | Event::Resize { .. }) {
                    self.look_before_granting();
                }
                self.apply(event);
            }
            Ok(None) => {}
            Err(Answer::Refuse(request, refusal)) => {
                self.counters.refusals += 1;
                self.put(client, &Reply::Refused { request, refusal });
            }
            Err(Answer::End(fault)) => return Err(fault),
        }
        self.settle();
        Ok(())
    }

    /// Refuses a request that cannot be read, and that one alone.
    pub(crate) fn refuse(&mut self, client: ClientId, request: u64, message: String) {
        self.counters.requests += 1;
        self.counters.refusals += 1;
        let refusal = refused(Reason::BadRequest, message);
        self.put(client, &Reply::Refused { request, refusal });
        self.settle();
    }

    /// The event that a request is; nothing where it is answered by other means.
    fn event(&mut self, client: ClientId, request: Request) -> Result<Option<Event>, Answer> {
        let now = Millis(milliseconds());
        Ok(Some(match request {
            Request::Hello { .. } => return Err(Answer::End("`hello` comes only once".to_owned())),
            Request::Reserve {
                request,
                claims,
                floor,
                priority,
                wait_ms,
                time_to_live_ms,
                label,
            } => {
                self.check_label(client, request, label.as_deref())?;
                let refuse = |refused| Answer::Refuse(request, refused);
                let claims = self.devices.claims(&claims).map_err(refuse)?;
                let floor = floor
                    .map(|floor| self.devices.claims(&floor))
                    .transpose()
                    .map_err(refuse)?;
                // The machine answers it: granted, refused or waiting, of which each client has one.
                if let Some(label) = label {
                    let name = (client, RequestId(request));
                    self.waiting_labels.insert(name, label);
                }
                Event::Reserve {
                    client,
                    request: RequestId(request),
                    ask: Ask {
                        floor: floor.unwrap_or_else(|| claims.clone()),
                        claims,
                        priority: Priority(priority),
                        wait: wait(now, wait_ms),
                        time_to_live: time_to_live_ms,
                    },
                }
            }
            Request::Commit {
                request,
                lease,
                revision,
            } => Event::Commit {
                client,
                request: RequestId(request),
                lease: LeaseId(lease),
                revision: Revision(revision),
            },
            Request::Resize {
                request,
                lease,
                revision,
                claims,
                wait_ms,
            } => Event::Resize {
                client,
                request: RequestId(request),
                lease: LeaseId(lease),
                revision: Revision(revision),
                claims: self.claims(request, &claims)?,
                wait: wait(now, wait_ms),
            },
            Request::Renew { request, lease } => Event::Renew {
                client,
                request: RequestId(request),
                lease: LeaseId(lease),
            },
            Request::Release { request, lease } => Event::Release {
                client,
                request: RequestId(request),
                lease: LeaseId(lease),
            },
            Request::Cancel { request } => Event::Cancel {
                client,
                request: RequestId(request),
            },
            Request::Decline { lease } => Event::Decline {
                client,
                lease: LeaseId(lease),
            },
            Request::Status { request } => {
                let status = Box::new(self.status());
                self.put(client, &Reply::Status { request, status });
                return Ok(None);
            }
        }))
    }

    fn claims(
        &self,
        request: u64,
        amounts: &Amounts,
    ) -> Result<memfit_engine::share::lease::Claims, Answer> {
        let claims = self.devices.claims(amounts);
        claims.map_err(|refused| Answer::Refuse(request, refused))
    }

    /// Keeps the label of a request and the number of leases within bounds.
    fn check_label(
        &self,
        client: ClientId,
        request: u64,
        label: Option<&str>,
    ) -> Result<(), Answer> {
        if label.is_some_and(|label| label.len() > NAME_BYTES) {
            let message = format!("a label is longer than {NAME_BYTES} bytes");
            return Err(Answer::Refuse(
                request,
                refused(Reason::BadRequest, message),
            ));
        }
        let leases = self.clients.get(&client).map_or(0, |client| client.leases);
        if leases >= MOST_LEASES {
            let message = format!("holds {MOST_LEASES} leases, and one client may hold no more");
            return Err(Answer::Refuse(request, refused(Reason::TooMany, message)));
        }
        Ok(())
    }

    /// A client is gone: its connection ended or its process died.
    pub(crate) fn leave(&mut self, client: ClientId, how: &str) {
        if let Some(entry) = self.clients.get(&client) {
            let facts = json!({
                "client": client.0, "pid": entry.process.pid, "leases": entry.leases, "how": how,
            });
            if entry.leases > 0 && how == "process_ended" {
                self.log.info("client_died", facts);
            } else {
                self.log.detail("client_left", || facts);
            }
            self.apply(Event::Leave { client });
            if let Some(Client {
                outbox: Some(outbox),
                ..
            }) = self.clients.remove(&client)
            {
                outbox.close();
            }
            self.waiting_labels
                .retain(|(labelled, _), _| *labelled != client);
            self.journal.gone(client.0);
            self.open_if_complete();
        }
        self.settle();
    }

    /// A client's connection was ended from here: while it lives it may come back to what it holds. Says whether it
    /// holds anything.
    pub(crate) fn cut_off(&mut self, client: ClientId) -> bool {
        let holds = |entry: &&mut Client| entry.leases > 0;
        let entry = self.clients.get_mut(&client).filter(holds);
        let is_kept = entry.map(|entry| entry.outbox = None).is_some();
        if is_kept {
            self.log
                .warn("client_cut_off", json!({ "client": client.0 }));
        }
        is_kept
    }

    /// Whether a client has not come back yet.
    pub(crate) fn is_away(&self, client: ClientId) -> bool {
        self.clients
            .get(&client)
            .is_some_and(|client| client.outbox.is_none())
    }

    /// Time has passed.
    pub(crate) fn tick(&mut self) {
        self.write_again();
        self.apply(Event::Tick);
        let is_complete = self.journal.known.is_incomplete && !self.is_held_back();
        if is_complete && !self.journal.complete() {
            self.stop_granting();
        }
        self.settle();
    }

    fn is_held_back(&self) -> bool {
        Millis(milliseconds()) < self.machine.opens()
    }

    /// Grants begin at once if the records are complete and every client in them is back.
    pub(crate) fn open_if_complete(&mut self) {
        let is_complete = self.clients.values().all(|client| client.outbox.is_some());
        if self.is_held_back() && is_complete && !self.journal.known.is_incomplete {
            self.apply(Event::Open);
        }
    }

    /// Lets an event happen, writes down what follows and carries it out.
    ///
    /// What cannot be written is not granted: then the event happens once more, to a machine that grants nothing.
    pub(super) fn apply(&mut self, event: Event) {
        let now = Millis(milliseconds());
        if self.journal.error.is_some() {
            if let Some((effects, changes)) = self.decide(now, event) {
                self.journal.owe(changes);
                self.carry_out_all(effects);
            }
            return;
        }
        let before = self.machine.clone();
        let Some((effects, changes)) = self.decide(now, event.clone()) else {
            return;
        };
        if self.journal.write(changes) {
            self.carry_out_all(effects);
            return;
        }
        self.machine = before;
        self.stop_granting();
        self.apply(event);
    }

    /// What an event leads to, and what is to be written of that; nothing where the sums are wrong.
    fn decide(&mut self, now: Millis, event: Event) -> Option<(Vec<Effect>, Vec<Change>)> {
        if self.fault.is_some() {
            return None;
        }
        let effects = self.machine.apply(now, event);
        if let Err(imbalance) = self.machine.audit() {
            // It is neither told nor written: the next broker starts from the last correct records.
            self.fault = Some(imbalance);
            self.has_fault.notify_one();
            return None;
        }
        let changes = self.changes(&effects);
        Some((effects, changes))
    }

    fn carry_out_all(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            self.carry_out(effect);
        }
    }

    /// The journal cannot be written: from now on nothing is granted.
    pub(super) fn stop_granting(&mut self) {
        let error = json!({ "error": self.journal.error });
        self.log.warn("state_not_written", error);
        self.apply(Event::Recording { works: false });
        // The clock looks after the journal too.
        self.deadline_changed.notify_one();
    }

    /// Tries again to write the journal, if it could not be.
    fn write_again(&mut self) {
        if self.journal.error.is_some() && self.journal.write(Vec::new()) {
            self.log.info("state_written", json!({}));
            self.apply(Event::Recording { works: true });
        }
    }

    /// Writes down what happened, then lets the clients hear of it, then plans the next look at the clock.
    pub(super) fn settle(&mut self) {
        if self.fault.is_some() {
            return;
        }
        if self.journal.error.is_none() && !self.journal.write(Vec::new()) {
            self.stop_granting();
        }
        for client in std::mem::take(&mut self.touched) {
            if let Some(Client {
                outbox: Some(outbox),
                ..
            }) = self.clients.get(&client)
            {
                outbox.flush();
            }
        }
        if self.alarm.is_late_for(self.machine.next_deadline()) {
            self.deadline_changed.notify_one();
        }
    }

    /// How long the clock sleeps from now on, unless it is woken.
    pub(crate) fn sleep_milliseconds(&mut self) -> Option<u64> {
        let next = self.machine.next_deadline();
        self.alarm.set(next);
        let left = next.map(|next| next.0.saturating_sub(milliseconds()));
        let again = self.journal.error.as_ref().map(|_| WRITE_AGAIN_MS);
        left.into_iter().chain(again).min()
    }

    /// Tells a client something it did not ask for and can do without, unless it has much to read already.
    pub(super) fn mention(&mut self, client: ClientId, reply: &Reply) {
        let entry = self.clients.get(&client);
        let outbox = entry.and_then(|entry| entry.outbox.as_ref());
        if outbox.is_some_and(|outbox| !outbox.is_full()) {
            self.put(client, reply);
        }
    }

    pub(super) fn put(&mut self, client: ClientId, reply: &Reply) {
        let outbox = self
            .clients
            .get(&client)
            .and_then(|client| client.outbox.as_ref());
        if let Some(outbox) = outbox {
            outbox.put(reply);
            self.touched.push(client);
        }
    }

    /// Clients of before a restart.
    pub(crate) fn absent(&self) -> impl Iterator<Item = (ClientId, Process)> + '_ {
        let absent = self
            .clients
            .iter()
            .filter(|(_, client)| client.outbox.is_none());
        absent.map(|(id, client)| (*id, client.process))
    }

    /// An orderly end.
    pub(crate) fn close(&mut self) {
        self.journal.close();
    }
}

/// What a request is answered with instead of an event.
enum Answer {
    Refuse(u64, Refused),
    End(Fault),
}

fn wait(now: Millis, milliseconds: Option<u64>) -> Wait {
    match milliseconds {
        None => Wait::Forever,
        Some(0) => Wait::No,
        Some(milliseconds) => Wait::Until(now.after(milliseconds)),
    }
}

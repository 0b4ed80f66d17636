//! The line to the broker: one connection that comes back by itself.
//!
//! Responsible for sending, for matching answers to requests, for keeping what this client holds, and for
//! presenting it to a broker that was started again. Not responsible for what is asked (`client.rs`).
//!
//! A thread reads. A connection that breaks fails the requests that wait for an answer; what they asked
//! for may or may not have happened, and the truth about leases is what the next `welcome` says. A child
//! of a fork is another process: nothing here is its own, and it must not even lock.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::amounts::Amounts;
use super::error::LeaseError;
use super::frame::Lines;
use super::protocol::{
    Cause, Held, NAME_BYTES, REPLY_BYTES, REQUEST_BYTES, Reply, Request, Resume, VERSION,
};
use super::socket::connect;
use crate::boot::milliseconds;

/// How often a caller that waits is asked whether it still wants to.
pub(super) const LOOK_UP: Duration = Duration::from_millis(50);

/// First pause before another try to connect; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How long a broker may take to answer `hello`.
const HELLO_WITHIN: Duration = Duration::from_secs(10);

/// What both the reading thread and the callers see.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Absent while there is no connection.
    stream: Option<UnixStream>,
    client: u64,
    next_request: u64,
    answers: BTreeMap<u64, Answer>,
    pub(super) devices: Amounts,
    pub(super) leases: BTreeMap<u64, Held>,
    /// What holders were asked to shrink to.
    pub(super) asked: BTreeMap<u64, Amounts>,
    /// Why leases ended that were not given back.
    pub(super) ended: BTreeMap<u64, Cause>,
    /// When leases end by themselves, no later than at the broker, in milliseconds since boot.
    pub(super) expire: BTreeMap<u64, u64>,
    /// Why there will be no connection again.
    over: Option<String>,
}

/// How a request stands.
#[derive(Debug, Clone, PartialEq)]
enum Answer {
    /// No answer yet; the number of requests before it, if it waits.
    Open(Option<u64>),
    /// The answer.
    There(Box<Reply>),
    /// The connection broke first.
    Broken,
}

/// What became of a request.
pub(super) enum Outcome {
    Answered(Reply),
    /// Unknown; the leases say after the next connection.
    Broken,
    /// The caller did not want to wait longer.
    GaveUp,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Line {
    path: PathBuf,
    name: String,
    /// The process it belongs to.
    process: u32,
    state: Mutex<State>,
    changed: Condvar,
}

impl Line {
    /// Connects and starts to read.
    pub(super) fn open(path: PathBuf, mut name: String) -> Result<Arc<Self>, LeaseError> {
        let mut end = name.len().min(NAME_BYTES);
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        name.truncate(end);
        let line = Arc::new(Self {
            path,
            name,
            process: std::process::id(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let stream = line.connect(None)?;
        let reader = Arc::clone(&line);
        std::thread::Builder::new()
            .name("memfit-lease".to_owned())
            .spawn(move || reader.read_for_ever(stream))
            .map_err(|error| LeaseError::Rejected(format!("cannot start a thread: {error}")))?;
        Ok(line)
    }

    /// The state, unless this is a child of the process it belongs to.
    pub(super) fn state(&self) -> Result<MutexGuard<'_, State>, LeaseError> {
        if self.process == std::process::id() {
            // A caller that panicked has not left anything half done: each change is one statement.
            Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
        } else {
            Err(LeaseError::Forked)
        }
    }

    /// Sends a request and waits for its answer, asking `goes_on` now and then with the number of requests
    /// before it.
    pub(super) fn ask(
        &self,
        request: impl FnOnce(u64) -> Request,
        goes_on: &mut dyn FnMut(Option<u64>) -> bool,
    ) -> Result<Outcome, LeaseError> {
        let mut state = self.state()?;
        if let Some(reason) = &state.over {
            return Err(LeaseError::Rejected(reason.clone()));
        }
        state.next_request += 1;
        let number = state.next_request;
        let request = request(number);
        let length = serde_json::to_vec(&request).map_or(0, |text| text.len());
        if length >= REQUEST_BYTES {
            // The broker would read no further.
            return Err(LeaseError::too_long());
        }
        if !state.send(&request) {
            return Ok(Outcome::Broken);
        }
        state.answers.insert(number, Answer::Open(None));
        let mut ahead = None;
        loop {
            match state.answers.get(&number) {
                Some(Answer::Open(now)) => ahead = *now,
                Some(Answer::There(_)) => {
                    let answer = state.answers.remove(&number);
                    if let Some(Answer::There(reply)) = answer {
                        return Ok(Outcome::Answered(*reply));
                    }
                }
                Some(Answer::Broken) | None => {
                    state.answers.remove(&number);
                    return Ok(Outcome::Broken);
                }
            }
            let waited = self.changed.wait_timeout(state, LOOK_UP);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if timeout.timed_out() {
                // The caller may take its time, and others need the state.
                drop(state);
                let goes_on = goes_on(ahead);
                state = self.state()?;
                if !goes_on && matches!(state.answers.get(&number), Some(Answer::Open(_))) {
                    state.answers.remove(&number);
                    state.send(&Request::Cancel { request: number });
                    return Ok(Outcome::GaveUp);
                }
            }
        }
    }

    /// Sends something that has no answer.
    pub(super) fn tell(&self, request: &Request) -> Result<(), LeaseError> {
        self.state()?.send(request);
        Ok(())
    }

    /// Waits until there is a connection; says whether there is.
    pub(super) fn wait_connected(
        &self,
        until: Option<Instant>,
        goes_on: &mut dyn FnMut(Option<u64>) -> bool,
    ) -> Result<bool, LeaseError> {
        let mut state = self.state()?;
        loop {
            if let Some(reason) = &state.over {
                return Err(LeaseError::Rejected(reason.clone()));
            }
            if state.stream.is_some() {
                return Ok(true);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
            let waited = self.changed.wait_timeout(state, LOOK_UP);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            if !goes_on(None) {
                return Ok(false);
            }
            state = self.state()?;
        }
    }

    /// Ends it; the reading thread ends too.
    pub(super) fn close(&self) {
        // In a child, a shutdown would end the parent's connection.
        if let Ok(mut state) = self.state() {
            state.over = Some("the connection was closed".to_owned());
            if let Some(stream) = state.stream.take() {
                let _gone_already = stream.shutdown(Shutdown::Both);
            }
            self.changed.notify_all();
        }
    }

    /// Connects, says hello and takes over what the broker says.
    fn connect(&self, resume: Option<Resume>) -> Result<Connected, LeaseError> {
        let mut stream = connect(&self.path)?;
        let hello = Request::Hello {
            version: VERSION,
            name: self.name.clone(),
            resume,
        };
        let mut text =
            serde_json::to_vec(&hello).map_err(|error| LeaseError::Rejected(error.to_string()))?;
        text.push(b'\n');
        let io = |error: std::io::Error| LeaseError::Broken(error.to_string());
        stream.write_all(&text).map_err(io)?;
        stream.set_read_timeout(Some(HELLO_WITHIN)).map_err(io)?;
        let mut lines = Lines::new(REPLY_BYTES);
        let welcome = loop {
            if let Some(reply) = read_one(&mut lines)? {
                break reply;
            }
            if !read_more(&mut stream, &mut lines) {
                return Err(LeaseError::Broken(
                    "it ended before its first word".to_owned(),
                ));
            }
        };
        stream.set_read_timeout(None).map_err(io)?;
        match welcome {
            Reply::Welcome {
                client,
                devices,
                leases,
                ..
            } => {
                let own = stream.try_clone().map_err(io)?;
                self.take_over(own, client, devices, leases)?;
                Ok((stream, lines))
            }
            Reply::Error { message } => Err(LeaseError::Rejected(message)),
            _ => Err(LeaseError::Rejected(
                "its first word is no welcome".to_owned(),
            )),
        }
    }

    fn take_over(
        &self,
        stream: UnixStream,
        client: u64,
        devices: Amounts,
        leases: Vec<Held>,
    ) -> Result<(), LeaseError> {
        let mut state = self.state()?;
        (state.client, state.devices) = (client, devices);
        state.stream = Some(stream);
        let before = std::mem::take(&mut state.leases);
        for held in leases {
            if before.contains_key(&held.lease) {
                state.leases.insert(held.lease, held);
            } else {
                // Given back after it was presented.
                state.give_back(held.lease);
            }
        }
        for lease in before.into_keys() {
            if !state.leases.contains_key(&lease) {
                state.ended.insert(lease, Cause::Lost);
            }
        }
        state.asked.clear();
        self.changed.notify_all();
        Ok(())
    }

    /// Reads answers, and connects again whenever the broker is gone, until closed.
    fn read_for_ever(&self, mut connected: Connected) {
        loop {
            self.read_until_broken(connected);
            let mut pause = FIRST_PAUSE;
            connected = loop {
                if self.broken().is_none() {
                    return;
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
                // What is held may have changed during the pause.
                let Some(resume) = self.broken() else {
                    return;
                };
                match self.connect(Some(resume)) {
                    Ok(connected) => break connected,
                    Err(LeaseError::Rejected(reason)) => {
                        self.give_up(reason);
                        return;
                    }
                    // No broker yet.
                    Err(_) => {}
                }
            };
        }
    }

    fn read_until_broken(&self, (mut stream, mut lines): Connected) {
        loop {
            match read_one(&mut lines) {
                Ok(Some(reply)) => {
                    let Ok(mut state) = self.state() else { return };
                    state.hear(reply);
                    self.changed.notify_all();
                }
                Ok(None) => {
                    if !read_more(&mut stream, &mut lines) {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }

    /// Fails what waits for an answer; what to present to the next broker, unless it is over.
    fn broken(&self) -> Option<Resume> {
        let mut state = self.state().ok()?;
        state.stream = None;
        for answer in state.answers.values_mut() {
            if matches!(answer, Answer::Open(_)) {
                *answer = Answer::Broken;
            }
        }
        self.changed.notify_all();
        state.expire();
        state.over.is_none().then(|| Resume {
            client: state.client,
            leases: state.leases.values().cloned().collect(),
        })
    }

    fn give_up(&self, reason: String) {
        if let Ok(mut state) = self.state() {
            let lost = std::mem::take(&mut state.leases);
            state
                .ended
                .extend(lost.into_keys().map(|lease| (lease, Cause::Lost)));
            state.over = Some(reason);
            self.changed.notify_all();
        }
    }
}

type Connected = (UnixStream, Lines);

fn read_one(lines: &mut Lines) -> Result<Option<Reply>, LeaseError> {
    let line = lines
        .next()
        .map_err(|error| LeaseError::Broken(error.to_string()))?;
    let reply = line.map(serde_json::from_slice).transpose();
    reply.map_err(|error| LeaseError::Broken(format!("an answer cannot be read: {error}")))
}

/// Waits for bytes; says whether there were any.
fn read_more(stream: &mut UnixStream, lines: &mut Lines) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) => {
                lines.push(&bytes[..count]);
                return true;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
}

impl State {
    /// Writes a request; says whether there was a connection that took it.
    fn send(&mut self, request: &Request) -> bool {
        let Some(stream) = &mut self.stream else {
            return false;
        };
        let Ok(mut text) = serde_json::to_vec(request) else {
            return false;
        };
        text.push(b'\n');
        stream.write_all(&text).is_ok()
    }

    /// Ends leases whose time is over, whether the broker could say so or not.
    pub(super) fn expire(&mut self) {
        let now = milliseconds();
        let (ended, leases) = (&mut self.ended, &mut self.leases);
        self.expire.retain(|lease, at| {
            let is_over = *at <= now;
            if is_over && leases.remove(lease).is_some() {
                ended.insert(*lease, Cause::Expired);
            }
            !is_over && leases.contains_key(lease)
        });
    }

    /// Releases a lease that this client does not hold; the answer is of no interest.
    fn give_back(&mut self, lease: u64) {
        self.send(&Request::Release { request: 0, lease });
    }

    /// Takes in what the broker says. Leases change here, before any caller looks, so that a connection
    /// that breaks right after presents them as they are.
    fn hear(&mut self, reply: Reply) {
        let number = match &reply {
            Reply::Granted {
                request,
                lease,
                claims,
                ..
            } => {
                if !self.answers.contains_key(request) {
                    // Granted in the moment in which the caller gave up.
                    self.give_back(*lease);
                    return;
                }
                let held = Held {
                    lease: *lease,
                    revision: 1,
                    claims: claims.clone(),
                    is_committed: false,
                };
                self.leases.insert(*lease, held);
                *request
            }
            Reply::Changed {
                request,
                lease,
                revision,
                claims,
            } => {
                if let Some(held) = self.leases.get_mut(lease) {
                    (held.revision, held.claims) = (*revision, claims.clone());
                    held.is_committed = true;
                }
                self.asked.remove(lease);
                *request
            }
            Reply::Ended {
                request,
                lease,
                cause,
            } => {
                if self.leases.remove(lease).is_some() {
                    self.ended.insert(*lease, *cause);
                }
                self.asked.remove(lease);
                match request {
                    Some(request) => *request,
                    None => return,
                }
            }
            Reply::Queued { request, ahead } => {
                if let Some(answer) = self.answers.get_mut(request) {
                    *answer = Answer::Open(Some(*ahead));
                }
                return;
            }
            Reply::Shrink { lease, to, .. } => {
                self.asked.insert(*lease, to.clone());
                return;
            }
            Reply::Refused { request, .. } | Reply::Status { request, .. } => *request,
            Reply::Welcome { .. } => return,
            Reply::Error { .. } => {
                // The connection ends, and the next one presents what is held; what was asked for is not asked again.
                let answers = self.answers.values_mut();
                for answer in answers.filter(|answer| matches!(answer, Answer::Open(_))) {
                    *answer = Answer::There(Box::new(reply.clone()));
                }
                return;
            }
        };
        if let Some(answer) = self.answers.get_mut(&number) {
            *answer = Answer::There(Box::new(reply));
        }
    }
}

//! A client of the broker: takes leases, changes them, gives them back.
//!
//! Responsible for doing each of these through to the end, over a broker that goes away and comes back.
//! Not responsible for the connection (`line.rs`) nor for what is allowed (the broker).
//!
//! A client is one line of work: while it waits for one thing it can ask for no other.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::amounts::Amounts;
use super::error::LeaseError;
use super::line::{LOOK_UP, Line, Outcome};
use super::protocol::{Cause, Held, Reason, Reply, Request};
use super::socket::SocketError;
use super::status::Status;
use crate::boot;

/// How long a request that does not wait lets a broker that is being restarted take.
const RESTART_WITHIN: Duration = Duration::from_secs(5);

/// What a lease shall be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseRequest {
    /// Bytes by device, all that is needed at the peak.
    pub claims: Amounts,
    /// What would do when asked to shrink; the claims when absent.
    pub floor: Option<Amounts>,
    /// Higher goes first.
    pub priority: i8,
    /// How long to wait; without end when absent.
    pub wait: Option<Duration>,
    /// The lease ends after so long unless renewed.
    pub time_to_live: Option<Duration>,
    /// What the memory is for.
    pub label: Option<String>,
}

/// How long to wait, from seconds.
///
/// # Errors
///
/// They are no number of seconds that can be waited.
pub fn seconds(seconds: Option<f64>) -> Result<Option<Duration>, String> {
    let duration = seconds.map(Duration::try_from_secs_f64).transpose();
    duration.map_err(|error| format!("cannot wait so long: {error}"))
}

/// Asked now and then while waiting, with the number of requests before; says whether to go on.
pub type GoesOn<'a> = &'a mut dyn FnMut(Option<u64>) -> bool;

/// A connection to the broker, which comes back by itself when the broker does.
#[derive(Debug)]
pub struct Client {
    line: Arc<Line>,
}

impl Client {
    /// Connects to the broker at `path`; `name` is what `memfit ps` shows.
    ///
    /// # Errors
    ///
    /// No broker listens there, or it is another user's, or it speaks another version.
    pub fn connect(path: &Path, name: &str) -> Result<Self, LeaseError> {
        let line = Line::open(PathBuf::from(path), name.to_owned())?;
        Ok(Self { line })
    }

    /// As [`Client::connect`], and waits for a broker that is away: as long as a request may wait, and at least as long as
    /// a restart may take.
    ///
    /// # Errors
    ///
    /// As [`Client::connect`], given up, or it is still away.
    pub fn connect_within(
        path: &Path,
        name: &str,
        wait: Option<Duration>,
        goes_on: GoesOn<'_>,
    ) -> Result<Self, LeaseError> {
        let until = wait.map(|wait| Instant::now() + wait.max(RESTART_WITHIN));
        loop {
            let error = match Self::connect(path, name) {
                // The latter ended while it was spoken to.
                Err(error @ (LeaseError::Socket(SocketError::Away(_)) | LeaseError::Broken(_))) => {
                    error
                }
                connected => return connected,
            };
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(error);
            }
            if !goes_on(None) {
                return Err(LeaseError::GaveUp);
            }
            std::thread::sleep(LOOK_UP);
        }
    }

    /// Capacity by device.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn devices(&self) -> Result<Amounts, LeaseError> {
        Ok(self.line.state()?.devices.clone())
    }

    /// Takes a lease: reserves, waits as long as the request says, and commits.
    ///
    /// # Errors
    ///
    /// Refused, given up, or no broker within the wait.
    pub fn acquire(&self, request: &LeaseRequest, goes_on: GoesOn<'_>) -> Result<Held, LeaseError> {
        let until = request.wait.map(|wait| Instant::now() + wait);
        loop {
            let reserve = |number| Request::Reserve {
                request: number,
                claims: request.claims.clone(),
                floor: request.floor.clone(),
                priority: request.priority,
                wait_ms: left(until),
                time_to_live_ms: request.time_to_live.map(milliseconds),
                label: request.label.clone(),
            };
            match self.line.ask(reserve, goes_on)? {
                Outcome::Answered(Reply::Granted { lease, .. }) => {
                    if let Some(held) = self.commit(lease, request.time_to_live, goes_on)? {
                        return Ok(held);
                    }
                    // The broker went away between the two and does not know it: once more.
                }
                Outcome::Answered(reply) => return Err(refused(reply)),
                Outcome::GaveUp => return Err(LeaseError::GaveUp),
                Outcome::Broken => {}
            }
            self.reconnect(until, goes_on)?;
        }
    }

    /// Takes up a reservation; nothing when it is no more.
    fn commit(
        &self,
        lease: u64,
        lives: Option<Duration>,
        goes_on: GoesOn<'_>,
    ) -> Result<Option<Held>, LeaseError> {
        // The broker counts from when it hears of the commit, which is later.
        let ends = lives.map(|lives| boot::milliseconds().saturating_add(milliseconds(lives)));
        loop {
            let Some(held) = self.held(lease)? else {
                return Ok(None);
            };
            if let Some(ends) = ends {
                self.line.state()?.expire.insert(lease, ends);
            }
            if held.is_committed {
                return Ok(Some(held));
            }
            let commit = |request| Request::Commit {
                request,
                lease,
                revision: held.revision,
            };
            // It is answered at once, so the caller is not asked whether to wait.
            match self.line.ask(commit, &mut |_| true)? {
                Outcome::Answered(Reply::Changed { .. }) => {}
                Outcome::Answered(Reply::Refused { refusal, .. }) => {
                    return match refusal.reason {
                        Reason::UnknownLease => Ok(None),
                        _ => Err(LeaseError::Refused(refusal)),
                    };
                }
                Outcome::Answered(reply) => return Err(refused(reply)),
                Outcome::GaveUp | Outcome::Broken => self.reconnect(None, goes_on)?,
            }
        }
    }

    /// Makes a lease larger or smaller; growth may wait.
    ///
    /// # Errors
    ///
    /// Refused (the lease is as before), given up, or the lease has ended.
    pub fn resize(
        &self,
        lease: u64,
        claims: &Amounts,
        wait: Option<Duration>,
        goes_on: GoesOn<'_>,
    ) -> Result<Held, LeaseError> {
        let until = wait.map(|wait| Instant::now() + wait);
        loop {
            let held = self.held(lease)?.ok_or_else(|| self.why_ended(lease))?;
            let wanted = claims.iter().filter(|(_, bytes)| **bytes > 0);
            if wanted.eq(held.claims.iter()) {
                return Ok(held);
            }
            let resize = |request| Request::Resize {
                request,
                lease,
                revision: held.revision,
                claims: claims.clone(),
                wait_ms: left(until),
            };
            match self.line.ask(resize, goes_on)? {
                Outcome::Answered(Reply::Changed { .. }) => {
                    return self.held(lease)?.ok_or_else(|| self.why_ended(lease));
                }
                Outcome::Answered(reply) => return Err(refused(reply)),
                Outcome::GaveUp => return Err(LeaseError::GaveUp),
                Outcome::Broken => self.reconnect(until, goes_on)?,
            }
        }
    }

    /// Gives a lease back. Without a connection it is given back by not being named at the next. A broker that does not
    /// answer takes it back when it reads on; a caller that stops waiting for that holds nothing either.
    ///
    /// # Errors
    ///
    /// In a forked child, whose lease it is not.
    pub fn release(&self, lease: u64, goes_on: GoesOn<'_>) -> Result<(), LeaseError> {
        {
            let mut state = self.line.state()?;
            state.ended.remove(&lease);
            if state.leases.remove(&lease).is_none() {
                return Ok(());
            }
        }
        let release = |request| Request::Release { request, lease };
        match self.line.ask(release, goes_on) {
            // Whatever became of the connection, the lease is not held any longer.
            Ok(_) | Err(LeaseError::Rejected(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// A lease as it stands; nothing when it has ended.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn held(&self, lease: u64) -> Result<Option<Held>, LeaseError> {
        let mut state = self.line.state()?;
        state.expire();
        Ok(state.leases.get(&lease).cloned())
    }

    /// What the broker asked to shrink the lease to, if it has.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn asked_to_shrink(&self, lease: u64) -> Result<Option<Amounts>, LeaseError> {
        Ok(self.line.state()?.asked.get(&lease).cloned())
    }

    /// Answers a shrink request with no.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn decline(&self, lease: u64) -> Result<(), LeaseError> {
        self.line.state()?.asked.remove(&lease);
        self.line.tell(&Request::Decline { lease })
    }

    /// Who holds what.
    ///
    /// # Errors
    ///
    /// The connection broke.
    pub fn status(&self) -> Result<Status, LeaseError> {
        let status = |request| Request::Status { request };
        match self.line.ask(status, &mut |_| true)? {
            Outcome::Answered(Reply::Status { status, .. }) => Ok(*status),
            Outcome::Answered(reply) => Err(refused(reply)),
            Outcome::Broken | Outcome::GaveUp => Err(LeaseError::Broken("it went away".to_owned())),
        }
    }

    fn why_ended(&self, lease: u64) -> LeaseError {
        let state = self.line.state();
        let cause = state
            .ok()
            .and_then(|state| state.ended.get(&lease).copied());
        LeaseError::Ended {
            lease,
            cause: cause.unwrap_or(Cause::Released),
        }
    }

    fn reconnect(&self, until: Option<Instant>, goes_on: GoesOn<'_>) -> Result<(), LeaseError> {
        let restart = Instant::now() + RESTART_WITHIN;
        let until = until.map(|until| until.max(restart));
        let mut gave_up = false;
        let mut asked = |ahead| {
            gave_up = !goes_on(ahead);
            !gave_up
        };
        let is_connected = self.line.wait_connected(until, &mut asked)?;
        match (is_connected, gave_up) {
            (true, _) => Ok(()),
            (false, true) => Err(LeaseError::GaveUp),
            (false, false) => Err(LeaseError::Broken(
                "it did not come back in time".to_owned(),
            )),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.line.close();
    }
}

fn refused(reply: Reply) -> LeaseError {
    match reply {
        Reply::Refused { refusal, .. } => LeaseError::Refused(refusal),
        Reply::Error { message } => LeaseError::Rejected(message),
        other => LeaseError::Rejected(format!("an answer does not match its request: {other:?}")),
    }
}

fn left(until: Option<Instant>) -> Option<u64> {
    until.map(|until| milliseconds(until.saturating_duration_since(Instant::now())))
}

/// Rounded up: no wait is shorter than it was asked for.
fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_never_cut_short() {
        let cases = [(0, 0), (1, 1), (1_000, 1), (299_900, 300), (300_000, 300)];
        for (micros, millis) in cases {
            assert_eq!(milliseconds(Duration::from_micros(micros)), millis);
        }
    }
}

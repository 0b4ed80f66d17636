//! Leases: who may use how many bytes of which device, decided by one pure state machine.
//!
//! Responsible for admission, order, growth, shrink requests, expiry and the sums. Not responsible for
//! sockets, processes, clocks or names: time comes in with every event, and the daemon around
//! ([`Machine::apply`] is its only way in) says which client spoke and which has died.
//!
//! A lease goes *reserved* -> *committed* -> ended, with a revision that rises at each change. A request
//! names everything that a step needs at its peak, on all devices at once, and gets all of it or
//! nothing. A reservation that is not committed in time expires.
//!
//! The daemon writes down what was granted before anyone hears of it. Where it cannot, it takes the event back:
//! it goes on from a copy of the machine as it was, tells it so ([`Event::Recording`]), and has the same happen once
//! more. Such a machine grants nothing: all that is left to write are ended leases and smaller ones. Records that
//! lack them count free memory as held, never held memory as free.
//!
//! # Words
//!
//! A client is one line of work: it waits for one thing at a time. A *holder* is a client whose leases are
//! not empty. A *fresh* request is a waiting request of a client that held nothing when it asked. Two
//! requests *meet* when they claim a common device.
//!
//! # The order of service
//!
//! 1. The waiting holder. There is at most one, over all devices.
//! 2. *Due* requests, in the order in which they became due. A fresh request becomes due when `N` grants
//!    that meet it have gone to requests that came later ([`Settings::overtakings`]), or when it has
//!    waited for [`Settings::patience`].
//! 3. Other fresh requests: higher priority first, then first come, first served.
//!
//! Requests are tried in this order. One that fits is granted. One of class 1 or 2 that does not fit
//! *blocks* its devices: nothing behind it gets a byte there. One of class 3 blocks nothing, so smaller
//! ones behind it overtake it, but no more than `N` times and no longer than the patience.
//!
//! A holder that asks for more (a resize, or another lease) is granted at once when it fits and meets no
//! waiting holder and no due request. Otherwise it may wait only if it meets none of these, no other
//! holder waits, and what it holds and wants together is within the capacity; else it is refused at
//! once. So a holder never stands in a queue behind anyone.
//!
//! # Why nothing deadlocks and no request starves
//!
//! Assumption A: a lease whose client is not waiting ends after finite time, and after finitely many
//! requests (growers included).
//!
//! *No deadlock.* A request waits for bytes held by others, or for requests before it. A cycle of waiting
//! has at least one client that waits and holds. There is one such client at most; it stands first,
//! so it waits for no request; and it does not wait for its own bytes, because held and wanted are within
//! the capacity. So there is no cycle.
//!
//! *The waiting holder is granted.* While it waits, its devices are blocked. All other holders do not
//! wait; by A their leases there end; what is free reaches capacity minus its own, which is enough.
//!
//! *A due request is granted.* Once it is due, no fresh request behind it and no new grower gets a byte
//! on its devices. The requests before it are finitely many (those due earlier, and one holder that
//! waited already), are granted by induction over the order, and end by A. Then all is free.
//!
//! *Every other fresh request is granted*, or cancelled, or reaches its own time limit. After `N`
//! overtakings or the patience it is due. Before that only requests that came earlier pass it without
//! being counted, and they are finitely many.
//!
//! A client that never ends its lease breaks A: then those that need its bytes wait until their own
//! time limit, and shrink requests are the only lever.
//!
//! # Shrinking
//!
//! A lease with a floor below its claims is elastic. When the first waiting request lacks bytes that
//! elastic leases of no higher priority (of any, once it is due) could give, they are asked, the lowest
//! priority and the youngest first, and only if the bytes they could give suffice. The holder answers
//! with a smaller resize or declines; until it answers the bytes stay its own. At the deadline the ask
//! lapses: bytes are never taken from a living process.
//!
//! A request that does not wait asks no holder to shrink. An ask cannot be taken back, and a holder answers when it can
//! (a training step between two steps, with another plan), so it would shrink for somebody who is gone. Who
//! wants a short courtesy waits for a moment: then it stands in the queue, with all that follows from that.

//!
//! # Memory used without a lease
//!
//! [`Event::Occupied`] says what others have taken of a device. It is not free, so requests wait for it as
//! for what is granted, and holders are asked to shrink where that helps; who holds a lease keeps it, whatever
//! others take. What could never be granted is still judged by the capacity alone. No request starves by it under
//! assumption B: what others have taken comes down again, for long enough, to what leaves room for the first in the order.

mod claims;
mod ledger;
mod machine;
mod queue;
mod requests;
mod restore;
mod shrink;
mod timers;

#[cfg(test)]
mod amounts;
#[cfg(test)]
mod examples;
#[cfg(test)]
mod failing_model;
#[cfg(test)]
mod histories;
#[cfg(test)]
mod naive;
#[cfg(test)]
mod small_model;
#[cfg(test)]
mod witness;

pub use claims::{Claims, ClaimsError, Device};
pub use machine::{Imbalance, Machine};
pub use restore::{Record, Records, RestoreError};

use crate::bytes::Bytes;

/// A line of work that holds leases and waits for one thing at a time; the daemon names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// A lease. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u64);

/// What a client calls a request of its own; the machine only gives it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// How often a lease has changed; starts at 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl Revision {
    /// The one after it; the last number has none.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// Who goes first; the default is 0 and higher goes before lower.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(pub i8);

/// Milliseconds of a clock that never goes back. An event with an earlier time counts as now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Millis(pub u64);

impl Millis {
    /// So much later; the end of time at the latest.
    #[must_use]
    pub const fn after(self, milliseconds: u64) -> Self {
        Self(self.0.saturating_add(milliseconds))
    }
}

/// The constants of the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Grants to later requests that a waiting request lets pass before it is due.
    pub overtakings: u32,
    /// Milliseconds of waiting after which a request is due.
    pub patience: u64,
    /// Milliseconds that a reservation waits for its commit.
    pub commit_within: u64,
    /// Milliseconds that a holder has to answer a shrink request, and that it is left alone after one
    /// it did not follow.
    pub shrink_within: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            overtakings: 16,
            patience: 10_000,
            commit_within: 10_000,
            shrink_within: 10_000,
        }
    }
}

/// How long a request may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Granted now or refused.
    No,
    /// Until this time.
    Until(Millis),
    /// As long as it takes.
    Forever,
}

/// What a new lease shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// Bytes on each device: the peak of the step, not its start.
    pub claims: Claims,
    /// What the client could do with when it is asked to shrink; the claims themselves when it could not.
    pub floor: Claims,
    /// Who goes first.
    pub priority: Priority,
    /// How long the request may wait.
    pub wait: Wait,
    /// Milliseconds after which the lease ends unless renewed.
    pub time_to_live: Option<u64>,
}

/// What happens to the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A client asks for a new lease.
    Reserve {
        /// Who asks.
        client: ClientId,
        /// Its name for the request.
        request: RequestId,
        /// What it asks for.
        ask: Ask,
    },
    /// A client takes up a reservation.
    Commit {
        /// Who.
        client: ClientId,
        /// Its name for the request.
        request: RequestId,
        /// The reserved lease.
        lease: LeaseId,
        /// The revision that the client knows.
        revision: Revision,
    },
    /// A client wants a committed lease smaller or larger.
    Resize {
        /// Who.
        client: ClientId,
        /// Its name for the request.
        request: RequestId,
        /// The committed lease.
        lease: LeaseId,
        /// The revision that the client knows.
        revision: Revision,
        /// What the lease shall hold.
        claims: Claims,
        /// How long growth may wait.
        wait: Wait,
    },
    /// A client keeps a lease with a time to live for another such time.
    Renew {
        /// Who.
        client: ClientId,
        /// Its name for the request.
        request: RequestId,
        /// The lease.
        lease: LeaseId,
    },
    /// A client gives a lease back.
    Release {
        /// Who.
        client: ClientId,
        /// Its name for the request.
        request: RequestId,
        /// The lease.
        lease: LeaseId,
    },
    /// A client takes back a request that waits.
    Cancel {
        /// Who.
        client: ClientId,
        /// The waiting request.
        request: RequestId,
    },
    /// A client answers a shrink request with no.
    Decline {
        /// Who.
        client: ClientId,
        /// The lease that was to shrink.
        lease: LeaseId,
    },
    /// A client is back after the daemon was away, and says what it holds; what it does not name ends.
    Resume {
        /// Who.
        client: ClientId,
        /// Its leases as it knows them.
        presented: Vec<Presented>,
    },
    /// A client is gone; everything of it ends.
    Leave {
        /// Who.
        client: ClientId,
    },
    /// So much of a device is taken without a lease: no more is granted than is left beside it. Counts
    /// until it is told anew.
    Occupied {
        /// Where.
        device: Device,
        /// How much; more than there is counts as all.
        bytes: Bytes,
    },
    /// Whether what is granted can be written down. While it cannot, nothing is: not by what happens in time
    /// before this event either.
    Recording {
        /// Whether it can.
        works: bool,
    },
    /// Everyone from before has come back or is gone: grants need not be held back any longer.
    Open,
    /// Only time has passed.
    Tick,
}

/// A lease as its holder knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presented {
    /// Which.
    pub lease: LeaseId,
    /// The revision it knows. Where the machine knows another, the machine's counts.
    pub revision: Revision,
    /// Its bytes.
    pub claims: Claims,
}

/// What follows from an event. All changes of sums are here, so folding the effects gives the sums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// A reservation was made.
    Granted {
        /// Whose.
        client: ClientId,
        /// Its name for the request.
        request: RequestId,
        /// The new lease, at revision 1.
        lease: LeaseId,
        /// Its bytes.
        claims: Claims,
        /// When it expires unless committed.
        commit_by: Millis,
    },
    /// A lease was committed, resized or renewed.
    Changed {
        /// Whose.
        client: ClientId,
        /// Its name for the request.
        request: RequestId,
        /// The lease.
        lease: LeaseId,
        /// Its revision now.
        revision: Revision,
        /// Its bytes now.
        claims: Claims,
    },
    /// A request waits.
    Queued {
        /// Whose.
        client: ClientId,
        /// Its name for the request.
        request: RequestId,
        /// Requests that are served before it.
        ahead: usize,
    },
    /// A request was refused; nothing changed.
    Refused {
        /// Whose.
        client: ClientId,
        /// Its name for the request.
        request: RequestId,
        /// Why.
        refusal: Refusal,
    },
    /// A lease ended; its bytes are free.
    Ended {
        /// Whose it was.
        client: ClientId,
        /// Its name for the request that ended it, if one did.
        request: Option<RequestId>,
        /// The lease.
        lease: LeaseId,
        /// Why.
        end: End,
    },
    /// A lease whose record was lost, presented by its holder, is held again.
    Adopted {
        /// Whose.
        client: ClientId,
        /// The lease.
        lease: LeaseId,
        /// Its revision.
        revision: Revision,
        /// Its bytes.
        claims: Claims,
    },
    /// A holder is asked for bytes that another needs.
    ShrinkAsked {
        /// The holder.
        client: ClientId,
        /// The lease.
        lease: LeaseId,
        /// What it should hold.
        to: Claims,
        /// When the ask lapses.
        by: Millis,
    },
}

/// Why a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its client gave it back.
    Released,
    /// It was not committed or not renewed in time.
    Expired,
    /// Its client is gone.
    ClientGone,
    /// Its client came back without naming it.
    NotPresented,
    /// Its client named it, but the machine does not know it and has no room for it.
    Lost,
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no such device.
    #[error("there is no device {0:?}")]
    UnknownDevice(Device),
    /// More than there will ever be.
    #[error("asks for {asked} and no more than {largest} can ever be granted")]
    AboveCapacity {
        /// Where.
        device: Device,
        /// What was asked for.
        asked: Bytes,
        /// The largest request of this client that can succeed: the capacity, less what the client holds.
        largest: Bytes,
    },
    /// The floor asks for more than the claims.
    #[error("the floor is above the claims")]
    FloorAboveClaims,
    /// There is not enough room now, and the request does not wait.
    #[error("asks for {asked} and {largest} are free")]
    NoRoom {
        /// Where.
        device: Device,
        /// What was asked for.
        asked: Bytes,
        /// The largest that would have been granted there; zero where earlier requests go first.
        largest: Bytes,
    },
    /// The request waited as long as it may.
    #[error("no room within the time allowed")]
    TimedOut {
        /// The device where it does not fit now, or the first it claims where it would fit and others go first.
        device: Device,
        /// What was asked for.
        asked: Bytes,
        /// The largest that would be granted there now.
        largest: Bytes,
    },
    /// A holder may not wait now: another holder waits, or others are due on the same devices.
    #[error("holds memory and may not wait for more while others have to be served first")]
    Contended,
    /// The client waits for another request already.
    #[error("waits for another request already")]
    AlreadyWaiting,
    /// Taken back by its client.
    #[error("cancelled")]
    Cancelled,
    /// The client holds no such lease.
    #[error("holds no lease {}", .0.0)]
    UnknownLease(LeaseId),
    /// The client waits for no such request.
    #[error("waits for no such request")]
    UnknownRequest,
    /// The lease has changed since.
    #[error("knows another revision of the lease than {}", .0.0)]
    Stale(Revision),
    /// The lease is not committed yet, or is already.
    #[error("the lease is not in the state for that")]
    WrongPhase,
    /// Grants are held back until clients of before have come back.
    #[error("grants are held back until clients of before the restart are back")]
    HeldBack,
    /// What is granted could not be written down, so nothing is.
    #[error("nothing is granted while it cannot be written down")]
    NotRecorded,
}

/// A lease, to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Whose.
    pub client: ClientId,
    /// How often it changed.
    pub revision: Revision,
    /// Its bytes.
    pub claims: Claims,
    /// What its client could do with.
    pub floor: Claims,
    /// Its priority.
    pub priority: Priority,
    /// When it was granted.
    pub since: Millis,
    /// Whether the client has taken it up.
    pub is_committed: bool,
    /// Milliseconds after which it ends unless renewed.
    pub time_to_live: Option<u64>,
    /// When it ends by itself: uncommitted or not renewed.
    pub ends: Option<Millis>,
    /// What its client was asked to shrink it to, and when the ask lapses.
    pub asked: Option<(Claims, Millis)>,
    /// Not asked to shrink before this time.
    pub(crate) left_alone_until: Millis,
}

/// A request that waits, to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// Whose.
    pub client: ClientId,
    /// Its name for the request.
    pub request: RequestId,
    /// The bytes it lacks: those of a new lease, or the growth of one.
    pub wants: Claims,
    /// Its priority.
    pub priority: Priority,
    /// Since when.
    pub since: Millis,
    /// Until when, if not forever.
    pub until: Option<Millis>,
    /// Grants that went to later requests.
    pub overtaken: u32,
    /// What is made of it.
    pub(crate) purpose: Purpose,
    /// Its place in the order of arrival.
    pub(crate) arrival: u64,
}

/// What a grant becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A new lease.
    New {
        floor: Claims,
        time_to_live: Option<u64>,
    },
    /// More for this one.
    Grow { lease: LeaseId, to: Claims },
}

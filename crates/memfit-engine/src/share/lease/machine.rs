//! The machine: one event in, its effects out.
//!
//! Responsible for dispatch, for serving the queue and for the bookkeeping around the sums. What a
//! request may do is in `requests.rs`, time in `timers.rs`, shrinking in `shrink.rs`.
//!
//! Invariant: a device's sum is the sum of the claims of the leases there, and no more than its capacity.
//! [`Machine::audit`] recounts it, so that the broker can check before it acts on an event.

use std::collections::BTreeMap;

use crate::bytes::Bytes;

use super::ledger::Ledger;
use super::queue::{Queue, Rank};
use super::{
    Claims, ClientId, Device, Effect, End, Event, Lease, LeaseId, Millis, Purpose, RequestId,
    Revision, Settings, Waiting,
};

/// The books do not agree: a fault of the machine, after which nothing may be granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the leases on device {} sum to {held}, {granted} are granted and {capacity} are there", .device.0)]
pub struct Imbalance {
    /// Where.
    pub device: Device,
    /// The sum of the leases there.
    pub held: u128,
    /// The sum that grants are decided by.
    pub granted: Bytes,
    /// What there is.
    pub capacity: Bytes,
}

/// Who holds what and who waits.
#[derive(Debug, Clone)]
pub struct Machine {
    pub(super) settings: Settings,
    pub(super) now: Millis,
    pub(super) ledger: Ledger,
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    /// Sum of the leases of each holder; no entry for who holds nothing.
    pub(super) held: BTreeMap<ClientId, Claims>,
    pub(super) queue: Queue,
    pub(super) next_lease: u64,
    /// Leases that records may lack have lower numbers; zero where no record was lost.
    pub(super) adopts_below: u64,
    pub(super) arrivals: u64,
    /// No grants before this time.
    pub(super) opens: Millis,
    /// No grants while they cannot be written down.
    pub(super) can_record: bool,
    /// Nothing happens by itself before this time.
    pub(super) earliest: Option<Millis>,
    pub(super) effects: Vec<Effect>,
}

impl Machine {
    /// A machine with nothing granted; a device for each capacity.
    #[must_use]
    pub fn new(settings: Settings, capacities: &[Bytes]) -> Self {
        Self {
            settings,
            now: Millis::default(),
            ledger: Ledger::new(capacities),
            leases: BTreeMap::new(),
            held: BTreeMap::new(),
            queue: Queue::default(),
            next_lease: 1,
            adopts_below: 0,
            arrivals: 0,
            opens: Millis::default(),
            can_record: true,
            earliest: None,
            effects: Vec::new(),
        }
    }

    /// Lets time pass up to `now`, then the event happen.
    pub fn apply(&mut self, now: Millis, event: Event) -> Vec<Effect> {
        self.can_record &= event != Event::Recording { works: false };
        self.pass_time(now);
        match event {
            Event::Reserve {
                client,
                request,
                ask,
            } => self.reserve(client, request, ask),
            Event::Commit {
                client,
                request,
                lease,
                revision,
            } => self.commit(client, request, lease, revision),
            Event::Resize {
                client,
                request,
                lease,
                revision,
                claims,
                wait,
            } => self.resize((client, request), (lease, revision), claims, wait),
            Event::Renew {
                client,
                request,
                lease,
            } => self.renew(client, request, lease),
            Event::Release {
                client,
                request,
                lease,
            } => self.release(client, request, lease),
            Event::Cancel { client, request } => self.cancel(client, request),
            Event::Decline { client, lease } => self.decline(client, lease),
            Event::Resume { client, presented } => self.resume(client, &presented),
            Event::Leave { client } => self.leave(client),
            Event::Occupied { device, bytes } => {
                self.ledger.occupy(device, bytes);
                self.serve();
            }
            Event::Recording { works } => {
                self.can_record = works;
                self.serve();
            }
            Event::Open => {
                self.opens = self.opens.min(self.now);
                self.serve();
            }
            Event::Tick => {}
        }
        self.ask_for_bytes();
        std::mem::take(&mut self.effects)
    }

    /// When something happens by itself next, at the earliest.
    #[must_use]
    pub const fn next_deadline(&self) -> Option<Millis> {
        self.earliest
    }

    /// The leases.
    pub fn leases(&self) -> impl Iterator<Item = (LeaseId, &Lease)> {
        self.leases.iter().map(|(id, lease)| (*id, lease))
    }

    /// A lease.
    #[must_use]
    pub fn lease(&self, lease: LeaseId) -> Option<&Lease> {
        self.leases.get(&lease)
    }

    /// The waiting requests in the order of service, and whether each blocks those behind it.
    pub fn waiting(&self) -> impl Iterator<Item = (&Waiting, bool)> {
        self.queue
            .iter()
            .map(|(rank, waiting)| (waiting, rank.blocks()))
    }

    /// What of a device is granted.
    #[must_use]
    pub fn granted(&self, device: Device) -> Bytes {
        self.ledger.granted(device)
    }

    /// What of a device is taken without a lease, as far as was told.
    #[must_use]
    pub fn occupied(&self, device: Device) -> Bytes {
        self.ledger.occupied(device)
    }

    /// What of a device could be granted now.
    #[must_use]
    pub fn free(&self, device: Device) -> Bytes {
        self.ledger.free(device)
    }

    /// What a device has.
    #[must_use]
    pub fn capacity(&self, device: Device) -> Bytes {
        self.ledger.capacity(device)
    }

    /// The number that the next lease gets.
    #[must_use]
    pub const fn next_lease(&self) -> LeaseId {
        LeaseId(self.next_lease)
    }

    /// When grants begin; in the past unless restored a moment ago.
    #[must_use]
    pub const fn opens(&self) -> Millis {
        self.opens
    }

    /// Whether each device's sum is that of its leases, counted anew, and within the capacity.
    ///
    /// # Errors
    ///
    /// It is not, on the first such device.
    pub fn audit(&self) -> Result<(), Imbalance> {
        let mut sums = vec![0_u128; self.ledger.devices()];
        for (device, bytes) in self.leases.values().flat_map(|lease| lease.claims.iter()) {
            if let Some(sum) = sums.get_mut(device.0) {
                *sum += u128::from(bytes.0);
            }
        }
        for (device, held) in (0..).map(Device).zip(sums) {
            let (granted, capacity) = (self.granted(device), self.capacity(device));
            if held != u128::from(granted.0) || granted > capacity {
                return Err(Imbalance {
                    device,
                    held,
                    granted,
                    capacity,
                });
            }
        }
        Ok(())
    }

    pub(super) fn may_grant(&self) -> bool {
        self.can_record && self.now >= self.opens
    }

    pub(super) fn effect(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// Something happens by itself at this time.
    pub(super) fn remember(&mut self, deadline: Option<Millis>) {
        let both = self.earliest.into_iter().chain(deadline);
        self.earliest = both.min();
    }

    /// Grants what can be granted, in the order of service.
    pub(super) fn serve(&mut self) {
        // A growth may give back on another device what one before it in the order needs, and a request that
        // became due has changed the order: so once more, until no request is granted.
        while self.may_grant() && self.serve_once() {}
    }

    /// One pass over the queue, which ends early where a request becomes due; says whether it granted.
    fn serve_once(&mut self) -> bool {
        let mut blocked = Claims::NONE;
        let mut granted = Vec::new();
        let mut left = self.ledger.clone();
        for (rank, waiting) in self.queue.iter() {
            if !waiting.wants.meets(&blocked) && left.take(&waiting.wants) {
                granted.push(waiting.client);
            } else if rank.blocks() {
                blocked = blocked.with(&waiting.wants);
            }
        }
        let is_any_granted = !granted.is_empty();
        for client in granted {
            let Some(waiting) = self.queue.remove(client) else {
                continue;
            };
            let gives_back = matches!(&waiting.purpose, Purpose::Grow { .. });
            let (arrival, wants) = (waiting.arrival, waiting.wants.clone());
            self.grant(waiting);
            let became_due = self
                .queue
                .overtake(arrival, &wants, self.settings.overtakings);
            if became_due || gives_back {
                break;
            }
        }
        is_any_granted
    }

    /// Turns a request that fits into a lease or a larger one.
    pub(super) fn grant(&mut self, waiting: Waiting) {
        let Waiting {
            client, request, ..
        } = waiting;
        match waiting.purpose {
            Purpose::New {
                floor,
                time_to_live,
            } => {
                let lease = LeaseId(self.next_lease);
                self.next_lease += 1;
                let commit_by = self.now.after(self.settings.commit_within);
                let record = Lease {
                    client,
                    revision: Revision(1),
                    claims: waiting.wants.clone(),
                    floor,
                    priority: waiting.priority,
                    since: self.now,
                    is_committed: false,
                    time_to_live,
                    ends: Some(commit_by),
                    asked: None,
                    left_alone_until: self.now,
                };
                self.insert(lease, record);
                self.effect(Effect::Granted {
                    client,
                    request,
                    lease,
                    claims: waiting.wants,
                    commit_by,
                });
            }
            Purpose::Grow { lease, to } => self.change(lease, request, to),
        }
    }

    /// Enters a lease whose claims fit, or are held already.
    pub(super) fn insert(&mut self, lease: LeaseId, record: Lease) {
        let taken = self.ledger.enter(&record.claims);
        debug_assert!(taken, "granted without room");
        self.remember(record.ends);
        self.hold(record.client, &Claims::NONE, &record.claims);
        self.leases.insert(lease, record);
    }

    /// Sets the claims of a lease, which fit, and raises its revision.
    pub(super) fn change(&mut self, lease: LeaseId, request: RequestId, to: Claims) {
        let Some(record) = self.leases.get_mut(&lease) else {
            return;
        };
        let before = std::mem::replace(&mut record.claims, to.clone());
        record.revision = record.revision.next();
        if let Some((asked, _)) = record.asked.take()
            && !to.is_within(&asked)
        {
            record.left_alone_until = self.now.after(self.settings.shrink_within);
        }
        let (client, revision, quiet) = (record.client, record.revision, record.left_alone_until);
        self.remember(Some(quiet));
        self.ledger.give(&before.beyond(&to));
        let taken = self.ledger.enter(&to.beyond(&before));
        debug_assert!(taken, "grown without room");
        self.hold(client, &before, &to);
        self.effect(Effect::Changed {
            client,
            request,
            lease,
            revision,
            claims: to,
        });
    }

    /// Ends a lease and frees its bytes; the caller serves.
    pub(super) fn end(&mut self, lease: LeaseId, request: Option<RequestId>, end: End) {
        let Some(record) = self.leases.remove(&lease) else {
            return;
        };
        self.ledger.give(&record.claims);
        self.hold(record.client, &record.claims, &Claims::NONE);
        self.effect(Effect::Ended {
            client: record.client,
            request,
            lease,
            end,
        });
        // What was to grow is gone.
        let grows = self.queue.of(record.client).filter(|waiting| {
            matches!(waiting.purpose, Purpose::Grow { lease: grown, .. } if grown == lease)
        });
        if grows.is_some() {
            self.withdraw(record.client, super::Refusal::Cancelled);
        }
    }

    /// Takes a client's waiting request out and refuses it.
    pub(super) fn withdraw(&mut self, client: ClientId, refusal: super::Refusal) {
        if let Some(waiting) = self.queue.remove(client) {
            self.effect(Effect::Refused {
                client,
                request: waiting.request,
                refusal,
            });
        }
    }

    /// What a client holds has changed by a lease.
    fn hold(&mut self, client: ClientId, before: &Claims, after: &Claims) {
        let held = self.held.remove(&client).unwrap_or_default();
        let held = held.beyond(before).with(after);
        if !held.is_empty() {
            self.held.insert(client, held);
        }
    }

    /// The rank of the request that is served next.
    pub(super) fn first_waiting(&self) -> Option<(Rank, &Waiting)> {
        self.queue.iter().next()
    }
}

//! What each request of a client may do.
//!
//! Responsible for checking requests and for deciding between granted now, waiting and refused. Not
//! responsible for the order of those that wait (`queue.rs`).

use crate::bytes::Bytes;

use super::{
    Ask, Claims, ClientId, Device, Effect, End, Lease, LeaseId, Machine, Purpose, Refusal,
    RequestId, Revision, Wait, Waiting,
};

impl Machine {
    pub(super) fn reserve(&mut self, client: ClientId, request: RequestId, ask: Ask) {
        let held = self.held.get(&client).cloned().unwrap_or_default();
        let checked = self.possible(&ask.claims, &held).and_then(|()| {
            if ask.floor.is_within(&ask.claims) {
                Ok(())
            } else {
                Err(Refusal::FloorAboveClaims)
            }
        });
        let purpose = Purpose::New {
            floor: ask.floor,
            time_to_live: ask.time_to_live,
        };
        let arrived = self.arrive(client, request, ask.claims, ask.priority, purpose);
        if let Err(refusal) = checked.and_then(|()| self.admit(arrived, ask.wait)) {
            self.refuse(client, request, refusal);
        }
    }

    pub(super) fn resize(
        &mut self,
        (client, request): (ClientId, RequestId),
        (id, revision): (LeaseId, Revision),
        to: Claims,
        wait: Wait,
    ) {
        match self.resizable(client, id, revision) {
            Err(refusal) => self.refuse(client, request, refusal),
            Ok(lease) => {
                let (claims, priority) = (lease.claims.clone(), lease.priority);
                let wants = to.beyond(&claims);
                if wants.is_empty() {
                    self.change(id, request, to);
                    self.serve();
                    return;
                }
                let others = self
                    .held
                    .get(&client)
                    .map_or(Claims::NONE, |held| held.beyond(&claims));
                let possible = self.possible(&to, &others);
                let purpose = Purpose::Grow { lease: id, to };
                let arrived = self.arrive(client, request, wants, priority, purpose);
                match possible.and_then(|()| self.admit(arrived, wait)) {
                    // It may have given back on one device what it did not need to grow on another.
                    Ok(()) => self.serve(),
                    Err(refusal) => self.refuse(client, request, refusal),
                }
            }
        }
    }

    pub(super) fn commit(
        &mut self,
        client: ClientId,
        request: RequestId,
        id: LeaseId,
        revision: Revision,
    ) {
        let (now, can_record) = (self.now, self.can_record);
        let found = self.known(client, id, revision).and_then(|lease| {
            if lease.is_committed {
                return Err(Refusal::WrongPhase);
            }
            if !can_record {
                // Records that call it reserved would let it expire.
                return Err(Refusal::NotRecorded);
            }
            lease.is_committed = true;
            lease.revision = lease.revision.next();
            lease.ends = lease
                .time_to_live
                .map(|milliseconds| now.after(milliseconds));
            Ok(lease.ends)
        });
        match found {
            Err(refusal) => self.refuse(client, request, refusal),
            Ok(ends) => {
                self.remember(ends);
                self.tell(client, request, id);
            }
        }
    }

    pub(super) fn renew(&mut self, client: ClientId, request: RequestId, id: LeaseId) {
        let now = self.now;
        let ends = match self.leases.get_mut(&id) {
            Some(lease) if lease.client == client && lease.is_committed => {
                lease.ends = lease
                    .time_to_live
                    .map(|milliseconds| now.after(milliseconds));
                Ok(lease.ends)
            }
            Some(lease) if lease.client == client => Err(Refusal::WrongPhase),
            _ => Err(Refusal::UnknownLease(id)),
        };
        match ends {
            Err(refusal) => self.refuse(client, request, refusal),
            Ok(ends) => {
                self.remember(ends);
                self.tell(client, request, id);
            }
        }
    }

    pub(super) fn release(&mut self, client: ClientId, request: RequestId, id: LeaseId) {
        if self
            .leases
            .get(&id)
            .is_some_and(|lease| lease.client == client)
        {
            self.end(id, Some(request), End::Released);
            self.serve();
        } else {
            self.refuse(client, request, Refusal::UnknownLease(id));
        }
    }

    pub(super) fn cancel(&mut self, client: ClientId, request: RequestId) {
        if self
            .queue
            .of(client)
            .is_some_and(|waiting| waiting.request == request)
        {
            self.withdraw(client, Refusal::Cancelled);
            self.serve();
        } else {
            self.refuse(client, request, Refusal::UnknownRequest);
        }
    }

    pub(super) fn decline(&mut self, client: ClientId, id: LeaseId) {
        let quiet = self.now.after(self.settings.shrink_within);
        let asked = self
            .leases
            .get_mut(&id)
            .filter(|lease| lease.client == client);
        if let Some(lease) = asked
            && lease.asked.take().is_some()
        {
            lease.left_alone_until = quiet;
            self.remember(Some(quiet));
        }
    }

    pub(super) fn leave(&mut self, client: ClientId) {
        self.withdraw(client, Refusal::Cancelled);
        let leases = self
            .leases
            .iter()
            .filter(|(_, lease)| lease.client == client);
        let leases: Vec<LeaseId> = leases.map(|(id, _)| *id).collect();
        for lease in leases {
            self.end(lease, None, End::ClientGone);
        }
        self.serve();
    }

    /// Whether a client that holds `held` beside could ever have `claims`.
    fn possible(&self, claims: &Claims, held: &Claims) -> Result<(), Refusal> {
        if let Some(device) = self.ledger.unknown(claims) {
            return Err(Refusal::UnknownDevice(device));
        }
        for (device, asked) in claims.iter() {
            let largest = self.ledger.capacity(device) - held.on(device);
            if asked > largest {
                return Err(Refusal::AboveCapacity {
                    device,
                    asked,
                    largest,
                });
            }
        }
        Ok(())
    }

    /// A client's lease at the revision it knows.
    fn known(
        &mut self,
        client: ClientId,
        id: LeaseId,
        revision: Revision,
    ) -> Result<&mut Lease, Refusal> {
        let lease = self
            .leases
            .get_mut(&id)
            .filter(|lease| lease.client == client);
        match lease {
            None => Err(Refusal::UnknownLease(id)),
            Some(lease) if lease.revision != revision => Err(Refusal::Stale(lease.revision)),
            Some(lease) => Ok(lease),
        }
    }

    /// A client's lease that may change now.
    fn resizable(
        &mut self,
        client: ClientId,
        id: LeaseId,
        revision: Revision,
    ) -> Result<&Lease, Refusal> {
        let is_growing = self.queue.of(client).is_some_and(
            |waiting| matches!(waiting.purpose, Purpose::Grow { lease, .. } if lease == id),
        );
        let lease = self.known(client, id, revision)?;
        if !lease.is_committed {
            Err(Refusal::WrongPhase)
        } else if is_growing {
            Err(Refusal::AlreadyWaiting)
        } else {
            Ok(lease)
        }
    }

    fn arrive(
        &mut self,
        client: ClientId,
        request: RequestId,
        wants: Claims,
        priority: super::Priority,
        purpose: Purpose,
    ) -> Waiting {
        self.arrivals += 1;
        Waiting {
            client,
            request,
            wants,
            priority,
            since: self.now,
            until: None,
            overtaken: 0,
            purpose,
            arrival: self.arrivals,
        }
    }

    /// Grants a possible request, lets it wait, or says why neither.
    ///
    /// No waiting request could be granted before this request came, so only this one is looked at.
    fn admit(&mut self, mut request: Waiting, wait: Wait) -> Result<(), Refusal> {
        let (client, wants) = (request.client, &request.wants);
        if self.queue.of(client).is_some() {
            return Err(Refusal::AlreadyWaiting);
        }
        let is_holder = self.held.contains_key(&client);
        let is_blocked = self.queue.blocks(wants);
        let is_open = self.may_grant();
        if is_open && !is_blocked && self.ledger.fits(wants) {
            let (arrival, wants) = (request.arrival, wants.clone());
            self.grant(request);
            self.queue
                .overtake(arrival, &wants, self.settings.overtakings);
            return Ok(());
        }
        request.until = match wait {
            Wait::Until(until) if until > self.now => Some(until),
            Wait::Forever => None,
            Wait::No | Wait::Until(_) => {
                return Err(match (is_open, self.can_record) {
                    (true, _) => self.no_room(wants),
                    (false, true) => Refusal::HeldBack,
                    (false, false) => Refusal::NotRecorded,
                });
            }
        };
        if is_holder && (is_blocked || self.queue.has_holder()) {
            return Err(Refusal::Contended);
        }
        self.remember(request.until);
        self.remember(Some(request.since.after(self.settings.patience)));
        let name = request.request;
        let rank = self.queue.push(request, is_holder);
        let ahead = self.queue.ahead_of(rank);
        self.effect(Effect::Queued {
            client,
            request: name,
            ahead,
        });
        Ok(())
    }

    /// Where a request does not fit, and what would.
    fn no_room(&self, wants: &Claims) -> Refusal {
        let (device, asked, largest) = self.shortage(wants);
        Refusal::NoRoom {
            device,
            asked,
            largest,
        }
    }

    /// The device where it does not fit, or the first where others go first; what it asks for there; what
    /// would be granted there.
    pub(super) fn shortage(&self, wants: &Claims) -> (Device, Bytes, Bytes) {
        let room = |device| {
            if self.queue.blocks(&Claims::one(device, Bytes(1))) {
                Bytes::ZERO
            } else {
                self.ledger.free(device)
            }
        };
        let mut rooms = wants
            .iter()
            .map(|(device, asked)| (device, asked, room(device)));
        let short = rooms.find(|(_, asked, room)| asked > room);
        let first = wants.iter().next();
        short
            .or_else(|| first.map(|(device, asked)| (device, asked, room(device))))
            .unwrap_or((Device(0), Bytes::ZERO, Bytes::ZERO))
    }

    fn refuse(&mut self, client: ClientId, request: RequestId, refusal: Refusal) {
        self.effect(Effect::Refused {
            client,
            request,
            refusal,
        });
    }

    /// Tells a client how a lease of its own stands.
    fn tell(&mut self, client: ClientId, request: RequestId, id: LeaseId) {
        if let Some(lease) = self.leases.get(&id) {
            let effect = Effect::Changed {
                client,
                request,
                lease: id,
                revision: lease.revision,
                claims: lease.claims.clone(),
            };
            self.effect(effect);
        }
    }
}

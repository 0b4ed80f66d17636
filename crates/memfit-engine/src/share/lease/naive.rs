//! The machine's slow twin: the rules of `mod.rs` once more, on plain lists, everything counted anew.
//! Shares types with the machine, and no code that decides.

use crate::bytes::Bytes;

use super::amounts::{Amounts, above, amounts, claims, meet};
use super::{
    ClientId, Device, Effect, End, Event, LeaseId, Millis, Presented, Refusal, RequestId, Revision,
    Settings, Wait,
};

#[derive(Debug, Clone)]
struct Held {
    id: u64,
    client: ClientId,
    revision: u64,
    amounts: Amounts,
    floor: Amounts,
    priority: i8,
    committed: bool,
    lives: Option<u64>,
    ends: Option<u64>,
    asked: Option<(Amounts, u64)>,
    quiet_until: u64,
}

#[derive(Debug, Clone)]
struct Waits {
    arrival: u64,
    client: ClientId,
    request: RequestId,
    wants: Amounts,
    priority: i8,
    since: u64,
    until: Option<u64>,
    holder: bool,
    overtaken: u32,
    due: Option<u64>,
    floor: Amounts,
    lives: Option<u64>,
    grows: Option<(u64, Amounts)>,
}

/// The twin.
#[derive(Debug, Clone)]
pub(super) struct Naive {
    settings: Settings,
    capacities: Vec<u128>,
    others: Vec<u128>,
    now: u64,
    /// Whether anything is granted at all.
    records: bool,
    leases: Vec<Held>,
    waiting: Vec<Waits>,
    granted_so_far: u64,
    arrived_so_far: u64,
    due_so_far: u64,
    effects: Vec<Effect>,
}

impl Naive {
    pub(super) fn new(settings: Settings, capacities: &[Bytes]) -> Self {
        Self {
            settings,
            capacities: capacities.iter().map(|bytes| u128::from(bytes.0)).collect(),
            others: vec![0; capacities.len()],
            now: 0,
            records: true,
            leases: Vec::new(),
            waiting: Vec::new(),
            granted_so_far: 0,
            arrived_so_far: 0,
            due_so_far: 0,
            effects: Vec::new(),
        }
    }

    #[expect(
        clippy::too_many_lines,
        reason = "one plain case for each kind of event"
    )]
    pub(super) fn apply(&mut self, now: Millis, event: &Event) -> Vec<Effect> {
        self.now = self.now.max(now.0);
        if *event == (Event::Recording { works: false }) {
            self.records = false;
        }
        self.overdue();
        match event {
            Event::Reserve {
                client,
                request,
                ask,
            } => {
                let mut refusal = self.impossible(&amounts(&ask.claims), &self.held_by(*client));
                if refusal.is_none()
                    && !above(&amounts(&ask.floor), &amounts(&ask.claims)).is_empty()
                {
                    refusal = Some(Refusal::FloorAboveClaims);
                }
                let waiter = Waits {
                    floor: amounts(&ask.floor),
                    lives: ask.time_to_live,
                    ..self.newcomer(*client, *request, amounts(&ask.claims), ask.priority.0)
                };
                self.decide(waiter, ask.wait, refusal);
            }
            Event::Resize {
                client,
                request,
                lease,
                revision,
                claims,
                wait,
            } => self.resize(
                *client,
                *request,
                *lease,
                *revision,
                &amounts(claims),
                *wait,
            ),
            Event::Commit {
                client,
                request,
                lease,
                revision,
            } => {
                let (now, records) = (self.now, self.records);
                let answer = match self.find(*client, *lease, *revision) {
                    Err(refusal) => Err(refusal),
                    Ok(held) if held.committed => Err(Refusal::WrongPhase),
                    Ok(_) if !records => Err(Refusal::NotRecorded),
                    Ok(held) => {
                        held.committed = true;
                        held.revision += 1;
                        held.ends = held.lives.map(|lives| now + lives);
                        Ok(held.clone())
                    }
                };
                self.tell(*client, *request, answer);
            }
            Event::Renew {
                client,
                request,
                lease,
            } => {
                let now = self.now;
                let mine = self
                    .leases
                    .iter_mut()
                    .find(|held| held.id == lease.0 && held.client == *client);
                let answer = match mine {
                    None => Err(Refusal::UnknownLease(*lease)),
                    Some(held) if !held.committed => Err(Refusal::WrongPhase),
                    Some(held) => {
                        held.ends = held.lives.map(|lives| now + lives);
                        Ok(held.clone())
                    }
                };
                self.tell(*client, *request, answer);
            }
            Event::Release {
                client,
                request,
                lease,
            } => {
                if self
                    .leases
                    .iter()
                    .any(|held| held.id == lease.0 && held.client == *client)
                {
                    self.end(lease.0, Some(*request), End::Released);
                    self.serve();
                } else {
                    self.refuse(*client, *request, Refusal::UnknownLease(*lease));
                }
            }
            Event::Cancel { client, request } => {
                let is_there =
                    |waiter: &&Waits| waiter.client == *client && waiter.request == *request;
                if self.waiting.iter().any(|waiter| is_there(&waiter)) {
                    self.withdraw(*client);
                    self.serve();
                } else {
                    self.refuse(*client, *request, Refusal::UnknownRequest);
                }
            }
            Event::Decline { client, lease } => {
                let quiet = self.now + self.settings.shrink_within;
                for held in &mut self.leases {
                    if held.id == lease.0 && held.client == *client && held.asked.is_some() {
                        held.asked = None;
                        held.quiet_until = quiet;
                    }
                }
            }
            Event::Resume { client, presented } => self.resume(*client, presented),
            Event::Leave { client } => {
                self.withdraw(*client);
                for id in self.ids_of(*client) {
                    self.end(id, None, End::ClientGone);
                }
                self.serve();
            }
            Event::Occupied { device, bytes } => {
                self.others[device.0] = u128::from(bytes.0);
                self.serve();
            }
            Event::Recording { works } => {
                self.records = *works;
                self.serve();
            }
            // The twin is never restored, so it is always open.
            Event::Open | Event::Tick => {}
        }
        self.ask();
        std::mem::take(&mut self.effects)
    }

    fn overdue(&mut self) {
        let now = self.now;
        let ended = self
            .leases
            .iter()
            .filter(|held| held.ends.is_some_and(|ends| ends <= now));
        let mut ended: Vec<u64> = ended.map(|held| held.id).collect();
        ended.sort_unstable();
        for id in ended {
            self.end(id, None, End::Expired);
        }
        // The list is in the order of arrival.
        for waiter in &mut self.waiting {
            let is_fresh = !waiter.holder && waiter.due.is_none();
            if is_fresh
                && now >= self.settings.patience
                && waiter.since <= now - self.settings.patience
            {
                self.due_so_far += 1;
                waiter.due = Some(self.due_so_far);
            }
        }
        self.serve();
        for waiter in self.in_order() {
            if waiter.until.is_some_and(|until| until <= now) {
                self.waiting.retain(|other| other.client != waiter.client);
                let (device, asked, largest) = self.shortage(&waiter.wants);
                let refusal = Refusal::TimedOut {
                    device,
                    asked,
                    largest,
                };
                self.refuse(waiter.client, waiter.request, refusal);
            }
        }
        self.serve();
        for held in &mut self.leases {
            if held.asked.as_ref().is_some_and(|(_, by)| *by <= now) {
                held.asked = None;
                held.quiet_until = now + self.settings.shrink_within;
            }
        }
    }

    fn free(&self, device: usize) -> u128 {
        let used: u128 = self
            .leases
            .iter()
            .filter_map(|held| held.amounts.get(&device))
            .sum();
        let others = self.others.get(device).copied().unwrap_or(0);
        self.capacities
            .get(device)
            .map_or(0, |capacity| capacity.saturating_sub(used + others))
    }

    fn fits(&self, wants: &Amounts) -> bool {
        wants
            .iter()
            .all(|(&device, &bytes)| bytes <= self.free(device))
    }

    fn held_by(&self, client: ClientId) -> Amounts {
        let mut sum = Amounts::new();
        for held in self.leases.iter().filter(|held| held.client == client) {
            for (&device, &bytes) in &held.amounts {
                *sum.entry(device).or_default() += bytes;
            }
        }
        sum
    }

    fn ids_of(&self, client: ClientId) -> Vec<u64> {
        let mine = self.leases.iter().filter(|held| held.client == client);
        let mut ids: Vec<u64> = mine.map(|held| held.id).collect();
        ids.sort_unstable();
        ids
    }

    fn in_order(&self) -> Vec<Waits> {
        let mut order = self.waiting.clone();
        order.sort_by_key(|waiter| match (waiter.holder, waiter.due) {
            (true, _) => (0, 0, 0),
            (false, Some(due)) => (1, 0, due),
            (false, None) => (2, -i32::from(waiter.priority), waiter.arrival),
        });
        order
    }

    fn blocking(&self) -> Vec<Waits> {
        let mut order = self.in_order();
        order.retain(|waiter| waiter.holder || waiter.due.is_some());
        order
    }

    /// Grants the first that can be granted, again and again.
    fn serve(&mut self) {
        while self.records {
            let order = self.in_order();
            let next = order.iter().enumerate().find(|(place, waiter)| {
                let is_blocked = order[..*place].iter().any(|before| {
                    (before.holder || before.due.is_some()) && meet(&before.wants, &waiter.wants)
                });
                !is_blocked && self.fits(&waiter.wants)
            });
            let Some((_, next)) = next else { return };
            let next = next.clone();
            self.waiting.retain(|waiter| waiter.client != next.client);
            self.grant(next);
        }
    }

    fn grant(&mut self, waiter: Waits) {
        let (arrival, wants) = (waiter.arrival, waiter.wants.clone());
        if let Some((id, to)) = waiter.grows {
            self.set(id, waiter.request, to);
        } else {
            self.granted_so_far += 1;
            let commit_by = self.now + self.settings.commit_within;
            self.leases.push(Held {
                id: self.granted_so_far,
                client: waiter.client,
                revision: 1,
                amounts: waiter.wants.clone(),
                floor: waiter.floor,
                priority: waiter.priority,
                committed: false,
                lives: waiter.lives,
                ends: Some(commit_by),
                asked: None,
                quiet_until: self.now,
            });
            self.effects.push(Effect::Granted {
                client: waiter.client,
                request: waiter.request,
                lease: LeaseId(self.granted_so_far),
                claims: claims(&waiter.wants),
                commit_by: Millis(commit_by),
            });
        }
        for passed in &mut self.waiting {
            let is_fresh = !passed.holder && passed.due.is_none();
            if is_fresh && passed.arrival < arrival && meet(&passed.wants, &wants) {
                passed.overtaken += 1;
                if passed.overtaken >= self.settings.overtakings {
                    self.due_so_far += 1;
                    passed.due = Some(self.due_so_far);
                }
            }
        }
    }

    fn set(&mut self, id: u64, request: RequestId, to: Amounts) {
        let quiet = self.now + self.settings.shrink_within;
        let held = self.leases.iter_mut().find(|held| held.id == id);
        let held = held.expect("only living leases change");
        if let Some((asked, _)) = held.asked.take()
            && !above(&to, &asked).is_empty()
        {
            held.quiet_until = quiet;
        }
        held.amounts = to;
        held.revision += 1;
        let held = held.clone();
        self.tell(held.client, request, Ok(held));
    }

    fn end(&mut self, id: u64, request: Option<RequestId>, end: End) {
        let place = self.leases.iter().position(|held| held.id == id);
        let held = self.leases.remove(place.expect("only living leases end"));
        self.effects.push(Effect::Ended {
            client: held.client,
            request,
            lease: LeaseId(id),
            end,
        });
        let grows = |waiter: &Waits| waiter.grows.as_ref().is_some_and(|(grown, _)| *grown == id);
        if self.waiting.iter().any(grows) {
            self.withdraw(held.client);
        }
    }

    fn impossible(&self, wants: &Amounts, held: &Amounts) -> Option<Refusal> {
        if let Some(device) = wants
            .keys()
            .find(|device| **device >= self.capacities.len())
        {
            return Some(Refusal::UnknownDevice(Device(*device)));
        }
        let fitting =
            |bytes: u128| Bytes(u64::try_from(bytes).expect("amounts in tests are small"));
        wants.iter().find_map(|(&device, &bytes)| {
            let largest = self.capacities[device] - held.get(&device).copied().unwrap_or(0);
            (bytes > largest).then(|| Refusal::AboveCapacity {
                device: Device(device),
                asked: fitting(bytes),
                largest: fitting(largest),
            })
        })
    }

    fn newcomer(
        &mut self,
        client: ClientId,
        request: RequestId,
        wants: Amounts,
        priority: i8,
    ) -> Waits {
        self.arrived_so_far += 1;
        Waits {
            arrival: self.arrived_so_far,
            client,
            request,
            wants,
            priority,
            since: self.now,
            until: None,
            holder: !self.held_by(client).is_empty(),
            overtaken: 0,
            due: None,
            floor: Amounts::new(),
            lives: None,
            grows: None,
        }
    }

    /// What the page says of a request that arrives, case by case.
    fn decide(&mut self, mut waiter: Waits, wait: Wait, refusal: Option<Refusal>) {
        let (client, request) = (waiter.client, waiter.request);
        if let Some(refusal) = refusal {
            return self.refuse(client, request, refusal);
        }
        if self.waiting.iter().any(|other| other.client == client) {
            return self.refuse(client, request, Refusal::AlreadyWaiting);
        }
        let is_met = self
            .blocking()
            .iter()
            .any(|other| meet(&other.wants, &waiter.wants));
        if self.records && !is_met && self.fits(&waiter.wants) {
            self.grant(waiter);
            return self.serve();
        }
        waiter.until = match wait {
            Wait::Forever => None,
            Wait::Until(until) if until.0 > self.now => Some(until.0),
            _ if !self.records => return self.refuse(client, request, Refusal::NotRecorded),
            _ => {
                let (device, asked, largest) = self.shortage(&waiter.wants);
                let refusal = Refusal::NoRoom {
                    device,
                    asked,
                    largest,
                };
                return self.refuse(client, request, refusal);
            }
        };
        if waiter.holder && (is_met || self.waiting.iter().any(|other| other.holder)) {
            return self.refuse(client, request, Refusal::Contended);
        }
        self.waiting.push(waiter);
        let order = self.in_order();
        let place = order.iter().position(|waiter| waiter.client == client);
        self.effects.push(Effect::Queued {
            client,
            request,
            ahead: place.expect("it waiter"),
        });
    }

    fn resize(
        &mut self,
        client: ClientId,
        request: RequestId,
        lease: LeaseId,
        revision: Revision,
        to: &Amounts,
        wait: Wait,
    ) {
        let is_growing = |waiter: &Waits| {
            waiter.client == client && waiter.grows.as_ref().is_some_and(|(id, _)| *id == lease.0)
        };
        let is_growing = self.waiting.iter().any(is_growing);
        let held = match self.find(client, lease, revision) {
            Err(refusal) => return self.refuse(client, request, refusal),
            Ok(held) if !held.committed => {
                return self.refuse(client, request, Refusal::WrongPhase);
            }
            Ok(_) if is_growing => return self.refuse(client, request, Refusal::AlreadyWaiting),
            Ok(held) => held.clone(),
        };
        let wants = above(to, &held.amounts);
        if wants.is_empty() {
            self.set(lease.0, request, to.clone());
            return self.serve();
        }
        let others = above(&self.held_by(client), &held.amounts);
        let refusal = self.impossible(to, &others);
        let waiter = Waits {
            grows: Some((lease.0, to.clone())),
            ..self.newcomer(client, request, wants, held.priority)
        };
        self.decide(waiter, wait, refusal);
    }

    fn resume(&mut self, client: ClientId, presented: &[Presented]) {
        self.withdraw(client);
        for id in self.ids_of(client) {
            if !presented.iter().any(|lease| lease.lease.0 == id) {
                self.end(id, None, End::NotPresented);
            }
        }
        for lease in presented {
            let is_mine = |held: &Held| held.id == lease.lease.0 && held.client == client;
            if !self.leases.iter().any(is_mine) {
                // The twin is never restored, so it is never in the time of adoption.
                self.effects.push(Effect::Ended {
                    client,
                    request: None,
                    lease: lease.lease,
                    end: End::Lost,
                });
            }
        }
        self.serve();
    }

    fn find(
        &mut self,
        client: ClientId,
        lease: LeaseId,
        revision: Revision,
    ) -> Result<&mut Held, Refusal> {
        let mine = self
            .leases
            .iter_mut()
            .find(|held| held.id == lease.0 && held.client == client);
        match mine {
            None => Err(Refusal::UnknownLease(lease)),
            Some(held) if held.revision != revision.0 => {
                Err(Refusal::Stale(Revision(held.revision)))
            }
            Some(held) => Ok(held),
        }
    }

    fn shortage(&self, wants: &Amounts) -> (Device, Bytes, Bytes) {
        let bytes =
            |amount: u128| Bytes(u64::try_from(amount).expect("amounts in tests are small"));
        let room = |device: usize| {
            let is_blocked = self
                .blocking()
                .iter()
                .any(|waiter| waiter.wants.contains_key(&device));
            if is_blocked { 0 } else { self.free(device) }
        };
        let all = wants
            .iter()
            .map(|(&device, &asked)| (device, asked, room(device)));
        let short = all.clone().find(|(_, asked, room)| asked > room);
        let (device, asked, largest) = short.or_else(|| all.clone().next()).unwrap_or((0, 0, 0));
        (Device(device), bytes(asked), bytes(largest))
    }

    /// Looks for every combination of lenders in the order of asking, until the first wait is covered.
    fn ask(&mut self) {
        let order = self.in_order();
        let Some(first) = order.first().filter(|_| self.records) else {
            return;
        };
        let mut short = Amounts::new();
        for (&device, &wanted) in &first.wants {
            let promised: u128 = self
                .leases
                .iter()
                .filter_map(|held| Some((held.amounts.get(&device)?, held.asked.as_ref()?)))
                .map(|(now, (to, _))| now - to.get(&device).copied().unwrap_or(0))
                .sum();
            let there = self.free(device) + promised;
            if wanted > there {
                short.insert(device, wanted - there);
            }
        }
        let mut lenders: Vec<usize> = (0..self.leases.len()).collect();
        lenders.retain(|&place| {
            let held = &self.leases[place];
            held.committed
                && held.asked.is_none()
                && held.quiet_until <= self.now
                && held.client != first.client
                && !self
                    .waiting
                    .iter()
                    .any(|waiter| waiter.client == held.client)
                && (held.priority <= first.priority || (!first.holder && first.due.is_some()))
        });
        lenders.sort_by_key(|&place| {
            (
                self.leases[place].priority,
                u64::MAX - self.leases[place].id,
            )
        });
        let mut asks = Vec::new();
        for place in lenders {
            let held = &self.leases[place];
            let mut to = held.amounts.clone();
            for (device, lacking) in &mut short {
                let has = held.amounts.get(device).copied().unwrap_or(0);
                let keeps = held.floor.get(device).copied().unwrap_or(0).min(has);
                let gives = (has - keeps).min(*lacking);
                *lacking -= gives;
                to.insert(*device, has - gives);
            }
            to.retain(|_, bytes| *bytes > 0);
            if to != held.amounts {
                asks.push((place, to));
            }
        }
        if short.values().any(|lacking| *lacking > 0) {
            return;
        }
        let by = self.now + self.settings.shrink_within;
        for (place, to) in asks {
            let held = &mut self.leases[place];
            held.asked = Some((to.clone(), by));
            self.effects.push(Effect::ShrinkAsked {
                client: held.client,
                lease: LeaseId(held.id),
                to: claims(&to),
                by: Millis(by),
            });
        }
    }

    fn withdraw(&mut self, client: ClientId) {
        if let Some(place) = self
            .waiting
            .iter()
            .position(|waiter| waiter.client == client)
        {
            let waiter = self.waiting.remove(place);
            self.refuse(client, waiter.request, Refusal::Cancelled);
        }
    }

    fn refuse(&mut self, client: ClientId, request: RequestId, refusal: Refusal) {
        self.effects.push(Effect::Refused {
            client,
            request,
            refusal,
        });
    }

    fn tell(&mut self, client: ClientId, request: RequestId, answer: Result<Held, Refusal>) {
        match answer {
            Err(refusal) => self.refuse(client, request, refusal),
            Ok(held) => self.effects.push(Effect::Changed {
                client,
                request,
                lease: LeaseId(held.id),
                revision: Revision(held.revision),
                claims: claims(&held.amounts),
            }),
        }
    }
}

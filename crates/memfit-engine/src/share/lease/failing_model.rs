//! Every state of small worlds in which things fail: the file cannot be written, the daemon is killed and started
//! again, clients hear late, and come back with any number.
//!
//! Beside the machine there is what the daemon adds: a file, which holds what was written; and for each client
//! what was sent to it and what it believes to hold. A client believes in a lease from when it hears that it was
//! taken up until it gives it back itself or hears of its end. At every moment, what all clients believe in is
//! within the capacity, and the file lacks nothing of it.
//!
//! The daemon of the model does what `memfit`'s does: an event that cannot be written happens once more to a
//! machine that grants nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::bytes::Bytes;

use super::histories::record;
use super::small_model::queue;
use super::{
    Ask, Claims, ClientId, Device, Effect, Event, LeaseId, Machine, Millis, Presented, Priority,
    Record, Records, RequestId, Revision, Settings, Wait,
};

const NEVER: u64 = 1 << 40;
const SETTINGS: Settings = Settings {
    overtakings: 2,
    patience: NEVER,
    commit_within: NEVER,
    shrink_within: NEVER,
};
/// More in a release build, where it takes seconds.
const CAPACITY: [Bytes; 1] = [Bytes(if cfg!(debug_assertions) { 2 } else { 3 })];
const CLIENTS: u64 = 2;

fn bytes(amount: u64) -> Claims {
    Claims::one(Device(0), Bytes(amount))
}

/// What stands in the file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Written {
    client: u64,
    claims: Claims,
    is_committed: bool,
}

#[derive(Debug, Clone, Default)]
struct Client {
    /// Sent and not heard yet.
    unheard: VecDeque<Effect>,
    is_deaf: bool,
    /// Heard of and not taken up.
    reserved: BTreeMap<LeaseId, Claims>,
    believes: BTreeMap<LeaseId, Claims>,
}

#[derive(Clone)]
struct World {
    machine: Machine,
    disk_works: bool,
    /// Leases in the file, and whether it may lack some; the machine's records are made from it.
    file: BTreeMap<LeaseId, Record>,
    file_lacks: bool,
    next_lease_in_file: LeaseId,
    clients: Vec<Client>,
    ever_granted: BTreeSet<LeaseId>,
    requests: u64,
}

impl World {
    fn new() -> Self {
        Self {
            machine: Machine::new(SETTINGS, &CAPACITY),
            disk_works: true,
            file: BTreeMap::new(),
            file_lacks: false,
            next_lease_in_file: LeaseId(1),
            clients: vec![Client::default(); usize::try_from(CLIENTS).unwrap()],
            ever_granted: BTreeSet::new(),
            requests: 0,
        }
    }

    /// What the daemon does with an event.
    fn happen(&mut self, event: Event) {
        let before = self.machine.clone();
        let mut effects = self.machine.apply(Millis(0), event.clone());
        if self.disk_works {
            self.write();
        } else if !effects.is_empty() {
            self.machine = before;
            effects = self
                .machine
                .apply(Millis(0), Event::Recording { works: false });
            effects.extend(self.machine.apply(Millis(0), event));
        }
        assert_eq!(self.machine.audit(), Ok(()));
        for effect in effects {
            self.send(effect);
        }
        self.hear();
        self.check();
    }

    fn write(&mut self) {
        let leases = self.machine.leases();
        self.file = leases.map(|(id, lease)| (id, record(id, lease))).collect();
        self.next_lease_in_file = self.machine.next_lease();
    }

    fn send(&mut self, effect: Effect) {
        let client = match &effect {
            Effect::Granted { client, lease, .. } => {
                assert!(
                    self.ever_granted.insert(*lease),
                    "{lease:?} is granted twice"
                );
                *client
            }
            Effect::Changed { client, .. } | Effect::Ended { client, .. } => *client,
            _ => return,
        };
        if let Some(client) = self.of(client) {
            client.unheard.push_back(effect);
        }
    }

    fn of(&mut self, client: ClientId) -> Option<&mut Client> {
        self.clients.get_mut(usize::try_from(client.0).unwrap())
    }

    fn hear(&mut self) {
        for client in self.clients.iter_mut().filter(|client| !client.is_deaf) {
            while let Some(effect) = client.unheard.pop_front() {
                match effect {
                    Effect::Granted { lease, claims, .. } => {
                        client.reserved.insert(lease, claims);
                    }
                    Effect::Changed { lease, claims, .. } => {
                        let is_taken_up = client.reserved.remove(&lease).is_some();
                        if is_taken_up || client.believes.contains_key(&lease) {
                            client.believes.insert(lease, claims);
                        }
                    }
                    Effect::Ended { lease, .. } => {
                        client.reserved.remove(&lease);
                        client.believes.remove(&lease);
                    }
                    _ => {}
                }
            }
        }
    }

    fn check(&self) {
        let next = self.machine.next_lease();
        assert!(
            self.machine.leases().all(|(id, _)| id < next),
            "a number is to be given out twice"
        );
        let believed = self
            .clients
            .iter()
            .flat_map(|client| client.believes.iter());
        let sum: u64 = believed
            .clone()
            .map(|(_, claims)| claims.on(Device(0)).0)
            .sum();
        assert!(sum <= CAPACITY[0].0, "{sum} are believed to be held");
        for (lease, claims) in believed {
            let written = self.file.get(lease);
            let is_there = written
                .is_some_and(|written| claims.is_within(&written.claims) && written.is_committed);
            assert!(
                is_there || self.file_lacks,
                "{lease:?} is believed in and not written"
            );
        }
    }

    /// Killed and started again; with a lost file nothing is known.
    fn restart(&mut self, is_file_lost: bool) {
        if is_file_lost {
            self.file.clear();
            self.file_lacks = true;
            // Above all that another daemon can have given out.
            let above = self.ever_granted.last().map_or(1, |lease| lease.0 + 1);
            self.next_lease_in_file = LeaseId(above);
        }
        let records = Records {
            leases: self.file.values().cloned().collect(),
            next_lease: self.next_lease_in_file,
            are_incomplete: self.file_lacks,
        };
        let times = (Millis(0), Millis(NEVER));
        self.machine = Machine::restore(SETTINGS, &CAPACITY, records, times).unwrap();
        self.disk_works = true;
        for client in &mut self.clients {
            // What was in the socket is heard before its end.
            client.is_deaf = false;
        }
        self.hear();
        for client in &mut self.clients {
            client.reserved.clear();
        }
        self.check();
        // An early client presents numbers that were never granted.
        let next = self.machine.next_lease().0;
        let numbers = [0, next, next + 1, u64::MAX - 1, u64::MAX];
        let presented = numbers.map(|number| Presented {
            lease: LeaseId(number),
            revision: Revision(u64::MAX),
            claims: bytes(1),
        });
        self.resume(ClientId(CLIENTS), presented.to_vec());
        for client in 0..CLIENTS {
            let believes = &self.clients[usize::try_from(client).unwrap()].believes;
            let presented = believes.iter().map(|(lease, claims)| Presented {
                lease: *lease,
                revision: Revision(2),
                claims: claims.clone(),
            });
            let presented: Vec<_> = presented.collect();
            self.resume(ClientId(client), presented);
        }
        self.file_lacks = false;
        self.write();
        self.happen(Event::Open);
        let client = ClientId(CLIENTS);
        self.happen(Event::Leave { client });
    }

    /// A client comes back; the welcome says what it holds.
    fn resume(&mut self, client: ClientId, presented: Vec<Presented>) {
        self.happen(Event::Resume { client, presented });
        let mine = self
            .machine
            .leases()
            .filter(|(_, lease)| lease.client == client);
        let mine: BTreeMap<_, _> = mine.map(|(id, lease)| (id, lease.claims.clone())).collect();
        if let Some(known) = self.of(client) {
            known.believes.retain(|lease, _| mine.contains_key(lease));
            for (lease, claims) in &mut known.believes {
                claims.clone_from(&mine[lease]);
            }
        }
        self.check();
    }

    fn key(&self) -> impl Ord + use<> {
        let lease = |id: &LeaseId| self.machine.leases().position(|(known, _)| known == *id);
        let leases = self.machine.leases().map(|(id, lease)| {
            let written = self.file.get(&id).map(|record| Written {
                client: record.client.0,
                claims: record.claims.clone(),
                is_committed: record.is_committed,
            });
            (
                lease.client.0,
                lease.claims.clone(),
                lease.is_committed,
                written,
            )
        });
        let owed: Vec<_> = self
            .file
            .iter()
            .filter(|(id, _)| lease(id).is_none())
            .collect();
        let owed = owed
            .into_iter()
            .map(|(_, record)| (record.client.0, record.claims.clone()));
        let waiting = queue(&self.machine);
        let clients = self.clients.iter().map(|client| {
            let of = |leases: &BTreeMap<LeaseId, Claims>| -> Vec<_> {
                let all = leases.iter();
                all.map(|(id, claims)| (lease(id), claims.clone()))
                    .collect()
            };
            let unheard = client.unheard.iter().map(|effect| match effect {
                Effect::Granted { lease: id, .. } => (0, lease(id), Claims::NONE),
                Effect::Changed {
                    lease: id, claims, ..
                } => (1, lease(id), claims.clone()),
                Effect::Ended { lease: id, .. } => (2, lease(id), Claims::NONE),
                _ => (3, None, Claims::NONE),
            });
            let unheard: Vec<_> = unheard.collect();
            (
                client.is_deaf,
                of(&client.reserved),
                of(&client.believes),
                unheard,
            )
        });
        (
            self.disk_works,
            self.machine.can_record,
            leases.collect::<Vec<_>>(),
            owed.collect::<Vec<_>>(),
            waiting,
            clients.collect::<Vec<_>>(),
        )
    }
}

/// What may happen, whatever the state.
#[derive(Debug, Clone, Copy)]
enum Try {
    Reserve(u64, Wait),
    Commit,
    Resize(u64),
    Release,
    Leave,
    /// The client does not hear from now on, or hears all.
    Deafness,
    /// A stranger presents any number, though the daemon never was away for it.
    ResumeWith(LeaseId),
    /// The same for the number of another's lease, by its place.
    ResumeWithAnother,
    Disk,
    Restart,
    RestartWithoutFile,
}

#[expect(
    clippy::too_many_lines,
    reason = "one plain case for each kind of attempt"
)]
fn apply(world: &mut World, client: u64, attempt: Try) -> bool {
    world.requests += 1;
    let request = RequestId(world.requests);
    let id = ClientId(client);
    let stranger = ClientId(CLIENTS);
    let own = &world.clients[usize::try_from(client).unwrap()];
    let (is_deaf, first) = (own.is_deaf, client == 0);
    let reserved = own.reserved.keys().next().copied();
    let believed = own.believes.keys().next().copied();
    let revision = |lease| world.machine.lease(lease).map(|lease| lease.revision);
    let event = match attempt {
        // A client waits for its answer.
        Try::Reserve(..) | Try::Commit | Try::Resize(_) | Try::Release if is_deaf => return false,
        Try::Reserve(amount, wait) => Event::Reserve {
            client: id,
            request,
            ask: Ask {
                claims: bytes(amount),
                floor: bytes(amount),
                priority: Priority(0),
                wait,
                time_to_live: None,
            },
        },
        Try::Commit => {
            let Some((lease, revision)) =
                reserved.and_then(|lease| Some((lease, revision(lease)?)))
            else {
                return false;
            };
            Event::Commit {
                client: id,
                request,
                lease,
                revision,
            }
        }
        Try::Resize(amount) => {
            let Some((lease, revision)) =
                believed.and_then(|lease| Some((lease, revision(lease)?)))
            else {
                return false;
            };
            // Bytes that are to go back are not used any longer.
            let own = &mut world.clients[usize::try_from(client).unwrap()];
            let less = own.believes[&lease].least(&bytes(amount));
            own.believes.insert(lease, less);
            Event::Resize {
                client: id,
                request,
                lease,
                revision,
                claims: bytes(amount),
                wait: Wait::No,
            }
        }
        Try::Release => {
            let Some(lease) = believed else { return false };
            let own = &mut world.clients[usize::try_from(client).unwrap()];
            own.believes.remove(&lease);
            Event::Release {
                client: id,
                request,
                lease,
            }
        }
        Try::Leave => {
            world.clients[usize::try_from(client).unwrap()] = Client::default();
            Event::Leave { client: id }
        }
        Try::Deafness => {
            world.clients[usize::try_from(client).unwrap()].is_deaf = !is_deaf;
            world.hear();
            world.check();
            return true;
        }
        Try::ResumeWith(_) | Try::ResumeWithAnother => {
            let lease = match attempt {
                Try::ResumeWith(lease) => Some(lease),
                _ => believed,
            };
            let Some(lease) = lease else { return false };
            let presented = Presented {
                lease,
                revision: Revision(u64::MAX),
                claims: bytes(1),
            };
            world.resume(stranger, vec![presented]);
            world.happen(Event::Leave { client: stranger });
            return true;
        }
        Try::Disk | Try::Restart | Try::RestartWithoutFile if !first => return false,
        Try::Disk if world.disk_works => {
            // The daemon finds out when it writes next.
            world.disk_works = false;
            return true;
        }
        Try::Disk => {
            world.disk_works = true;
            world.write();
            Event::Recording { works: true }
        }
        Try::Restart | Try::RestartWithoutFile => {
            world.restart(matches!(attempt, Try::RestartWithoutFile));
            return true;
        }
    };
    world.happen(event);
    true
}

#[test]
fn in_all_states_with_failures_nobody_believes_in_bytes_that_another_has() {
    let attempts = [
        Try::Reserve(1, Wait::Forever),
        Try::Reserve(2, Wait::Forever),
        Try::Commit,
        Try::Resize(1),
        Try::Resize(2),
        Try::Release,
        Try::Leave,
        Try::Deafness,
        Try::ResumeWith(LeaseId(0)),
        Try::ResumeWith(LeaseId(u64::MAX - 1)),
        Try::ResumeWith(LeaseId(u64::MAX)),
        Try::ResumeWithAnother,
        Try::Disk,
        Try::Restart,
        Try::RestartWithoutFile,
    ];
    let start = World::new();
    let mut seen = BTreeSet::from([start.key()]);
    let mut open = VecDeque::from([start]);
    while let Some(world) = open.pop_front() {
        for client in 0..CLIENTS {
            for attempt in attempts {
                let mut next = world.clone();
                if apply(&mut next, client, attempt) && seen.insert(next.key()) {
                    open.push_back(next);
                }
            }
        }
        assert!(seen.len() < 2_000_000, "the model does not end");
    }
    assert!(seen.len() > 1000, "{}", seen.len());
}

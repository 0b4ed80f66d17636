//! Every state that small worlds can reach, not a sample of them.
//!
//! Three clients on a device or two of a few bytes, where every request is tried in every state. Time stands still, so the
//! states are finitely many: two that differ only in the numbers of leases, revisions and requests are one.
//! Each transition is compared with the twin and watched by the witness; from each state, ending the leases of
//! clients that do not wait must serve everyone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::bytes::Bytes;

use super::histories::drain;
use super::naive::Naive;
use super::witness::Witness;
use super::{
    Ask, Claims, ClientId, Device, Event, LeaseId, Machine, Millis, Priority, RequestId, Settings,
    Wait,
};

const NEVER: u64 = 1 << 40;
const SETTINGS: Settings = Settings {
    overtakings: 2,
    patience: NEVER,
    commit_within: NEVER,
    shrink_within: 1,
};

/// What a state is, without the numbers that only count.
type Key = (
    Vec<(u64, Claims, bool, Option<Claims>)>,
    Vec<Waiter>,
    Vec<Bytes>,
);

/// Who waits: client, claims, how often it was overtaken, whether it blocks others, and its place in the order of
/// arrival.
pub(super) type Waiter = (u64, Claims, u32, bool, usize);

/// All who wait, without the numbers that only tell when they came.
pub(super) fn queue(machine: &Machine) -> Vec<Waiter> {
    let mut arrivals: Vec<u64> = machine.waiting().map(|(waits, _)| waits.arrival).collect();
    arrivals.sort_unstable();
    let waiting = machine.waiting().map(|(waits, blocks)| {
        let place = arrivals.binary_search(&waits.arrival).unwrap();
        (
            waits.client.0,
            waits.wants.clone(),
            waits.overtaken,
            blocks,
            place,
        )
    });
    waiting.collect()
}

#[derive(Clone)]
struct World {
    machine: Machine,
    twin: Naive,
    witness: Witness,
    number: u64,
}

impl World {
    fn new(capacities: &[Bytes]) -> Self {
        Self {
            machine: Machine::new(SETTINGS, capacities),
            twin: Naive::new(SETTINGS, capacities),
            witness: Witness::new(capacities),
            number: 0,
        }
    }

    fn step(&mut self, event: Event) {
        let was = self.machine.clone();
        let expected = self.twin.apply(Millis(0), &event);
        let effects = self.machine.apply(Millis(0), event);
        assert_eq!(effects, expected);
        self.witness.watch(&was, &effects, &self.machine);
    }

    fn next_request(&mut self) -> RequestId {
        self.number += 1;
        RequestId(self.number)
    }

    /// Commits what was just granted, so that half-made leases do not multiply the states.
    fn commit_all(&mut self) {
        loop {
            let reserved = self.machine.leases().find(|(_, lease)| !lease.is_committed);
            let Some((lease, client, revision)) =
                reserved.map(|(id, lease)| (id, lease.client, lease.revision))
            else {
                return;
            };
            let request = self.next_request();
            self.step(Event::Commit {
                client,
                request,
                lease,
                revision,
            });
        }
    }

    fn key(&self) -> Key {
        let leases = self.machine.leases().map(|(_, lease)| {
            let asked = lease.asked.as_ref().map(|(to, _)| to.clone());
            let is_quiet = lease.left_alone_until > Millis(0);
            (lease.client.0, lease.claims.clone(), is_quiet, asked)
        });
        let devices = [0, 1].map(Device);
        let occupied = devices.map(|device| self.machine.occupied(device));
        (leases.collect(), queue(&self.machine), occupied.to_vec())
    }
}

/// What each client may try, whatever the state.
#[derive(Debug, Clone)]
enum Try {
    Reserve(Claims, Claims, Priority, Wait),
    Resize(Claims),
    FollowAsk,
    Decline,
    Release,
    Cancel,
    Leave,
    Occupied(Bytes),
}

fn event(world: &mut World, client: ClientId, attempt: &Try) -> Option<Event> {
    let request = world.next_request();
    let lease = {
        let mut mine = world
            .machine
            .leases()
            .filter(|(_, lease)| lease.client == client);
        mine.next().map(|(id, lease)| (id, lease.clone()))
    };
    Some(match attempt {
        Try::Reserve(claims, floor, priority, wait) => Event::Reserve {
            client,
            request,
            ask: Ask {
                claims: claims.clone(),
                floor: floor.clone(),
                priority: *priority,
                wait: *wait,
                time_to_live: None,
            },
        },
        Try::Resize(_) | Try::FollowAsk => {
            let (id, lease) = lease?;
            let claims = match attempt {
                Try::Resize(claims) => claims.clone(),
                _ => lease.asked?.0,
            };
            Event::Resize {
                client,
                request,
                lease: id,
                revision: lease.revision,
                claims,
                wait: Wait::Forever,
            }
        }
        Try::Decline => {
            lease.as_ref()?.1.asked.as_ref()?;
            let (lease, _) = lease?;
            Event::Decline { client, lease }
        }
        Try::Release => {
            let (lease, _): (LeaseId, _) = lease?;
            Event::Release {
                client,
                request,
                lease,
            }
        }
        Try::Cancel => {
            let mut waiting = world.machine.waiting().map(|(waiting, _)| waiting);
            let request = waiting.find(|waiting| waiting.client == client)?.request;
            Event::Cancel { client, request }
        }
        Try::Leave => Event::Leave { client },
        Try::Occupied(bytes) => Event::Occupied {
            device: Device(0),
            bytes: *bytes,
        },
    })
}

/// Walks through all reachable states and says how many there are.
fn explore(capacities: &[Bytes], clients: u64, attempts: &[Try]) -> usize {
    let start = World::new(capacities);
    let mut seen = BTreeSet::from([start.key()]);
    let mut open = VecDeque::from([start]);
    let mut reached: BTreeMap<&str, usize> = BTreeMap::new();
    while let Some(world) = open.pop_front() {
        drain(world.machine.clone(), world.witness.clone(), 0);
        for client in 0..clients {
            for attempt in attempts {
                let mut next = world.clone();
                let Some(event) = event(&mut next, ClientId(client), attempt) else {
                    continue;
                };
                next.step(event);
                next.commit_all();
                if seen.insert(next.key()) {
                    let has_due = next
                        .machine
                        .waiting()
                        .any(|(waits, blocks)| blocks && waits.overtaken >= 2);
                    let kind = if has_due {
                        "somebody is due"
                    } else {
                        "nobody is due"
                    };
                    *reached.entry(kind).or_default() += 1;
                    open.push_back(next);
                }
            }
        }
    }
    assert!(
        reached.len() == 2,
        "the model never gets to what it is for: {reached:?}"
    );
    seen.len()
}

fn bytes(amount: u64) -> Claims {
    Claims::one(Device(0), Bytes(amount))
}

fn both(one: u64, two: u64) -> Claims {
    Claims::new([(Device(0), Bytes(one)), (Device(1), Bytes(two))]).unwrap()
}

fn rigid(claims: Claims) -> Try {
    Try::Reserve(claims.clone(), claims, Priority(0), Wait::Forever)
}

#[test]
fn in_all_states_of_three_clients_on_one_device_the_rules_hold_and_everyone_is_served() {
    let attempts = [
        rigid(bytes(1)),
        rigid(bytes(3)),
        Try::Reserve(bytes(2), bytes(1), Priority(0), Wait::Forever),
        Try::Reserve(bytes(2), bytes(2), Priority(1), Wait::No),
        Try::Resize(bytes(2)),
        Try::FollowAsk,
        Try::Decline,
        Try::Release,
        Try::Cancel,
        Try::Leave,
    ];
    let states = explore(&[Bytes(3)], 3, &attempts);
    assert!(states > 100, "{states}");
}

#[test]
fn in_all_states_of_three_clients_on_two_devices_the_rules_hold_and_everyone_is_served() {
    let attempts = [
        rigid(both(1, 0)),
        rigid(both(0, 1)),
        rigid(both(2, 1)),
        Try::Resize(both(1, 1)),
        Try::Release,
        Try::Leave,
    ];
    let states = explore(&[Bytes(2), Bytes(1)], 3, &attempts);
    assert!(states > 100, "{states}");
}

#[test]
fn in_all_states_of_three_clients_of_two_priorities_everyone_is_served() {
    let attempts = [
        rigid(bytes(1)),
        rigid(bytes(2)),
        Try::Reserve(bytes(1), bytes(1), Priority(1), Wait::Forever),
        Try::Release,
    ];
    let states = explore(&[Bytes(2)], 3, &attempts);
    assert!(states > 100, "{states}");
}

#[test]
fn in_all_states_beside_others_who_take_memory_too_everyone_is_served_when_they_leave() {
    let attempts = [
        rigid(bytes(1)),
        Try::Reserve(bytes(2), bytes(1), Priority(0), Wait::Forever),
        Try::FollowAsk,
        Try::Release,
        Try::Occupied(Bytes(0)),
        Try::Occupied(Bytes(1)),
    ];
    let states = explore(&[Bytes(2)], 3, &attempts);
    assert!(states > 100, "{states}");
}

//! Random histories: the machine against its twin and before the witness.

use proptest::prelude::*;

use crate::bytes::Bytes;

use super::naive::Naive;
use super::witness::Witness;
use super::{
    Ask, Claims, ClientId, Device, Effect, Event, LeaseId, Machine, Millis, Presented, Priority,
    Record, Records, RequestId, Revision, Settings, Wait,
};

const CAPACITIES: [Bytes; 2] = [Bytes(12), Bytes(7)];
/// Thousands in a release build, where they take seconds.
const CASES: u32 = if cfg!(debug_assertions) { 400 } else { 4000 };
const SETTINGS: Settings = Settings {
    overtakings: 3,
    patience: 40,
    commit_within: 12,
    shrink_within: 9,
};

/// A step of a history; which lease is meant is known only when it happens.
#[derive(Debug, Clone)]
enum Step {
    Reserve {
        client: u64,
        bytes: [u64; 2],
        floor: [u64; 2],
        priority: i8,
        wait: u8,
        lives: Option<u64>,
    },
    Commit {
        pick: usize,
        slip: u8,
    },
    Resize {
        pick: usize,
        bytes: [u64; 2],
        wait: u8,
        slip: u8,
    },
    FollowAsk {
        pick: usize,
    },
    Renew {
        pick: usize,
    },
    Release {
        pick: usize,
        slip: u8,
    },
    Cancel {
        pick: usize,
        slip: u8,
    },
    Decline {
        pick: usize,
    },
    Resume {
        client: u64,
        forget: usize,
    },
    Leave {
        client: u64,
    },
    Occupied {
        device: usize,
        bytes: u64,
    },
    Recording {
        works: bool,
    },
    Tick,
}

fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    let client = 0..5_u64;
    let pick = 0..8_usize;
    let slip = prop_oneof![9 => Just(0_u8), 1 => 1..3_u8];
    let amounts = || {
        prop_oneof![
            4 => (1..8_u64).prop_map(|bytes| [bytes, 0]),
            2 => (1..6_u64).prop_map(|bytes| [0, bytes]),
            2 => (0..13_u64, 0..8_u64).prop_map(|(one, two)| [one, two]),
            1 => Just([13, 1]),
        ]
    };
    let reserve = (
        client.clone(),
        amounts(),
        [0..4_u64, 0..3_u64],
        -1..2_i8,
        0..4_u8,
        prop_oneof![4 => Just(None), 1 => (1..60_u64).prop_map(Some)],
    )
        .prop_map(
            |(client, bytes, floor, priority, wait, lives)| Step::Reserve {
                client,
                bytes,
                floor,
                priority,
                wait,
                lives,
            },
        );
    let step = prop_oneof![
        8 => reserve,
        6 => (pick.clone(), slip.clone()).prop_map(|(pick, slip)| Step::Commit { pick, slip }),
        4 => (pick.clone(), amounts(), 0..4_u8, slip.clone())
            .prop_map(|(pick, bytes, wait, slip)| Step::Resize { pick, bytes, wait, slip }),
        2 => pick.clone().prop_map(|pick| Step::FollowAsk { pick }),
        1 => pick.clone().prop_map(|pick| Step::Renew { pick }),
        5 => (pick.clone(), slip.clone()).prop_map(|(pick, slip)| Step::Release { pick, slip }),
        1 => (pick.clone(), slip).prop_map(|(pick, slip)| Step::Cancel { pick, slip }),
        1 => pick.clone().prop_map(|pick| Step::Decline { pick }),
        1 => (client.clone(), pick).prop_map(|(client, forget)| Step::Resume { client, forget }),
        1 => client.prop_map(|client| Step::Leave { client }),
        2 => (0..2_usize, prop_oneof![2 => Just(0), 3 => 0..15_u64])
            .prop_map(|(device, bytes)| Step::Occupied { device, bytes }),
        2 => prop_oneof![1 => Just(false), 2 => Just(true)].prop_map(|works| Step::Recording { works }),
        2 => Just(Step::Tick),
    ];
    let pause = prop_oneof![6 => 0..3_u64, 1 => 3..30_u64];
    prop::collection::vec((pause, step), 1..120)
}

fn on_both(bytes: [u64; 2]) -> Claims {
    let pairs = [(Device(0), Bytes(bytes[0])), (Device(1), Bytes(bytes[1]))];
    Claims::new(pairs).unwrap()
}

fn wait(kind: u8, now: u64) -> Wait {
    match kind {
        0 => Wait::No,
        1 => Wait::Until(Millis(now + 15)),
        _ => Wait::Forever,
    }
}

/// Turns a step into an event, given who holds what now. A slip is a wrong client or revision.
#[expect(
    clippy::too_many_lines,
    reason = "one plain case for each kind of step"
)]
fn event(step: &Step, machine: &Machine, now: u64, number: u64) -> Event {
    let request = RequestId(number);
    let nothing = (ClientId(9), LeaseId(900), Revision(1));
    let lease = |pick: usize| {
        let leases: Vec<_> = machine.leases().collect();
        let picked = leases.get(pick % leases.len().max(1));
        picked.map_or(nothing, |(id, lease)| (lease.client, *id, lease.revision))
    };
    let slipped = |pick: usize, slip: u8| {
        let (client, id, revision) = lease(pick);
        match slip {
            1 => (ClientId(client.0 + 1), id, revision),
            2 => (client, id, Revision(revision.0 + 1)),
            _ => (client, id, revision),
        }
    };
    match *step {
        Step::Reserve {
            client,
            bytes,
            floor,
            priority,
            wait: kind,
            lives,
        } => {
            // Mostly a floor that is none.
            let floor = if floor[0] == 3 {
                bytes
            } else {
                [floor[0].min(bytes[0]), floor[1]]
            };
            Event::Reserve {
                client: ClientId(client),
                request,
                ask: Ask {
                    claims: on_both(bytes),
                    floor: on_both(floor),
                    priority: Priority(priority),
                    wait: wait(kind, now),
                    time_to_live: lives,
                },
            }
        }
        Step::Commit { pick, slip } => {
            let (client, lease, revision) = slipped(pick, slip);
            Event::Commit {
                client,
                request,
                lease,
                revision,
            }
        }
        Step::Resize {
            pick,
            bytes,
            wait: kind,
            slip,
        } => {
            let (client, lease, revision) = slipped(pick, slip);
            Event::Resize {
                client,
                request,
                lease,
                revision,
                claims: on_both(bytes),
                wait: wait(kind, now),
            }
        }
        Step::FollowAsk { pick } => {
            let asked = machine.leases().filter_map(|(id, lease)| {
                let (to, _) = lease.asked.clone()?;
                Some((lease.client, id, lease.revision, to))
            });
            let asked: Vec<_> = asked.collect();
            let Some((client, lease, revision, to)) = asked.get(pick % asked.len().max(1)) else {
                return Event::Tick;
            };
            Event::Resize {
                client: *client,
                request,
                lease: *lease,
                revision: *revision,
                claims: to.clone(),
                wait: Wait::No,
            }
        }
        Step::Renew { pick } => {
            let (client, lease, _) = lease(pick);
            Event::Renew {
                client,
                request,
                lease,
            }
        }
        Step::Release { pick, slip } => {
            let (client, lease, _) = slipped(pick, slip);
            Event::Release {
                client,
                request,
                lease,
            }
        }
        Step::Cancel { pick, slip } => {
            let waiting: Vec<_> = machine.waiting().collect();
            let Some((waiting, _)) = waiting.get(pick % waiting.len().max(1)) else {
                return Event::Tick;
            };
            Event::Cancel {
                client: waiting.client,
                request: RequestId(waiting.request.0 + u64::from(slip)),
            }
        }
        Step::Decline { pick } => {
            let (client, lease, _) = lease(pick);
            Event::Decline { client, lease }
        }
        Step::Resume { client, forget } => {
            let client = ClientId(client);
            let mine = machine.leases().filter(|(_, lease)| lease.client == client);
            let presented = mine
                .skip(forget % 3)
                .map(|(id, lease)| presented(id, lease));
            Event::Resume {
                client,
                presented: presented.collect(),
            }
        }
        Step::Leave { client } => Event::Leave {
            client: ClientId(client),
        },
        Step::Occupied { device, bytes } => Event::Occupied {
            device: Device(device),
            bytes: Bytes(bytes),
        },
        Step::Recording { works } => Event::Recording { works },
        Step::Tick => Event::Tick,
    }
}

fn presented(id: LeaseId, lease: &super::Lease) -> Presented {
    Presented {
        lease: id,
        revision: lease.revision,
        claims: lease.claims.clone(),
    }
}

/// What is granted can be written down, others leave the devices, assumption B, and all leases of clients that do not wait are ended, again and
/// again, assumption A. All who wait must be served by that alone.
pub(super) fn drain(mut machine: Machine, mut witness: Witness, now: u64) {
    let was = machine.clone();
    let effects = machine.apply(Millis(now), Event::Recording { works: true });
    witness.watch(&was, &effects, &machine);
    for device in [0, 1].map(Device) {
        let was = machine.clone();
        let bytes = Bytes::ZERO;
        let effects = machine.apply(Millis(now), Event::Occupied { device, bytes });
        witness.watch(&was, &effects, &machine);
    }
    let mut number = 100_000;
    for _round in 0..200 {
        let waiting: Vec<ClientId> = machine
            .waiting()
            .map(|(waiting, _)| waiting.client)
            .collect();
        if waiting.is_empty() {
            return;
        }
        let idle = machine
            .leases()
            .find(|(_, lease)| !waiting.contains(&lease.client));
        let (lease, client) = idle
            .map(|(id, lease)| (id, lease.client))
            .expect("somebody waits although nobody else holds anything");
        number += 1;
        let was = machine.clone();
        let release = Event::Release {
            client,
            request: RequestId(number),
            lease,
        };
        let effects = machine.apply(Millis(now), release);
        witness.watch(&was, &effects, &machine);
    }
    panic!(
        "somebody waits for ever: {:?}",
        machine.waiting().collect::<Vec<_>>()
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, ..ProptestConfig::default() })]

    #[test]
    fn the_machine_does_what_its_twin_does_and_the_witness_finds_no_fault(steps in steps()) {
        let mut machine = Machine::new(SETTINGS, &CAPACITIES);
        let mut twin = Naive::new(SETTINGS, &CAPACITIES);
        let mut witness = Witness::new(&CAPACITIES);
        let mut now = 0;
        for (number, (pause, step)) in (1..).zip(&steps) {
            now += pause;
            let event = event(step, &machine, now, number * 10);
            let was = machine.clone();
            let expected = twin.apply(Millis(now), &event);
            let effects = machine.apply(Millis(now), event);
            prop_assert_eq!(&effects, &expected);
            witness.watch(&was, &effects, &machine);
        }
        drain(machine, witness, now);
    }

    #[test]
    fn nothing_happens_by_itself_before_the_deadline_that_was_named(steps in steps()) {
        let mut machine = Machine::new(SETTINGS, &CAPACITIES);
        let mut now = 0;
        for (number, (pause, step)) in (1..).zip(&steps) {
            let until = now + pause;
            // A daemon that sleeps until the deadline sees the same as one that asks at every moment.
            let mut asleep = machine.clone();
            let mut slept = Vec::new();
            while let Some(deadline) = asleep.next_deadline().filter(|deadline| deadline.0 <= until) {
                slept.extend(asleep.apply(deadline, Event::Tick));
            }
            let mut awake = Vec::new();
            for moment in now..=until {
                awake.extend(machine.apply(Millis(moment), Event::Tick));
            }
            prop_assert_eq!(slept, awake);
            now = until;
            let event = event(step, &machine, now, number * 10);
            machine.apply(Millis(now), event);
        }
    }

    #[test]
    fn a_restored_machine_holds_what_was_held_and_grants_nothing_twice(
        steps in steps(),
        more in steps(),
        is_record_lost in any::<bool>(),
    ) {
        let mut machine = Machine::new(SETTINGS, &CAPACITIES);
        let mut now = 0;
        for (number, (pause, step)) in (1..).zip(&steps) {
            now += pause;
            let event = event(step, &machine, now, number * 10);
            machine.apply(Millis(now), event);
        }
        let known: Vec<_> = machine.leases().map(|(id, lease)| (id, lease.clone())).collect();
        let lost = usize::from(is_record_lost);
        let records = Records {
            leases: known.iter().skip(lost).map(|(id, lease)| record(*id, lease)).collect(),
            next_lease: machine.next_lease(),
            are_incomplete: is_record_lost,
        };
        let times = (Millis(now), Millis(now + 20));
        let mut machine = Machine::restore(SETTINGS, &CAPACITIES, records, times).unwrap();
        let mut witness = Witness::new(&CAPACITIES);
        let before = machine.clone();
        let held = known.iter().skip(lost).map(|(id, lease)| Effect::Adopted {
            client: lease.client,
            lease: *id,
            revision: lease.revision,
            claims: lease.claims.clone(),
        });
        witness.watch(&before, &held.collect::<Vec<_>>(), &machine);
        // Everyone comes back and presents what it knows.
        let clients: std::collections::BTreeSet<_> = known.iter().map(|(_, lease)| lease.client).collect();
        for client in clients {
            let mine = known.iter().filter(|(_, lease)| lease.client == client);
            let presented = mine.map(|(id, lease)| presented(*id, lease)).collect();
            let was = machine.clone();
            let effects = machine.apply(Millis(now), Event::Resume { client, presented });
            witness.watch(&was, &effects, &machine);
        }
        let again: Vec<_> = machine.leases().map(|(id, lease)| (id, lease.claims.clone())).collect();
        let all: Vec<_> = known.iter().map(|(id, lease)| (*id, lease.claims.clone())).collect();
        prop_assert_eq!(again, all);
        for (number, (pause, step)) in (10_001..).zip(&more) {
            now += pause;
            let event = event(step, &machine, now, number * 10);
            let was = machine.clone();
            let effects = machine.apply(Millis(now), event);
            if now < times.1.0 {
                let is_growth = |effect: &Effect| matches!(effect, Effect::Granted { .. });
                prop_assert!(!effects.iter().any(is_growth), "granted while held back");
            }
            witness.watch(&was, &effects, &machine);
        }
        drain(machine, witness, now.max(times.1.0));
    }
}

pub(super) fn record(id: LeaseId, lease: &super::Lease) -> Record {
    Record {
        lease: id,
        client: lease.client,
        revision: lease.revision,
        claims: lease.claims.clone(),
        floor: lease.floor.clone(),
        priority: lease.priority,
        since: lease.since,
        is_committed: lease.is_committed,
        time_to_live: lease.time_to_live,
    }
}

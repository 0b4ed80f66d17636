//! The rules one by one, in words of the page above.

use crate::bytes::Bytes;

use super::{
    Ask, Claims, ClientId, Device, Effect, End, Event, LeaseId, Machine, Millis, Presented,
    Priority, Record, Records, Refusal, RequestId, RestoreError, Revision, Settings, Wait,
};

const HOST: Device = Device(0);

fn host(bytes: u64) -> Claims {
    Claims::one(HOST, Bytes(bytes))
}

fn machine() -> Machine {
    let settings = Settings {
        overtakings: 2,
        patience: 1000,
        commit_within: 50,
        shrink_within: 20,
    };
    Machine::new(settings, &[Bytes(10), Bytes(4)])
}

fn ask(claims: Claims, wait: Wait) -> Ask {
    Ask {
        floor: claims.clone(),
        claims,
        priority: Priority(0),
        wait,
        time_to_live: None,
    }
}

fn reserve(machine: &mut Machine, client: u64, ask: Ask) -> Vec<Effect> {
    let event = Event::Reserve {
        client: ClientId(client),
        request: RequestId(client),
        ask,
    };
    machine.apply(Millis(0), event)
}

fn commit(machine: &mut Machine, client: u64, lease: u64) {
    let event = Event::Commit {
        client: ClientId(client),
        request: RequestId(100),
        lease: LeaseId(lease),
        revision: Revision(1),
    };
    let effects = machine.apply(Millis(0), event);
    assert!(matches!(effects[0], Effect::Changed { .. }), "{effects:?}");
}

fn resize(
    machine: &mut Machine,
    client: u64,
    lease: u64,
    claims: Claims,
    wait: Wait,
) -> Vec<Effect> {
    let revision = machine.lease(LeaseId(lease)).unwrap().revision;
    let event = Event::Resize {
        client: ClientId(client),
        request: RequestId(200),
        lease: LeaseId(lease),
        revision,
        claims,
        wait,
    };
    machine.apply(Millis(0), event)
}

fn release(machine: &mut Machine, client: u64, lease: u64) -> Vec<Effect> {
    let event = Event::Release {
        client: ClientId(client),
        request: RequestId(300),
        lease: LeaseId(lease),
    };
    machine.apply(Millis(0), event)
}

fn granted(effects: &[Effect]) -> Vec<u64> {
    let clients = effects.iter().filter_map(|effect| match effect {
        Effect::Granted { client, .. } => Some(client.0),
        _ => None,
    });
    clients.collect()
}

fn refusal(effects: &[Effect]) -> &Refusal {
    match effects {
        [Effect::Refused { refusal, .. }] => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_above_the_capacity_is_refused_at_once_with_the_largest_possible() {
    let mut machine = machine();
    let effects = reserve(&mut machine, 1, ask(host(u64::MAX), Wait::Forever));
    let expected = Refusal::AboveCapacity {
        device: HOST,
        asked: Bytes(u64::MAX),
        largest: Bytes(10),
    };
    assert_eq!(*refusal(&effects), expected);
    // What a client holds itself will not be free while it waits.
    assert_eq!(
        granted(&reserve(&mut machine, 1, ask(host(4), Wait::No))),
        [1]
    );
    let effects = reserve(&mut machine, 1, ask(host(7), Wait::Forever));
    let expected = Refusal::AboveCapacity {
        device: HOST,
        asked: Bytes(7),
        largest: Bytes(6),
    };
    assert_eq!(*refusal(&effects), expected);
}

#[test]
fn a_small_request_overtakes_a_large_one_twice_and_not_a_third_time() {
    let mut machine = machine();
    assert_eq!(
        granted(&reserve(&mut machine, 1, ask(host(6), Wait::Forever))),
        [1]
    );
    assert!(granted(&reserve(&mut machine, 2, ask(host(8), Wait::Forever))).is_empty());
    assert_eq!(
        granted(&reserve(&mut machine, 3, ask(host(1), Wait::Forever))),
        [3]
    );
    assert_eq!(
        granted(&reserve(&mut machine, 4, ask(host(1), Wait::Forever))),
        [4]
    );
    let third = reserve(&mut machine, 5, ask(host(1), Wait::Forever));
    assert!(
        matches!(third[..], [Effect::Queued { ahead: 1, .. }]),
        "{third:?}"
    );
    // Not even for the highest priority.
    let urgent = Ask {
        priority: Priority(100),
        ..ask(host(1), Wait::No)
    };
    let expected = Refusal::NoRoom {
        device: HOST,
        asked: Bytes(1),
        largest: Bytes::ZERO,
    };
    assert_eq!(*refusal(&reserve(&mut machine, 6, urgent)), expected);
    // On another device nothing is in the way.
    let elsewhere = Claims::one(Device(1), Bytes(4));
    assert_eq!(
        granted(&reserve(&mut machine, 7, ask(elsewhere, Wait::No))),
        [7]
    );
    assert_eq!(granted(&release(&mut machine, 1, 1)), [2]);
    assert_eq!(granted(&release(&mut machine, 3, 2)), [5]);
}

#[test]
fn among_those_that_wait_the_higher_priority_goes_first_and_then_the_earlier() {
    let mut machine = machine();
    reserve(&mut machine, 1, ask(host(10), Wait::Forever));
    for (client, priority) in [(2, 0), (3, 5), (4, 5), (5, -1)] {
        let ask = Ask {
            priority: Priority(priority),
            ..ask(host(10), Wait::Forever)
        };
        reserve(&mut machine, client, ask);
    }
    let mut served = Vec::new();
    let mut next = granted(&release(&mut machine, 1, 1));
    while let [client] = next[..] {
        served.push(client);
        let lease = machine.leases().next().unwrap().0;
        next = granted(&release(&mut machine, client, lease.0));
    }
    assert_eq!(served, [3, 4, 2, 5]);
}

#[test]
fn one_holder_may_wait_for_more_and_the_second_is_refused_where_waiting_would_be_deadlock() {
    let mut machine = machine();
    for client in [1, 2] {
        assert_eq!(
            granted(&reserve(&mut machine, client, ask(host(5), Wait::No))),
            [client]
        );
        commit(&mut machine, client, client);
    }
    let first = resize(&mut machine, 1, 1, host(8), Wait::Forever);
    assert!(
        matches!(first[..], [Effect::Queued { ahead: 0, .. }]),
        "{first:?}"
    );
    let second = resize(&mut machine, 2, 2, host(6), Wait::Forever);
    assert_eq!(*refusal(&second), Refusal::Contended);
    let effects = release(&mut machine, 2, 2);
    assert!(
        matches!(&effects[..], [Effect::Ended { .. }, Effect::Changed { claims, .. }] if *claims == host(8)),
        "{effects:?}"
    );
}

#[test]
fn what_a_dead_client_held_and_waited_for_is_gone_and_the_next_is_served() {
    let mut machine = machine();
    reserve(&mut machine, 1, ask(host(6), Wait::Forever));
    reserve(&mut machine, 2, ask(host(5), Wait::Forever));
    reserve(&mut machine, 3, ask(host(9), Wait::Forever));
    machine.apply(
        Millis(1),
        Event::Leave {
            client: ClientId(2),
        },
    );
    let effects = machine.apply(
        Millis(1),
        Event::Leave {
            client: ClientId(1),
        },
    );
    assert_eq!(granted(&effects), [3]);
    assert_eq!(machine.granted(HOST), Bytes(9));
    let again = machine.apply(
        Millis(1),
        Event::Leave {
            client: ClientId(1),
        },
    );
    assert!(again.is_empty(), "{again:?}");
}

#[test]
fn a_reservation_that_is_not_committed_expires() {
    let mut machine = machine();
    reserve(&mut machine, 1, ask(host(6), Wait::No));
    assert_eq!(machine.next_deadline(), Some(Millis(50)));
    assert!(machine.apply(Millis(49), Event::Tick).is_empty());
    let effects = machine.apply(Millis(50), Event::Tick);
    assert!(
        matches!(
            effects[..],
            [Effect::Ended {
                end: End::Expired,
                ..
            }]
        ),
        "{effects:?}"
    );
    assert_eq!(machine.granted(HOST), Bytes::ZERO);
}

#[test]
fn a_lease_with_a_time_to_live_lives_as_long_as_it_is_renewed() {
    let mut machine = machine();
    let ask = Ask {
        time_to_live: Some(100),
        ..ask(host(1), Wait::No)
    };
    reserve(&mut machine, 1, ask);
    commit(&mut machine, 1, 1);
    let renew = Event::Renew {
        client: ClientId(1),
        request: RequestId(9),
        lease: LeaseId(1),
    };
    machine.apply(Millis(90), renew);
    assert!(machine.apply(Millis(189), Event::Tick).is_empty());
    assert_eq!(machine.apply(Millis(190), Event::Tick).len(), 1);
}

#[test]
fn a_request_waits_no_longer_than_it_says() {
    let mut machine = machine();
    reserve(&mut machine, 1, ask(host(7), Wait::Forever));
    reserve(&mut machine, 2, ask(host(4), Wait::Until(Millis(30))));
    let expected = Refusal::TimedOut {
        device: HOST,
        asked: Bytes(4),
        largest: Bytes(3),
    };
    assert_eq!(*refusal(&machine.apply(Millis(30), Event::Tick)), expected);
}

#[test]
fn elastic_holders_are_asked_only_if_what_they_could_give_suffices() {
    let mut machine = machine();
    for (client, bytes) in [(1, 6), (2, 4)] {
        let ask = Ask {
            floor: host(2),
            ..ask(host(bytes), Wait::No)
        };
        reserve(&mut machine, client, ask);
        commit(&mut machine, client, client);
    }
    // 4 + 2 could be given.
    let too_much = reserve(&mut machine, 3, ask(host(7), Wait::Until(Millis(5))));
    assert!(
        matches!(too_much[..], [Effect::Queued { .. }]),
        "{too_much:?}"
    );
    machine.apply(Millis(5), Event::Tick);
    let enough = reserve(&mut machine, 4, ask(host(5), Wait::Forever));
    let asked = enough.iter().filter_map(|effect| match effect {
        Effect::ShrinkAsked { client, to, .. } => Some((client.0, to.on(HOST).0)),
        _ => None,
    });
    // The youngest first, and no more than is needed.
    assert_eq!(asked.collect::<Vec<_>>(), [(2, 2), (1, 3)]);
    resize(&mut machine, 2, 2, host(2), Wait::No);
    assert_eq!(granted(&resize(&mut machine, 1, 1, host(3), Wait::No)), [4]);
}

#[test]
fn bytes_of_a_holder_that_does_not_answer_stay_its_own() {
    let mut machine = machine();
    let elastic = Ask {
        floor: Claims::NONE,
        ..ask(host(10), Wait::No)
    };
    reserve(&mut machine, 1, elastic);
    commit(&mut machine, 1, 1);
    reserve(&mut machine, 2, ask(host(1), Wait::Forever));
    assert!(machine.apply(Millis(20), Event::Tick).is_empty());
    assert_eq!(machine.granted(HOST), Bytes(10));
    assert!(
        machine.apply(Millis(39), Event::Tick).is_empty(),
        "left alone for a while"
    );
    let again = machine.apply(Millis(40), Event::Tick);
    assert!(
        matches!(again[..], [Effect::ShrinkAsked { .. }]),
        "{again:?}"
    );
}

#[test]
fn nobody_changes_a_lease_of_another_or_one_it_does_not_know_anymore() {
    let mut machine = machine();
    reserve(&mut machine, 1, ask(host(2), Wait::No));
    commit(&mut machine, 1, 1);
    assert_eq!(
        *refusal(&release(&mut machine, 2, 1)),
        Refusal::UnknownLease(LeaseId(1))
    );
    let stale = Event::Resize {
        client: ClientId(1),
        request: RequestId(1),
        lease: LeaseId(1),
        revision: Revision(1),
        claims: host(1),
        wait: Wait::No,
    };
    assert_eq!(
        *refusal(&machine.apply(Millis(0), stale)),
        Refusal::Stale(Revision(2))
    );
}

/// One lease of 6 bytes in the records of a machine that is not open yet.
fn restored(are_incomplete: bool) -> Machine {
    let record = Record {
        lease: LeaseId(7),
        client: ClientId(1),
        revision: Revision(2),
        claims: host(6),
        floor: host(6),
        priority: Priority(0),
        since: Millis(0),
        is_committed: true,
        time_to_live: None,
    };
    let records = Records {
        leases: vec![record],
        next_lease: LeaseId(9),
        are_incomplete,
    };
    let times = (Millis(0), Millis(100));
    Machine::restore(Settings::default(), &[Bytes(10)], records, times).unwrap()
}

fn presents(machine: &mut Machine, lease: u64, revision: u64) -> Vec<Effect> {
    let presented = Presented {
        lease: LeaseId(lease),
        revision: Revision(revision),
        claims: host(1),
    };
    let resume = Event::Resume {
        client: ClientId(2),
        presented: vec![presented],
    };
    machine.apply(Millis(0), resume)
}

#[test]
fn a_lease_is_adopted_only_where_a_record_may_be_lost_and_its_number_was_given_out() {
    for lease in [7, 8, 9, 10, u64::MAX - 1, u64::MAX] {
        for are_incomplete in [false, true] {
            let mut machine = restored(are_incomplete);
            let effects = presents(&mut machine, lease, u64::MAX);
            let is_adopted = matches!(effects[..], [Effect::Adopted { .. }]);
            assert_eq!(
                is_adopted,
                are_incomplete && lease == 8,
                "{lease}: {effects:?}"
            );
            machine.apply(Millis(1), Event::Open);
            let next = reserve(&mut machine, 3, ask(host(1), Wait::No));
            assert!(
                matches!(
                    next[..],
                    [Effect::Granted {
                        lease: LeaseId(9),
                        ..
                    }]
                ),
                "{next:?}"
            );
            assert_eq!(machine.audit(), Ok(()));
        }
    }
}

#[test]
fn the_last_revision_stays_the_last() {
    let mut machine = restored(true);
    presents(&mut machine, 8, u64::MAX);
    let effects = resize(&mut machine, 2, 8, Claims::NONE, Wait::No);
    assert!(
        matches!(
            effects[..],
            [Effect::Changed {
                revision: Revision(u64::MAX),
                ..
            }]
        ),
        "{effects:?}"
    );
}

#[test]
fn records_that_leave_no_numbers_for_leases_are_refused() {
    let records = Records {
        leases: Vec::new(),
        next_lease: LeaseId(u64::MAX),
        are_incomplete: false,
    };
    let times = (Millis(0), Millis(0));
    let machine = Machine::restore(Settings::default(), &[Bytes(10)], records, times);
    assert_eq!(
        machine.err(),
        Some(RestoreError::NumbersSpent(LeaseId(u64::MAX)))
    );
}

#[test]
fn an_audit_finds_a_lease_that_was_overwritten() {
    let mut machine = machine();
    reserve(&mut machine, 1, ask(host(6), Wait::No));
    assert_eq!(machine.audit(), Ok(()));
    let lease = machine.leases.get_mut(&LeaseId(1)).unwrap();
    lease.claims = host(1);
    let imbalance = machine.audit().unwrap_err();
    assert_eq!((imbalance.held, imbalance.granted), (1, Bytes(6)));
}

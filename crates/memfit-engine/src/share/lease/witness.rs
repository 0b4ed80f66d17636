//! Judges a history from the effects alone, as someone outside would.
//!
//! Folds grants and ends into sums and holds them to the capacities after every single effect; holds the
//! order of service to the rules. Knows nothing of how the machine decides.

use std::collections::{BTreeMap, BTreeSet};

use crate::bytes::Bytes;

use super::{Claims, ClientId, Device, Effect, End, LeaseId, Machine, RequestId, Revision};

/// What the effects so far add up to.
#[derive(Debug, Clone)]
pub(super) struct Witness {
    capacities: Vec<u128>,
    leases: BTreeMap<LeaseId, (ClientId, Revision, Claims)>,
    /// For each due request, who stood before it when it became due.
    before: BTreeMap<(ClientId, RequestId), BTreeSet<(ClientId, RequestId)>>,
    ever_granted: BTreeSet<LeaseId>,
}

impl Witness {
    pub(super) fn new(capacities: &[Bytes]) -> Self {
        Self {
            capacities: capacities.iter().map(|bytes| u128::from(bytes.0)).collect(),
            leases: BTreeMap::new(),
            before: BTreeMap::new(),
            ever_granted: BTreeSet::new(),
        }
    }

    /// Watches one event's effects; `was` is the machine before and `is` after.
    pub(super) fn watch(&mut self, was: &Machine, effects: &[Effect], is: &Machine) {
        for effect in effects {
            let before = self.sums();
            self.fold(effect);
            self.check_sums();
            if !matches!(effect, Effect::Adopted { .. }) {
                self.check_room(&before, was, is);
                self.check_records(&before, is);
            }
        }
        self.check_turns(was, effects);
        self.check_books(is);
        self.note_due(is);
    }

    fn fold(&mut self, effect: &Effect) {
        match effect {
            Effect::Granted {
                client,
                lease,
                claims,
                ..
            } => {
                assert!(
                    self.ever_granted.insert(*lease),
                    "lease {lease:?} is granted twice"
                );
                let first = (*client, Revision(1), claims.clone());
                assert_eq!(self.leases.insert(*lease, first), None);
            }
            Effect::Adopted {
                client,
                lease,
                revision,
                claims,
            } => {
                self.ever_granted.insert(*lease);
                let adopted = (*client, *revision, claims.clone());
                assert_eq!(self.leases.insert(*lease, adopted), None, "held by another");
            }
            Effect::Changed {
                client,
                lease,
                revision,
                claims,
                ..
            } => {
                let held = self
                    .leases
                    .get_mut(lease)
                    .expect("a changed lease was granted");
                assert_eq!(held.0, *client, "changed for another client");
                assert!(*revision >= held.1, "a revision went back");
                assert!(
                    held.2 == *claims || *revision > held.1,
                    "bytes changed in secret"
                );
                *held = (*client, *revision, claims.clone());
            }
            Effect::Ended { end: End::Lost, .. }
            | Effect::Queued { .. }
            | Effect::Refused { .. } => {}
            Effect::Ended { client, lease, .. } => {
                let held = self
                    .leases
                    .remove(lease)
                    .expect("an ended lease was granted");
                assert_eq!(held.0, *client, "ended for another client");
            }
            Effect::ShrinkAsked {
                client, lease, to, ..
            } => {
                let held = &self.leases[lease];
                assert_eq!(held.0, *client);
                assert!(to.is_within(&held.2) && *to != held.2, "asked to grow");
            }
        }
    }

    fn sum(&self, device: usize) -> u128 {
        let claims = self
            .leases
            .values()
            .map(|(_, _, claims)| claims.on(Device(device)));
        claims.map(|bytes| u128::from(bytes.0)).sum()
    }

    /// Never over, at any moment.
    fn check_sums(&self) {
        for (device, capacity) in self.capacities.iter().enumerate() {
            let sum = self.sum(device);
            assert!(
                sum <= *capacity,
                "{sum} granted of {capacity} on device {device}"
            );
        }
    }

    /// Nothing granted beyond what others leave, as was told before this event or by it.
    fn check_room(&self, before: &[u128], was: &Machine, is: &Machine) {
        for (device, sum) in self.sums().into_iter().enumerate() {
            let others = was
                .occupied(Device(device))
                .min(is.occupied(Device(device)));
            let whole = sum + u128::from(others.0);
            assert!(
                sum <= before[device] || whole <= self.capacities[device],
                "{sum} granted beside {others} of others on device {device}"
            );
        }
    }

    /// Nothing granted that cannot be written down.
    fn check_records(&self, before: &[u128], is: &Machine) {
        let mut sums = self.sums().into_iter().zip(before);
        assert!(
            is.can_record || sums.all(|(sum, before)| sum <= *before),
            "granted and not written down"
        );
    }

    fn sums(&self) -> Vec<u128> {
        let devices = 0..self.capacities.len();
        devices.map(|device| self.sum(device)).collect()
    }

    /// No lost bytes, none invented: the machine's books are what the effects add up to.
    fn check_books(&self, machine: &Machine) {
        assert_eq!(machine.audit(), Ok(()));
        for device in 0..self.capacities.len() {
            let granted = u128::from(machine.granted(Device(device)).0);
            assert_eq!(granted, self.sum(device), "device {device}");
        }
        let books = machine
            .leases()
            .map(|(id, lease)| (id, (lease.client, lease.revision, lease.claims.clone())));
        assert_eq!(books.collect::<BTreeMap<_, _>>(), self.leases);
        let holders = self.holders();
        let waiting: Vec<ClientId> = machine
            .waiting()
            .map(|(waiting, _)| waiting.client)
            .collect();
        let once: BTreeSet<_> = waiting.iter().collect();
        assert_eq!(once.len(), waiting.len(), "a client waits twice");
        let waits_and_holds = waiting
            .iter()
            .filter(|client| holders.contains(client))
            .count();
        assert!(waits_and_holds <= 1, "two clients wait and hold");
        if waits_and_holds == 1 {
            assert!(
                holders.contains(&waiting[0]),
                "the waiting holder is not first"
            );
        }
    }

    fn holders(&self) -> BTreeSet<ClientId> {
        let held = self
            .leases
            .values()
            .filter(|(_, _, claims)| !claims.is_empty());
        held.map(|(client, _, _)| *client).collect()
    }

    /// Once a request is due, bytes on its devices go only to those who stood before it.
    fn check_turns(&self, was: &Machine, effects: &[Effect]) {
        let mut sizes: BTreeMap<LeaseId, Claims> = was
            .leases()
            .map(|(id, lease)| (id, lease.claims.clone()))
            .collect();
        for (place, effect) in effects.iter().enumerate() {
            let (client, request, lease, claims) = match effect {
                Effect::Granted {
                    client,
                    request,
                    lease,
                    claims,
                    ..
                }
                | Effect::Changed {
                    client,
                    request,
                    lease,
                    claims,
                    ..
                } => (*client, *request, *lease, claims),
                _ => continue,
            };
            let before = sizes.insert(lease, claims.clone()).unwrap_or_default();
            let got = claims.beyond(&before);
            for (waiting, blocks) in was.waiting() {
                let name = (waiting.client, waiting.request);
                let is_out = effects[..place]
                    .iter()
                    .any(|effect| is_end_of(effect, name));
                if blocks && !is_out && name != (client, request) && waiting.wants.meets(&got) {
                    let stood_before = self.before.get(&name).expect("every due request was noted");
                    assert!(
                        stood_before.contains(&(client, request)),
                        "{client:?} was served before {name:?}, which was due"
                    );
                }
            }
        }
    }

    fn note_due(&mut self, machine: &Machine) {
        let mut ahead = BTreeSet::new();
        let mut still = BTreeSet::new();
        for (waiting, blocks) in machine.waiting() {
            let name = (waiting.client, waiting.request);
            if blocks {
                self.before.entry(name).or_insert_with(|| ahead.clone());
                still.insert(name);
            }
            ahead.insert(name);
        }
        self.before.retain(|name, _| still.contains(name));
    }
}

/// Whether the effect takes the request out of the queue.
fn is_end_of(effect: &Effect, name: (ClientId, RequestId)) -> bool {
    match effect {
        Effect::Granted {
            client, request, ..
        }
        | Effect::Changed {
            client, request, ..
        }
        | Effect::Refused {
            client, request, ..
        } => (*client, *request) == name,
        _ => false,
    }
}

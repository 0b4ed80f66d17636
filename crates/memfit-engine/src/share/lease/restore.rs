//! A machine that goes on where another stopped.
//!
//! Responsible for taking leases over from a daemon that is gone and from clients that come back. Not
//! responsible for where the records were kept, nor for which clients still live: the daemon says
//! [`Event::Leave`](super::Event::Leave) for those that do not.
//!
//! What the records say is held counts from the start, so nothing is granted twice. Until the machine
//! opens, nothing new is granted at all. Where records were lost, a lease that is in none but presented by
//! its holder is adopted until then, if it fits and has a number that may have been given out. Otherwise, and
//! after that, the records are the truth.

use std::collections::BTreeSet;

use crate::bytes::Bytes;

use super::{
    Claims, ClientId, Device, Effect, End, Lease, LeaseId, Machine, Millis, Presented, Priority,
    Refusal, Revision, Settings,
};

/// A lease as it was written down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Which.
    pub lease: LeaseId,
    /// Whose.
    pub client: ClientId,
    /// How often it had changed.
    pub revision: Revision,
    /// Its bytes.
    pub claims: Claims,
    /// What its client could do with.
    pub floor: Claims,
    /// Its priority.
    pub priority: Priority,
    /// When it was granted.
    pub since: Millis,
    /// Whether the client had taken it up.
    pub is_committed: bool,
    /// Milliseconds after which it ends unless renewed; counted anew.
    pub time_to_live: Option<u64>,
}

/// All that was written down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Records {
    /// The leases that had not ended.
    pub leases: Vec<Record>,
    /// The number that the next lease gets, above all that were given out before.
    pub next_lease: LeaseId,
    /// Whether leases may have been held that are not in the records.
    pub are_incomplete: bool,
}

/// Why a machine could not be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// More is held than there is.
    #[error("{held} are held and the capacity is {capacity}")]
    AboveCapacity {
        /// Where.
        device: Device,
        /// What the records hold there.
        held: Bytes,
        /// What there is.
        capacity: Bytes,
    },
    /// A device of a lease does not exist.
    #[error("lease {} is on a device that is not there", .0.0)]
    UnknownDevice(LeaseId),
    /// A lease is recorded twice.
    #[error("lease {} is recorded twice", .0.0)]
    Twice(LeaseId),
    /// The numbers of leases come to their end; those that count leases never get so far.
    #[error("the next lease would be number {}, and no number that high is given out", .0.0)]
    NumbersSpent(LeaseId),
}

/// The next lease after a restart has a lower number, so that numbers do not end before time does.
const MOST_LEASES_EVER: u64 = 1 << 63;

impl Machine {
    /// A machine that holds what the records say and grants nothing before `opens`.
    ///
    /// # Errors
    ///
    /// The records hold more than there is, or contradict themselves.
    pub fn restore(
        settings: Settings,
        capacities: &[Bytes],
        records: Records,
        (now, opens): (Millis, Millis),
    ) -> Result<Self, RestoreError> {
        let mut machine = Self::new(settings, capacities);
        machine.now = now;
        machine.opens = opens;
        machine.next_lease = records.next_lease.0.max(1);
        machine.remember(Some(opens));
        for record in records.leases {
            machine.take_over(record)?;
        }
        if machine.next_lease >= MOST_LEASES_EVER {
            return Err(RestoreError::NumbersSpent(machine.next_lease()));
        }
        if records.are_incomplete {
            machine.adopts_below = machine.next_lease;
        }
        Ok(machine)
    }

    fn take_over(&mut self, record: Record) -> Result<(), RestoreError> {
        let id = record.lease;
        if self.leases.contains_key(&id) {
            return Err(RestoreError::Twice(id));
        }
        if self.ledger.unknown(&record.claims).is_some() {
            return Err(RestoreError::UnknownDevice(id));
        }
        for (device, bytes) in record.claims.iter() {
            let capacity = self.ledger.capacity(device);
            if bytes > self.ledger.ungranted(device) {
                let held = self.ledger.granted(device) + bytes;
                return Err(RestoreError::AboveCapacity {
                    device,
                    held,
                    capacity,
                });
            }
        }
        let lives = if record.is_committed {
            record.time_to_live
        } else {
            Some(self.settings.commit_within)
        };
        let lease = Lease {
            client: record.client,
            revision: record.revision,
            claims: record.claims,
            floor: record.floor,
            priority: record.priority,
            since: record.since,
            is_committed: record.is_committed,
            time_to_live: record.time_to_live,
            ends: lives.map(|milliseconds| self.now.max(self.opens).after(milliseconds)),
            asked: None,
            left_alone_until: self.now,
        };
        self.next_lease = self.next_lease.max(id.0.saturating_add(1));
        self.insert(id, lease);
        Ok(())
    }

    pub(super) fn resume(&mut self, client: ClientId, presented: &[Presented]) {
        // What it waited for on its old connection, it asks for again.
        self.withdraw(client, Refusal::Cancelled);
        let named: BTreeSet<LeaseId> = presented.iter().map(|lease| lease.lease).collect();
        let forgotten = self
            .leases
            .iter()
            .filter(|(id, lease)| lease.client == client && !named.contains(id));
        let forgotten: Vec<LeaseId> = forgotten.map(|(id, _)| *id).collect();
        for lease in forgotten {
            self.end(lease, None, End::NotPresented);
        }
        for lease in presented {
            let known = self.leases.get(&lease.lease);
            if known.is_none_or(|known| known.client != client) {
                self.adopt(client, lease);
            }
        }
        self.serve();
    }

    fn adopt(&mut self, client: ClientId, presented: &Presented) {
        let (id, claims) = (presented.lease, &presented.claims);
        let was_given_out = self.now < self.opens && id.0 < self.adopts_below;
        let may_be = was_given_out && !self.leases.contains_key(&id);
        if !may_be || !self.ledger.has(claims) {
            self.effect(Effect::Ended {
                client,
                request: None,
                lease: id,
                end: End::Lost,
            });
            return;
        }
        let lease = Lease {
            client,
            revision: presented.revision,
            claims: claims.clone(),
            floor: claims.clone(),
            priority: Priority::default(),
            since: self.now,
            is_committed: true,
            time_to_live: None,
            ends: None,
            asked: None,
            left_alone_until: self.now,
        };
        self.insert(id, lease);
        self.effect(Effect::Adopted {
            client,
            lease: id,
            revision: presented.revision,
            claims: claims.clone(),
        });
    }
}

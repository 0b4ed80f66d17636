//! Devices by name, as clients know them, and by place, as the machine does.

use memfit_engine::bytes::Bytes;
use memfit_engine::share::lease::{Claims, Device, Lease, LeaseId, Machine, Refusal};

use super::refusal::refused;
use crate::lease::amounts::Amounts;
use crate::lease::protocol::{Held, Reason, Refused};

/// The names, in the machine's order.
#[derive(Debug, Clone)]
pub(crate) struct Devices {
    names: Vec<String>,
}

impl Devices {
    pub(crate) const fn new(names: Vec<String>) -> Self {
        Self { names }
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = (Device, &str)> {
        let places = (0..).map(Device);
        places.zip(self.names.iter().map(String::as_str))
    }

    fn name(&self, device: Device) -> &str {
        self.names.get(device.0).map_or("?", String::as_str)
    }

    /// Amounts by name as claims.
    pub(crate) fn claims(&self, amounts: &Amounts) -> Result<Claims, Refused> {
        let named = amounts.iter().map(|(name, bytes)| {
            let place = self.names.iter().position(|known| known == name);
            place
                .map(|place| (Device(place), Bytes(*bytes)))
                .ok_or_else(|| {
                    let shown: String = name.chars().take(40).collect();
                    let known = self.names.join("`, `");
                    let message = format!("there is no device `{shown}` here; there is `{known}`");
                    refused(Reason::UnknownDevice, message)
                })
        });
        let named: Vec<_> = named.collect::<Result<_, _>>()?;
        // The names in a map are distinct, and so are their places.
        Claims::new(named).map_err(|error| refused(Reason::UnknownDevice, error.to_string()))
    }

    /// Claims as amounts by name.
    pub(crate) fn amounts(&self, claims: &Claims) -> Amounts {
        claims
            .iter()
            .map(|(device, bytes)| (self.name(device).to_owned(), bytes.0))
            .collect()
    }

    /// What there is.
    pub(crate) fn capacities(&self, machine: &Machine) -> Amounts {
        self.names()
            .map(|(device, name)| (name.to_owned(), machine.capacity(device).0))
            .collect()
    }

    /// A lease as its holder should know it.
    pub(crate) fn held(&self, id: LeaseId, lease: &Lease) -> Held {
        Held {
            lease: id.0,
            revision: lease.revision.0,
            claims: self.amounts(&lease.claims),
            is_committed: lease.is_committed,
        }
    }

    /// A refusal for programs and people.
    pub(crate) fn refusal(&self, refusal: &Refusal) -> Refused {
        let reason = match refusal {
            Refusal::UnknownDevice(_) => Reason::UnknownDevice,
            Refusal::AboveCapacity { .. } => Reason::AboveCapacity,
            Refusal::FloorAboveClaims => Reason::FloorAboveClaims,
            Refusal::NoRoom { .. } => Reason::NoRoom,
            Refusal::TimedOut { .. } => Reason::TimedOut,
            Refusal::Contended => Reason::Contended,
            Refusal::AlreadyWaiting => Reason::AlreadyWaiting,
            Refusal::Cancelled => Reason::Cancelled,
            Refusal::UnknownLease(_) => Reason::UnknownLease,
            Refusal::UnknownRequest => Reason::UnknownRequest,
            Refusal::Stale(_) => Reason::Stale,
            Refusal::WrongPhase => Reason::WrongPhase,
            Refusal::HeldBack => Reason::HeldBack,
            Refusal::NotRecorded => Reason::NotRecorded,
        };
        let plain = refused(reason, refusal.to_string());
        match *refusal {
            Refusal::AboveCapacity {
                device,
                asked,
                largest,
            }
            | Refusal::NoRoom {
                device,
                asked,
                largest,
            }
            | Refusal::TimedOut {
                device,
                asked,
                largest,
            } => Refused {
                message: format!("on `{}`: {refusal}", self.name(device)),
                device: Some(self.name(device).to_owned()),
                asked_bytes: Some(asked.0),
                largest_bytes: Some(largest.0),
                ..plain
            },
            Refusal::Stale(revision) => Refused {
                revision: Some(revision.0),
                ..plain
            },
            _ => plain,
        }
    }
}

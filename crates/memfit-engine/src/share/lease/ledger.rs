//! The sums: what each device has, what of it is granted and what others have taken.
//!
//! The only place where a sum changes. Invariant: on every device granted <= capacity, at every
//! moment; [`Ledger::take`] checks before it adds, all devices before any. What others have taken can
//! be anything: it only keeps more from being granted.

use crate::bytes::Bytes;

use super::{Claims, Device};

/// One device's capacity and sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    capacity: Bytes,
    granted: Bytes,
    /// Taken without a lease.
    occupied: Bytes,
}

/// The sums of all devices.
#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    sums: Vec<Sum>,
}

impl Ledger {
    pub(crate) fn new(capacities: &[Bytes]) -> Self {
        let sums = capacities.iter().map(|&capacity| Sum {
            capacity,
            granted: Bytes::ZERO,
            occupied: Bytes::ZERO,
        });
        Self {
            sums: sums.collect(),
        }
    }

    /// How many devices there are.
    pub(crate) const fn devices(&self) -> usize {
        self.sums.len()
    }

    /// The first device of the claims that does not exist.
    pub(crate) fn unknown(&self, claims: &Claims) -> Option<Device> {
        let mut devices = claims.iter().map(|(device, _)| device);
        devices.find(|device| device.0 >= self.sums.len())
    }

    /// The capacity of a device; none where there is no device.
    pub(crate) fn capacity(&self, device: Device) -> Bytes {
        self.sums
            .get(device.0)
            .map_or(Bytes::ZERO, |sum| sum.capacity)
    }

    /// What is granted on a device.
    pub(crate) fn granted(&self, device: Device) -> Bytes {
        self.sums
            .get(device.0)
            .map_or(Bytes::ZERO, |sum| sum.granted)
    }

    /// What others than holders have taken of a device.
    pub(crate) fn occupied(&self, device: Device) -> Bytes {
        self.sums
            .get(device.0)
            .map_or(Bytes::ZERO, |sum| sum.occupied)
    }

    /// Notes what others than holders have taken of a device.
    pub(crate) fn occupy(&mut self, device: Device, bytes: Bytes) {
        if let Some(sum) = self.sums.get_mut(device.0) {
            sum.occupied = bytes;
        }
    }

    /// What is not granted of a device.
    pub(crate) fn ungranted(&self, device: Device) -> Bytes {
        self.capacity(device) - self.granted(device)
    }

    /// What is free on a device: neither granted nor taken by others.
    pub(crate) fn free(&self, device: Device) -> Bytes {
        self.ungranted(device) - self.occupied(device)
    }

    /// Whether the claims fit what is free.
    pub(crate) fn fits(&self, claims: &Claims) -> bool {
        claims
            .iter()
            .all(|(device, bytes)| bytes <= self.free(device))
    }

    /// Whether the claims, which a living client holds already, fit what is not granted.
    pub(crate) fn has(&self, claims: &Claims) -> bool {
        claims
            .iter()
            .all(|(device, bytes)| bytes <= self.ungranted(device))
    }

    /// Grants the claims if they fit, all or nothing; says whether it did.
    #[must_use]
    pub(crate) fn take(&mut self, claims: &Claims) -> bool {
        self.fits(claims) && self.enter(claims)
    }

    /// Enters claims that are held, whatever others have taken; says whether they are within the
    /// capacity, without which nothing is entered.
    #[must_use]
    pub(crate) fn enter(&mut self, claims: &Claims) -> bool {
        let has = self.has(claims);
        if has {
            for (device, bytes) in claims.iter() {
                // A device of claims that fit exists: where none is, nothing is there to grant.
                if let Some(sum) = self.sums.get_mut(device.0) {
                    sum.granted += bytes;
                }
            }
        }
        has
    }

    /// Gives granted claims back. They were taken before, so no sum goes below zero.
    pub(crate) fn give(&mut self, claims: &Claims) {
        for (device, bytes) in claims.iter() {
            if let Some(sum) = self.sums.get_mut(device.0) {
                debug_assert!(bytes <= sum.granted, "more given back than taken");
                sum.granted -= bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_devices_are_taken_or_none() {
        let mut ledger = Ledger::new(&[Bytes(10), Bytes(5)]);
        let pair = |a, b| Claims::new([(Device(0), Bytes(a)), (Device(1), Bytes(b))]).unwrap();
        assert!(ledger.take(&pair(6, 5)));
        assert!(!ledger.take(&pair(1, 1)));
        assert_eq!(ledger.free(Device(0)), Bytes(4));
        ledger.give(&pair(6, 5));
        assert_eq!(ledger.granted(Device(1)), Bytes::ZERO);
    }

    #[test]
    fn the_largest_numbers_do_not_wrap() {
        let mut ledger = Ledger::new(&[Bytes(u64::MAX)]);
        assert!(ledger.take(&Claims::one(Device(0), Bytes(u64::MAX - 1))));
        assert!(!ledger.take(&Claims::one(Device(0), Bytes(u64::MAX))));
        assert!(ledger.take(&Claims::one(Device(0), Bytes(1))));
        assert_eq!(ledger.free(Device(0)), Bytes::ZERO);
    }

    #[test]
    fn what_others_have_taken_is_not_free_and_takes_nothing_from_who_holds() {
        let mut ledger = Ledger::new(&[Bytes(10)]);
        let of = |bytes| Claims::one(Device(0), Bytes(bytes));
        assert!(ledger.take(&of(4)));
        ledger.occupy(Device(0), Bytes(5));
        assert_eq!(ledger.free(Device(0)), Bytes(1));
        assert!(!ledger.take(&of(2)));
        // More than there is at all.
        ledger.occupy(Device(0), Bytes(u64::MAX));
        assert_eq!(ledger.free(Device(0)), Bytes::ZERO);
        assert_eq!(ledger.granted(Device(0)), Bytes(4));
        assert!(ledger.enter(&of(6)));
        assert!(!ledger.enter(&of(1)));
        ledger.occupy(Device(0), Bytes::ZERO);
        ledger.give(&of(10));
        assert_eq!(ledger.free(Device(0)), Bytes(10));
    }

    #[test]
    fn a_device_that_is_not_there_has_no_room() {
        let mut ledger = Ledger::new(&[]);
        assert!(!ledger.take(&Claims::one(Device(3), Bytes(1))));
        ledger.occupy(Device(3), Bytes(1));
        ledger.give(&Claims::one(Device(3), Bytes(1)));
    }
}

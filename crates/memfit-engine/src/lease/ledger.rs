//! The sums: what each device has and what of it is granted.
//!
//! The only place where a sum changes. Invariant: on every device granted <= capacity, at every
//! moment; [`Ledger::take`] checks before it adds, all devices before any.

use crate::bytes::Bytes;

use super::{Claims, Device};

/// One device's capacity and sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    capacity: Bytes,
    granted: Bytes,
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
        });
        Self {
            sums: sums.collect(),
        }
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

    /// What is free on a device.
    pub(crate) fn free(&self, device: Device) -> Bytes {
        self.capacity(device) - self.granted(device)
    }

    /// Whether the claims fit what is free.
    pub(crate) fn fits(&self, claims: &Claims) -> bool {
        claims
            .iter()
            .all(|(device, bytes)| bytes <= self.free(device))
    }

    /// Grants the claims, all or nothing; says whether it did.
    #[must_use]
    pub(crate) fn take(&mut self, claims: &Claims) -> bool {
        let fits = self.fits(claims);
        if fits {
            for (device, bytes) in claims.iter() {
                // A device of claims that fit exists: where none is, nothing is free.
                self.sums[device.0].granted += bytes;
            }
        }
        fits
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
    fn a_device_that_is_not_there_has_no_room() {
        let mut ledger = Ledger::new(&[]);
        assert!(!ledger.take(&Claims::one(Device(3), Bytes(1))));
        ledger.give(&Claims::one(Device(3), Bytes(1)));
    }
}

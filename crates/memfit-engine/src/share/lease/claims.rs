//! Bytes on several devices, asked for and granted together.
//!
//! Responsible for arithmetic that cannot wrap or go below zero. Not responsible for what there is.

use crate::bytes::Bytes;

/// A device of the machine, by its place in the list that [`Machine::new`](super::Machine::new) got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device(pub usize);

/// Bytes by device: sorted by device, each device once, no zeros.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Claims(Vec<(Device, Bytes)>);

/// Why claims could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimsError {
    /// A device is named twice.
    #[error("device {} is named twice", .0.0)]
    Twice(Device),
}

impl Claims {
    /// Claims of nothing.
    pub const NONE: Self = Self(Vec::new());

    /// Bytes on one device.
    #[must_use]
    pub fn one(device: Device, bytes: Bytes) -> Self {
        Self::kept(vec![(device, bytes)])
    }

    /// Bytes on several devices; zeros are left out.
    ///
    /// # Errors
    ///
    /// A device is named twice.
    pub fn new(claims: impl IntoIterator<Item = (Device, Bytes)>) -> Result<Self, ClaimsError> {
        let mut claims: Vec<_> = claims.into_iter().collect();
        claims.sort_unstable();
        let twice = claims.windows(2).find(|pair| pair[0].0 == pair[1].0);
        match twice {
            Some(pair) => Err(ClaimsError::Twice(pair[0].0)),
            None => Ok(Self::kept(claims)),
        }
    }

    /// `claims` is sorted and names each device once.
    fn kept(mut claims: Vec<(Device, Bytes)>) -> Self {
        claims.retain(|(_, bytes)| *bytes > Bytes::ZERO);
        Self(claims)
    }

    /// Devices and bytes, in the order of devices.
    pub fn iter(&self) -> impl Iterator<Item = (Device, Bytes)> + '_ {
        self.0.iter().copied()
    }

    /// Bytes on a device.
    #[must_use]
    pub fn on(&self, device: Device) -> Bytes {
        let found = self.0.binary_search_by_key(&device, |(device, _)| *device);
        found.map_or(Bytes::ZERO, |place| self.0[place].1)
    }

    /// Whether it claims nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether both claim a common device.
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        self.iter()
            .any(|(device, _)| other.on(device) > Bytes::ZERO)
    }

    /// Whether it claims no more than the other, on any device.
    #[must_use]
    pub fn is_within(&self, other: &Self) -> bool {
        self.iter().all(|(device, bytes)| bytes <= other.on(device))
    }

    /// What it has above the other, device by device; never below zero.
    #[must_use]
    pub fn beyond(&self, other: &Self) -> Self {
        let above = self
            .iter()
            .map(|(device, bytes)| (device, bytes - other.on(device)));
        Self::kept(above.collect())
    }

    /// The smaller of both, device by device.
    #[must_use]
    pub fn least(&self, other: &Self) -> Self {
        self.beyond(&self.beyond(other))
    }

    /// Both together; saturates, as [`Bytes`] does.
    #[must_use]
    pub fn with(&self, other: &Self) -> Self {
        let mut sum = self.0.clone();
        for (device, bytes) in other.iter() {
            match sum.binary_search_by_key(&device, |(device, _)| *device) {
                Ok(place) => sum[place].1 += bytes,
                Err(place) => sum.insert(place, (device, bytes)),
            }
        }
        Self(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(pairs: &[(usize, u64)]) -> Claims {
        let pairs = pairs
            .iter()
            .map(|&(device, bytes)| (Device(device), Bytes(bytes)));
        Claims::new(pairs).unwrap()
    }

    #[test]
    fn a_device_named_twice_is_no_claim() {
        let twice = [
            (Device(1), Bytes(1)),
            (Device(0), Bytes(2)),
            (Device(1), Bytes(3)),
        ];
        assert_eq!(Claims::new(twice), Err(ClaimsError::Twice(Device(1))));
    }

    #[test]
    fn zeros_are_left_out_so_that_equal_claims_are_equal_values() {
        assert_eq!(claims(&[(1, 5), (0, 0)]), claims(&[(1, 5)]));
        assert!(claims(&[(0, 0)]).is_empty());
    }

    #[test]
    fn differences_stop_at_zero_and_sums_at_the_largest_number() {
        let (small, large) = (claims(&[(0, 3)]), claims(&[(0, 5), (1, u64::MAX)]));
        assert_eq!(small.beyond(&large), Claims::NONE);
        assert_eq!(large.beyond(&small), claims(&[(0, 2), (1, u64::MAX)]));
        assert_eq!(large.with(&large).on(Device(1)), Bytes(u64::MAX));
        assert_eq!(large.least(&small), small);
        assert!(small.is_within(&large) && !large.is_within(&small));
    }
}

//! The device below the allocator: how much memory is left, and which addresses come back.
//!
//! Responsible for counting the bytes that are taken and for an address model of `cudaMalloc` and of
//! virtual reservations. Not responsible for what lies in the ranges. The model: `cudaMalloc` hands out
//! multiples of 2 MiB, first the lowest range that was freed and is large enough, else the next new one;
//! freed neighbours become one range. `crates/memfit-engine/tests/oracle/stand_in_runtime.cpp` has the same
//! rules. A real driver's addresses follow them often, not always; decisions of the allocator depend on
//! them only where two free blocks tie.

use std::collections::BTreeMap;

/// The bytes of one address granule.
const GRANULE_BYTES: u64 = 2 << 20;
const FIRST_ADDRESS: u64 = 0x7f00_0000_0000;
const FIRST_RESERVED: u64 = 0x6000_0000_0000;
/// No address lies beyond; real devices have 49 bits of them.
const ADDRESS_LIMIT: u64 = 1 << 62;
/// Between two reservations, so that they never touch.
const RESERVATION_GAP_BYTES: u64 = 1 << 30;

/// Whether new address ranges lie above or below the ones before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AddressOrder {
    /// Each above the last.
    #[default]
    Ascending,
    /// Each below the last, as Linux drivers mostly do.
    Descending,
}

/// The device an allocator takes its memory from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Its memory in bytes (`totalGlobalMem`).
    pub total_bytes: u64,
    /// Bytes that somebody else holds: other processes, the CUDA context, libraries.
    pub other_bytes: u64,
    /// Where new address ranges lie.
    pub address_order: AddressOrder,
}

impl Device {
    /// A device that no other process uses, with ascending addresses.
    #[must_use]
    pub fn new(total_bytes: u64) -> Self {
        Self {
            total_bytes,
            other_bytes: 0,
            address_order: AddressOrder::Ascending,
        }
    }
}

/// What `cudaMalloc`, `cudaFree` and the virtual memory calls answer.
#[derive(Debug, Clone)]
pub(super) struct Driver {
    pub(super) device: Device,
    used_bytes: u64,
    next_address: u64,
    next_reserved: u64,
    free_ranges: BTreeMap<u64, u64>,
    /// Addresses that come next, because a trace says so, the last one first.
    expected: Vec<u64>,
    never_refuses: bool,
}

impl Driver {
    pub(super) fn new(device: Device) -> Self {
        Self {
            device,
            used_bytes: 0,
            next_address: FIRST_ADDRESS,
            next_reserved: FIRST_RESERVED,
            free_ranges: BTreeMap::new(),
            expected: Vec::new(),
            never_refuses: false,
        }
    }

    /// Serves every request from here on.
    pub(super) fn never_refuse(&mut self) {
        self.never_refuses = true;
    }

    /// The addresses of the next segments, first to last.
    pub(super) fn expect(&mut self, addresses: impl DoubleEndedIterator<Item = u64>) {
        self.expected = addresses.rev().collect();
    }

    /// Counts bytes that were taken before.
    pub(super) fn occupy(&mut self, bytes: u64) {
        self.used_bytes = self.used_bytes.saturating_add(bytes);
    }

    /// Free bytes (`cudaMemGetInfo`).
    pub(super) fn free_bytes(&self) -> u64 {
        if self.never_refuses {
            return u64::MAX;
        }
        self.device
            .total_bytes
            .saturating_sub(self.used_bytes)
            .saturating_sub(self.device.other_bytes)
    }

    /// Takes bytes without an address (`cuMemCreate`); `false` when they are not there.
    pub(super) fn take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.free_bytes();
        if fits {
            self.occupy(bytes);
        }
        fits
    }

    /// Gives bytes back (`cuMemRelease`).
    pub(super) fn give(&mut self, bytes: u64) {
        self.used_bytes = self.used_bytes.saturating_sub(bytes);
    }

    /// `cudaMalloc`: an address, or nothing when the bytes are not there.
    pub(super) fn allocate(&mut self, bytes: u64) -> Option<u64> {
        if !self.take(bytes) {
            return None;
        }
        if let Some(address) = self.expected.pop() {
            return Some(address);
        }
        let size = granules(bytes);
        let fitting = self
            .free_ranges
            .iter()
            .find(|&(_, &range)| range >= size)
            .map(|(&address, &range)| (address, range));
        if let Some((address, range)) = fitting {
            self.free_ranges.remove(&address);
            if range > size {
                self.free_ranges.insert(address + size, range - size);
            }
            return Some(address);
        }
        let address = self.new_address(size);
        if address.is_none() {
            self.give(bytes);
        }
        address
    }

    fn new_address(&mut self, size: u64) -> Option<u64> {
        let address = self.next_address;
        match self.device.address_order {
            AddressOrder::Ascending => {
                let end = address.checked_add(size)?;
                self.next_address = Some(end).filter(|&end| end < ADDRESS_LIMIT)?;
                Some(address)
            }
            AddressOrder::Descending => {
                self.next_address = address.checked_sub(size).filter(|&start| start > 0)?;
                Some(self.next_address)
            }
        }
    }

    /// `cudaFree` of what [`Driver::allocate`] returned.
    pub(super) fn free(&mut self, address: u64, bytes: u64) {
        self.give(bytes);
        let mut start = address;
        let mut size = granules(bytes);
        if let Some(next) = self.free_ranges.remove(&start.saturating_add(size)) {
            size += next;
        }
        if let Some((&before, &range)) = self.free_ranges.range(..start).next_back()
            && before + range == start
        {
            start = before;
            size += range;
        }
        self.free_ranges.insert(start, size);
    }

    /// `cuMemAddressReserve`: address space without memory; `None` when there is none left.
    pub(super) fn reserve(&mut self, bytes: u64) -> Option<u64> {
        if let Some(address) = self.expected.pop() {
            return Some(address);
        }
        let address = self.next_reserved;
        let end = address.checked_add(granules(bytes))?;
        let next = end.checked_add(RESERVATION_GAP_BYTES)?;
        self.next_reserved = Some(next).filter(|&next| next < ADDRESS_LIMIT)?;
        Some(address)
    }
}

fn granules(bytes: u64) -> u64 {
    bytes
        .checked_next_multiple_of(GRANULE_BYTES)
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_lowest_freed_range_serves_first() {
        let mut driver = Driver::new(Device::new(64 * MIB));
        let [first, second, third] = [4, 6, 8].map(|mib| driver.allocate(mib * MIB).unwrap());
        assert_eq!(second, first + 4 * MIB);
        driver.free(first, 4 * MIB);
        driver.free(second, 6 * MIB);
        // The two freed neighbours are one range now.
        assert_eq!(driver.allocate(9 * MIB), Some(first));
        assert_eq!(driver.allocate(2 * MIB), Some(third + 8 * MIB));
    }

    #[test]
    fn what_is_not_there_is_refused_and_takes_nothing() {
        let mut driver = Driver::new(Device {
            other_bytes: 4 * MIB,
            ..Device::new(16 * MIB)
        });
        assert_eq!(driver.allocate(13 * MIB), None);
        assert_eq!(driver.free_bytes(), 12 * MIB);
        assert!(driver.take(12 * MIB));
        assert!(!driver.take(1));
    }

    #[test]
    fn descending_addresses_fall() {
        let mut driver = Driver::new(Device {
            address_order: AddressOrder::Descending,
            ..Device::new(64 * MIB)
        });
        let first = driver.allocate(MIB).unwrap();
        assert_eq!(driver.allocate(3 * MIB), Some(first - 4 * MIB));
    }
}

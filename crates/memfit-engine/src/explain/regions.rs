//! What the driver has given: segments, and mapped ranges of expandable segments.
//!
//! Responsible for adding and removing them, forwards and backwards in time. Not responsible for the
//! blocks inside.
//!
//! Invariant: regions do not overlap. Mapped ranges of expandable segments that touch are one region, as
//! a snapshot shows them; two `cudaMalloc`s that touch stay two.

use std::collections::BTreeMap;

use crate::snapshot::{Event, PoolIndex, Segment};

/// Size of a segment of the small pool, and of no segment of the large one (`kSmallBuffer` in
/// `c10/core/AllocatorConfig.h`).
const SMALL_SEGMENT_BYTES: u64 = 2 << 20;
/// Expandable segments of the large pool grow and shrink by no less (`kLargeBuffer`).
const LEAST_LARGE_RANGE_BYTES: u64 = 20 << 20;

/// One segment, or one contiguous mapped range of an expandable segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) size: u64,
    pub(super) stream: u64,
    pub(super) pool: PoolIndex,
    pub(super) is_small: bool,
    pub(super) is_expandable: bool,
}

impl Region {
    /// A region as an event tells of it. A trace does not say which pool a segment belongs to, but only
    /// those of the small one have 2 MiB, or are mapped in pages of so much.
    pub(super) fn of_event(event: &Event, is_expandable: bool) -> Self {
        Self {
            size: event.size,
            stream: event.stream,
            pool: event.pool,
            is_small: if is_expandable {
                event.size < LEAST_LARGE_RANGE_BYTES
            } else {
                event.size == SMALL_SEGMENT_BYTES
            },
            is_expandable,
        }
    }

    /// Whether two regions that touch are one. Neither stream nor pool is compared: a mapped range never
    /// touches another expandable segment, since each reserves more addresses than the device has
    /// memory, and a private pool that is gone leaves its last segments with a number that means nothing.
    const fn continues(&self, other: &Self) -> bool {
        self.is_expandable && other.is_expandable
    }
}

/// Why a change contradicts what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Contradiction;

/// All regions of a device at one moment, by address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Regions {
    regions: BTreeMap<u64, Region>,
}

impl Regions {
    /// Those of a snapshot; segments that overlap an earlier one are left out.
    pub(super) fn of_segments(segments: &[Segment]) -> Self {
        let mut regions = Self::default();
        for segment in segments {
            let region = Region {
                size: segment.total_size,
                stream: segment.stream,
                pool: segment.pool,
                is_small: segment.is_small,
                is_expandable: segment.is_expandable,
            };
            // What overlaps is reported where its blocks are found outside every region.
            let _overlapping = regions.add(segment.address, region);
        }
        regions
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Region)> {
        self.regions
            .iter()
            .map(|(&address, region)| (address, region))
    }

    /// Bytes of all of them.
    pub(super) fn total_bytes(&self) -> u64 {
        self.regions
            .values()
            .fold(0, |sum, region| sum.saturating_add(region.size))
    }

    /// The region that holds an address, and where it starts.
    pub(super) fn holding(&self, address: u64) -> Option<(u64, &Region)> {
        let (&start, region) = self.regions.range(..=address).next_back()?;
        (address - start < region.size).then_some((start, region))
    }

    /// Adds a region where nothing is.
    pub(super) fn add(&mut self, address: u64, region: Region) -> Result<(), Contradiction> {
        let end = address.checked_add(region.size).ok_or(Contradiction)?;
        if region.size == 0 {
            return Err(Contradiction);
        }
        let before = self.regions.range(..end).next_back();
        let before = before.map(|(&start, &region)| (start, region));
        if before.is_some_and(|(start, before)| start + before.size > address) {
            return Err(Contradiction);
        }
        let (mut start, mut whole) = (address, region);
        if let Some((left, before)) = before
            .filter(|(left, before)| left + before.size == address && before.continues(&region))
        {
            (start, whole.size) = (left, before.size + region.size);
            // Many small pages unmapped at once may be as long as a large one.
            whole.is_small |= before.is_small;
        }
        if let Some(after) = self.regions.get(&end).copied()
            && after.continues(&region)
        {
            self.regions.remove(&end);
            whole.size += after.size;
            whole.is_small |= after.is_small;
        }
        self.regions.insert(start, whole);
        Ok(())
    }

    /// Removes a whole segment, or any part of a mapped range, and returns what it was part of.
    pub(super) fn remove(
        &mut self,
        address: u64,
        size: u64,
        is_expandable: bool,
    ) -> Result<Region, Contradiction> {
        let end = address.checked_add(size).ok_or(Contradiction)?;
        let (start, region) = self.holding(address).ok_or(Contradiction)?;
        let (region, region_end) = (*region, start + region.size);
        let is_whole = (start, region_end) == (address, end);
        if region.is_expandable != is_expandable || end > region_end || size == 0 {
            return Err(Contradiction);
        }
        if !is_expandable && !is_whole {
            return Err(Contradiction);
        }
        self.regions.remove(&start);
        for (left, right) in [(start, address), (end, region_end)] {
            if left < right {
                let size = right - left;
                self.regions.insert(left, Region { size, ..region });
            }
        }
        Ok(region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(size: u64, is_expandable: bool) -> Region {
        Region {
            size,
            stream: 0,
            pool: PoolIndex::DEFAULT,
            is_small: false,
            is_expandable,
        }
    }

    fn shown(regions: &Regions) -> Vec<(u64, u64)> {
        regions.iter().map(|(start, r)| (start, r.size)).collect()
    }

    #[test]
    fn mapped_ranges_join_and_part_and_segments_do_not() {
        let mut regions = Regions::default();
        for start in [10, 30, 20] {
            regions.add(start, region(10, true)).unwrap();
        }
        assert_eq!(shown(&regions), [(10, 30)]);
        regions.remove(20, 10, true).unwrap();
        assert_eq!(shown(&regions), [(10, 10), (30, 10)]);
        regions.add(40, region(10, false)).unwrap();
        regions.add(50, region(10, false)).unwrap();
        assert_eq!(shown(&regions), [(10, 10), (30, 10), (40, 10), (50, 10)]);
        assert_eq!(regions.total_bytes(), 40);
        assert_eq!(regions.holding(39).unwrap().0, 30);
        assert!(regions.holding(20).is_none());
    }

    #[test]
    fn contradictions_change_nothing() {
        let mut regions = Regions::default();
        regions.add(10, region(10, false)).unwrap();
        let before = regions.clone();
        for (start, size) in [(5, 6), (19, 1), (0, 100), (u64::MAX, 2), (30, 0)] {
            assert!(regions.add(start, region(size, false)).is_err());
        }
        for (start, size, expandable) in [
            (10, 5, false),
            (10, 10, true),
            (12, 8, false),
            (0, 1, false),
        ] {
            assert!(regions.remove(start, size, expandable).is_err());
        }
        assert_eq!(regions, before);
    }
}

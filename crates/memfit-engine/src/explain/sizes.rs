//! Sizes of blocks that no longer exist.
//!
//! Responsible for the bytes of every block that was freed before the snapshot was taken. A trace has only
//! what was requested; the block is larger by rounding and by the remainder that was too small to split
//! off. Not responsible for lives.
//!
//! The walk goes forwards from the state that the rollback found and keeps the layout: an allocation
//! takes the front of the free piece at its address, and whether the rest is split off is the allocator's
//! own rule (`should_split` in `c10/cuda/CUDACachingAllocator.cpp`):
//!
//! | piece | split off when the rest is |
//! |---|---|
//! | small pool, or expandable | at least 512 bytes |
//! | large pool, request below `max_split_size` | more than 1 MiB |
//! | large pool, request of `max_split_size` or more | never |
//!
//! Exact, given the layout at state 0. There, a block from before recording that is freed inside the trace
//! and was not split may reach up to 1 MiB beyond its rounded request:
//!
//! - the next block, or the segment's end, is at most 1 MiB away: it reaches that far, since no free piece of
//!   the large pool is that small;
//! - else it ends where the first allocation behind it starts, if one comes while it lives, since
//!   allocations take the front of a free piece;
//! - else nothing tells: the rounded request is taken, and the doubt (1 MiB, or `max_split_size` rules it
//!   out) is added to `uncertain_bytes`.
//!
//! Not known from a snapshot: pools marked as never to be split (`torch.cuda.MemPool(no_split=True)`).

use std::collections::BTreeMap;

use super::life::{Allocation, Problems};
use super::regions::{Region, Regions};
use crate::snapshot::{Action, DeviceRecord, Event};

/// Smallest block, and what sizes round up to (`kMinBlockSize`).
const MIN_BLOCK_BYTES: u64 = 512;
/// Largest remainder that stays with a block of the large pool (`kSmallSize`).
const MAX_UNSPLIT_BYTES: u64 = 1 << 20;

/// How requests become block sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rounding {
    /// Requests of this size or more are never split (`max_split_size`).
    pub max_split_bytes: u64,
    /// `roundup_power2_divisions` for requests from 1 MiB, 2 MiB, 4 MiB, .. on; 0 is off.
    pub power2_divisions: [u64; 16],
}

impl Default for Rounding {
    fn default() -> Self {
        Self {
            max_split_bytes: u64::MAX,
            power2_divisions: [0; 16],
        }
    }
}

impl Rounding {
    /// As the `allocator_settings` of a snapshot say.
    #[must_use]
    pub fn of_settings(settings: &[(String, String)]) -> Self {
        let mut rounding = Self::default();
        for (name, value) in settings {
            match name.as_str() {
                // -1 is no limit.
                "max_split_size" => {
                    rounding.max_split_bytes = value.parse().unwrap_or(u64::MAX);
                }
                "roundup_power2_divisions" => rounding.power2_divisions = divisions(value),
                _ => {}
            }
        }
        rounding
    }

    /// The size of the block that a request asks for (`round_size`).
    #[must_use]
    pub fn round(&self, requested: u64) -> u64 {
        if requested < MIN_BLOCK_BYTES {
            return MIN_BLOCK_BYTES;
        }
        let slot = requested.ilog2().saturating_sub(20).min(15) as usize;
        let divisions = self.power2_divisions[slot];
        if divisions > 1 && requested > MIN_BLOCK_BYTES.saturating_mul(divisions) {
            return round_to_division(requested, divisions);
        }
        requested
            .checked_next_multiple_of(MIN_BLOCK_BYTES)
            .unwrap_or(requested)
    }
}

/// `[1:0,2:4,..]`: divisions by MiB, as the reader writes the dictionary down.
fn divisions(text: &str) -> [u64; 16] {
    let mut divisions = [0; 16];
    for pair in text.trim_matches(['[', ']']).split(',') {
        let pair = pair.split_once(':');
        let pair = pair
            .and_then(|(mib, value)| Some((mib.trim().parse().ok()?, value.trim().parse().ok()?)));
        if let Some((mib @ 1.., value)) = pair {
            let mib: u64 = mib;
            divisions[mib.ilog2().min(15) as usize] = value;
        }
    }
    divisions
}

/// Up to the next of `divisions` steps between two powers of two (`roundup_power2_next_division`).
fn round_to_division(requested: u64, divisions: u64) -> u64 {
    if requested.is_power_of_two() {
        return requested;
    }
    let floor = 1u64 << requested.ilog2();
    let step = floor >> divisions.ilog2();
    if step == 0 {
        return floor.saturating_mul(2);
    }
    requested
        .checked_next_multiple_of(step)
        .unwrap_or(requested)
}

/// What kind of region a piece is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Small,
    Large,
    Expandable,
}

impl Kind {
    const fn of(region: &Region) -> Self {
        match (region.is_expandable, region.is_small) {
            (true, _) => Self::Expandable,
            (false, true) => Self::Small,
            (false, false) => Self::Large,
        }
    }

    /// Whether a rest of 512 bytes is split off.
    const fn splits_finely(self) -> bool {
        !matches!(self, Self::Large)
    }
}

/// A stretch of a region: one block, or free.
#[derive(Debug, Clone, Copy)]
struct Piece {
    size: u64,
    /// Index of its allocation; absent when it is free.
    allocation: Option<usize>,
    /// Whether a region starts here, so that it never merges with what lies before.
    is_first: bool,
    kind: Kind,
    /// Whether it may reach further than its size says.
    is_open: bool,
}

/// The pieces of all regions, by address.
struct Layout<'a> {
    pieces: BTreeMap<u64, Piece>,
    rounding: &'a Rounding,
    /// Bytes by which blocks that are gone may have been larger than taken for.
    doubt: u64,
}

impl Layout<'_> {
    /// Lays out state 0: the blocks from before recording, and free pieces between them.
    fn open(&mut self, regions: &Regions, allocations: &mut [Allocation], problems: &mut Problems) {
        let mut first: Vec<usize> = (0..allocations.len())
            .filter(|&index| allocations[index].start == 0)
            .collect();
        first.sort_by_key(|&index| allocations[index].address);
        let mut first = first.into_iter().peekable();
        for (start, region) in regions.iter() {
            let end = start + region.size;
            let mut at = start;
            while let Some(&index) = first.peek() {
                let address = allocations[index].address;
                if address >= end {
                    break;
                }
                first.next();
                if address < at {
                    outside(&allocations[index], problems);
                    continue;
                }
                let next = first
                    .peek()
                    .map_or(end, |&next| allocations[next].address.min(end));
                let (size, is_open) = self.first_size(&allocations[index], next, region);
                self.fill(at, address, at == start, region);
                allocations[index].size = size;
                let piece = Piece {
                    size,
                    allocation: Some(index),
                    is_first: address == start,
                    kind: Kind::of(region),
                    is_open,
                };
                self.pieces.insert(address, piece);
                at = address.saturating_add(size).min(end);
            }
            self.fill(at, end, at == start, region);
        }
        for index in first {
            outside(&allocations[index], problems);
        }
    }

    /// Puts a free piece between two addresses, if there is room.
    fn fill(&mut self, start: u64, end: u64, is_first: bool, region: &Region) {
        if start < end {
            let piece = Piece {
                size: end - start,
                allocation: None,
                is_first,
                kind: Kind::of(region),
                is_open: false,
            };
            self.pieces.insert(start, piece);
        }
    }

    /// The size of a block at state 0, and whether it may be larger. `next` is where the next block or the
    /// region's end is.
    fn first_size(&self, allocation: &Allocation, next: u64, region: &Region) -> (u64, bool) {
        let room = next - allocation.address;
        if allocation.size > 0 {
            return (allocation.size.min(room), false);
        }
        let rounded = self.rounding.round(allocation.requested_size).min(room);
        if Kind::of(region).splits_finely() {
            return (rounded, false);
        }
        let is_oversize = rounded >= self.rounding.max_split_bytes;
        if is_oversize || room - rounded <= MAX_UNSPLIT_BYTES {
            return (room, false);
        }
        (rounded, true)
    }

    /// Gives the front of a free piece to an allocation; `false` when there is none at its address.
    fn allocate(&mut self, event: &Event, index: usize, allocations: &mut [Allocation]) -> bool {
        let address = event.address;
        let Some((&start, &piece)) = self.pieces.range(..=address).next_back() else {
            return false;
        };
        let reaches = start.saturating_add(piece.size);
        if piece.allocation.is_some() || address >= reaches {
            return false;
        }
        let before = self.pieces.range(..start).next_back();
        let before = before
            .map(|(&before, _)| before)
            .filter(|_| !piece.is_first);
        self.settle(before, start, address - start, allocations);
        let free = self.pieces.remove(&address).unwrap_or(piece);
        let allocation = &mut allocations[index];
        if allocation.size == 0 {
            allocation.size = self.block_size(event.size, &free);
        }
        let size = allocation.size;
        if size > free.size {
            self.pieces.insert(address, free);
            return false;
        }
        let taken = Piece {
            size,
            allocation: Some(index),
            ..free
        };
        self.pieces.insert(address, taken);
        if size < free.size {
            let rest = Piece {
                size: free.size - size,
                is_first: false,
                ..free
            };
            self.pieces.insert(address + size, rest);
        }
        true
    }

    /// An allocation starts `offset` bytes into the free piece at `start`: the block before reaches that
    /// far, or, where it cannot, the piece is cut.
    fn settle(
        &mut self,
        before: Option<u64>,
        start: u64,
        offset: u64,
        allocations: &mut [Allocation],
    ) {
        let open = before
            .and_then(|before| self.pieces.get_mut(&before).map(|piece| (before, piece)))
            .filter(|(before, piece)| piece.is_open && before + piece.size == start);
        let grows = match open {
            Some((_, piece)) => {
                piece.is_open = false;
                let grows = offset <= MAX_UNSPLIT_BYTES;
                if let Some(index) = piece.allocation.filter(|_| grows) {
                    piece.size += offset;
                    allocations[index].size = piece.size;
                }
                grows
            }
            None => false,
        };
        if offset == 0 {
            return;
        }
        if let Some(whole) = self.pieces.remove(&start) {
            if !grows {
                let front = Piece {
                    size: offset,
                    ..whole
                };
                self.pieces.insert(start, front);
            }
            let back = Piece {
                size: whole.size - offset,
                is_first: false,
                ..whole
            };
            self.pieces.insert(start + offset, back);
        }
    }

    /// How much of a free piece a request takes.
    fn block_size(&self, requested: u64, free: &Piece) -> u64 {
        let rounded = self.rounding.round(requested);
        // Rounding that the settings in the file do not tell of never makes a block smaller than this.
        let rounded = if rounded > free.size {
            Rounding::default().round(requested)
        } else {
            rounded
        };
        let rest = free.size.saturating_sub(rounded);
        let is_split = if free.kind.splits_finely() {
            rest >= MIN_BLOCK_BYTES
        } else {
            rounded < self.rounding.max_split_bytes && rest > MAX_UNSPLIT_BYTES
        };
        if is_split || rest == 0 {
            rounded
        } else {
            free.size
        }
    }

    /// Frees a block and merges it with the free pieces beside it; `false` when it is not there.
    fn free(&mut self, address: u64, index: usize) -> bool {
        let Some(piece) = self.pieces.get_mut(&address) else {
            return false;
        };
        if piece.allocation != Some(index) {
            return false;
        }
        piece.allocation = None;
        if piece.is_open {
            self.doubt = self.doubt.saturating_add(MAX_UNSPLIT_BYTES);
            piece.is_open = false;
        }
        self.merge(address);
        true
    }

    /// Merges the free piece at an address with the free pieces beside it.
    fn merge(&mut self, address: u64) {
        let Some(mut piece) = self.pieces.get(&address).copied() else {
            return;
        };
        let mut start = address;
        let after = self.pieces.get(&(address + piece.size)).copied();
        if let Some(after) = after.filter(|after| after.allocation.is_none() && !after.is_first) {
            self.pieces.remove(&(address + piece.size));
            piece.size += after.size;
        }
        if !piece.is_first {
            let before = self.pieces.range(..address).next_back();
            let before = before.map(|(&before, &piece)| (before, piece));
            if let Some((left, before)) = before.filter(|(left, before)| {
                before.allocation.is_none() && left + before.size == address
            }) {
                self.pieces.remove(&address);
                start = left;
                piece.size += before.size;
                piece.is_first = before.is_first;
            }
        }
        self.pieces.insert(start, piece);
    }

    /// Adds a segment, or a mapped range that joins the ones beside it.
    fn grow(&mut self, event: &Event, is_expandable: bool) -> bool {
        let Some(end) = event.address.checked_add(event.size) else {
            return false;
        };
        let before = self.pieces.range(..end).next_back();
        let overlaps = before.is_some_and(|(start, piece)| start + piece.size > event.address);
        if overlaps || event.size == 0 {
            return false;
        }
        let continues = is_expandable
            && before.is_some_and(|(start, piece)| {
                start + piece.size == event.address && piece.kind == Kind::Expandable
            });
        let region = Region::of_event(event, is_expandable);
        self.fill(event.address, end, !continues, &region);
        if let Some(after) = self.pieces.get_mut(&end).filter(|_| is_expandable) {
            after.is_first &= after.kind != Kind::Expandable;
        }
        self.merge(event.address);
        true
    }

    /// Removes a free segment or mapped range; `false` when it is not wholly free.
    fn shrink(&mut self, event: &Event) -> bool {
        let Some(end) = event.address.checked_add(event.size) else {
            return false;
        };
        let piece = self.pieces.range(..=event.address).next_back();
        let Some((start, piece)) = piece.map(|(&start, &piece)| (start, piece)) else {
            return false;
        };
        let reaches = start + piece.size;
        if piece.allocation.is_some() || reaches < end || event.size == 0 {
            return false;
        }
        self.pieces.remove(&start);
        if start < event.address {
            let size = event.address - start;
            self.pieces.insert(start, Piece { size, ..piece });
        }
        if end < reaches {
            let rest = Piece {
                size: reaches - end,
                is_first: true,
                ..piece
            };
            self.pieces.insert(end, rest);
        } else if let Some(after) = self.pieces.get_mut(&end) {
            after.is_first = true;
        }
        true
    }
}

fn outside(allocation: &Allocation, problems: &mut Problems) {
    problems.add(None, || {
        format!(
            "the block at {:#x}, alive before recording, lies in no segment or in another block",
            allocation.address
        )
    });
}

/// Fills in the sizes that are 0; returns the bytes in doubt. `of_event` says which allocation an event is about, by
/// position of the event.
pub(super) fn resolve(
    allocations: &mut [Allocation],
    of_event: impl Fn(usize) -> Option<usize>,
    first_regions: &Regions,
    device: &DeviceRecord,
    rounding: &Rounding,
    problems: &mut Problems,
) -> u64 {
    let mut layout = Layout {
        pieces: BTreeMap::new(),
        rounding,
        doubt: 0,
    };
    layout.open(first_regions, allocations, problems);
    for (position, event) in device.events.iter().enumerate() {
        let fine = match event.action {
            Action::Alloc => match of_event(position) {
                Some(index) => layout.allocate(&event, index, allocations),
                None => true,
            },
            Action::FreeCompleted => match of_event(position) {
                Some(index) => layout.free(event.address, index),
                None => true,
            },
            Action::SegmentAlloc => layout.grow(&event, false),
            Action::SegmentMap => layout.grow(&event, true),
            Action::SegmentFree | Action::SegmentUnmap => layout.shrink(&event),
            _ => true,
        };
        if !fine {
            problems.add(Some(position), || {
                format!(
                    "`{}` of {} bytes at {:#x} does not match the blocks that are there",
                    name(event.action),
                    event.size,
                    event.address
                )
            });
        }
    }
    // What no region held, and what contradicts: the request, rounded.
    for allocation in allocations {
        if allocation.size == 0 {
            allocation.size = rounding.round(allocation.requested_size);
        }
    }
    layout.doubt
}

/// An action as the pickle writes it.
const fn name(action: Action) -> &'static str {
    match action {
        Action::Alloc => "alloc",
        Action::FreeRequested => "free_requested",
        Action::FreeCompleted => "free_completed",
        Action::SegmentAlloc => "segment_alloc",
        Action::SegmentFree => "segment_free",
        Action::SegmentMap => "segment_map",
        Action::SegmentUnmap => "segment_unmap",
        Action::Snapshot => "snapshot",
        Action::OutOfMemory => "oom",
        Action::Annotate => "annotate",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn requests_round_as_measured_on_the_real_allocator() {
        let plain = Rounding::default();
        for (requested, block) in [
            (0, 512),
            (1, 512),
            (513, 1024),
            (MIB + 1, 1_049_088),
            (5_000_000, 5_000_192),
            (33_554_433, 33_554_944),
        ] {
            assert_eq!(plain.round(requested), block);
        }
        let settings = [(
            "roundup_power2_divisions".to_owned(),
            "[1:4,2:4,4:4,8:4,16:4,32:4,64:4]".to_owned(),
        )];
        let four = Rounding::of_settings(&settings);
        for (requested, block) in [
            (MIB + 1, 1_310_720),
            (5_000_000, 5_242_880),
            (10 * MIB + 1, 12 * MIB),
            (33_554_433, 40 * MIB),
            (100 * MIB, 112 * MIB),
            (128 * MIB + 1, 128 * MIB + 512),
            (64 * MIB, 64 * MIB),
        ] {
            assert_eq!(four.round(requested), block);
        }
    }

    #[test]
    fn settings_without_limits_have_none() {
        let settings = [("max_split_size".to_owned(), "-1".to_owned())];
        assert_eq!(Rounding::of_settings(&settings), Rounding::default());
        let settings = [("max_split_size".to_owned(), "268435456".to_owned())];
        assert_eq!(Rounding::of_settings(&settings).max_split_bytes, 256 * MIB);
    }
}

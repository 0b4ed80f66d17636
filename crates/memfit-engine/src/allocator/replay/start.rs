//! What the allocator held when a trace began.
//!
//! Responsible for undoing the trace from its end, and for the sizes of the blocks that were there before it:
//! a block that is still there at the end has its size; another one is its request rounded and, in the
//! large pool, the gap behind it up to the next known boundary when that is too small to be split off. Every
//! address that a block of the trace or of the end has is a boundary.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocator::rounding::{self, SMALL_BYTES, SMALL_SEGMENT_BYTES};
use crate::allocator::{BlockLayout, SegmentLayout, Settings};
use crate::snapshot::{Action, BlockState, DeviceRecord, PoolIndex, Snapshot};

/// No device has more bytes, and no address lies beyond 2^60: what a trace says of larger ones is nonsense.
const MAX_BYTES: u64 = 1 << 50;

/// Whether a range can be true at all.
pub(super) fn is_possible(address: u64, size: u64) -> bool {
    address <= 1 << 60 && size <= MAX_BYTES
}

/// A block in use when the trace began.
#[derive(Debug, Clone, Copy)]
struct Held {
    requested: u64,
    state: BlockState,
    /// Its size, known when it is still there at the end.
    size: Option<u64>,
}

/// A segment or mapped range.
#[derive(Debug, Clone, Copy)]
struct Region {
    size: u64,
    stream: u64,
    pool: PoolIndex,
    is_small: bool,
    is_expandable: bool,
}

struct Start {
    held: BTreeMap<u64, Held>,
    regions: BTreeMap<u64, Region>,
    boundaries: BTreeSet<u64>,
}

/// The segments with their blocks at the beginning of the trace, in address order.
pub(super) fn layout(
    snapshot: &Snapshot,
    device: &DeviceRecord,
    settings: &Settings,
) -> Vec<SegmentLayout> {
    let mut start = Start::at_end(device);
    for event in device.events.iter().rev() {
        start.undo(&event);
    }
    let Start {
        held,
        regions,
        boundaries,
    } = start;
    // Segments that overlap the one before are left out: the recording contradicts itself there.
    let mut covered = 0;
    let possible = regions.iter().filter(|&(&address, region)| {
        let is_sound = region.size > 0 && is_possible(address, region.size) && address >= covered;
        if is_sound {
            covered = address + region.size;
        }
        is_sound
    });
    let segments = possible.map(|(&address, region)| {
        let end = address + region.size;
        SegmentLayout {
            address,
            total_size: region.size,
            stream: region.stream,
            pool: snapshot.pools.id(region.pool),
            is_small: region.is_small,
            is_expandable: region.is_expandable,
            counter: 0,
            blocks: blocks(address, end, region, &held, &boundaries, settings),
        }
    });
    segments.collect()
}

impl Start {
    fn at_end(device: &DeviceRecord) -> Self {
        let mut start = Self {
            held: BTreeMap::new(),
            regions: BTreeMap::new(),
            boundaries: BTreeSet::new(),
        };
        for segment in &device.segments {
            let region = Region {
                size: segment.total_size,
                stream: segment.stream,
                pool: segment.pool,
                is_small: segment.is_small,
                is_expandable: segment.is_expandable,
            };
            start.regions.insert(segment.address, region);
            for block in &segment.blocks {
                start.boundaries.insert(block.address);
                if block.state != BlockState::Inactive {
                    let held = Held {
                        requested: block.requested_size,
                        state: block.state,
                        size: Some(block.size),
                    };
                    start.held.insert(block.address, held);
                }
            }
        }
        start
    }

    fn undo(&mut self, event: &crate::snapshot::Event) {
        match event.action {
            Action::Alloc => {
                self.held.remove(&event.address);
                self.boundaries.insert(event.address);
            }
            Action::FreeCompleted => {
                let held = Held {
                    requested: event.size,
                    state: BlockState::AwaitingFree,
                    size: None,
                };
                self.held.insert(event.address, held);
                self.boundaries.insert(event.address);
            }
            Action::FreeRequested => {
                if let Some(held) = self.held.get_mut(&event.address) {
                    held.state = BlockState::Allocated;
                }
            }
            Action::SegmentAlloc => {
                self.regions.remove(&event.address);
            }
            Action::SegmentFree => self.add(event, false),
            Action::SegmentMap => self.cut(event.address, event.size),
            Action::SegmentUnmap => self.add(event, true),
            Action::Snapshot | Action::OutOfMemory | Action::Annotate => {}
        }
    }

    fn add(&mut self, event: &crate::snapshot::Event, is_expandable: bool) {
        let size = event.size;
        // A segment of the small pool is 2 MiB, and so are its pages; ranges of several such pages look
        // like the large pool's only when they come to a multiple of its pages.
        let is_small = if is_expandable {
            !size.is_multiple_of(rounding::LARGE_SEGMENT_BYTES)
        } else {
            size == SMALL_SEGMENT_BYTES
        };
        let mut region = Region {
            size,
            stream: event.stream,
            pool: event.pool,
            is_small,
            is_expandable,
        };
        let mut address = event.address;
        if is_expandable {
            // Ranges that touch are one.
            let joins = |other: &Region| {
                other.is_expandable && (other.stream, other.pool) == (region.stream, region.pool)
            };
            let behind = address.saturating_add(size);
            let after = self.regions.get(&behind).copied().filter(joins);
            let before = self.regions.range(..address).next_back();
            let before = before
                .map(|(&start, &other)| (start, other))
                .filter(|(start, other)| {
                    start.saturating_add(other.size) == address && joins(other)
                });
            if let Some(after) = after {
                self.regions.remove(&behind);
                region.size = region.size.saturating_add(after.size);
                region.is_small = after.is_small;
            }
            if let Some((start, before)) = before {
                address = start;
                region.size = region.size.saturating_add(before.size);
                region.is_small = before.is_small;
            }
        }
        self.regions.insert(address, region);
    }

    /// Takes a mapped range out of the region that holds it.
    fn cut(&mut self, address: u64, size: u64) {
        let Some((&start, &region)) = self.regions.range(..=address).next_back() else {
            return;
        };
        let end = start.saturating_add(region.size);
        let cut_end = address.saturating_add(size);
        if cut_end > end {
            return;
        }
        self.regions.remove(&start);
        if address > start {
            let size = address - start;
            self.regions.insert(start, Region { size, ..region });
        }
        if end > cut_end {
            let size = end - cut_end;
            self.regions.insert(cut_end, Region { size, ..region });
        }
    }
}

/// The blocks of one region: those held, and what is free between them.
fn blocks(
    start: u64,
    end: u64,
    region: &Region,
    held: &BTreeMap<u64, Held>,
    boundaries: &BTreeSet<u64>,
    settings: &Settings,
) -> Vec<BlockLayout> {
    let mut blocks = Vec::new();
    let mut cursor = start;
    let mut inside = held.range(start..end).peekable();
    while let Some((&address, block)) = inside.next() {
        if address < cursor {
            // Overlaps the one before: the recording contradicts itself here.
            continue;
        }
        if address > cursor {
            blocks.push(free(cursor, address));
        }
        let next = inside.peek().map_or(end, |&(&next, _)| next);
        let rounded = rounding::block_bytes(settings, block.requested);
        let known = block.size.filter(|&size| size > 0);
        let mut size = known.unwrap_or(rounded).min(next - address);
        if block.size.is_none() && !region.is_small && !region.is_expandable {
            let behind = address + size;
            let boundary = boundaries.range(behind..next).next();
            let boundary = boundary.map_or(next, |&boundary| boundary);
            if boundary - behind <= SMALL_BYTES {
                size = boundary - address;
            }
        }
        blocks.push(BlockLayout {
            address,
            size,
            requested_size: block.requested,
            state: block.state,
        });
        cursor = address + size;
    }
    if cursor < end {
        blocks.push(free(cursor, end));
    }
    blocks
}

fn free(start: u64, end: u64) -> BlockLayout {
    BlockLayout {
        address: start,
        size: end - start,
        requested_size: 0,
        state: BlockState::Inactive,
    }
}

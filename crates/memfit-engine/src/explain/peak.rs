//! When a device held most, and what was alive then.
//!
//! Responsible for the peaks of allocated, active and reserved bytes over the recording. Not responsible
//! for lives (`history.rs`) nor for owners (`owners.rs`).
//!
//! What counts, as PyTorch's statistics count it (`c10/cuda/CUDACachingAllocator.cpp`):
//!
//! | bytes | rise at | fall at |
//! |---|---|---|
//! | allocated | `alloc`, by the block | `free_requested` |
//! | active | `alloc`, by the block | `free_completed` |
//! | reserved | `segment_alloc`, `segment_map` | `segment_free`, `segment_unmap` |
//!
//! The three peaks may lie at different events. *The* peak is that of allocated bytes: what is said of
//! owners and fragmentation is said of that moment.

use super::history::History;
use super::life::NEVER;
use crate::bytes::Bytes;
use crate::snapshot::{Action, DeviceRecord};

/// Bytes of a device at one state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Held by tensors.
    pub allocated_bytes: Bytes,
    /// Allocated, and blocks that wait for another stream.
    pub active_bytes: Bytes,
    /// Taken from the driver.
    pub reserved_bytes: Bytes,
}

/// The highest value of a count and the first state that has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Highest {
    /// The value.
    pub bytes: Bytes,
    /// The state; state 0 is before the first event, state `i + 1` after event `i`.
    pub state: u32,
}

/// The peaks of a device, and where it started and ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peaks {
    /// Of allocated bytes: *the* peak.
    pub allocated: Highest,
    /// Of active bytes.
    pub active: Highest,
    /// Of reserved bytes.
    pub reserved: Highest,
    /// At state 0.
    pub first: Totals,
    /// When the snapshot was taken.
    pub last: Totals,
}

/// The index of the event after which a state holds; absent for the state before the first.
#[must_use]
pub fn event_of(state: u32) -> Option<u64> {
    state.checked_sub(1).map(u64::from)
}

/// Totals at every state, first to last.
pub fn totals<'a>(
    device: &'a DeviceRecord,
    history: &'a History,
) -> impl Iterator<Item = Totals> + 'a {
    let first = first_totals(history);
    let mut now = first;
    let steps = (0..)
        .zip(device.events.iter())
        .map(move |(position, event)| {
            let allocation = history.of_event(position);
            let allocation = allocation.map(|index| &history.allocations[index]);
            let block = allocation.map_or(Bytes::ZERO, |it| Bytes(it.size));
            match event.action {
                Action::Alloc => {
                    now.allocated_bytes += block;
                    now.active_bytes += block;
                }
                Action::FreeRequested => now.allocated_bytes -= block,
                Action::FreeCompleted => {
                    now.active_bytes -= block;
                    // A trace that contradicts itself may have no `free_requested`.
                    if allocation.is_some_and(|it| it.let_go == it.end) {
                        now.allocated_bytes -= block;
                    }
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    now.reserved_bytes += Bytes(event.size);
                }
                Action::SegmentFree | Action::SegmentUnmap => {
                    now.reserved_bytes -= Bytes(event.size);
                }
                Action::Snapshot | Action::OutOfMemory | Action::Annotate => {}
            }
            now
        });
    std::iter::once(first).chain(steps)
}

fn first_totals(history: &History) -> Totals {
    let alive = history.allocations.iter().filter(|it| it.start == 0);
    let mut totals = Totals {
        reserved_bytes: Bytes(history.first_regions.total_bytes()),
        ..Totals::default()
    };
    for allocation in alive {
        totals.active_bytes += Bytes(allocation.size);
        if allocation.let_go > 0 {
            totals.allocated_bytes += Bytes(allocation.size);
        }
    }
    totals
}

impl Peaks {
    /// The peaks of a device.
    #[must_use]
    pub fn of(device: &DeviceRecord, history: &History) -> Self {
        let mut peaks = Self::default();
        for (state, totals) in (0..NEVER).zip(totals(device, history)) {
            if state == 0 {
                peaks.first = totals;
            }
            peaks.last = totals;
            raise(&mut peaks.allocated, totals.allocated_bytes, state);
            raise(&mut peaks.active, totals.active_bytes, state);
            raise(&mut peaks.reserved, totals.reserved_bytes, state);
        }
        peaks
    }
}

fn raise(highest: &mut Highest, bytes: Bytes, state: u32) {
    if bytes > highest.bytes {
        *highest = Highest { bytes, state };
    }
}

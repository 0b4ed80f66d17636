//! A trace, predicted event by event.
//!
//! The device never refuses here, and hands out the addresses of segments that the trace has; segments given
//! back are taken from the trace, since what others held on the device is not known. All else is predicted:
//! whether a request is served from a free block or needs a segment, of which size, and at which address
//! its block lies.

use std::collections::BTreeMap;

use super::{ORDERS, recorded_settings, start};
use crate::allocator::{BlockId, Device, FreeOrder, SegmentLayout, Settings, Simulator};
use crate::snapshot::{Action, BlockState, DeviceRecord, Event, Snapshot};

/// How many of how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// As recorded.
    pub matched: u64,
    /// All.
    pub total: u64,
}

impl Count {
    fn add(&mut self, is_match: bool) {
        self.total += 1;
        self.matched += u64::from(is_match);
    }
}

/// The first allocation that was not predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    /// Index of the event.
    pub event: u64,
    /// Where the block lay.
    pub recorded_address: u64,
    /// Where it was predicted.
    pub predicted_address: u64,
}

/// How well the simulator does what a trace says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayReport {
    /// The order of the free list that fits best, the newest of equals.
    pub order: FreeOrder,
    /// Addresses of allocations.
    pub allocations: Count,
    /// New segments and mapped ranges: that one was needed, and its size.
    pub segments: Count,
    /// Segments given back that were free and whole here too.
    pub released: Count,
    /// Segments at the end whose blocks are the same.
    pub final_segments: Count,
    /// The first allocation that was not predicted.
    pub first_mismatch: Option<Mismatch>,
}

impl ReplayReport {
    /// Whether everything was as recorded.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        [
            self.allocations,
            self.segments,
            self.released,
            self.final_segments,
        ]
        .iter()
        .all(|count| count.matched == count.total)
    }
}

/// Predicts the trace of a device under the settings it was recorded under.
#[must_use]
pub fn check(snapshot: &Snapshot, device: &DeviceRecord) -> ReplayReport {
    let settings = recorded_settings(snapshot);
    let layout = start::layout(snapshot, device, &settings);
    let run = |order| Forward::run(snapshot, device, &settings, order, &layout);
    let [newest, older] = ORDERS;
    let report = run(newest);
    if report.is_exact() {
        return report;
    }
    let other = run(older);
    if other.allocations.matched > report.allocations.matched {
        other
    } else {
        report
    }
}

struct Forward<'a> {
    snapshot: &'a Snapshot,
    simulator: Simulator,
    blocks: BTreeMap<u64, BlockId>,
    /// New segments that the trace has and no allocation has used yet.
    pending: Vec<(Action, u64, u64)>,
    /// Whether memory was given back since the last request.
    was_released: bool,
    report: ReplayReport,
}

impl<'a> Forward<'a> {
    fn run(
        snapshot: &'a Snapshot,
        device: &DeviceRecord,
        settings: &Settings,
        order: FreeOrder,
        layout: &[SegmentLayout],
    ) -> ReplayReport {
        // What limited the process shows in the trace.
        let settings = Settings {
            per_process_memory_fraction: 1.0,
            garbage_collection_threshold: 0.0,
            throw_on_cudamalloc_oom: false,
            ..settings.clone()
        };
        let device_model = Device::new(reservation(device));
        let mut simulator = Simulator::new(&settings, order, device_model);
        simulator.never_refuse();
        let blocks = simulator.restore(layout);
        simulator.record_trace(true);
        let mut forward = Self {
            snapshot,
            simulator,
            blocks: blocks.into_iter().collect(),
            pending: Vec::new(),
            was_released: false,
            report: ReplayReport {
                order,
                allocations: Count::default(),
                segments: Count::default(),
                released: Count::default(),
                final_segments: Count::default(),
                first_mismatch: None,
            },
        };
        let mut events = (0..).zip(device.events.iter()).peekable();
        while let Some((number, event)) = events.next() {
            let next = events.peek().map(|(_, next)| *next);
            forward.step(number, &event, next.as_ref());
        }
        forward.compare_end(device);
        forward.report
    }

    fn step(&mut self, number: u64, event: &Event, next: Option<&Event>) {
        if !start::is_possible(event.address, event.size) {
            if event.action == Action::Alloc {
                self.report.allocations.add(false);
            }
            return;
        }
        match event.action {
            Action::Alloc => self.alloc(number, event),
            Action::FreeRequested => {
                self.was_released = false;
                let Some(&block) = self.blocks.get(&event.address) else {
                    return;
                };
                if completes_at_once(event, next) {
                    self.simulator.free(block);
                } else {
                    self.simulator.free_awaiting(block);
                }
            }
            Action::FreeCompleted => {
                if let Some(block) = self.blocks.remove(&event.address) {
                    // Already free when nothing had to be awaited.
                    self.simulator.complete_free(block);
                }
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                self.pending.push((event.action, event.address, event.size));
            }
            Action::SegmentFree => {
                self.was_released = true;
                let is_whole = self.simulator.release_segment(event.address, event.size);
                self.report.released.add(is_whole);
            }
            Action::SegmentUnmap => {
                self.was_released = true;
                let is_whole = self.simulator.unmap_range(event.address, event.size);
                self.report.released.add(is_whole);
            }
            Action::OutOfMemory => {
                // Pages that were mapped for a request that failed all the same stay mapped.
                self.pending.clear();
                self.was_released = false;
            }
            Action::Snapshot | Action::Annotate => {}
        }
    }

    fn alloc(&mut self, number: u64, event: &Event) {
        let pool = self.snapshot.pools.id(event.pool);
        let pending = std::mem::take(&mut self.pending);
        self.simulator.expect_addresses(&pending);
        // After memory was given back PyTorch does not search its free blocks again.
        self.simulator
            .skip_search(self.was_released && !pending.is_empty());
        self.was_released = false;
        self.simulator.take_trace();
        let Ok(block) = self.simulator.malloc_in(event.size, event.stream, pool) else {
            self.report.allocations.add(false);
            return;
        };
        let taken: Vec<(Action, u64, u64)> = self
            .simulator
            .take_trace()
            .iter()
            .filter(|taken| matches!(taken.action, Action::SegmentAlloc | Action::SegmentMap))
            .map(|taken| (taken.action, taken.address, taken.size))
            .collect();
        for place in 0..pending.len().max(taken.len()) {
            self.report
                .segments
                .add(pending.get(place) == taken.get(place));
        }
        let predicted_address = self.simulator.address(block);
        let is_match = predicted_address == event.address;
        self.report.allocations.add(is_match);
        if !is_match && self.report.first_mismatch.is_none() {
            self.report.first_mismatch = Some(Mismatch {
                event: number,
                recorded_address: event.address,
                predicted_address,
            });
        }
        self.blocks.insert(event.address, block);
    }

    fn compare_end(&mut self, device: &DeviceRecord) {
        let simulated: BTreeMap<u64, SegmentLayout> = self
            .simulator
            .segments()
            .into_iter()
            .map(|segment| (segment.address, segment))
            .collect();
        for segment in &device.segments {
            let is_same =
                simulated.get(&segment.address).is_some_and(|simulated| {
                    simulated.blocks.len() == segment.blocks.len()
                        && simulated.blocks.iter().zip(&segment.blocks).all(
                            |(simulated, recorded)| {
                                (simulated.address, simulated.size, simulated.state)
                                    == (recorded.address, recorded.size, recorded.state)
                                    && (recorded.state == BlockState::Inactive
                                        || simulated.requested_size == recorded.requested_size)
                            },
                        )
                });
            self.report.final_segments.add(is_same);
        }
    }
}

/// Whether a free needs no other stream: the trace completes it with the next event.
pub(super) fn completes_at_once(event: &Event, next: Option<&Event>) -> bool {
    next.is_some_and(|next| next.action == Action::FreeCompleted && next.address == event.address)
}

/// A device large enough for the ranges of every expandable segment to be one reservation each.
fn reservation(device: &DeviceRecord) -> u64 {
    let mapped = device.events.iter();
    let mapped = mapped.filter(|event| event.action == Action::SegmentMap);
    let total = mapped.fold(0_u64, |sum, event| sum.saturating_add(event.size));
    let held = device.segments.iter();
    let held = held.fold(0_u64, |sum, segment| sum.saturating_add(segment.total_size));
    total.saturating_add(held).clamp(1 << 30, 1 << 44)
}

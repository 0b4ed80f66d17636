//! The requests of a trace under other settings.
//!
//! The blocks that were in use when the trace began are asked for first, in address order, since how they came to
//! lie where they lay is not recorded; a trace from a program's start has none, and then the outcome is exact. Memory that
//! the program gave back itself (`torch.cuda.empty_cache`) is given back here too. A trace does not tell it from
//! memory that the allocator gave back to serve a request; it is taken for the latter when a refusal follows, or a
//! segment for which the device had no room before.

use std::collections::BTreeMap;

use super::forward::completes_at_once;
use super::{recorded_settings, start};
use crate::allocator::{BlockId, Device, FreeOrder, OutOfMemory, Settings, Simulator};
use crate::snapshot::{Action, BlockState, DeviceRecord, Event, Events, Snapshot};

/// A request that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// Index of the event; `None` for the blocks that were there before the trace.
    pub event: Option<u64>,
    /// What was refused, and why.
    pub error: OutOfMemory,
}

/// What would have happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The most that was taken from the driver.
    pub peak_reserved_bytes: u64,
    /// The most that tensors held, after rounding.
    pub peak_allocated_bytes: u64,
    /// The most that was held or awaited, after rounding.
    pub peak_active_bytes: u64,
    /// Times that all cached memory was given back to serve one request.
    pub num_alloc_retries: u64,
    /// Calls that took memory from the driver or gave it back.
    pub device_calls: u64,
    /// Bytes in use when the trace began, asked for anew.
    pub initial_bytes: u64,
    /// The first request that was refused; nothing was run behind it.
    pub oom: Option<Refusal>,
    /// Requests refused in the recording that were served here.
    pub ooms_avoided: u64,
}

/// Runs the requests of a device's trace under other settings, on a device that may be another one.
#[must_use]
pub fn under(
    snapshot: &Snapshot,
    device: &DeviceRecord,
    settings: &Settings,
    order: FreeOrder,
    model: Device,
) -> Outcome {
    let mut run = Run {
        snapshot,
        events: &device.events,
        row_of_frees: (0, false),
        simulator: Simulator::new(settings, order, model),
        blocks: BTreeMap::new(),
        waited_for: Vec::new(),
        recorded_bytes: 0,
        recorded_bytes_before: 0,
        capacity_bytes: model.total_bytes.saturating_sub(model.other_bytes),
        refusal: None,
        ooms_avoided: 0,
    };
    run.begin(device);
    let initial_bytes = run.simulator.statistics().active_bytes.all.current;
    for (number, event) in device.events.iter().enumerate() {
        if run.refusal.is_some() {
            break;
        }
        run.step(number, &event);
    }
    let statistics = run.simulator.statistics();
    Outcome {
        peak_reserved_bytes: statistics.reserved_bytes.all.peak,
        peak_allocated_bytes: statistics.allocated_bytes.all.peak,
        peak_active_bytes: statistics.active_bytes.all.peak,
        num_alloc_retries: statistics.num_alloc_retries,
        device_calls: statistics.num_device_alloc + statistics.num_device_free,
        initial_bytes,
        oom: run.refusal,
        ooms_avoided: run.ooms_avoided,
    }
}

struct Run<'a> {
    snapshot: &'a Snapshot,
    events: &'a Events,
    /// The first event behind the frees in a row that were looked at last, and whether they completed by waiting.
    row_of_frees: (usize, bool),
    simulator: Simulator,
    blocks: BTreeMap<u64, BlockId>,
    /// Frees that completed because the recorded allocator waited for all streams. They do so here when it waits here,
    /// and at the latest behind the request that made it wait.
    waited_for: Vec<BlockId>,
    /// What the recorded allocator held, now and before the segments it is giving back.
    recorded_bytes: u64,
    recorded_bytes_before: u64,
    capacity_bytes: u64,
    refusal: Option<Refusal>,
    ooms_avoided: u64,
}

impl Run<'_> {
    /// Asks for what was in use before.
    fn begin(&mut self, device: &DeviceRecord) {
        let recorded = recorded_settings(self.snapshot);
        for segment in start::layout(self.snapshot, device, &recorded) {
            self.recorded_bytes = self.recorded_bytes.saturating_add(segment.total_size);
            for block in segment.blocks {
                if block.state == BlockState::Inactive || self.refusal.is_some() {
                    continue;
                }
                let requested = block.requested_size;
                match self
                    .simulator
                    .malloc_in(requested, segment.stream, segment.pool)
                {
                    Ok(id) => {
                        self.blocks.insert(block.address, id);
                        if block.state == BlockState::AwaitingFree {
                            self.simulator.free_awaiting(id);
                        }
                    }
                    Err(error) => self.refusal = Some(Refusal { event: None, error }),
                }
            }
        }
    }

    fn step(&mut self, number: usize, event: &Event) {
        if !start::is_possible(event.address, event.size) {
            return;
        }
        let pool = self.snapshot.pools.id(event.pool);
        match event.action {
            Action::Alloc => match self.simulator.malloc_in(event.size, event.stream, pool) {
                Ok(block) => {
                    self.blocks.insert(event.address, block);
                }
                Err(error) => {
                    self.refusal = Some(Refusal {
                        event: Some(number as u64),
                        error,
                    });
                }
            },
            Action::FreeRequested => {
                let Some(&block) = self.blocks.get(&event.address) else {
                    return;
                };
                if completes_at_once(event, self.events.get(number + 1).as_ref()) {
                    self.simulator.free(block);
                } else {
                    self.simulator.free_awaiting(block);
                }
            }
            Action::FreeCompleted => {
                if let Some(block) = self.blocks.remove(&event.address) {
                    if self.completes_by_waiting(number) {
                        self.waited_for.push(block);
                    } else {
                        self.simulator.complete_free(block);
                    }
                }
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                // Memory of a private pool goes only when the pool is no longer used.
                self.simulator.release_pool(pool);
                self.recorded_bytes = self.recorded_bytes.saturating_sub(event.size);
                if self.is_last_of_the_programs_own(number) {
                    self.simulator.empty_cache(None);
                }
            }
            Action::OutOfMemory => self.retry(number, event),
            Action::SegmentAlloc | Action::SegmentMap => {
                self.recorded_bytes = self.recorded_bytes.saturating_add(event.size);
            }
            Action::Snapshot | Action::Annotate => {}
        }
        if !matches!(event.action, Action::SegmentFree | Action::SegmentUnmap) {
            self.recorded_bytes_before = self.recorded_bytes;
        }
        if matches!(event.action, Action::Alloc | Action::OutOfMemory) {
            for block in std::mem::take(&mut self.waited_for) {
                self.simulator.complete_free(block);
            }
        }
    }

    /// Whether a late free completed because the allocator waited for all streams before it gave memory back:
    /// segments freed come next, then a new segment or a refusal.
    fn completes_by_waiting(&mut self, number: usize) -> bool {
        let (end, answer) = self.row_of_frees;
        if number < end {
            return answer;
        }
        let action = |position: usize| self.events.get(position).map(|event| event.action);
        let behind = |mut position: usize, is_in_row: fn(Action) -> bool| {
            while action(position).is_some_and(is_in_row) {
                position += 1;
            }
            position
        };
        let frees = behind(number, |action| action == Action::FreeCompleted);
        let returns = behind(frees, |action| {
            matches!(action, Action::SegmentFree | Action::SegmentUnmap)
        });
        let is_waiting = match action(returns) {
            Some(Action::OutOfMemory) => true,
            Some(Action::SegmentAlloc | Action::SegmentMap) => returns > frees,
            _ => false,
        };
        self.row_of_frees = (frees, is_waiting);
        is_waiting
    }

    /// Whether the program itself gave memory back here, and this is the last segment of it.
    fn is_last_of_the_programs_own(&self, number: usize) -> bool {
        let Some(next) = self.events.get(number + 1) else {
            return true;
        };
        match next.action {
            Action::SegmentFree
            | Action::SegmentUnmap
            | Action::FreeCompleted
            | Action::OutOfMemory => false,
            Action::SegmentAlloc | Action::SegmentMap => {
                self.recorded_bytes_before.saturating_add(next.size) <= self.capacity_bytes
            }
            _ => true,
        }
    }

    /// The request that was refused. When it is served, the program would have gone on; how long it would have kept
    /// the block is not known, so it is let go at once.
    fn retry(&mut self, number: usize, event: &Event) {
        let pool = self.snapshot.pools.id(event.pool);
        match self.simulator.malloc_in(event.size, event.stream, pool) {
            Ok(block) => {
                self.ooms_avoided += 1;
                self.simulator.free(block);
            }
            Err(error) => {
                self.refusal = Some(Refusal {
                    event: Some(number as u64),
                    error,
                });
            }
        }
    }
}

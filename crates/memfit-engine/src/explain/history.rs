//! Every allocation of a device with its life, from a trace that starts in the middle.
//!
//! Responsible for rolling the trace back from the final segments to the state before its first event.
//! Not responsible for the sizes of blocks that are gone (`sizes.rs`), nor for what the lives add up to
//! (`peak.rs`).
//!
//! A trace is a ring buffer, so it opens with allocations already alive and says nothing of them; only the
//! end is known whole. So the walk goes backwards from the end: undoing `alloc` removes a block, undoing
//! `free_completed` brings one back, undoing `free_requested` gives it back to its tensor. What is left at
//! the front was alive before recording.
//!
//! Time is counted in *states*: state 0 is before the first event and state `i + 1` after event `i`.
//! Ranges of states are half-open.
//!
//! Exact: which allocations are alive at every state, their addresses, requested sizes and stacks; the
//! segments; and the block size of every allocation that is alive at the end. The other block sizes follow
//! from the allocator's own rules; see `sizes.rs` for when that leaves a doubt.
//!
//! Invariants: `start <= let_go <= end`; at any state no two live allocations share an address.

use std::collections::HashMap;

use super::life::{Allocation, NEVER, Problems};
use super::regions::{Region, Regions};
use super::sizes::{self, Rounding};
use crate::snapshot::{
    Action, BlockState, DeviceRecord, Event, PoolIndex, Problem, StackIndex, TextIndex,
};

/// No allocation.
const NONE: u32 = u32::MAX;

/// Every allocation of a device, and its segments over time.
#[derive(Debug, Clone)]
pub struct History {
    /// Those alive at the end first, in address order; then by their end, latest first.
    pub allocations: Vec<Allocation>,
    /// For each event the allocation it is about, or `NONE`.
    allocation_of_event: Vec<u32>,
    /// Segments at state 0.
    pub(super) first_regions: Regions,
    /// By position of the event, pools of segments whose event does not name one, as in older versions.
    unnamed_pools: HashMap<usize, PoolIndex>,
    /// Bytes that block sizes of allocations from before recording may be above what is said here.
    pub uncertain_bytes: u64,
    /// Events that contradict the others, by index; the rest was analysed.
    pub problems: Vec<Problem>,
}

impl History {
    /// Rolls a device's trace back and works out the block sizes.
    #[must_use]
    pub fn of(device: &DeviceRecord, rounding: &Rounding) -> Self {
        let mut rollback = Rollback::from_end(device);
        for (position, event) in device.events.iter().enumerate().rev() {
            rollback.undo(position, &event);
        }
        let mut history = rollback.history;
        history.first_regions = rollback.regions;
        let mut problems = rollback.problems;
        // Walking backwards finds the last first.
        problems.all.reverse();
        let (lives, of_events) = (&mut history.allocations, &history.allocation_of_event);
        let of_event = |position| allocation_in(of_events, position);
        let first = &history.first_regions;
        history.uncertain_bytes =
            sizes::resolve(lives, of_event, first, device, rounding, &mut problems);
        history.problems = problems.told();
        history
    }

    /// The allocation an event is about.
    #[must_use]
    pub fn of_event(&self, position: usize) -> Option<usize> {
        allocation_in(&self.allocation_of_event, position)
    }

    /// The private pool of what the driver gave at an event.
    pub(super) fn pool_of_growth(&self, position: usize, event: &Event) -> PoolIndex {
        let unnamed = self.unnamed_pools.get(&position);
        unnamed.copied().unwrap_or(event.pool)
    }

    /// The number of states: one more than events.
    #[must_use]
    pub fn states(&self) -> usize {
        self.allocation_of_event.len() + 1
    }

    /// The allocations whose block is not free at a state, by address.
    #[must_use]
    pub fn active_at(&self, state: u32) -> Vec<&Allocation> {
        let mut active: Vec<&Allocation> = self
            .allocations
            .iter()
            .filter(|allocation| allocation.is_active_at(state))
            .collect();
        active.sort_by_key(|allocation| allocation.address);
        active
    }
}

/// The allocation an event is about, by position of the event.
fn allocation_in(of_events: &[u32], position: usize) -> Option<usize> {
    let index = *of_events.get(position)?;
    (index != NONE).then_some(index as usize)
}

/// The state of the device while time runs backwards.
struct Rollback {
    history: History,
    regions: Regions,
    /// By address, the allocation whose block is not free.
    active: HashMap<u64, u32>,
    problems: Problems,
}

/// The state after an event. Events beyond what a state can count share the last one.
fn state_after(position: usize) -> u32 {
    u32::try_from(position + 1).map_or(NEVER - 1, |state| state.min(NEVER - 1))
}

impl Rollback {
    fn from_end(device: &DeviceRecord) -> Self {
        let mut rollback = Self {
            history: History {
                allocations: Vec::new(),
                allocation_of_event: vec![NONE; device.events.len()],
                first_regions: Regions::default(),
                unnamed_pools: HashMap::new(),
                uncertain_bytes: 0,
                problems: Vec::new(),
            },
            regions: Regions::of_segments(&device.segments),
            active: HashMap::new(),
            problems: Problems::new(device.index),
        };
        for segment in &device.segments {
            for block in &segment.blocks {
                if block.state == BlockState::Inactive {
                    continue;
                }
                let awaits = block.state == BlockState::AwaitingFree;
                rollback.bring_back(Allocation {
                    address: block.address,
                    size: block.size,
                    requested_size: block.requested_size,
                    start: 0,
                    let_go: if awaits { 0 } else { NEVER },
                    end: NEVER,
                    stack: block.stack,
                    label: TextIndex::default(),
                    pool: segment.pool,
                });
            }
        }
        rollback
    }

    fn bring_back(&mut self, allocation: Allocation) -> u32 {
        // A snapshot with 4 billion blocks does not fit into an address space of events either.
        let index = u32::try_from(self.history.allocations.len()).unwrap_or(NONE);
        self.active.insert(allocation.address, index);
        self.history.allocations.push(allocation);
        index
    }

    fn undo(&mut self, position: usize, event: &Event) {
        match event.action {
            Action::Alloc => self.undo_alloc(position, event),
            Action::FreeCompleted => self.undo_free_completed(position, event),
            Action::FreeRequested => self.undo_free_requested(position, event),
            Action::SegmentAlloc => self.undo_growth(position, event, false),
            Action::SegmentMap => self.undo_growth(position, event, true),
            Action::SegmentFree => self.undo_shrinking(position, event, false),
            Action::SegmentUnmap => self.undo_shrinking(position, event, true),
            Action::Snapshot | Action::OutOfMemory | Action::Annotate => {}
        }
    }

    fn undo_alloc(&mut self, position: usize, event: &Event) {
        let Some(index) = self.active.remove(&event.address) else {
            self.problems.add(Some(position), || {
                format!(
                    "the allocation at {:#x} is neither freed later nor there at the end",
                    event.address
                )
            });
            return;
        };
        self.history.allocation_of_event[position] = index;
        let allocation = &mut self.history.allocations[index as usize];
        allocation.start = state_after(position);
        allocation.requested_size = event.size;
        allocation.label = event.label;
        if event.stack != StackIndex::NONE {
            allocation.stack = event.stack;
        }
        if allocation.let_go < allocation.start {
            // Freed without having been asked to: the block waits, and since when is not recorded.
            allocation.let_go = allocation.end;
            self.problems.add(Some(position), || {
                format!(
                    "the allocation at {:#x} ends without `free_requested`",
                    event.address
                )
            });
        }
    }

    fn undo_free_completed(&mut self, position: usize, event: &Event) {
        if self.active.contains_key(&event.address) {
            self.problems.add(Some(position), || {
                format!(
                    "the block at {:#x} is freed, yet in use afterwards without a new allocation",
                    event.address
                )
            });
            return;
        }
        let index = self.bring_back(Allocation {
            address: event.address,
            size: 0,
            requested_size: event.size,
            start: 0,
            let_go: 0,
            end: state_after(position),
            stack: StackIndex::NONE,
            label: TextIndex::default(),
            pool: event.pool,
        });
        self.history.allocation_of_event[position] = index;
    }

    fn undo_free_requested(&mut self, position: usize, event: &Event) {
        let Some(&index) = self.active.get(&event.address) else {
            self.problems.add(Some(position), || {
                format!(
                    "the block at {:#x} is let go, yet neither freed later nor waiting at the end",
                    event.address
                )
            });
            return;
        };
        let allocation = &mut self.history.allocations[index as usize];
        if allocation.let_go != 0 {
            self.problems.add(Some(position), || {
                format!(
                    "the block at {:#x} is let go, yet held afterwards without a new allocation",
                    event.address
                )
            });
            return;
        }
        allocation.let_go = state_after(position);
        self.history.allocation_of_event[position] = index;
    }

    fn undo_growth(&mut self, position: usize, event: &Event, is_expandable: bool) {
        let removed = self
            .regions
            .remove(event.address, event.size, is_expandable);
        match removed {
            Ok(region) if region.pool != event.pool && event.pool == PoolIndex::DEFAULT => {
                self.history.unnamed_pools.insert(position, region.pool);
            }
            Ok(_) => {}
            Err(_) => self.problems.add(Some(position), || {
                format!(
                    "the segment of {} bytes at {:#x} is not there afterwards",
                    event.size, event.address
                )
            }),
        }
    }

    fn undo_shrinking(&mut self, position: usize, event: &Event, is_expandable: bool) {
        let region = Region::of_event(event, is_expandable);
        if self.regions.add(event.address, region).is_err() {
            self.problems.add(Some(position), || {
                format!(
                    "the segment of {} bytes at {:#x} is given back, yet another is there afterwards",
                    event.size, event.address
                )
            });
        }
    }
}

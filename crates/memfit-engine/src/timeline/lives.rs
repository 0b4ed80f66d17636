//! When each allocation was there.
//!
//! Responsible for matching allocations with their frees, for allocations made before the recording began and
//! for those still there at its end. Not responsible for segments.
//!
//! Invariants: `birth <= released <= end`, and `birth < end`; changes are in the order of their moments, and
//! replaying them from the lives with birth 0 gives exactly the lives.

use std::collections::HashMap;

use super::Moment;
use crate::snapshot::{Action, BlockState, DeviceRecord, StackIndex};

/// Every block is a multiple of this (`kMinBlockSize`, `c10/cuda/CUDACachingAllocator.cpp`).
const GRANULE_BYTES: u64 = 512;

/// One allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// Where it was.
    pub address: u64,
    /// Bytes of its block. Known exactly when it is there at the end; otherwise the request, rounded.
    pub size: u64,
    /// First moment at which it is there; 0 when it was there before the recording.
    pub birth: Moment,
    /// First moment at which no tensor holds it.
    pub released: Moment,
    /// First moment at which its block is free.
    pub end: Moment,
    /// Who asked for it.
    pub stack: StackIndex,
}

/// What happens to a life at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// It begins.
    Born,
    /// Its tensor lets go.
    Released,
    /// Its block is free.
    Ended,
}

/// All lives of a device, and what happens to them in order.
#[derive(Debug, Default)]
pub(super) struct Lives {
    pub(super) all: Vec<Life>,
    pub(super) changes: Vec<(Moment, u32, Change)>,
    /// One more than the number of events.
    pub(super) moments: Moment,
}

impl Lives {
    /// Puts what happens to lives in order: by moment, then by their positions.
    pub(super) fn new(lives: Vec<Life>, moments: Moment) -> Self {
        let changes_of = |life: &Life| {
            [
                (life.birth, Change::Born),
                (life.released, Change::Released),
                (life.end, Change::Ended),
            ]
            .into_iter()
            .filter(|change| change.0 > 0 && change.0 < moments)
        };
        // Counting first, so that millions of changes need no sort.
        let mut starts = vec![0_u32; moments as usize + 1];
        for (moment, _) in lives.iter().flat_map(changes_of) {
            starts[moment as usize + 1] += 1;
        }
        let mut before = 0;
        for start in &mut starts {
            before += *start;
            *start = before;
        }
        let mut changes = vec![(0, 0, Change::Born); before as usize];
        for (index, life) in (0..).zip(&lives) {
            for (moment, change) in changes_of(life) {
                let place = &mut starts[moment as usize];
                changes[*place as usize] = (moment, index, change);
                *place += 1;
            }
        }
        Self {
            all: lives,
            changes,
            moments,
        }
    }

    pub(super) fn of(device: &DeviceRecord) -> Self {
        let mut builder = Builder::default();
        let last = Moment::try_from(device.events.len()).unwrap_or(Moment::MAX - 1);
        for (moment, event) in (1..=last).zip(device.events.iter()) {
            match event.action {
                Action::Alloc => {
                    builder.end(event.address, moment);
                    builder.add(Life {
                        address: event.address,
                        size: rounded(event.size),
                        birth: moment,
                        released: Moment::MAX,
                        end: Moment::MAX,
                        stack: event.stack,
                    });
                }
                Action::FreeRequested => {
                    let life = builder.at(event.address, event.size, event.stack, Moment::MAX);
                    builder.lives[life].released = builder.lives[life].released.min(moment);
                }
                Action::FreeCompleted => {
                    // Without its request in the trace, that request came before the recording.
                    builder.at(event.address, event.size, event.stack, 0);
                    builder.end(event.address, moment);
                }
                _ => {}
            }
        }
        builder.finish(device, last + 1)
    }
}

#[derive(Default)]
struct Builder {
    lives: Vec<Life>,
    /// The life that is at an address.
    open: HashMap<u64, usize>,
}

impl Builder {
    fn add(&mut self, life: Life) -> usize {
        let index = self.lives.len();
        self.open.insert(life.address, index);
        self.lives.push(life);
        index
    }

    /// The life at an address; one from before the recording when none is known.
    fn at(&mut self, address: u64, request: u64, stack: StackIndex, released: Moment) -> usize {
        let known = self.open.get(&address).copied();
        known.unwrap_or_else(|| {
            self.add(Life {
                address,
                size: rounded(request),
                birth: 0,
                released,
                end: Moment::MAX,
                stack,
            })
        })
    }

    /// Ends the life at an address, if there is one: its free, or an allocation on top of it.
    fn end(&mut self, address: u64, moment: Moment) {
        if let Some(index) = self.open.remove(&address) {
            let life = &mut self.lives[index];
            life.released = life.released.min(moment);
            life.end = moment;
        }
    }

    fn finish(mut self, device: &DeviceRecord, moments: Moment) -> Lives {
        for block in device.segments.iter().flat_map(|segment| &segment.blocks) {
            let released = match block.state {
                BlockState::Inactive => continue,
                BlockState::Allocated => Moment::MAX,
                BlockState::AwaitingFree => 0,
            };
            let index = self.at(block.address, block.size, block.stack, released);
            self.lives[index].size = block.size;
        }
        for life in &mut self.lives {
            life.released = life.released.min(moments);
            life.end = life.end.min(moments);
        }
        Lives::new(self.lives, moments)
    }
}

/// A request as the allocator rounds it by default (`round_size` in the same file).
fn rounded(request: u64) -> u64 {
    request
        .max(1)
        .checked_next_multiple_of(GRANULE_BYTES)
        .unwrap_or(u64::MAX - (GRANULE_BYTES - 1))
}

//! Lives by a walk forwards, to test the rollback's against.
//!
//! Responsible for matching allocations with their frees as they come. Shares nothing with the explanation's
//! rollback, which walks backwards.

use std::collections::HashMap;

use super::{Life, Moment, Subject};
use crate::snapshot::{Action, BlockState, DeviceRecord, Snapshot, StackIndex};

/// Every block is a multiple of this (`kMinBlockSize`, `c10/cuda/CUDACachingAllocator.cpp`).
const GRANULE_BYTES: u64 = 512;

/// A device with its lives, owned by the innermost frame of their stacks.
pub(super) fn subject<'a>(snapshot: &Snapshot, device: &'a DeviceRecord) -> Subject<'a> {
    let name = |index| {
        let frame = snapshot.stacks.get(StackIndex(index)).first();
        let function = frame.map_or("", |frame| snapshot.texts.get(frame.function));
        function.to_owned()
    };
    let stacks = u32::try_from(snapshot.stacks.len()).unwrap();
    let mut lives = of(device);
    for life in &mut lives {
        life.owner = life.stack.0;
    }
    Subject::new(device, lives, (0..stacks).map(name).collect())
}

/// The lives of a device, walking its trace forwards.
pub(super) fn of(device: &DeviceRecord) -> Vec<Life> {
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
                    owner: 0,
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
                owner: 0,
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

    fn finish(mut self, device: &DeviceRecord, moments: Moment) -> Vec<Life> {
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
        self.lives
    }
}

/// A request as the allocator rounds it by default (`round_size` in the same file).
fn rounded(request: u64) -> u64 {
    request
        .max(1)
        .checked_next_multiple_of(GRANULE_BYTES)
        .unwrap_or(u64::MAX - (GRANULE_BYTES - 1))
}

//! Snapshots made up for tests: hand-written ones and long ones that look like training.

#![expect(
    clippy::cast_possible_truncation,
    reason = "the sizes of tests are small"
)]

use crate::snapshot::{
    Action, Annotation, Block, BlockState, DeviceRecord, Event, Frame, PoolIndex, Segment,
    Snapshot, StackIndex, TextIndex,
};

/// Writes events one by one, a microsecond apart.
#[derive(Default)]
pub(super) struct Recorder {
    pub(super) device: DeviceRecord,
}

impl Recorder {
    pub(super) fn event(&mut self, action: Action, address: u64, size: u64) {
        self.event_of(action, address, size, StackIndex::NONE);
    }

    pub(super) fn event_of(&mut self, action: Action, address: u64, size: u64, stack: StackIndex) {
        let event = Event {
            action,
            address,
            size,
            stream: 0,
            time_us: 10 + self.device.events.len() as u64,
            stack,
            pool: PoolIndex::DEFAULT,
            label: TextIndex::default(),
        };
        self.device.events.push(event).unwrap();
    }

    pub(super) fn free(&mut self, address: u64, size: u64) {
        self.event(Action::FreeRequested, address, size);
        self.event(Action::FreeCompleted, address, size);
    }

    pub(super) fn segment(&mut self, address: u64, total_size: u64, is_expandable: bool) {
        self.device.segments.push(Segment {
            address,
            total_size,
            stream: 0,
            is_small: false,
            is_expandable,
            pool: PoolIndex::DEFAULT,
            stack: StackIndex::NONE,
            blocks: Vec::new(),
        });
    }

    pub(super) fn snapshot(self) -> Snapshot {
        Snapshot {
            devices: vec![self.device],
            ..Snapshot::default()
        }
    }
}

/// `SplitMix64` (Steele, Lea and Flood 2014).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}

/// How a long snapshot looks.
pub(super) struct Shape {
    pub(super) events: usize,
    pub(super) segments: u64,
    /// Distinct stacks, each with frames of its own.
    pub(super) stacks: u32,
    pub(super) depth: u32,
    /// Characters of each name.
    pub(super) letters: usize,
}

/// Allocations and frees in slots of segments, in waves that rise and fall.
pub(super) fn waves(shape: &Shape, seed: u64) -> Snapshot {
    const SLOT: u64 = 1 << 20;
    const SLOTS: u64 = 6;
    let mut random = Random(seed);
    let mut snapshot = Snapshot::default();
    let mut stacks = vec![StackIndex::NONE];
    for stack in 0..shape.stacks {
        let frames: Vec<Frame> = (0..shape.depth)
            .map(|depth| {
                let mut name = format!("f{stack}_{depth}_");
                while name.len() < shape.letters {
                    name.push(char::from(b'a' + (random.below(26) as u8)));
                }
                Frame {
                    file: snapshot.texts.push(&format!("{name}.py")).unwrap(),
                    function: snapshot.texts.push(&name).unwrap(),
                    line: depth + 1,
                }
            })
            .collect();
        stacks.push(snapshot.stacks.push(&frames).unwrap());
    }
    let mut recorder = Recorder::default();
    let slots = shape.segments * SLOTS;
    let address = |slot: u64| 0x7f00_0000_0000 + slot / SLOTS * (64 << 20) + slot % SLOTS * SLOT;
    let mut sizes = vec![0_u64; usize::try_from(slots).unwrap()];
    for slot in 0..slots {
        // Half of the slots are taken when the recording begins, but for one that is freed unseen.
        sizes[slot as usize] = if slot % 2 == 0 {
            512 * (1 + slot % 7)
        } else {
            0
        };
    }
    let mut wave = 0;
    while recorder.device.events.len() < shape.events {
        wave += 1;
        let slot = random.below(slots);
        let size = &mut sizes[slot as usize];
        let is_rising = (wave * 7 / shape.events.max(1)).is_multiple_of(2);
        let stack = stacks[random.below(stacks.len() as u64) as usize];
        if *size == 0 && (is_rising || random.below(3) == 0) {
            *size = 512 * (1 + random.below(2000));
            recorder.event_of(Action::Alloc, address(slot), *size, stack);
        } else if *size > 0 && (!is_rising || random.below(3) == 0) {
            recorder.free(address(slot), *size);
            *size = 0;
        }
        if random.below(5000) == 0 {
            recorder.event_of(Action::OutOfMemory, 1 << 30, 8 << 30, stack);
        }
    }
    for segment in 0..shape.segments {
        recorder.segment(address(segment * SLOTS), SLOTS * SLOT, false);
        let taken = (segment * SLOTS..(segment + 1) * SLOTS).filter(|&s| sizes[s as usize] > 0);
        let blocks = taken.map(|slot| Block {
            address: address(slot),
            size: sizes[slot as usize],
            requested_size: sizes[slot as usize],
            state: BlockState::Allocated,
            stack: StackIndex::NONE,
        });
        recorder.device.segments.last_mut().unwrap().blocks = blocks.collect();
    }
    let step = snapshot.texts.push("Optimizer.step#AdamW.step").unwrap();
    let last = shape.events as u64;
    snapshot.annotations = (1..5)
        .flat_map(|part| {
            [(true, 0), (false, last / 20)].map(|(is_start, later)| Annotation {
                is_start,
                name: step,
                device: 0,
                time_us: last * part / 5 + later,
            })
        })
        .collect();
    snapshot.devices = vec![recorder.device];
    snapshot
}

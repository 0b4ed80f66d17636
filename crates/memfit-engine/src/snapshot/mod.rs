//! A CUDA memory snapshot as data: segments and blocks at the end, events before it.
//!
//! Responsible for the types, kept as columns because a snapshot may hold ten million events, and for
//! reading them from a pickle ([`read`]). Not responsible for what they mean.
//!
//! A snapshot is what `torch.cuda.memory._snapshot()` returns (`torch/cuda/memory.py`,
//! `torch/csrc/cuda/memory_snapshot.cpp`). Its trace is a ring buffer: an allocation without its free, and
//! a free without its allocation, are normal. The state at the end of the trace is `segments`; the state
//! at any earlier event follows by undoing events backwards.
//!
//! Invariants: every index stored here is valid in the table it points into (a reader checks once, when
//! it builds the tables); events of a device are in the order they were recorded; blocks of a segment are in
//! address order and do not overlap.

mod assemble;
mod check;
mod collect;
mod containers;
mod error;
mod intern;
mod pickle;
mod problems;
mod read;
mod recognise;
mod rows;
mod value;
mod window;
mod words;

pub use error::SnapshotError;
pub use read::{ReadOptions, read, read_bytes};

use serde::Serialize;

/// Problems beyond these are counted, not listed.
const MOST_PROBLEMS: usize = 100;

/// Index into [`Texts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
pub struct TextIndex(pub u32);

/// Index into [`Stacks`]. [`StackIndex::NONE`] is the empty stack: recording was without stacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
pub struct StackIndex(pub u32);

impl StackIndex {
    /// The empty stack, always present.
    pub const NONE: Self = Self(0);
}

/// Index into [`Snapshot::pools`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
pub struct PoolIndex(pub u16);

impl PoolIndex {
    /// The default pool, `(0, 0)` in the pickle, always present.
    pub const DEFAULT: Self = Self(0);
}

/// Distinct strings. Entry 0 is the empty string.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Texts {
    texts: Vec<Box<str>>,
}

/// One frame of a stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
pub struct Frame {
    /// File, as recorded; `??` for C++ frames without symbols.
    pub file: TextIndex,
    /// Function.
    pub function: TextIndex,
    /// Line; 0 when unknown.
    pub line: u32,
}

/// Distinct stacks, innermost frame first, as PyTorch records them. Entry 0 is the empty stack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stacks {
    frames: Vec<Frame>,
    /// Stack `i` is `frames[ends[i - 1]..ends[i]]`; stack 0 is empty.
    ends: Vec<u32>,
}

/// What the allocator did (`TraceEntry::Action` in `c10/core/CachingDeviceAllocator.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Action {
    /// A block was handed out. The size is what was requested, not the block's.
    Alloc,
    /// Its tensor let go; the block may still wait for other streams.
    FreeRequested,
    /// The block is free.
    FreeCompleted,
    /// Memory was taken from the driver with `cudaMalloc`.
    SegmentAlloc,
    /// It was given back with `cudaFree`.
    SegmentFree,
    /// Pages were mapped into an expandable segment.
    SegmentMap,
    /// Pages were unmapped from it.
    SegmentUnmap,
    /// A snapshot was taken.
    Snapshot,
    /// A request was refused. The size is the request rounded; the address column holds the bytes that
    /// were free on the device.
    OutOfMemory,
    /// The user's own mark.
    Annotate,
}

/// One event, as a row; [`Events`] keeps them as columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Event {
    /// What happened.
    pub action: Action,
    /// Where; for [`Action::OutOfMemory`] the free bytes of the device.
    pub address: u64,
    /// Bytes; see [`Action`] for whose.
    pub size: u64,
    /// The CUDA stream's handle; 0 is the default stream.
    pub stream: u64,
    /// Microseconds; 0 in snapshots of torch 2.0, which have no times.
    pub time_us: u64,
    /// Who asked.
    pub stack: StackIndex,
    /// Private pool.
    pub pool: PoolIndex,
    /// Category that the profiler gave, user metadata or compile context; empty when there is none.
    pub label: TextIndex,
}

/// The events of one device, in recording order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Events {
    actions: Vec<Action>,
    addresses: Vec<u64>,
    sizes: Vec<u64>,
    /// Index into `streams`: devices have few streams and events are many.
    stream_numbers: Vec<u16>,
    streams: Vec<u64>,
    /// Numbers of streams, by handle.
    #[serde(skip)]
    stream_order: Vec<u16>,
    times_us: Vec<u64>,
    stacks: Vec<StackIndex>,
    pools: Vec<PoolIndex>,
    labels: Vec<TextIndex>,
}

/// State of a block when the snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// Held by a tensor.
    Allocated,
    /// Its tensor let go, another stream may still use it (`active_awaiting_free`, formerly
    /// `active_pending_free`).
    AwaitingFree,
    /// Free inside its segment.
    Inactive,
}

/// One block of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Block {
    /// Where it starts.
    pub address: u64,
    /// Its bytes, after rounding.
    pub size: u64,
    /// What was asked for. Stale in inactive blocks: never sum it over those.
    pub requested_size: u64,
    /// Free or not.
    pub state: BlockState,
    /// Who asked for it.
    pub stack: StackIndex,
}

/// One segment: a `cudaMalloc`, or one contiguous mapped range of an expandable segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// Where it starts.
    pub address: u64,
    /// Its bytes.
    pub total_size: u64,
    /// The stream it serves.
    pub stream: u64,
    /// Whether it serves blocks of up to 1 MiB (`segment_type == "small"`).
    pub is_small: bool,
    /// Whether it can grow.
    pub is_expandable: bool,
    /// Private pool.
    pub pool: PoolIndex,
    /// Who asked for the segment.
    pub stack: StackIndex,
    /// Its blocks in address order.
    pub blocks: Vec<Block>,
}

/// What a snapshot says of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct DeviceRecord {
    /// Index of the device.
    pub index: u32,
    /// Its segments when the snapshot was taken, in address order.
    pub segments: Vec<Segment>,
    /// What happened before, as far as the ring buffer reached.
    pub events: Events,
}

/// Start or end of an annotated stretch, such as `Optimizer.step#AdamW.step`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Annotation {
    /// Start rather than end.
    pub is_start: bool,
    /// Its name.
    pub name: TextIndex,
    /// Device it was recorded on.
    pub device: u32,
    /// Microseconds, on the clock of the events.
    pub time_us: u64,
}

/// Something in the file that contradicts itself. The rest is analysed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The device, when it is about one.
    pub device: Option<u32>,
    /// Index of the event in that device's trace, when it is about one.
    pub event: Option<u64>,
    /// What is wrong, in one sentence.
    pub what: String,
}

/// A whole snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Snapshot {
    /// Strings of frames, labels and annotations.
    pub texts: Texts,
    /// Stacks of events and blocks.
    pub stacks: Stacks,
    /// Private pools as `(first, second)`; entry 0 is `(0, 0)`, the default pool.
    pub pools: Pools,
    /// By index; a device without events and segments is left out.
    pub devices: Vec<DeviceRecord>,
    /// `allocator_settings`, in the file's order, values as text; empty in old snapshots.
    pub settings: Vec<(String, String)>,
    /// `external_annotations`, in the file's order.
    pub annotations: Vec<Annotation>,
    /// What contradicts itself; at most 100, then one entry that counts the rest.
    pub problems: Vec<Problem>,
}

/// Distinct private pool ids. Entry 0 is `(0, 0)`, the default pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Pools {
    ids: Vec<(u64, u64)>,
}

impl Default for Pools {
    fn default() -> Self {
        Self { ids: vec![(0, 0)] }
    }
}

impl Pools {
    /// The index of a pool's id, added if it is new; `None` when there are more pools than an index counts.
    pub fn index_of(&mut self, id: (u64, u64)) -> Option<PoolIndex> {
        // Pools are few: a scan is as good as a map.
        match self.ids.iter().position(|&known| known == id) {
            // No more are let in than an index counts.
            Some(index) => u16::try_from(index).ok().map(PoolIndex),
            None => self.push_new(id),
        }
    }

    /// The index of a pool's id that is not there yet.
    fn push_new(&mut self, id: (u64, u64)) -> Option<PoolIndex> {
        let index = u16::try_from(self.ids.len()).ok()?;
        self.ids.push(id);
        Some(PoolIndex(index))
    }

    /// The id of a pool.
    #[must_use]
    pub fn id(&self, index: PoolIndex) -> (u64, u64) {
        self.ids[usize::from(index.0)]
    }
}

impl Default for Texts {
    fn default() -> Self {
        Self {
            texts: vec!["".into()],
        }
    }
}

impl Texts {
    /// Adds a string without looking whether it is there; `None` when the table is full.
    pub fn push(&mut self, text: &str) -> Option<TextIndex> {
        let index = u32::try_from(self.texts.len()).ok()?;
        self.texts.push(text.into());
        Some(TextIndex(index))
    }

    /// The string.
    #[must_use]
    pub fn get(&self, index: TextIndex) -> &str {
        &self.texts[index.0 as usize]
    }

    /// How many there are.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "the empty string is always there"
    )]
    pub fn len(&self) -> usize {
        self.texts.len()
    }
}

impl Default for Stacks {
    fn default() -> Self {
        Self {
            frames: Vec::new(),
            ends: vec![0],
        }
    }
}

impl Stacks {
    /// Adds a stack, innermost frame first, without looking whether it is there; `None` when the table is
    /// full.
    pub fn push(&mut self, frames: &[Frame]) -> Option<StackIndex> {
        let index = u32::try_from(self.ends.len()).ok()?;
        let end = u32::try_from(self.frames.len() + frames.len()).ok()?;
        self.frames.extend_from_slice(frames);
        self.ends.push(end);
        Some(StackIndex(index))
    }

    /// The frames of a stack, innermost first.
    #[must_use]
    pub fn get(&self, index: StackIndex) -> &[Frame] {
        let end = self.ends[index.0 as usize] as usize;
        let start = match index.0 {
            0 => 0,
            later => self.ends[later as usize - 1] as usize,
        };
        &self.frames[start..end]
    }

    /// How many there are, the empty one included.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "the empty stack is always there"
    )]
    pub fn len(&self) -> usize {
        self.ends.len()
    }
}

impl Events {
    /// Adds an event at the end; gives it back when the device would have more than 65,536 streams.
    ///
    /// # Errors
    ///
    /// The event itself.
    pub fn push(&mut self, event: Event) -> Result<(), Event> {
        // The stream of the event before is nearly always the one.
        let last = self.stream_numbers.last().copied();
        let number = match last.filter(|&last| self.streams[usize::from(last)] == event.stream) {
            Some(last) => last,
            None => self.stream_number(event.stream).ok_or(event)?,
        };
        self.actions.push(event.action);
        self.addresses.push(event.address);
        self.sizes.push(event.size);
        self.stream_numbers.push(number);
        self.times_us.push(event.time_us);
        self.stacks.push(event.stack);
        self.pools.push(event.pool);
        self.labels.push(event.label);
        Ok(())
    }

    fn stream_number(&mut self, stream: u64) -> Option<u16> {
        let streams = &self.streams;
        let place = |&number: &u16| streams[usize::from(number)];
        match self.stream_order.binary_search_by_key(&stream, place) {
            Ok(at) => Some(self.stream_order[at]),
            Err(at) => {
                let number = u16::try_from(self.streams.len()).ok()?;
                self.streams.push(stream);
                self.stream_order.insert(at, number);
                Some(number)
            }
        }
    }

    /// A stream that has a number; the default stream when there is none.
    fn any_stream(&self) -> u64 {
        self.streams.first().copied().unwrap_or_default()
    }

    /// Bytes that the columns take.
    fn held_bytes(&self) -> usize {
        // All columns grow together: one byte, two numbers of 16 bits, two of 32, three of 64.
        self.actions.capacity() + 4 * self.pools.capacity() + 32 * self.sizes.capacity()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.actions.len()
    }

    /// Whether nothing was recorded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.actions.is_empty()
    }

    /// The event at a position.
    #[must_use]
    pub fn get(&self, position: usize) -> Option<Event> {
        let action = *self.actions.get(position)?;
        Some(Event {
            action,
            address: self.addresses[position],
            size: self.sizes[position],
            stream: self.streams[usize::from(self.stream_numbers[position])],
            time_us: self.times_us[position],
            stack: self.stacks[position],
            pool: self.pools[position],
            label: self.labels[position],
        })
    }

    /// All events, first to last; reversible.
    #[must_use]
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Event> + ExactSizeIterator + '_ {
        // Every position below the length has an event.
        (0..self.len()).map(|position| Event {
            action: self.actions[position],
            address: self.addresses[position],
            size: self.sizes[position],
            stream: self.streams[usize::from(self.stream_numbers[position])],
            time_us: self.times_us[position],
            stack: self.stacks[position],
            pool: self.pools[position],
            label: self.labels[position],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_start_with_what_is_always_there() {
        let mut snapshot = Snapshot::default();
        assert_eq!(snapshot.texts.get(TextIndex::default()), "");
        assert!(snapshot.stacks.get(StackIndex::NONE).is_empty());
        assert_eq!(snapshot.pools.id(PoolIndex::DEFAULT), (0, 0));
        assert_eq!(snapshot.pools.index_of((0, 0)), Some(PoolIndex::DEFAULT));
        let pool = snapshot.pools.index_of((0, 7)).unwrap();
        assert_eq!(snapshot.pools.id(pool), (0, 7));
    }

    #[test]
    fn stacks_and_events_come_back_as_they_went_in() {
        let mut stacks = Stacks::default();
        let frame = |line| Frame {
            line,
            ..Frame::default()
        };
        let first = stacks.push(&[frame(1), frame(2)]).unwrap();
        let second = stacks.push(&[frame(3)]).unwrap();
        assert_eq!(stacks.get(first), [frame(1), frame(2)]);
        assert_eq!(stacks.get(second), [frame(3)]);

        let mut events = Events::default();
        let event = |stream| Event {
            action: Action::Alloc,
            address: 512,
            size: 100,
            stream,
            time_us: 9,
            stack: second,
            pool: PoolIndex::DEFAULT,
            label: TextIndex::default(),
        };
        for stream in [0, 7, 0] {
            events.push(event(stream)).unwrap();
        }
        assert_eq!(events.get(1), Some(event(7)));
        assert_eq!(events.get(3), None);
        assert!(events.iter().rev().map(|e| e.stream).eq([0, 7, 0]));
    }
}

//! A made-up program on the simulated allocator, with its recording and with what is true of it.
//!
//! Responsible for running requests, for the snapshot that PyTorch would write, and for remembering what the
//! program keeps on purpose. Not responsible for what it does (`scenario.rs`) nor for judging (`super`).
//!
//! Once a request is refused, or the limit of operations is reached, the program is over and does nothing more.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocator::{BlockId, Device, FreeOrder, OutOfMemory, Settings, Simulator};
use crate::snapshot::{
    Action, Annotation, Block, BlockState, DeviceRecord, Event, Events, Frame, Segment, Snapshot,
    StackIndex, TextIndex,
};

pub(super) const MIB: u64 = 1 << 20;

/// `SplitMix64`.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }
}

/// Which stacks a recording has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stacks {
    /// Those of Python and of C++.
    All,
    /// Those of Python: backward has none.
    Python,
    None,
}

/// The settings as a snapshot tells them: as they were written, and one by one.
fn told(written: &str) -> Vec<(String, String)> {
    let mut told = vec![("PYTORCH_CUDA_ALLOC_CONF".to_owned(), written.to_owned())];
    if let Some(("max_split_size_mb", mib)) = written.split_once(':') {
        let bytes = mib.parse::<u64>().unwrap() * MIB;
        told.push(("max_split_size".to_owned(), bytes.to_string()));
    }
    if let Some(("roundup_power2_divisions", count)) = written.split_once(':') {
        let pairs = (0..16).map(|power| format!("{}:{count}", 1 << power));
        let all: Vec<String> = pairs.collect();
        told.push((
            "roundup_power2_divisions".to_owned(),
            format!("[{}]", all.join(",")),
        ));
    }
    told
}

/// A request that was refused.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    pub(super) before: Simulator,
    pub(super) after: Simulator,
    pub(super) requested: u64,
    pub(super) stream: u64,
    pub(super) error: OutOfMemory,
}

/// What the device and the recording are like.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) device: Device,
    /// Of what others hold, this process' own context.
    pub(super) context_bytes: u64,
    pub(super) settings: &'static str,
    pub(super) fraction: Option<f64>,
    pub(super) stacks: Stacks,
    /// Events of older versions do not name their pool.
    pub(super) hides_pools: bool,
    pub(super) order: FreeOrder,
}

/// What a program keeps from every step on.
#[derive(Debug, Clone, Default)]
pub(super) struct Kept {
    pub(super) stacks: BTreeSet<StackIndex>,
    /// Whether more is held after every step, kept by mistake or not. Without stacks no more than that is said.
    pub(super) rises: bool,
    pub(super) has_graph: bool,
    pub(super) has_scalar: bool,
}

pub(super) struct Program {
    pub(super) random: Random,
    pub(super) place: Place,
    pub(super) simulator: Simulator,
    pub(super) snapshot: Snapshot,
    pub(super) kept: Kept,
    pub(super) refusal: Option<Refusal>,
    /// Events after each operation.
    pub(super) ends: Vec<usize>,
    events: Vec<Event>,
    stacks: BTreeMap<String, StackIndex>,
    /// Who asked last for the block at an address.
    askers: BTreeMap<u64, StackIndex>,
    pool: Option<(u64, u64)>,
    clock_us: u64,
    limit: usize,
}

impl Program {
    pub(super) fn new(random: Random, place: Place, limit: usize) -> Self {
        let mut settings = Settings::parse(place.settings).unwrap();
        settings.per_process_memory_fraction = place.fraction.unwrap_or(1.0);
        let mut simulator = Simulator::new(&settings, place.order, place.device);
        simulator.record_trace(true);
        let snapshot = Snapshot {
            settings: told(place.settings),
            ..Snapshot::default()
        };
        Self {
            random,
            place,
            simulator,
            snapshot,
            kept: Kept::default(),
            refusal: None,
            ends: Vec::new(),
            events: Vec::new(),
            stacks: BTreeMap::new(),
            askers: BTreeMap::new(),
            pool: None,
            clock_us: 1000,
            limit,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.refusal.is_some() || self.ends.len() >= self.limit
    }

    /// A stack, innermost frame first, of `file:line function` each; a part of them as the recording has it.
    pub(super) fn stack(&mut self, frames: &[&str]) -> StackIndex {
        let is_kept = |frame: &&&str| match self.place.stacks {
            Stacks::All => true,
            Stacks::Python => frame.contains(".py:"),
            Stacks::None => false,
        };
        let frames: Vec<&str> = frames.iter().filter(is_kept).copied().collect();
        if frames.is_empty() {
            return StackIndex::NONE;
        }
        let key = frames.join("\n");
        if let Some(&known) = self.stacks.get(&key) {
            return known;
        }
        let texts = &mut self.snapshot.texts;
        let frames: Vec<Frame> = frames
            .iter()
            .map(|text| {
                let (place, function) = text.split_once(' ').unwrap();
                let (file, line) = place.rsplit_once(':').unwrap_or((place, "0"));
                Frame {
                    file: texts.push(file).unwrap(),
                    function: texts.push(function).unwrap(),
                    line: line.parse().unwrap(),
                }
            })
            .collect();
        let index = self.snapshot.stacks.push(&frames).unwrap();
        self.stacks.insert(key, index);
        index
    }

    pub(super) fn malloc(&mut self, bytes: u64, stack: StackIndex) -> Option<BlockId> {
        self.malloc_on(bytes, 0, stack)
    }

    pub(super) fn malloc_on(
        &mut self,
        bytes: u64,
        stream: u64,
        stack: StackIndex,
    ) -> Option<BlockId> {
        if self.is_over() {
            return None;
        }
        // Copied only where it matters: near the device's end.
        let is_near = self.left_bytes() < bytes + 64 * MIB;
        let before = is_near.then(|| self.simulator.clone());
        let outcome = self.simulator.malloc(bytes, stream);
        self.log(stack);
        match outcome {
            Ok(block) => {
                self.askers.insert(self.simulator.address(block), stack);
                Some(block)
            }
            Err(error) => {
                self.refusal = Some(Refusal {
                    before: before.unwrap(),
                    after: self.simulator.clone(),
                    requested: bytes,
                    stream,
                    error,
                });
                None
            }
        }
    }

    /// What PyTorch can still take from the device.
    pub(super) fn left_bytes(&self) -> u64 {
        let reserved = self.simulator.statistics().reserved_bytes.all.current;
        self.room_bytes().saturating_sub(reserved)
    }

    /// What it can have at most.
    fn room_bytes(&self) -> u64 {
        let device = &self.place.device;
        let room = device.total_bytes - device.other_bytes;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "as the simulator computes it"
        )]
        let share = |fraction: f64| (fraction * device.total_bytes as f64) as u64;
        self.place.fraction.map_or(room, |it| room.min(share(it)))
    }

    pub(super) fn free(&mut self, block: Option<BlockId>) {
        if let Some(block) = block.filter(|_| !self.is_over()) {
            self.simulator.free(block);
            self.log(StackIndex::NONE);
        }
    }

    pub(super) fn free_all(&mut self, blocks: Vec<Option<BlockId>>) {
        for block in blocks {
            self.free(block);
        }
    }

    /// Lets a block go that another stream still uses, until [`Program::catch_up`].
    pub(super) fn free_late(&mut self, block: Option<BlockId>) {
        if let Some(block) = block.filter(|_| !self.is_over()) {
            self.simulator.set_events_ready(false);
            self.simulator.record_stream(block, 7);
            self.free(Some(block));
        }
    }

    /// The other stream is done; the allocator learns of it with its next request.
    pub(super) fn catch_up(&mut self) {
        self.simulator.complete_events(7, u64::MAX);
    }

    pub(super) fn empty_cache(&mut self) {
        if !self.is_over() {
            self.simulator.empty_cache(None);
            self.log(StackIndex::NONE);
        }
    }

    pub(super) fn begin_pool(&mut self, id: (u64, u64)) {
        if !self.is_over() {
            self.simulator.begin_pool(id, None);
            self.pool = Some(id);
        }
    }

    pub(super) fn end_pool(&mut self) {
        if let Some(id) = self.pool.filter(|_| !self.is_over()) {
            self.simulator.end_pool(id);
            self.pool = None;
        }
    }

    /// The pool that requests go to now.
    pub(super) fn pool(&self) -> (u64, u64) {
        self.pool.unwrap_or_default()
    }

    pub(super) fn annotate(&mut self, name: &str, is_start: bool) {
        if self.is_over() {
            return;
        }
        self.clock_us += 1;
        let name = self.snapshot.texts.push(name).unwrap();
        self.snapshot.annotations.push(Annotation {
            is_start,
            name,
            device: 0,
            time_us: self.clock_us,
        });
        self.clock_us += 1;
    }

    fn log(&mut self, stack: StackIndex) {
        for event in self.simulator.take_trace() {
            self.clock_us += 1;
            let pool = self.snapshot.pools.index_of(event.pool).unwrap();
            let is_free = matches!(event.action, Action::FreeRequested | Action::FreeCompleted);
            self.events.push(Event {
                action: event.action,
                address: event.address,
                size: event.size,
                stream: event.stream,
                time_us: self.clock_us,
                stack: if is_free { StackIndex::NONE } else { stack },
                pool: if self.place.hides_pools {
                    crate::snapshot::PoolIndex::DEFAULT
                } else {
                    pool
                },
                label: TextIndex::default(),
            });
        }
        self.ends.push(self.events.len());
    }

    pub(super) fn event_count(&self) -> usize {
        self.events.len()
    }

    /// The snapshot as it is now, with the events from `cut` on and the marks since then.
    pub(super) fn taken(&self, cut: usize) -> Snapshot {
        let mut snapshot = self.snapshot.clone();
        let mut events = Events::default();
        for &event in &self.events[cut..] {
            events.push(event).unwrap();
        }
        let since = self.events.get(cut).map_or(u64::MAX, |it| it.time_us);
        snapshot.annotations.retain(|mark| mark.time_us >= since);
        let segments = self
            .simulator
            .segments()
            .into_iter()
            .map(|segment| Segment {
                address: segment.address,
                total_size: segment.total_size,
                stream: segment.stream,
                is_small: segment.is_small,
                is_expandable: segment.is_expandable,
                pool: snapshot.pools.index_of(segment.pool).unwrap(),
                stack: StackIndex::NONE,
                blocks: segment
                    .blocks
                    .into_iter()
                    .map(|block| Block {
                        address: block.address,
                        size: block.size,
                        requested_size: block.requested_size,
                        state: block.state,
                        stack: match block.state {
                            BlockState::Inactive => StackIndex::NONE,
                            _ => self.askers[&block.address],
                        },
                    })
                    .collect(),
            });
        let segments = segments.collect();
        snapshot.devices = vec![DeviceRecord {
            index: 0,
            segments,
            events,
        }];
        snapshot
    }
}

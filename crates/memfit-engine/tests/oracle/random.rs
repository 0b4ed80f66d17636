//! Random streams of operations, fixed by their seed.

use crate::script::Operation;

/// What a stream of operations draws from.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "every combination is a case")]
pub(crate) struct Mix {
    /// Bytes that live blocks should come to: close to the device's for out-of-memory errors.
    pub(crate) live_bytes: u64,
    /// The most a request asks for.
    pub(crate) largest_bytes: u64,
    pub(crate) streams: &'static [u64],
    /// Whether other streams use blocks and events complete late.
    pub(crate) has_events: bool,
    pub(crate) has_pools: bool,
    /// Whether private pools are released. With expandable segments PyTorch counts their memory wrongly, and may
    /// delete a pool whose blocks live on, so there they are not.
    pub(crate) releases_pools: bool,
    /// Whether memory is given back, limited and taken by others in between.
    pub(crate) has_pressure: bool,
    /// Settings to change to in between.
    pub(crate) settings: &'static [&'static str],
}

/// `SplitMix64`.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::try_from(self.below(choices.len() as u64)).unwrap()]
    }

    /// Sizes over all magnitudes, now and then one that others share, so that free blocks tie.
    fn bytes(&mut self, largest: u64) -> u64 {
        let bytes = match self.below(8) {
            0 => self.of(&[
                512,
                1 << 20,
                2 << 20,
                5 << 20,
                10 << 20,
                16 << 20,
                (10 << 20) + 1,
            ]),
            1 => self.of(&[8192, 100_000, 1_500_000, 9_000_000, 30_000_000]),
            _ => {
                let magnitude = 1 << (6 + self.below(22));
                magnitude + self.below(magnitude)
            }
        };
        bytes.min(largest)
    }
}

struct Stream {
    random: Random,
    mix: Mix,
    live: Vec<(usize, u64)>,
    live_bytes: u64,
    free_slots: Vec<usize>,
    slot_count: usize,
    /// Pools begun, latest last, and pools that were released.
    begun: Vec<u64>,
    kept: Vec<u64>,
    last_pool: u64,
    last_resort: Option<u64>,
    operations: Vec<Operation>,
}

/// `count` operations, and in between what shows the outcome.
pub(crate) fn operations(seed: u64, count: usize, mix: Mix) -> Vec<Operation> {
    let mut stream = Stream {
        random: Random(seed),
        mix,
        live: Vec::new(),
        live_bytes: 0,
        free_slots: Vec::new(),
        slot_count: 0,
        begun: Vec::new(),
        kept: Vec::new(),
        last_pool: 0,
        last_resort: None,
        operations: Vec::new(),
    };
    for number in 1..=count {
        stream.step();
        if number % 50 == 0 {
            stream.operations.push(Operation::Statistics);
        }
        if number % 500 == 0 {
            stream.operations.push(Operation::Segments);
            stream.operations.push(Operation::Trace);
        }
    }
    for _ in 0..stream.live.len() {
        stream.free();
    }
    let pools = std::mem::take(&mut stream.begun);
    stream
        .operations
        .extend(pools.into_iter().rev().map(|pool| Operation::End { pool }));
    stream.operations.extend([
        Operation::Segments,
        Operation::EmptyCache { pool: 0 },
        Operation::Segments,
        Operation::Statistics,
        Operation::Trace,
    ]);
    stream.operations
}

impl Stream {
    fn step(&mut self) {
        if self.random.one_in(40) && self.something_rare() {
            return;
        }
        if self.mix.has_events && self.random.one_in(6) {
            self.event();
            return;
        }
        let is_full = self.live_bytes >= self.mix.live_bytes;
        let frees = if is_full { 70 } else { 45 };
        if !self.live.is_empty() && self.random.below(100) < frees {
            self.free();
        } else {
            self.malloc();
        }
    }

    fn malloc(&mut self) {
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.slot_count += 1;
            self.slot_count - 1
        });
        let bytes = self.random.bytes(self.mix.largest_bytes);
        let stream = self.random.of(self.mix.streams);
        self.live.push((slot, bytes));
        self.live_bytes += bytes;
        self.operations.push(Operation::Malloc {
            slot,
            bytes,
            stream,
        });
    }

    fn free(&mut self) {
        let place = self.random.below(self.live.len() as u64);
        let (slot, bytes) = self.live.swap_remove(usize::try_from(place).unwrap());
        self.live_bytes -= bytes;
        self.free_slots.push(slot);
        self.operations.push(Operation::Free { slot });
    }

    fn event(&mut self) {
        let stream = self.random.of(self.mix.streams);
        let operation = match self.random.below(12) {
            0 => Operation::EventsReady(self.random.one_in(2)),
            1..4 => Operation::Complete {
                stream,
                count: self.random.below(8),
            },
            _ if self.live.is_empty() => return,
            _ => {
                let place = self.random.below(self.live.len() as u64);
                let (slot, _) = self.live[usize::try_from(place).unwrap()];
                Operation::RecordStream { slot, stream }
            }
        };
        self.operations.push(operation);
    }

    /// `false` when there is nothing rare to do.
    fn something_rare(&mut self) -> bool {
        let operation = match self.random.below(12) {
            0 => Operation::ResetPeaks,
            1 if self.random.one_in(4) => Operation::ResetAccumulated,
            2 if self.mix.has_pressure => Operation::EmptyCache { pool: 0 },
            3 if self.mix.has_pressure => {
                let share = u32::try_from(self.random.below(9)).unwrap();
                Operation::Fraction(f64::from(share.max(3)) / 8.0)
            }
            4 if self.mix.has_pressure => {
                Operation::Other(self.random.below(self.mix.live_bytes / 2))
            }
            5 if !self.mix.settings.is_empty() => {
                Operation::Settings(self.random.of(self.mix.settings))
            }
            6..12 if self.mix.has_pools => return self.pool(),
            _ => return false,
        };
        self.operations.push(operation);
        true
    }

    fn no_last_resort(&mut self, pool: u64) {
        if self.last_resort == Some(pool) {
            self.last_resort = None;
            let is_on = false;
            self.operations.push(Operation::LastResort { pool, is_on });
        }
    }

    fn pool(&mut self) -> bool {
        let operation = match self.random.below(10) {
            0..4 if self.begun.len() < 2 => {
                self.last_pool += 1;
                let pool = self.last_pool;
                self.begun.push(pool);
                let is_of_one_stream = self.random.one_in(3);
                let stream = self.random.of(self.mix.streams);
                self.operations.push(Operation::Begin {
                    pool,
                    stream: is_of_one_stream.then_some(stream),
                });
                if !self.random.one_in(6) {
                    return true;
                }
                Operation::NoSplit { pool }
            }
            4..7 if !self.begun.is_empty() => {
                let place = self.random.below(self.begun.len() as u64);
                let pool = self.begun.remove(usize::try_from(place).unwrap());
                self.kept.push(pool);
                self.operations.push(Operation::End { pool });
                if !self.random.one_in(4) {
                    return true;
                }
                // One at a time: PyTorch tries several in the order of a hash table.
                if let Some(pool) = self.last_resort.replace(pool) {
                    let is_on = false;
                    self.operations.push(Operation::LastResort { pool, is_on });
                }
                Operation::LastResort { pool, is_on: true }
            }
            7 if !self.kept.is_empty() && self.begun.len() < 2 => {
                let pool = self.random.of(&self.kept);
                self.kept.retain(|&kept| kept != pool);
                self.begun.push(pool);
                self.no_last_resort(pool);
                self.operations
                    .push(Operation::Begin { pool, stream: None });
                // The pool was kept in use once already.
                Operation::Release { pool }
            }
            8.. if !self.kept.is_empty() && self.mix.releases_pools => {
                let pool = self.random.of(&self.kept);
                self.kept.retain(|&kept| kept != pool);
                self.no_last_resort(pool);
                self.operations.push(Operation::Release { pool });
                if self.random.one_in(2) {
                    return true;
                }
                Operation::EmptyCache { pool }
            }
            _ => return false,
        };
        self.operations.push(operation);
        true
    }
}

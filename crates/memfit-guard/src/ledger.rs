//! Which blocks are live, how many bytes they take, and what was live at the peak.
//!
//! Responsible for the counting, as plain values under one lock that the caller holds. Not
//! responsible for where the events come from ([`crate::hook`]).
//!
//! Invariant: `current_bytes` is the sum of all live blocks, and `category_bytes` divides it.
//!
//! A [`Window`] is a stretch of time with its own peak. To say what was live at that peak, the blocks
//! live now are not enough: some have died since. So a block that dies is written down if it was
//! already there at the peak of an open window. Each block dies once, so that list is never longer
//! than the blocks at the peaks, however long the program runs.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use serde::Serialize;

use crate::category::{Category, CategoryBytes, by_name};
use crate::refusal::LiveBlock;

/// One live block.
#[derive(Debug, Clone, Copy)]
struct Block {
    bytes: u64,
    /// Bytes that lie in a file and are not counted.
    file_bytes: u64,
    /// What it takes of the process's memory.
    taken_bytes: u64,
    born: u64,
    category: Category,
    owner: Owner,
}

/// Names who holds a block, in numbers that the one who labels keeps; 0 names no holder.
pub type Owner = u32;

/// A block that was live at the peak of some window and is no more.
#[derive(Debug, Clone, Copy)]
struct Dead {
    block: Block,
    died: u64,
}

/// A block that has left the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gone {
    pub(crate) bytes: u64,
    pub(crate) taken_bytes: u64,
}

/// A block could not be written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unwritten;

/// Names an open window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowId(pub(crate) u64);

#[derive(Debug)]
struct Window {
    id: WindowId,
    opened: Instant,
    peak_bytes: u64,
    peak_sequence: u64,
    peak_at: Instant,
    peak_mark: u64,
    allocations: u64,
}

impl Window {
    /// Whether a block born then and dead from `died` on was live at the peak.
    const fn had_at_peak(&self, born: u64, died: u64) -> bool {
        born <= self.peak_sequence && self.peak_sequence < died
    }
}

/// Blocks of one category and one owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Owned {
    /// What they hold.
    pub category: Category,
    /// Who holds them.
    pub owner: Owner,
    /// How many.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What a window has seen so far.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reading {
    /// Bytes live now.
    pub current_bytes: u64,
    /// Bytes live now, by category.
    #[serde(serialize_with = "by_name")]
    pub current_by_category: CategoryBytes,
    /// Most bytes live at once since the window was opened, those from before included.
    pub peak_bytes: u64,
    /// Bytes live at that peak, by the category known of each block by now or when it died.
    #[serde(serialize_with = "by_name")]
    pub peak_by_category: CategoryBytes,
    /// The same by owner, in the order of categories and owners.
    pub peak_by_owner: Vec<Owned>,
    /// Number of the event that reached the peak.
    pub peak_event: u64,
    /// Nanoseconds from the opening to the peak, zero where nothing was higher than the start.
    pub peak_at_ns: u64,
    /// The mark that was set when the peak was reached.
    pub peak_mark: u64,
    /// Allocations since the window was opened.
    pub allocations: u64,
}

/// A live block and when it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Survivor {
    /// Where it lies.
    pub address: usize,
    /// Bytes as asked for.
    pub bytes: u64,
    /// Number of the event.
    pub born: u64,
}

impl Survivor {
    /// Address, bytes and event.
    #[must_use]
    pub const fn told(&self) -> (usize, u64, u64) {
        (self.address, self.bytes, self.born)
    }
}

/// Spreads addresses, which are multiples of 64, over the table.
#[derive(Debug, Default, Clone, Copy)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0 ^ u64::from(byte));
        }
    }
    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
    fn write_u64(&mut self, value: u64) {
        // Fibonacci hashing; the high half, which is well mixed, goes where the table looks.
        let mixed = value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// Dead blocks kept beyond those needed before they are sorted out.
const SLACK: usize = 1024;

/// The count of one process.
#[derive(Debug)]
pub(crate) struct Ledger {
    blocks: HashMap<usize, Block, BuildHasherDefault<AddressHasher>>,
    current_bytes: u64,
    taken_bytes: u64,
    category_bytes: CategoryBytes,
    /// Number of the last event.
    sequence: u64,
    windows: Vec<Window>,
    last_window: u64,
    dead: Vec<Dead>,
    /// Length of `dead` at which it is next sorted out.
    dead_limit: usize,
    mark: u64,
    /// Blocks that could not be written down because no memory was left for the table.
    uncounted: u64,
    /// Size of the last request that the system refused.
    refused_bytes: u64,
}

impl Ledger {
    pub(crate) const fn new() -> Self {
        Self {
            blocks: HashMap::with_hasher(BuildHasherDefault::new()),
            current_bytes: 0,
            taken_bytes: 0,
            category_bytes: [0; Category::ALL.len()],
            sequence: 0,
            windows: Vec::new(),
            last_window: 0,
            dead: Vec::new(),
            dead_limit: SLACK,
            mark: 0,
            uncounted: 0,
            refused_bytes: 0,
        }
    }

    /// A block was handed out.
    ///
    /// Returns what lay there before: an address cannot be handed out twice, so it went by a way that
    /// is not watched.
    pub(crate) fn allocated(
        &mut self,
        address: usize,
        bytes: u64,
        taken_bytes: u64,
    ) -> Result<Option<Gone>, Unwritten> {
        self.handed_out(address, bytes, taken_bytes, 0)
    }

    /// A block was handed out that lies in a file: its bytes are known, and not counted.
    ///
    /// Errors and what is returned are those of [`Self::allocated`].
    pub(crate) fn filed(&mut self, address: usize, bytes: u64) -> Result<Option<Gone>, Unwritten> {
        self.handed_out(address, 0, 0, bytes)
    }

    fn handed_out(
        &mut self,
        address: usize,
        bytes: u64,
        taken_bytes: u64,
        file_bytes: u64,
    ) -> Result<Option<Gone>, Unwritten> {
        let before = self.freed(address);
        self.sequence += 1;
        // Growing the table must not end the process when memory is what is short.
        if self.blocks.try_reserve(1).is_err() {
            self.uncounted += 1;
            return Err(Unwritten);
        }
        let block = Block {
            bytes,
            file_bytes,
            taken_bytes,
            born: self.sequence,
            category: Category::Other,
            owner: 0,
        };
        self.blocks.insert(address, block);
        self.current_bytes += bytes;
        self.taken_bytes += taken_bytes;
        self.category_bytes[Category::Other as usize] += bytes;
        for window in &mut self.windows {
            window.allocations += 1;
            if self.current_bytes > window.peak_bytes {
                window.peak_bytes = self.current_bytes;
                window.peak_sequence = self.sequence;
                window.peak_mark = self.mark;
                window.peak_at = Instant::now();
            }
        }
        Ok(before)
    }

    /// A block is about to be given back; unknown ones are not counted.
    pub(crate) fn freed(&mut self, address: usize) -> Option<Gone> {
        let block = self.blocks.remove(&address)?;
        self.sequence += 1;
        self.current_bytes -= block.bytes;
        self.taken_bytes -= block.taken_bytes;
        self.category_bytes[block.category as usize] -= block.bytes;
        let died = self.sequence;
        let needed = |window: &Window| window.had_at_peak(block.born, died);
        if self.windows.iter().any(needed) && self.dead.try_reserve(1).is_ok() {
            self.dead.push(Dead { block, died });
            if self.dead.len() >= self.dead_limit {
                self.forget_dead();
            }
        }
        Some(Gone {
            bytes: block.bytes,
            taken_bytes: block.taken_bytes,
        })
    }

    /// Drops the dead that no open window had at its peak.
    fn forget_dead(&mut self) {
        let windows = &self.windows;
        self.dead.retain(|dead| {
            windows
                .iter()
                .any(|window| window.had_at_peak(dead.block.born, dead.died))
        });
        self.dead_limit = 2 * self.dead.len() + SLACK;
    }

    /// The system refused a request.
    pub(crate) fn refused(&mut self, bytes: u64) {
        self.refused_bytes = bytes;
    }

    /// A block from before counting began; it counts as live all along. Known ones stay as they are.
    ///
    /// Returns whether it is new.
    pub(crate) fn seed(&mut self, address: usize, bytes: u64, taken_bytes: u64) -> bool {
        if self.blocks.contains_key(&address) || self.blocks.try_reserve(1).is_err() {
            return false;
        }
        let block = Block {
            bytes,
            file_bytes: 0,
            taken_bytes,
            born: 0,
            category: Category::Other,
            owner: 0,
        };
        self.blocks.insert(address, block);
        self.current_bytes += bytes;
        self.taken_bytes += taken_bytes;
        self.category_bytes[Category::Other as usize] += bytes;
        for window in &mut self.windows {
            window.peak_bytes += bytes;
        }
        true
    }

    /// Says what the block at an address holds, and for whom; unknown addresses are passed over.
    pub(crate) fn label(&mut self, address: usize, category: Category, owner: Owner) {
        if let Some(block) = self.blocks.get_mut(&address) {
            self.category_bytes[block.category as usize] -= block.bytes;
            self.category_bytes[category as usize] += block.bytes;
            block.category = category;
            block.owner = owner;
        }
    }

    /// Says the same of the unnamed blocks that were live at some window's peak, came with an event
    /// from `since` on and are gone.
    pub(crate) fn label_gone(&mut self, since: u64, category: Category, owner: Owner) {
        // They lie in the order in which they went, and none went before it came.
        for dead in self
            .dead
            .iter_mut()
            .rev()
            .take_while(|dead| dead.died > since)
        {
            if dead.block.born >= since && dead.block.category == Category::Other {
                dead.block.category = category;
                dead.block.owner = owner;
            }
        }
    }

    /// Number of the last event.
    pub(crate) const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Live blocks that came with an event in `[from, until)`, with or without those of models and
    /// optimizers.
    pub(crate) fn survivors(&self, from: u64, until: u64, with_models: bool) -> Vec<Survivor> {
        let blocks = self.blocks.iter().filter(|(_, block)| {
            (from..until).contains(&block.born) && (with_models || !block.category.is_static())
        });
        let survivor = |(&address, block): (&usize, &Block)| Survivor {
            address,
            bytes: block.bytes + block.file_bytes,
            born: block.born,
        };
        let mut found: Vec<Survivor> = blocks.map(survivor).collect();
        found.sort_unstable_by_key(|block| block.born);
        found
    }

    /// Is there a live block at this address?
    pub(crate) fn knows(&self, address: usize) -> bool {
        self.blocks.contains_key(&address)
    }

    /// Number of the event with which the block at an address came; `None` where there is none.
    pub(crate) fn born(&self, address: usize) -> Option<u64> {
        self.blocks.get(&address).map(|block| block.born)
    }

    /// Sets the number that peaks reached from now on carry.
    pub(crate) const fn set_mark(&mut self, mark: u64) {
        self.mark = mark;
    }

    pub(crate) const fn current_bytes(&self) -> u64 {
        self.current_bytes
    }

    /// What all live blocks take of the process's memory.
    pub(crate) const fn taken_bytes(&self) -> u64 {
        self.taken_bytes
    }

    /// Begins a window anew, with what is live now.
    pub(crate) fn restart(&mut self, id: WindowId) {
        let (now, peak_bytes, peak_sequence, peak_mark) =
            (Instant::now(), self.current_bytes, self.sequence, self.mark);
        if let Some(window) = self.windows.iter_mut().find(|window| window.id == id) {
            *window = Window {
                id,
                opened: now,
                peak_bytes,
                peak_sequence,
                peak_at: now,
                peak_mark,
                allocations: 0,
            };
            // Who restarts a window at every op cannot pay for all blocks each time; what is dead and needed by none
            // goes when there are twice as many as there were.
        }
    }

    /// All live blocks, by address; empty where there is no memory for the list.
    pub(crate) fn live(&self) -> Vec<LiveBlock> {
        let mut live = Vec::new();
        if live.try_reserve_exact(self.blocks.len()).is_ok() {
            live.extend(self.blocks.iter().map(|(&address, block)| LiveBlock {
                address,
                bytes: block.bytes,
                category: block.category,
            }));
            live.sort_unstable_by_key(|block| block.address);
        }
        live
    }

    pub(crate) const fn uncounted(&self) -> u64 {
        self.uncounted
    }

    pub(crate) const fn refused_bytes(&self) -> u64 {
        self.refused_bytes
    }

    /// Begins a window whose peak starts at what is live now.
    pub(crate) fn open(&mut self) -> WindowId {
        self.last_window += 1;
        let id = WindowId(self.last_window);
        let now = Instant::now();
        self.windows.push(Window {
            id,
            opened: now,
            peak_bytes: self.current_bytes,
            peak_sequence: self.sequence,
            peak_at: now,
            peak_mark: self.mark,
            allocations: 0,
        });
        id
    }

    /// Peak of a window so far and the number of the event that reached it.
    pub(crate) fn peak(&self, id: WindowId) -> Option<(u64, u64)> {
        let window = self.windows.iter().find(|window| window.id == id)?;
        Some((window.peak_bytes, window.peak_sequence))
    }

    /// What a window has seen so far; `None` when it is closed.
    pub(crate) fn read(&self, id: WindowId) -> Option<Reading> {
        let window = self.windows.iter().find(|window| window.id == id)?;
        let mut peak_by_category = CategoryBytes::default();
        let mut owned = BTreeMap::<(usize, Owner), (Category, u64, u64)>::new();
        let live = self.blocks.values().map(|block| (block, u64::MAX));
        let dead = self.dead.iter().map(|dead| (&dead.block, dead.died));
        for (block, died) in live.chain(dead) {
            if window.had_at_peak(block.born, died) {
                peak_by_category[block.category as usize] += block.bytes;
                let key = (block.category as usize, block.owner);
                let entry = owned.entry(key).or_insert((block.category, 0, 0));
                entry.1 += 1;
                entry.2 += block.bytes;
            }
        }
        let owned = owned.into_iter();
        let owned = owned.map(|((_, owner), (category, blocks, bytes))| Owned {
            category,
            owner,
            blocks,
            bytes,
        });
        let since = window.peak_at.duration_since(window.opened).as_nanos();
        Some(Reading {
            current_bytes: self.current_bytes,
            current_by_category: self.category_bytes,
            peak_bytes: window.peak_bytes,
            peak_by_category,
            peak_by_owner: owned.collect(),
            peak_event: window.peak_sequence,
            peak_at_ns: u64::try_from(since).unwrap_or(u64::MAX),
            peak_mark: window.peak_mark,
            allocations: window.allocations,
        })
    }

    /// Ends a window; other windows are not touched, in whatever order they end.
    pub(crate) fn close(&mut self, id: WindowId) -> Option<Reading> {
        let reading = self.read(id)?;
        self.windows.retain(|window| window.id != id);
        self.forget_dead();
        Some(reading)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Event {
        Allocate(usize, u64),
        Free(usize),
        Label(usize, Category),
        Open,
        Close(usize),
    }

    fn event() -> impl Strategy<Value = Event> {
        let address = 1_usize..24;
        prop_oneof![
            4 => (address.clone(), 0_u64..1000).prop_map(|(a, b)| Event::Allocate(a * 64, b)),
            4 => address.clone().prop_map(|a| Event::Free(a * 64)),
            1 => (address, 0_usize..11).prop_map(|(a, c)| Event::Label(a * 64, Category::ALL[c])),
            1 => Just(Event::Open),
            1 => (0_usize..6).prop_map(Event::Close),
        ]
    }

    /// A block of the slow twin: it forgets nothing.
    #[derive(Debug, Clone, Copy)]
    struct Life {
        address: usize,
        bytes: u64,
        category: Category,
        born: usize,
        died: Option<usize>,
    }

    /// Bytes live after `time` events, by category.
    fn live_at(lives: &[Life], time: usize) -> CategoryBytes {
        let mut bytes = CategoryBytes::default();
        for life in lives {
            if life.born <= time && life.died.is_none_or(|died| time < died) {
                bytes[life.category as usize] += life.bytes;
            }
        }
        bytes
    }

    proptest! {
        /// Peaks, and what was live at them, against a list of all lives that is asked at every time.
        #[test]
        fn windows_know_their_peaks(events in prop::collection::vec(event(), 0..400)) {
            let mut ledger = Ledger::new();
            let mut lives: Vec<Life> = Vec::new();
            let mut windows: Vec<(WindowId, usize)> = Vec::new();
            for (time, event) in events.iter().enumerate() {
                let time = time + 1;
                let end = |lives: &mut Vec<Life>, address: usize| {
                    for life in lives.iter_mut() {
                        if life.address == address && life.died.is_none() {
                            life.died = Some(time);
                        }
                    }
                };
                match *event {
                    Event::Allocate(address, bytes) => {
                        end(&mut lives, address);
                        let category = Category::Other;
                        lives.push(Life { address, bytes, category, born: time, died: None });
                        ledger.allocated(address, bytes, bytes + 16).unwrap();
                    }
                    Event::Free(address) => {
                        end(&mut lives, address);
                        ledger.freed(address);
                    }
                    Event::Label(address, category) => {
                        let mut live = lives.iter_mut();
                        if let Some(life) = live.find(|l| l.address == address && l.died.is_none()) {
                            life.category = category;
                        }
                        ledger.label(address, category, 1);
                    }
                    Event::Open => windows.push((ledger.open(), time)),
                    Event::Close(which) if which < windows.len() => {
                        let (id, opened) = windows.remove(which);
                        let reading = ledger.close(id).unwrap();
                        let totals = |time| live_at(&lives, time).iter().sum::<u64>();
                        let highest = (opened..=time).map(totals).max().unwrap();
                        let first = (opened..=time).find(|&t| totals(t) == highest).unwrap();
                        prop_assert_eq!(reading.peak_bytes, highest);
                        prop_assert_eq!(reading.peak_by_category, live_at(&lives, first));
                        prop_assert_eq!(reading.current_by_category, live_at(&lives, time));
                        prop_assert_eq!(reading.current_bytes, totals(time));
                        prop_assert!(ledger.read(id).is_none());
                    }
                    Event::Close(_) => {}
                }
            }
            prop_assert!(!windows.is_empty() || ledger.dead.is_empty());
        }
    }

    #[test]
    fn the_dead_do_not_pile_up() {
        let mut ledger = Ledger::new();
        let outer = ledger.open();
        for address in 1..=50_usize {
            ledger.allocated(address * 64, 100, 112).unwrap();
        }
        for address in 1..=50_usize {
            ledger.freed(address * 64);
        }
        // A long program that stays below its peak, and small windows in it.
        for _ in 0..10_000 {
            let inner = ledger.open();
            ledger.allocated(64, 10, 32).unwrap();
            ledger.freed(64);
            ledger.close(inner);
        }
        assert!(ledger.dead.len() <= 50 + SLACK, "{}", ledger.dead.len());
        let reading = ledger.close(outer).unwrap();
        assert_eq!(reading.peak_by_category[0], 5000);
        assert!(ledger.dead.is_empty());
    }

    #[test]
    fn blocks_from_before_lived_all_along() {
        let mut ledger = Ledger::new();
        let window = ledger.open();
        assert!(ledger.seed(64, 100, 112));
        assert!(!ledger.seed(64, 999, 1008));
        ledger.label(64, Category::Parameter, 7);
        ledger.allocated(128, 10, 32).unwrap();
        ledger.freed(64);
        let reading = ledger.close(window).unwrap();
        assert_eq!((reading.peak_bytes, reading.current_bytes), (110, 10));
        assert_eq!(reading.peak_by_category[..3], [10, 100, 0]);
        assert_eq!((reading.peak_by_owner[1].owner, reading.peak_event), (7, 1));
    }

    #[test]
    fn what_came_and_went_can_be_named_and_what_stayed_is_listed() {
        let mut ledger = Ledger::new();
        let window = ledger.open();
        ledger.allocated(64, 100, 112).unwrap();
        ledger.label(64, Category::Parameter, 0);
        ledger.allocated(128, 10, 32).unwrap();
        let since = ledger.sequence() + 1;
        ledger.allocated(192, 5, 32).unwrap();
        ledger.allocated(256, 7, 32).unwrap();
        ledger.freed(128);
        ledger.freed(192);
        ledger.label_gone(since, Category::Temporary, 3);
        let reading = ledger.read(window).unwrap();
        let owned = reading.peak_by_owner.iter();
        let temporaries = owned.filter(|owned| owned.category == Category::Temporary);
        assert_eq!(
            temporaries
                .map(|owned| (owned.owner, owned.bytes))
                .collect::<Vec<_>>(),
            [(3, 5)]
        );
        let survivors = ledger.survivors(0, u64::MAX, false);
        assert_eq!(
            survivors
                .iter()
                .map(|block| block.bytes)
                .collect::<Vec<_>>(),
            [7]
        );
        ledger.restart(window);
        assert_eq!(ledger.read(window).unwrap().peak_bytes, 107);
    }
}

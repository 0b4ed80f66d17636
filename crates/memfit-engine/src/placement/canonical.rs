//! Exact search for a placement within a capacity.
//!
//! Responsible for answering, for one capacity and one preorder, whether a placement exists: found,
//! proved impossible, or limit reached. Not responsible for which capacities and preorders to try
//! (`portfolio.rs`).
//!
//! # The search
//!
//! After Moffitt, "`MiniMalloc`: A Lightweight Memory Allocator for Hardware-Accelerated Machine
//! Learning" (ASPLOS 2023). Allocations are placed in non-decreasing offset, ties by *rank* in a fixed
//! preorder, each at its *minimum offset*: the end of the highest placed allocation that it overlaps. Every
//! placement that cannot be pushed down is met exactly once. What cuts the tree down:
//!
//! - *Dominance*: nothing is placed at or above the lowest end that some unplaced allocation could have,
//!   because that one would fit below.
//! - *Sections*: in each section, the unplaced members above any height `h` have to fit between `h` and
//!   the capacity, for every `h` that is a minimum offset of one of them (a machine with release times).
//! - *Lifting*: an allocation that was passed over can only come to lie on one that is unplaced too.
//! - *Hatless*: when nothing unplaced overlaps the one just placed, its place was no choice, and its
//!   siblings need not be tried.
//! - *Decomposition*: where no unplaced allocation spans two neighbouring sections, the two sides are
//!   solved one after the other, each in a preorder of its own.
//!
//! # Invariants
//!
//! Each inference is a switch and changes only how long the answer takes, never the answer. Every change
//! of state is on the trail; undoing to a mark restores it exactly. Memory is taken before the search,
//! not in it. Work is counted in nodes, so that the same limits give the same answer on any machine.

use super::prepare::{Item, Prepared};
use super::sections::Lists;

/// Which inferences are on; all of them, but in tests.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub(super) struct Switches {
    pub(super) dominance: bool,
    pub(super) release_times: bool,
    pub(super) lifting: bool,
    pub(super) hatless: bool,
    pub(super) decomposition: bool,
    pub(super) reranking: bool,
}

impl Default for Switches {
    fn default() -> Self {
        Self {
            dominance: true,
            release_times: true,
            lifting: true,
            hatless: true,
            decomposition: true,
            reranking: true,
        }
    }
}

/// What allocations are sorted by, largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    /// Live range, then area, then the largest total of a section it is in.
    WidthAreaTotal,
    /// Total, area, width.
    TotalAreaWidth,
    /// Total, width, area.
    TotalWidthArea,
}

/// A preorder: a key, and how much chance disturbs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Preorder {
    pub(super) key: Key,
    /// 0 for the key alone; otherwise the seed of a disturbance.
    pub(super) seed: u64,
}

/// What all searches of one problem share.
#[derive(Debug)]
pub(super) struct Instance<'p> {
    pub(super) prepared: &'p Prepared,
    neighbours: Lists,
    members: Lists,
}

impl<'p> Instance<'p> {
    pub(super) fn new(prepared: &'p Prepared) -> Self {
        Self {
            prepared,
            neighbours: prepared.neighbours(),
            members: prepared.members(),
        }
    }
}

/// How a search ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// Offsets in units, by item.
    Placed(Vec<u64>),
    /// No placement is within the capacity.
    Impossible,
    /// The node limit was reached, or the caller stopped it.
    Limit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Placed,
    Impossible,
    Limit,
}

/// One change of state, with what it replaced.
#[derive(Debug, Clone, Copy)]
enum Change {
    MinimumOffset { item: u32, before: u64 },
    Rank { item: u32, before: u32 },
    Placed { item: u32 },
}

/// The unplaced items `order[begin..end]` and the sections `first..last` they are in.
#[derive(Debug, Clone, Copy)]
struct Scope {
    begin: usize,
    end: usize,
    first: usize,
    last: usize,
}

/// Stops a search between nodes.
pub(super) type Stop<'s> = &'s (dyn Fn() -> bool + Sync);

/// Nodes between two questions whether to stop.
const STOP_INTERVAL: u64 = 64;

const UNPLACED: u64 = u64::MAX;

/// One search: one capacity, one preorder.
#[derive(Debug)]
pub(super) struct Search<'i> {
    instance: &'i Instance<'i>,
    items: &'i [Item],
    switches: Switches,
    preorder: Preorder,
    /// Highest end each item may have.
    limits: Vec<u64>,
    /// The highest of them.
    capacity: u64,
    /// Offset of a placed item, or [`UNPLACED`].
    offsets: Vec<u64>,
    minimum_offsets: Vec<u64>,
    ranks: Vec<u32>,
    /// Per section: sum of unplaced sizes.
    totals: Vec<u64>,
    /// Per section: unplaced items that are in the next one too.
    crossings: Vec<u32>,
    /// The members of each section, kept nearly sorted by minimum offset, highest first.
    sorted: Vec<(u64, u32)>,
    /// All items; a scope is a part of it.
    order: Vec<u32>,
    /// Where each item is in `order`.
    positions: Vec<usize>,
    trail: Vec<Change>,
    /// Candidates of all open nodes: minimum offset, rank, item.
    candidates: Vec<(u64, u32, u32)>,
    nodes: u64,
    node_limit: u64,
}

impl<'i> Search<'i> {
    /// `limits` are those of [`Prepared::limits`].
    pub(super) fn new(
        instance: &'i Instance<'i>,
        limits: Vec<u64>,
        preorder: Preorder,
        switches: Switches,
    ) -> Self {
        let items = &instance.prepared.items;
        let sections = instance.prepared.section_count;
        let mut totals = vec![0; sections];
        let mut crossings = vec![0; sections];
        for item in items {
            for section in item.span.range() {
                totals[section] += item.size;
            }
            for section in &mut crossings[item.span.first as usize..item.span.end as usize - 1] {
                *section += 1;
            }
        }
        let entries = instance.members.entries();
        let mut search = Self {
            instance,
            items,
            switches,
            preorder,
            capacity: limits.iter().copied().max().unwrap_or(0),
            limits,
            offsets: vec![UNPLACED; items.len()],
            minimum_offsets: vec![0; items.len()],
            ranks: vec![0; items.len()],
            totals,
            crossings,
            sorted: entries.iter().map(|&item| (0, item)).collect(),
            order: (0..).take(items.len()).collect(),
            positions: (0..items.len()).collect(),
            trail: Vec::with_capacity(4 * items.len()),
            candidates: Vec::new(),
            nodes: 0,
            node_limit: 0,
        };
        search.rank(search.whole());
        search.trail.clear();
        search
    }

    /// Searches up to `node_limit` nodes. Starts anew at each call.
    pub(super) fn run(&mut self, node_limit: u64, stop: Stop<'_>) -> Found {
        self.nodes = 0;
        self.node_limit = node_limit;
        let whole = self.whole();
        let fits = self.totals.iter().all(|&total| total <= self.capacity);
        let verdict = if fits {
            self.decompose(whole, 0, 0, stop)
        } else {
            Verdict::Impossible
        };
        let found = match verdict {
            Verdict::Placed => Found::Placed(self.offsets.clone()),
            Verdict::Impossible => Found::Impossible,
            Verdict::Limit => Found::Limit,
        };
        self.undo(0);
        self.candidates.clear();
        found
    }

    /// Nodes of the last run.
    pub(super) const fn nodes(&self) -> u64 {
        self.nodes
    }

    fn whole(&self) -> Scope {
        Scope {
            begin: 0,
            end: self.items.len(),
            first: 0,
            last: self.totals.len(),
        }
    }

    /// Solves the parts of a scope one after the other, if it has any; otherwise branches.
    /// From here offsets are at least `least`, and at `least` ranks are at least `least_rank`.
    fn decompose(&mut self, scope: Scope, least: u64, least_rank: u32, stop: Stop<'_>) -> Verdict {
        if !self.switches.decomposition || !self.splits(scope) {
            return self.branch(scope, least, least_rank, stop);
        }
        let Scope { begin, end, .. } = scope;
        let items = self.items;
        self.order[begin..end]
            .sort_unstable_by_key(|&item| (items[item as usize].span.first, item));
        for position in begin..end {
            self.positions[self.order[position] as usize] = position;
        }
        let mut from = begin;
        while from < end {
            let part = self.part(from, end);
            let alone = (part.begin, part.end) == (begin, end);
            let rank = if self.switches.reranking && !alone {
                self.rank(part);
                0
            } else {
                least_rank
            };
            match self.branch(part, least, rank, stop) {
                Verdict::Placed => from = part.end,
                other => return other,
            }
        }
        Verdict::Placed
    }

    /// Whether some section inside has no item that spans it and the next.
    fn splits(&self, scope: Scope) -> bool {
        scope.last > scope.first + 1 && self.crossings[scope.first..scope.last - 1].contains(&0)
    }

    /// The first time component of `order[from..end]`, which is sorted by first section.
    fn part(&self, from: usize, end: usize) -> Scope {
        let span = |position: usize| self.items[self.order[position] as usize].span;
        let mut last = span(from).end;
        let mut to = from + 1;
        while to < end && span(to).first < last {
            last = last.max(span(to).end);
            to += 1;
        }
        Scope {
            begin: from,
            end: to,
            first: span(from).first as usize,
            last: last as usize,
        }
    }

    /// Ranks the items of a scope by the preorder's key.
    fn rank(&mut self, scope: Scope) {
        let mut keys: Vec<([u128; 3], u32)> = self.order[scope.begin..scope.end]
            .iter()
            .map(|&index| {
                let item = &self.items[index as usize];
                let total = self.totals[item.span.range()].iter().copied().max();
                let (width, total) = (u128::from(item.width), u128::from(total.unwrap_or(0)));
                let area = width * u128::from(item.size);
                let mut keys = match self.preorder.key {
                    Key::WidthAreaTotal => [width, area, total],
                    Key::TotalAreaWidth => [total, area, width],
                    Key::TotalWidthArea => [total, width, area],
                };
                if self.preorder.seed != 0 {
                    // Up to a quarter more or less of the leading key.
                    let chance = mix(self.preorder.seed, u64::from(index)) % 64;
                    keys[0] = keys[0] * (224 + u128::from(chance)) / 256;
                }
                (keys, index)
            })
            .collect();
        keys.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        for (rank, (_, item)) in (0..).zip(keys) {
            let before = std::mem::replace(&mut self.ranks[item as usize], rank);
            self.trail.push(Change::Rank { item, before });
        }
    }

    fn branch(&mut self, scope: Scope, least: u64, least_rank: u32, stop: Stop<'_>) -> Verdict {
        if scope.begin == scope.end {
            return Verdict::Placed;
        }
        if self.nodes >= self.node_limit {
            return Verdict::Limit;
        }
        self.nodes += 1;
        if self.nodes.is_multiple_of(STOP_INTERVAL) && stop() {
            self.node_limit = 0;
            return Verdict::Limit;
        }
        let open = self.candidates.len();
        self.collect(scope, least, least_rank);
        let mut next = open;
        let mut verdict = Verdict::Impossible;
        while next < self.candidates.len() {
            let (offset, rank, item) = self.candidates[next];
            next += 1;
            let mark = self.trail.len();
            let hatless = self.place(scope, item, offset);
            let inner = Scope {
                end: scope.end - 1,
                ..scope
            };
            if self.is_open(inner, offset, rank, mark) {
                // Children append to `candidates` and cut it back to where it was.
                verdict = self.decompose(inner, offset, rank, stop);
                if verdict != Verdict::Impossible {
                    break;
                }
            }
            self.undo(mark);
            if hatless && self.switches.hatless {
                break;
            }
        }
        self.candidates.truncate(open);
        verdict
    }

    /// Appends what may be placed next, in the order to try.
    fn collect(&mut self, scope: Scope, least: u64, least_rank: u32) {
        let open = self.candidates.len();
        let mut lowest_end = u64::MAX;
        for &item in &self.order[scope.begin..scope.end] {
            let offset = self.minimum_offsets[item as usize];
            lowest_end = lowest_end.min(offset + self.items[item as usize].size);
        }
        if !self.switches.dominance {
            lowest_end = u64::MAX;
        }
        for &item in &self.order[scope.begin..scope.end] {
            let index = item as usize;
            let key = (self.minimum_offsets[index], self.ranks[index]);
            let within = key.0 + self.items[index].size <= self.limits[index];
            if key.0 < lowest_end && key >= (least, least_rank) && within {
                self.candidates.push((key.0, key.1, item));
            }
        }
        self.candidates[open..].sort_unstable();
    }

    /// Places `item`; whether nothing unplaced overlaps it.
    fn place(&mut self, scope: Scope, item: u32, offset: u64) -> bool {
        let index = item as usize;
        let (position, last) = (self.positions[index], scope.end - 1);
        let moved = self.order[last];
        self.order.swap(position, last);
        self.positions[moved as usize] = position;
        self.positions[index] = last;
        self.offsets[index] = offset;
        self.trail.push(Change::Placed { item });
        let placed = &self.items[index];
        for section in placed.span.range() {
            self.totals[section] -= placed.size;
        }
        for section in &mut self.crossings[placed.span.first as usize..placed.span.end as usize - 1]
        {
            *section -= 1;
        }
        let end = offset + placed.size;
        let mut hatless = true;
        for &other in self.instance.neighbours.get(index) {
            let at = other as usize;
            if self.offsets[at] != UNPLACED {
                continue;
            }
            hatless = false;
            let before = self.minimum_offsets[at];
            if before < end {
                self.trail.push(Change::MinimumOffset {
                    item: other,
                    before,
                });
                self.minimum_offsets[at] = self.items[at].align(end);
            }
        }
        hatless
    }

    /// Whether what is unplaced may still fit, after the placement that the trail has from `mark`.
    fn is_open(&mut self, scope: Scope, least: u64, least_rank: u32, mark: usize) -> bool {
        let Some(room) = self.capacity.checked_sub(least) else {
            return false;
        };
        if self.totals[scope.first..scope.last]
            .iter()
            .any(|&total| total > room)
        {
            return false;
        }
        if self.switches.lifting && !self.lift(scope, least, least_rank) {
            return false;
        }
        // A section whose members fit above the highest minimum offset of all needs no closer look.
        let unplaced = &self.order[scope.begin..scope.end];
        let offsets = unplaced
            .iter()
            .map(|&item| self.minimum_offsets[item as usize]);
        let highest = offsets.max().unwrap_or(0);
        let (mut from, mut to) = (usize::MAX, 0);
        for &change in &self.trail[mark..] {
            if let Change::MinimumOffset { item, .. } = change {
                let index = item as usize;
                let span = self.items[index].span;
                if self.minimum_offsets[index] + self.items[index].size > self.limits[index] {
                    return false;
                }
                from = from.min(span.first as usize);
                to = to.max(span.end as usize);
            }
        }
        (from..to)
            .all(|section| highest + self.totals[section] <= self.capacity || self.fits(section))
    }

    /// Raises what was passed over to the lowest end that an unplaced neighbour could have.
    fn lift(&mut self, scope: Scope, least: u64, least_rank: u32) -> bool {
        for position in scope.begin..scope.end {
            let item = self.order[position];
            let index = item as usize;
            let before = self.minimum_offsets[index];
            if (before, self.ranks[index]) >= (least, least_rank) {
                continue;
            }
            let mut lowest = u64::MAX;
            for &other in self.instance.neighbours.get(index) {
                let at = other as usize;
                if self.offsets[at] == UNPLACED {
                    let end = self.minimum_offsets[at].max(least) + self.items[at].size;
                    lowest = lowest.min(end);
                }
            }
            if lowest == u64::MAX {
                return false;
            }
            if lowest > before {
                self.trail.push(Change::MinimumOffset { item, before });
                self.minimum_offsets[index] = self.items[index].align(lowest);
            }
        }
        true
    }

    /// Whether the unplaced members of a section fit above their minimum offsets.
    fn fits(&mut self, section: usize) -> bool {
        let total = self.totals[section];
        if total == 0 {
            return true;
        }
        let range = self.instance.members.range(section);
        let members = &mut self.sorted[range];
        if !self.switches.release_times {
            let unplaced = members
                .iter()
                .filter(|(_, item)| self.offsets[*item as usize] == UNPLACED);
            let lowest = unplaced
                .map(|(_, item)| self.minimum_offsets[*item as usize])
                .min();
            return lowest.is_none_or(|lowest| lowest + total <= self.capacity);
        }
        // Insertion: the order changes little from one look to the next. Placed items come first and
        // count nothing.
        for i in 0..members.len() {
            let item = members[i].1;
            let key = if self.offsets[item as usize] == UNPLACED {
                self.minimum_offsets[item as usize]
            } else {
                UNPLACED
            };
            let mut to = i;
            while to > 0 && members[to - 1].0 < key {
                members[to] = members[to - 1];
                to -= 1;
            }
            members[to] = (key, item);
        }
        let mut above = 0;
        for &(offset, item) in members.iter() {
            if offset == UNPLACED {
                continue;
            }
            above += self.items[item as usize].size;
            if offset + above > self.capacity {
                return false;
            }
        }
        true
    }

    fn undo(&mut self, mark: usize) {
        while self.trail.len() > mark {
            let Some(change) = self.trail.pop() else {
                return;
            };
            match change {
                Change::MinimumOffset { item, before } => {
                    self.minimum_offsets[item as usize] = before;
                }
                Change::Rank { item, before } => self.ranks[item as usize] = before,
                Change::Placed { item } => {
                    self.offsets[item as usize] = UNPLACED;
                    let item = &self.items[item as usize];
                    for section in item.span.range() {
                        self.totals[section] += item.size;
                    }
                    let crossed = item.span.first as usize..item.span.end as usize - 1;
                    for section in &mut self.crossings[crossed] {
                        *section += 1;
                    }
                }
            }
        }
    }
}

/// A number from a seed and an index that looks like chance (`SplitMix64`).
pub(super) fn mix(seed: u64, index: u64) -> u64 {
    let mut x = seed.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

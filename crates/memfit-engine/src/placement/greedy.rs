//! One-pass placement: every order, first fit and best fit.
//!
//! Responsible for placing items one after the other in a given order, and for the orders worth trying.
//! On traced training steps the first order reaches the lower bound. Not responsible for improving
//! an order (`local_search.rs`).

use super::prepare::Prepared;
use super::sections::{self, Lists, Span};

/// Which of the gaps that are large enough is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fit {
    /// The lowest.
    First,
    /// The smallest; of equal ones the lowest.
    Best,
}

/// Up to so many items, looking at all placed ones is faster than looking up those that overlap.
const SCAN_ITEMS: usize = 2_048;
/// Up to so many overlaps are kept in memory, 4 bytes each.
const KEPT_OVERLAPS: usize = 64_000_000;

/// A placed item while others are placed around it.
#[derive(Debug, Clone, Copy)]
struct Placed {
    offset: u64,
    end: u64,
    span: Span,
}

/// Places items one by one; keeps its memory between passes.
#[derive(Debug)]
pub(super) struct Greedy<'p> {
    prepared: &'p Prepared,
    /// Who overlaps whom; absent where scanning is better.
    neighbours: Option<Lists>,
    /// Everything placed in this pass, by offset; only without `neighbours`.
    placed: Vec<Placed>,
    /// Offsets and ends of what overlaps the next item.
    obstacles: Vec<(u64, u64)>,
    /// Position of each item in the order of this pass.
    positions: Vec<usize>,
    pub(super) offsets: Vec<u64>,
}

impl<'p> Greedy<'p> {
    pub(super) fn new(prepared: &'p Prepared) -> Self {
        let count = prepared.items.len();
        let spans = prepared.spans();
        let keeps = count > SCAN_ITEMS && sections::overlap_count(&spans) <= KEPT_OVERLAPS;
        Self {
            prepared,
            neighbours: keeps.then(|| sections::neighbours(&spans)),
            placed: Vec::with_capacity(count),
            obstacles: Vec::new(),
            positions: vec![0; count],
            offsets: vec![0; count],
        }
    }

    /// Places all items in `order`; the height in units, or nothing when it would pass `limit`.
    pub(super) fn place(&mut self, order: &[u32], fit: Fit, limit: u64) -> Option<u64> {
        self.replace(order, 0, fit, limit)
    }

    /// Places again from position `from` of `order` on; what comes before has kept its offset since
    /// the last pass.
    pub(super) fn replace(
        &mut self,
        order: &[u32],
        from: usize,
        fit: Fit,
        limit: u64,
    ) -> Option<u64> {
        for (position, &item) in order.iter().enumerate() {
            self.positions[item as usize] = position;
        }
        self.placed.clear();
        let mut height = 0;
        for (position, &index) in order.iter().enumerate() {
            let item = &self.prepared.items[index as usize];
            let offset = if position < from {
                self.offsets[index as usize]
            } else if self.neighbours.is_some() {
                self.find_among_neighbours(index, position, fit)
            } else {
                self.find_among_all(index, fit)
            };
            let end = offset + item.size;
            self.offsets[index as usize] = offset;
            height = height.max(end);
            if height > limit {
                return None;
            }
            if self.neighbours.is_none() {
                let span = item.span;
                let at = self.placed.partition_point(|other| other.offset <= offset);
                self.placed.insert(at, Placed { offset, end, span });
            }
        }
        Some(height)
    }

    fn find_among_all(&self, index: u32, fit: Fit) -> u64 {
        let item = &self.prepared.items[index as usize];
        let overlapping = self
            .placed
            .iter()
            .filter(|other| other.span.overlaps(item.span))
            .map(|other| (other.offset, other.end));
        gap(overlapping, |offset| item.align(offset), item.size, fit)
    }

    fn find_among_neighbours(&mut self, index: u32, position: usize, fit: Fit) -> u64 {
        let items = &self.prepared.items;
        let item = &items[index as usize];
        self.obstacles.clear();
        if let Some(neighbours) = &self.neighbours {
            for &other in neighbours.get(index as usize) {
                if self.positions[other as usize] < position {
                    let offset = self.offsets[other as usize];
                    self.obstacles
                        .push((offset, offset + items[other as usize].size));
                }
            }
        }
        self.obstacles.sort_unstable();
        let overlapping = self.obstacles.iter().copied();
        gap(overlapping, |offset| item.align(offset), item.size, fit)
    }
}

/// The offset for `size` among obstacles sorted by offset.
fn gap(
    obstacles: impl Iterator<Item = (u64, u64)>,
    align: impl Fn(u64) -> u64,
    size: u64,
    fit: Fit,
) -> u64 {
    let mut free = 0;
    let mut best: Option<(u64, u64)> = None;
    for (offset, end) in obstacles {
        let start = align(free);
        if offset >= start && offset - start >= size {
            match fit {
                Fit::First => return start,
                Fit::Best if best.is_none_or(|(room, _)| offset - free < room) => {
                    best = Some((offset - free, start));
                }
                Fit::Best => {}
            }
        }
        free = free.max(end);
    }
    best.map_or_else(|| align(free), |(_, start)| start)
}

/// The orders to try, the most promising first; ties go to the item that comes first.
pub(super) fn orders(prepared: &Prepared) -> impl Iterator<Item = Vec<u32>> + '_ {
    let totals = largest_totals(prepared);
    KEYS.iter().map(move |key| {
        let mut order: Vec<u32> = (0..).take(prepared.items.len()).collect();
        order.sort_by_cached_key(|&index| {
            let item = &prepared.items[index as usize];
            let area = u128::from(item.size) * u128::from(item.width);
            let facts = Facts {
                birth: u128::from(item.span.first),
                size: u128::from(item.size),
                width: u128::from(item.width),
                area,
                total: u128::from(totals[index as usize]),
            };
            key(&facts)
        });
        order
    })
}

/// What items are ordered by.
struct Facts {
    birth: u128,
    size: u128,
    width: u128,
    area: u128,
    /// Largest total of a section it is in.
    total: u128,
}

/// Sorted ascending, so what is wanted largest first is negated.
const KEYS: [fn(&Facts) -> [u128; 3]; 8] = [
    |facts| [!facts.total, !facts.size, 0],
    |facts| [!facts.total, !facts.width, !facts.area],
    |facts| [!facts.size, !facts.width, 0],
    |facts| [!facts.total, !facts.area, !facts.width],
    |facts| [!facts.area, !facts.size, 0],
    |facts| [!facts.width, !facts.size, 0],
    |facts| [!facts.width, !facts.area, !facts.total],
    |facts| [facts.birth, !facts.size, 0],
];

/// For each item, the largest total of the sections it is in, by a sparse table of maxima.
fn largest_totals(prepared: &Prepared) -> Vec<u64> {
    let mut rises: Vec<i128> = vec![0; prepared.section_count + 1];
    for item in &prepared.items {
        rises[item.span.first as usize] += i128::from(item.size);
        rises[item.span.end as usize] -= i128::from(item.size);
    }
    let mut sum = 0;
    let totals = rises.iter().map(|rise| {
        sum += rise;
        u64::try_from(sum).unwrap_or(u64::MAX)
    });
    let mut maxima: Vec<Vec<u64>> = vec![totals.collect()];
    let mut reach = 1;
    while 2 * reach <= prepared.section_count {
        let last = &maxima[maxima.len() - 1];
        let next = (0..last.len() - reach).map(|at| last[at].max(last[at + reach]));
        let next = next.collect();
        maxima.push(next);
        reach *= 2;
    }
    let largest = |span: Span| {
        let length = (span.end - span.first) as usize;
        let level = length.ilog2() as usize;
        let row = &maxima[level];
        row[span.first as usize].max(row[span.end as usize - (1 << level)])
    };
    prepared
        .items
        .iter()
        .map(|item| largest(item.span))
        .collect()
}

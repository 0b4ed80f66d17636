//! A problem brought to the form that the algorithms work on.
//!
//! Responsible for what makes the problem smaller without changing its answer: time compressed to
//! sections, sizes rounded to the alignment that all share and divided by their greatest common divisor,
//! and allocations that live throughout laid at the bottom. Not responsible for any search.
//!
//! # Invariants
//!
//! Offsets count *units* above `base`. Every offset that an algorithm here can reach is a sum of sizes
//! rounded up to alignments, so all are multiples of the unit; no sum of sizes and alignments overflows,
//! because [`Problem`] bounds it.

use super::sections::{self, Lists, Span};
use super::{Placement, Problem};

/// One allocation in units.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    /// Index in the problem.
    pub(super) index: usize,
    pub(super) span: Span,
    /// Length of the live range in the problem's own time.
    pub(super) width: u64,
    pub(super) size: u64,
    /// Offsets are multiples of it; 1 for nearly all.
    pub(super) alignment: u64,
    /// The size in bytes, before rounding.
    bytes: u64,
}

impl Item {
    /// The lowest offset at or above `offset` that the item may have.
    pub(super) const fn align(&self, offset: u64) -> u64 {
        if self.alignment <= 1 {
            offset
        } else {
            offset.next_multiple_of(self.alignment)
        }
    }
}

/// A problem in units.
#[derive(Debug, Clone)]
pub(super) struct Prepared {
    pub(super) items: Vec<Item>,
    pub(super) section_count: usize,
    /// Bytes in a unit.
    pub(super) unit: u64,
    /// Bytes below every item.
    base: u64,
    /// Offsets of what lies there, by index in the problem.
    laid: Vec<(usize, u64)>,
    /// No placement is lower, in bytes.
    pub(super) lower_bound: u64,
}

impl Prepared {
    pub(super) fn new(problem: &Problem) -> Self {
        let allocations = problem.allocations();
        // An allocation without bytes is in no other's way.
        let present: Vec<usize> = (0..allocations.len())
            .filter(|&index| allocations[index].size > 0)
            .collect();
        let ranges: Vec<(i64, i64)> = present
            .iter()
            .map(|&index| (allocations[index].lower, allocations[index].upper))
            .collect();
        let (spans, section_count) = sections::spans(&ranges);
        // Every offset is a multiple of what divides all alignments, so no space between is of use.
        let grain = present
            .iter()
            .fold(0, |grain, &index| gcd(grain, allocations[index].alignment))
            .max(1);
        let mut items: Vec<Item> = present
            .iter()
            .zip(&spans)
            .map(|(&index, &span)| {
                let allocation = &allocations[index];
                Item {
                    index,
                    span,
                    width: allocation.upper.abs_diff(allocation.lower),
                    size: allocation.size.next_multiple_of(grain),
                    alignment: allocation.alignment,
                    bytes: allocation.size,
                }
            })
            .collect();
        let unit = unit(&items);
        let lower_bound = lower_bound(&items, section_count);
        for item in &mut items {
            item.size /= unit;
            item.alignment = (item.alignment / unit).max(1);
        }
        let mut prepared = Self {
            items,
            section_count,
            unit,
            base: 0,
            laid: Vec::new(),
            lower_bound,
        };
        prepared.lay_what_lives_throughout();
        prepared
    }

    /// What overlaps everything divides a placement into the part below and the part above, and the two
    /// can change places with it: so it may as well lie at the bottom.
    fn lay_what_lives_throughout(&mut self) {
        if self.items.iter().any(|item| item.alignment > 1) {
            return;
        }
        let section_count = self.section_count;
        let unit = self.unit;
        let throughout =
            |item: &Item| item.span.range() == (0..section_count) && item.size * unit == item.bytes;
        let (laid, items): (Vec<Item>, Vec<Item>) = self.items.drain(..).partition(throughout);
        self.items = items;
        for item in laid {
            self.laid.push((item.index, self.base));
            self.base += item.bytes;
        }
    }

    /// For each item, the highest end in units with which its bytes end at or below `capacity` bytes.
    pub(super) fn limits(&self, capacity: u64) -> Option<Vec<u64>> {
        let room = capacity.checked_sub(self.base)?;
        let limit = |item: &Item| Some(room.checked_sub(item.bytes)? / self.unit + item.size);
        self.items.iter().map(limit).collect()
    }

    /// The most units that end at or below `height` bytes.
    pub(super) fn units_within(&self, height: u64) -> u64 {
        height.saturating_sub(self.base) / self.unit
    }

    /// Heights differ by multiples of this.
    pub(super) fn step(&self) -> u64 {
        let is_rounded = |item: &Item| item.size * self.unit != item.bytes;
        if self.items.iter().any(is_rounded) {
            // The highest allocation may end anywhere.
            1
        } else {
            self.unit
        }
    }

    /// The lowest height above `capacity` that a placement can have.
    pub(super) fn next_height(&self, capacity: u64) -> u64 {
        if self.step() == 1 || capacity < self.base {
            return capacity + 1;
        }
        self.base + (self.units_within(capacity) + 1) * self.unit
    }

    /// Offsets in units as a placement in bytes.
    pub(super) fn placement(&self, allocation_count: usize, offsets: &[u64]) -> Placement {
        let mut placement = Placement {
            offsets: vec![0; allocation_count],
            height: self.base,
        };
        for &(index, offset) in &self.laid {
            placement.offsets[index] = offset;
        }
        for (item, &offset) in self.items.iter().zip(offsets) {
            let offset = self.base + offset * self.unit;
            placement.offsets[item.index] = offset;
            placement.height = placement.height.max(offset + item.bytes);
        }
        placement
    }

    pub(super) fn spans(&self) -> Vec<Span> {
        self.items.iter().map(|item| item.span).collect()
    }

    pub(super) fn members(&self) -> Lists {
        sections::members(&self.spans(), self.section_count)
    }

    pub(super) fn neighbours(&self) -> Lists {
        sections::neighbours(&self.spans())
    }
}

/// The largest unit that divides every size, and every alignment that it does not make trivial.
fn unit(items: &[Item]) -> u64 {
    let mut unit = items.iter().fold(0, |unit, item| gcd(unit, item.size));
    loop {
        let coarser = |item: &&Item| unit % item.alignment != 0;
        let next = items
            .iter()
            .filter(coarser)
            .fold(unit, |unit, item| gcd(unit, item.alignment));
        if next == unit {
            return unit.max(1);
        }
        unit = next;
    }
}

/// The largest sum over a section. The topmost allocation needs no rounding, and any may be topmost.
fn lower_bound(items: &[Item], section_count: usize) -> u64 {
    let mut rises: Vec<i128> = vec![0; section_count + 1];
    for item in items {
        rises[item.span.first as usize] += i128::from(item.size);
        rises[item.span.end as usize] -= i128::from(item.size);
    }
    let paddings = largest_paddings(items, section_count);
    let mut sum = 0;
    let mut highest = 0;
    for (rise, padding) in rises.iter().zip(paddings) {
        sum += rise;
        highest = highest.max(sum - i128::from(padding));
    }
    u64::try_from(highest).unwrap_or(u64::MAX)
}

/// Per section, the most bytes that rounding added to one item.
fn largest_paddings(items: &[Item], section_count: usize) -> Vec<u64> {
    let padding = |item: &Item| item.size - item.bytes;
    let mut order: Vec<&Item> = items.iter().filter(|item| padding(item) > 0).collect();
    order.sort_by_key(|item| std::cmp::Reverse(padding(item)));
    let mut paddings = vec![0; section_count];
    // Each section is set once, by the first item that reaches it: `next` leads past those set.
    let mut next: Vec<usize> = (0..=section_count).collect();
    for item in order {
        let mut section = next_unset(&mut next, item.span.first as usize);
        while section < item.span.end as usize {
            paddings[section] = padding(item);
            next[section] = section + 1;
            section = next_unset(&mut next, section);
        }
    }
    paddings
}

fn next_unset(next: &mut [usize], from: usize) -> usize {
    let mut section = from;
    while next[section] != section {
        next[section] = next[next[section]];
        section = next[section];
    }
    section
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

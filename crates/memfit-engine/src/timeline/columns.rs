//! Totals over time at a bounded number of columns.
//!
//! Responsible for the exact peak and for columns: equal stretches of moments, each shown by its highest
//! moment. Not responsible for how many columns a page can hold.
//!
//! Invariants: a column's `allocated` is the maximum over its moments and `at` the first moment that
//! attains it; the bands of a column are the owners' bytes at that moment and add up to `allocated`. Halving the
//! number of columns gives what sweeping with twice the width would have given.

use super::Moment;
use super::lives::{Change, Lives};
use super::segments::SegmentLife;

/// The largest integer that a page's numbers hold exactly; hostile sums are cut to it.
pub(super) const LARGEST: u64 = (1 << 53) - 1;

/// Bytes as a page can hold them.
pub(super) fn capped(bytes: i128) -> u64 {
    u64::try_from(bytes.max(0)).map_or(LARGEST, |bytes| bytes.min(LARGEST))
}

/// The highest moment, and what each owner has at its own highest.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Peak {
    /// The first moment with the most allocated bytes.
    pub(super) moment: Moment,
    pub(super) allocated: i128,
    /// Each owner's bytes and allocations at that moment.
    pub(super) owners: Vec<(i128, u64)>,
    /// Each owner's most bytes at any moment.
    pub(super) highest: Vec<i128>,
}

pub(super) fn peak(lives: &Lives<'_>, owners: usize) -> Peak {
    let mut current = vec![0_i128; owners];
    let mut total = 0;
    for life in lives
        .all
        .iter()
        .filter(|life| life.birth == 0 && life.released > 0)
    {
        current[life.owner as usize] += i128::from(life.size);
        total += i128::from(life.size);
    }
    let mut peak = Peak {
        moment: 0,
        allocated: total,
        owners: vec![(0, 0); owners],
        highest: current.clone(),
    };
    let mut changes = lives.changes.iter().peekable();
    while let Some(&(moment, index, change)) = changes.next() {
        let life = &lives.all[index as usize];
        let owner = life.owner as usize;
        let delta = signed(change, life.size);
        current[owner] += delta;
        total += delta;
        if changes.peek().is_some_and(|next| next.0 == moment) {
            continue;
        }
        peak.highest[owner] = peak.highest[owner].max(current[owner]);
        if total > peak.allocated {
            (peak.allocated, peak.moment) = (total, moment);
        }
    }
    for life in lives.all {
        if (life.birth..life.released).contains(&peak.moment) {
            let owner = &mut peak.owners[life.owner as usize];
            owner.0 += i128::from(life.size);
            owner.1 += 1;
        }
    }
    peak
}

/// What a change does to the allocated bytes.
fn signed(change: Change, size: u64) -> i128 {
    match change {
        Change::Born => i128::from(size),
        Change::Released => -i128::from(size),
        Change::Ended => 0,
    }
}

/// Equal stretches of moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    /// Moment at which the first column starts.
    pub(super) first: Moment,
    /// Moments per column.
    pub(super) width: u32,
    /// Columns; the last may reach beyond the end.
    pub(super) count: u32,
}

impl Grid {
    /// The narrowest grid over all moments with at most so many columns; widths are powers of two.
    pub(super) fn whole(moments: Moment, most: u32) -> Self {
        let mut width = 1;
        while moments.div_ceil(width) > most.max(1) {
            width *= 2;
        }
        Self {
            first: 0,
            width,
            count: moments.div_ceil(width),
        }
    }

    fn start(self, column: u32) -> u64 {
        u64::from(self.first) + u64::from(self.width) * u64::from(column)
    }
}

/// Columns over a grid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Columns {
    pub(super) grid: Grid,
    pub(super) at: Vec<Moment>,
    pub(super) allocated: Vec<u64>,
    pub(super) active: Vec<u64>,
    pub(super) reserved: Vec<u64>,
    /// For each band its bytes in each column; the last band is everybody else.
    pub(super) bands: Vec<Vec<u64>>,
}

impl Columns {
    /// Sweeps the lives over a grid. `band` says for each owner which band it is counted in.
    pub(super) fn sweep(
        lives: &Lives<'_>,
        segments: &[SegmentLife],
        band: &[u8],
        bands: usize,
        grid: Grid,
    ) -> Self {
        let count = grid.count as usize;
        let mut columns = Self {
            grid,
            at: Vec::with_capacity(count),
            allocated: Vec::with_capacity(count),
            active: envelope(&active_changes(lives), grid),
            reserved: envelope(&reserved_changes(segments), grid),
            bands: vec![Vec::with_capacity(count); bands],
        };
        let band_of = |index: u32| {
            let life = &lives.all[index as usize];
            usize::from(band[life.owner as usize])
        };
        let mut current = vec![0_i128; bands];
        let mut total = 0;
        for (index, life) in (0..).zip(lives.all) {
            if life.birth == 0 && life.released > 0 {
                current[band_of(index)] += i128::from(life.size);
                total += i128::from(life.size);
            }
        }
        let mut changes = lives.changes.as_slice();
        // Applies all changes of the next moment, if that is before `end`.
        let mut advance = |end: u64, current: &mut [i128], total: &mut i128| {
            let moment = changes.first().map(|change| change.0)?;
            if u64::from(moment) >= end {
                return None;
            }
            while let Some((&(next, index, change), rest)) = changes.split_first() {
                if next != moment {
                    break;
                }
                let delta = signed(change, lives.all[index as usize].size);
                current[band_of(index)] += delta;
                *total += delta;
                changes = rest;
            }
            Some(moment)
        };
        for column in 0..grid.count {
            let (start, end) = (grid.start(column), grid.start(column + 1));
            while advance(start + 1, &mut current, &mut total).is_some() {}
            let mut highest = (total, Moment::try_from(start).unwrap_or(Moment::MAX));
            let mut composition = current.clone();
            while let Some(moment) = advance(end, &mut current, &mut total) {
                if total > highest.0 {
                    highest = (total, moment);
                    composition.copy_from_slice(&current);
                }
            }
            columns.at.push(highest.1);
            columns.allocated.push(capped(highest.0));
            for (band, bytes) in columns.bands.iter_mut().zip(&composition) {
                band.push(capped(*bytes));
            }
        }
        columns
    }

    /// The same with columns twice as wide.
    pub(super) fn halved(&self) -> Self {
        let pairs = || (0..self.at.len()).step_by(2);
        let higher: Vec<usize> = pairs()
            .map(|left| match self.allocated.get(left + 1) {
                Some(right) if *right > self.allocated[left] => left + 1,
                _ => left,
            })
            .collect();
        let pick = |column: &[u64]| higher.iter().map(|&index| column[index]).collect();
        let most = |column: &[u64]| {
            pairs()
                .map(|left| column[left].max(column.get(left + 1).copied().unwrap_or(0)))
                .collect()
        };
        Self {
            grid: Grid {
                width: self.grid.width * 2,
                count: self.grid.count.div_ceil(2),
                ..self.grid
            },
            at: higher.iter().map(|&index| self.at[index]).collect(),
            allocated: pick(&self.allocated),
            active: most(&self.active),
            reserved: most(&self.reserved),
            bands: self.bands.iter().map(|band| pick(band)).collect(),
        }
    }
}

fn active_changes(lives: &Lives<'_>) -> Vec<(Moment, i128)> {
    let before = lives.all.iter().filter(|life| life.birth == 0);
    let mut changes = vec![(0, before.map(|life| i128::from(life.size)).sum())];
    changes.extend(lives.changes.iter().filter_map(|&(moment, index, change)| {
        let size = i128::from(lives.all[index as usize].size);
        match change {
            Change::Born => Some((moment, size)),
            Change::Released => None,
            Change::Ended => Some((moment, -size)),
        }
    }));
    changes
}

pub(super) fn reserved_changes(segments: &[SegmentLife]) -> Vec<(Moment, i128)> {
    let mut changes: Vec<_> = segments
        .iter()
        .flat_map(|life| {
            let size = i128::from(life.size);
            [(life.birth, size), (life.end, -size)]
        })
        .collect();
    changes.sort_unstable();
    changes
}

/// The exact maximum over each column of a total that changes in order; it starts at 0 before moment 0.
fn envelope(changes: &[(Moment, i128)], grid: Grid) -> Vec<u64> {
    let mut changes = changes;
    let mut total = 0;
    let mut advance = |end: u64, total: &mut i128| {
        let moment = changes.first().map(|change| change.0)?;
        if u64::from(moment) >= end {
            return None;
        }
        while let Some((&(next, delta), rest)) = changes.split_first() {
            if next != moment {
                break;
            }
            *total += delta;
            changes = rest;
        }
        Some(())
    };
    (0..grid.count)
        .map(|column| {
            while advance(grid.start(column) + 1, &mut total).is_some() {}
            let mut highest = total;
            while advance(grid.start(column + 1), &mut total).is_some() {
                highest = highest.max(total);
            }
            capped(highest)
        })
        .collect()
}

//! Search by order, for problems too large for the exact search.
//!
//! Responsible for changing an order of one-pass placement a little at a time: an item that sticks out
//! is moved earlier, so that it finds a lower gap. Late acceptance (Burke and Bykov 2017): a change is
//! kept when it is no worse than what was current some steps ago. Deterministic: the seed is fixed and
//! work is counted in placed items.

use super::canonical::{Stop, mix};
use super::greedy::{Fit, Greedy};
use super::prepare::Prepared;

/// Steps after which a cost is compared again.
const HISTORY: usize = 50;
/// Weight of the height against the sum of what sticks out above the floor.
const HEIGHT_WEIGHT: u128 = 1 << 10;
const SEED: u64 = 0x6D65_6D66_6974;

/// An order, the fit, and what they lead to.
#[derive(Debug, Clone)]
pub(super) struct Arrangement {
    pub(super) order: Vec<u32>,
    pub(super) fit: Fit,
    /// Offsets in units.
    pub(super) offsets: Vec<u64>,
    /// In units.
    pub(super) height: u64,
}

/// Why the search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The height is at or below the goal.
    Reached,
    /// The limit on placed items was reached, or nothing sticks out.
    Limit,
    /// The caller stopped it.
    Stopped,
}

/// Improves `best` in place until its height is at most `goal` units.
pub(super) fn improve(
    prepared: &Prepared,
    greedy: &mut Greedy<'_>,
    best: &mut Arrangement,
    goal: u64,
    item_limit: u64,
    stop: Stop<'_>,
) -> End {
    let count = best.order.len();
    let mut chance = Chance { step: 0 };
    let mut current = best.clone();
    let mut cost = cost(prepared, &current, goal);
    let mut history = [cost; HISTORY];
    let mut placed: u64 = 0;
    let mut turn = 0;
    while best.height > goal {
        if placed >= item_limit {
            return End::Limit;
        }
        if stop() {
            return End::Stopped;
        }
        let Some((order, from)) = neighbour(prepared, &current, goal, &mut chance) else {
            return End::Limit;
        };
        let slot = turn % HISTORY;
        turn += 1;
        placed += (count - from) as u64 + 1;
        let allowed = cost.max(history[slot]);
        let limit = u64::try_from(allowed / HEIGHT_WEIGHT).unwrap_or(u64::MAX);
        greedy.offsets.copy_from_slice(&current.offsets);
        if let Some(height) = greedy.replace(&order, from, current.fit, limit) {
            let next = Arrangement {
                order,
                fit: current.fit,
                offsets: greedy.offsets.clone(),
                height,
            };
            let next_cost = self::cost(prepared, &next, goal);
            if next_cost <= allowed {
                if next.height < best.height {
                    *best = next.clone();
                }
                current = next;
                cost = next_cost;
            }
        }
        history[slot] = history[slot].min(cost);
    }
    End::Reached
}

/// The height, and how much sticks out above the goal.
fn cost(prepared: &Prepared, arrangement: &Arrangement, goal: u64) -> u128 {
    let ends = prepared
        .items
        .iter()
        .zip(&arrangement.offsets)
        .map(|(item, offset)| item.size + offset);
    let above: u128 = ends.map(|end| u128::from(end.saturating_sub(goal))).sum();
    u128::from(arrangement.height) * HEIGHT_WEIGHT + above
}

/// Another order, and the position from which on it differs.
fn neighbour(
    prepared: &Prepared,
    current: &Arrangement,
    goal: u64,
    chance: &mut Chance,
) -> Option<(Vec<u32>, usize)> {
    let count = current.order.len();
    let mut order = current.order.clone();
    if chance.below(10) < 2 {
        let (a, b) = (chance.below(count), chance.below(count));
        order.swap(a, b);
        return Some((order, a.min(b)));
    }
    // What passes the goal, or what is highest.
    let floor = if chance.below(2) == 0 {
        current.height - 1
    } else {
        goal
    };
    let sticks_out = |&item: &u32| {
        let index = item as usize;
        current.offsets[index] + prepared.items[index].size > floor
    };
    let out: Vec<usize> = (0..count)
        .filter(|&position| sticks_out(&order[position]))
        .collect();
    let from = *out.get(chance.below(out.len().max(1)))?;
    // Small moves are more frequent than large ones.
    let reach = chance.below(from + 1).min(chance.below(from + 1)).max(1);
    let to = from.saturating_sub(reach);
    order[to..=from].rotate_right(1);
    Some((order, to))
}

/// A fixed sequence that looks like chance.
struct Chance {
    step: u64,
}

impl Chance {
    fn below(&mut self, count: usize) -> usize {
        self.step += 1;
        let count = count.max(1) as u64;
        usize::try_from(mix(SEED, self.step) % count).unwrap_or(0)
    }
}

//! What no plan can beat.
//!
//! Responsible for a lower bound on the time that a plan adds under a budget, and on the peak itself. Both come from
//! looking at one moment at a time: at op `i` the unplanned step holds `live(i)`; a plan within the budget
//! must free the excess from what only autograd holds there and backward has not asked for yet. Freeing
//! an allocation takes at least one run of the op that made it, or moving it out and back, or shrinking it, of which the
//! narrower form that stays is left out. So the fractional knapsack at each `i`
//! bounds the time from below, and the worst `i` is the bound. Pins, replay temporaries and the replays
//! that a replay needs are ignored, which only lowers it.

use std::cmp::Reverse;

use super::relaxation::{Relaxation, Relaxed};
use crate::bytes::Bytes;
use crate::plan::search::problem::Problem;
use crate::step::{Evaluator, Treatment};
use crate::trace::{AllocationId, OpIndex};

/// Moments looked at more closely.
const MOST_MOMENTS: usize = 6;
/// Those whose choices the search starts from.
const START_MOMENTS: usize = 2;
/// They lie at least this part of the step apart.
const SPREAD: usize = 64;

/// The bound for one problem.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::plan) struct Bound {
    /// Least seconds that any plan within the target adds; infinite when there is none.
    pub(in crate::plan) added_seconds: f64,
    /// No plan has a lower peak.
    pub(in crate::plan) peak_bytes: Bytes,
    /// What is best at one of the worst moments, for the target or somewhat less.
    pub(in crate::plan) choices: Vec<Vec<(AllocationId, Treatment)>>,
}

/// An allocation that could be freed over a stretch of the step.
struct Freeable {
    bytes: u64,
    seconds: f64,
    /// Autograd alone holds it during these ops.
    from: usize,
    until: usize,
}

pub(in crate::plan) fn bound(problem: &Problem<'_>, target: Bytes) -> Bound {
    let none = vec![Treatment::Keep; problem.trace.allocations.len()];
    let heights = Evaluator::new(&problem.model).timeline(&none);
    let mut freeable = freeable(problem);
    // Most bytes per second first: the order of the fractional knapsack.
    freeable.sort_by(|a, b| {
        let (a, b) = (bytes_per_second(a), bytes_per_second(b));
        b.total_cmp(&a)
    });
    let mut result = Bound {
        added_seconds: 0.0,
        peak_bytes: Bytes::ZERO,
        choices: Vec::new(),
    };
    let mut seconds_at = vec![0.0; heights.len()];
    let mut there = There::before(&freeable);
    for (op, &height) in heights.iter().enumerate() {
        there.move_to(op);
        result.peak_bytes = result.peak_bytes.max(height - there.bytes());
        if height > target {
            let seconds = knapsack_seconds(there.items(), height - target);
            seconds_at[op] = seconds;
            result.added_seconds = result.added_seconds.max(seconds);
        }
    }
    if result.added_seconds.is_finite() {
        for (rank, op) in moments(&seconds_at).into_iter().enumerate() {
            let mut relaxation = Relaxation::new(problem, op, heights[op]);
            let relaxed = relaxation.solve(target);
            result.added_seconds = result.added_seconds.max(relaxed.added_seconds);
            if rank >= START_MOMENTS {
                continue;
            }
            let choices = |relaxed: Relaxed| relaxed.choices.into_iter().map(|c| c.treatments);
            result.choices.extend(choices(relaxed));
            for part in [16, 6, 3] {
                let less = target - Bytes((heights[op] - target).0 / part);
                result.choices.extend(choices(relaxation.solve(less)));
            }
        }
    }
    result
}

/// What could be freed at one op, as it moves through the step.
struct There<'f> {
    freeable: &'f [Freeable],
    /// In the order in which they come, the next one last.
    coming: Vec<usize>,
    /// In the order in which they go, the next one last.
    going: Vec<usize>,
    /// Ascending.
    now: Vec<usize>,
    total: u128,
}

impl<'f> There<'f> {
    fn before(freeable: &'f [Freeable]) -> Self {
        let lasting = |&i: &usize| freeable[i].from < freeable[i].until;
        let mut coming: Vec<usize> = (0..freeable.len()).filter(lasting).collect();
        let mut going = coming.clone();
        coming.sort_by_key(|&i| Reverse(freeable[i].from));
        going.sort_by_key(|&i| Reverse(freeable[i].until));
        Self {
            freeable,
            coming,
            going,
            now: Vec::new(),
            total: 0,
        }
    }

    fn move_to(&mut self, op: usize) {
        while let Some(i) = self.coming.pop_if(|&mut i| self.freeable[i].from <= op) {
            let place = self.now.partition_point(|&other| other < i);
            self.now.insert(place, i);
            self.total += u128::from(self.freeable[i].bytes);
        }
        while let Some(i) = self.going.pop_if(|&mut i| self.freeable[i].until <= op) {
            let place = self.now.partition_point(|&other| other < i);
            self.now.remove(place);
            self.total -= u128::from(self.freeable[i].bytes);
        }
    }

    fn bytes(&self) -> Bytes {
        Bytes(u64::try_from(self.total).unwrap_or(u64::MAX))
    }

    fn items(&self) -> impl Iterator<Item = &'f Freeable> {
        self.now.iter().map(|&i| &self.freeable[i])
    }
}

/// The ops of the largest seconds, spread over the step.
pub(super) fn moments(seconds: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..seconds.len()).filter(|&op| seconds[op] > 0.0).collect();
    order.sort_by(|&a, &b| seconds[b].total_cmp(&seconds[a]).then(a.cmp(&b)));
    let apart = seconds.len() / SPREAD;
    let mut moments: Vec<usize> = Vec::new();
    for op in order {
        if moments.iter().all(|&moment| moment.abs_diff(op) > apart) {
            moments.push(op);
            if moments.len() == MOST_MOMENTS {
                break;
            }
        }
    }
    moments
}

fn knapsack_seconds<'f>(freeable: impl Iterator<Item = &'f Freeable>, excess: Bytes) -> f64 {
    let (mut left, mut seconds) = (excess.as_f64(), 0.0);
    for item in freeable {
        let bytes = Bytes(item.bytes).as_f64();
        if bytes >= left {
            return seconds + item.seconds * left / bytes;
        }
        left -= bytes;
        seconds += item.seconds;
    }
    f64::INFINITY
}

fn bytes_per_second(item: &Freeable) -> f64 {
    Bytes(item.bytes).as_f64() / item.seconds.max(1e-12)
}

fn freeable(problem: &Problem<'_>) -> Vec<Freeable> {
    // An op that makes several allocations runs once for all of them.
    let mut sharers = vec![0_u32; problem.op_seconds.len()];
    for &id in problem
        .candidates
        .iter()
        .filter(|id| problem.may_drop(**id))
    {
        for maker in problem.model.makers(id) {
            sharers[maker.index()] += 1;
        }
    }
    let mut items = Vec::new();
    for &id in &problem.candidates {
        let Some((from, until)) = problem.away(id) else {
            continue;
        };
        let asked_for = problem.first_unpack[id.index()] != usize::MAX;
        let share = |op: OpIndex| {
            let sharers = f64::from(sharers.get(op.index()).copied().unwrap_or(1).max(1));
            problem.op_seconds.get(op.index()).copied().unwrap_or(0.0) / sharers
        };
        let (_, mut seconds) = problem.least_elsewhere(id);
        if problem.may_drop(id) {
            seconds = seconds.min(problem.needed_makers(id).map(share).sum());
        }
        items.push(Freeable {
            bytes: problem.model.bytes(id).0,
            seconds: if asked_for { seconds } else { 0.0 },
            from,
            until,
        });
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{CostSource, Costs};
    use crate::plan::search::problem::Allowed;
    use crate::step::Variant;
    use crate::trace::sample;

    #[test]
    fn the_bound_of_a_chain_is_what_a_hand_computes() {
        let trace = sample::chain();
        let source = CostSource::profile(vec![1.0, 2.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        let costs = Costs::new(&trace, &source).unwrap();
        let problem = Problem::new(&trace, Variant::default(), &costs, Allowed::REMAT);
        // `a` (128 bytes, 1 s) is away during ops 2..6, `b` (128 bytes, 2 s) during ops 3..5. At `mean` and
        // `cos_backward` the step holds 772 bytes; a 64th of `a` is the cheapest way to 770.
        let at = bound(&problem, Bytes(770));
        assert!((at.added_seconds - 2.0 / 128.0).abs() < 1e-5, "{at:?}");
        // At `gelu_backward` and `mm` nothing can go: 768 bytes.
        assert_eq!(at.peak_bytes, Bytes(768));
    }
}

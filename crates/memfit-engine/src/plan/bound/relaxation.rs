//! One moment of the step, solved exactly: what to hold there and what to compute again later.
//!
//! Responsible for a relaxation of the inner problem that looks at one op only. Everything that autograd
//! alone holds during that op and that backward asks for later is either held there, or its makers run
//! again later; then each input of those ops is held there in turn, or is computed again itself. Instead of being
//! held, what may be stored may also be moved out and back, and what may be shrunk be so, for the least cost of either. Not
//! responsible for the moments worth looking at (`bound.rs`) nor for what to do with the answer
//! (`search.rs`).
//!
//! # How
//!
//! With a price on the bytes held (a Lagrange multiplier) this is a minimum cut. The best price is where
//! the lines of two cuts, seconds over price, meet (Dinkelbach's way to the top of a concave function).
//!
//! # Why it is a bound
//!
//! Take a plan within the target, and an allocation that is away during op `i`. Kept, it is there. Dropped,
//! it has a token, so its record is referred to: either it was materialised already and is there, or it
//! is replayed after `i`. Then its record exists at `i` and pins every kept input, which is there; and
//! what holds for the allocation holds for each dropped input. So the plan is a solution of the
//! relaxation: it holds no more bytes at `i`, and runs at least these ops. Each of them counts once. Stored, it is
//! there, or was moved out and is moved back.
//! Replay temporaries, copies, and every other moment are left out, which only lowers the result.

use std::collections::BTreeMap;

use super::min_cut::{Network, UNBOUNDED};
use crate::bytes::Bytes;
use crate::plan::search::problem::Problem;
use crate::step::Treatment;
use crate::trace::{AllocationId, OpIndex};

/// Edges that one relaxation may scan in all.
const WORK: u64 = 30_000_000;
/// Prices tried at most.
const PRICES: usize = 14;
/// All capacities in time sum up to about this many units.
const UNITS: f64 = 1e15;

/// The relaxation at one op.
pub(in crate::plan) struct Relaxation<'p> {
    problem: &'p Problem<'p>,
    network: Network,
    source: u32,
    sink: u32,
    /// Per allocation: autograd alone holds it at the op, and a plan may free it.
    away: Vec<bool>,
    /// Per allocation: it is there whatever the plan.
    standing: Vec<bool>,
    /// What is asked for later, or may be read by what runs again.
    values: BTreeMap<AllocationId, Value>,
    /// Values whose makers are still to be laid out.
    waiting: Vec<AllocationId>,
    /// Ops that may run again.
    ops: BTreeMap<OpIndex, u32>,
    /// Bytes that are there whatever the plan.
    fixed: f64,
    units_per_second: f64,
    work: u64,
}

/// An allocation that is not there at the op by itself.
struct Value {
    /// On the source's side: it is held at the op, or computed again.
    node: u32,
    /// On the source's side: it is computed again. The sink where it cannot be.
    again: u32,
    /// The edge between the two, cut where it is held.
    held: u32,
}

/// A choice at the op.
#[derive(Debug, Clone)]
pub(in crate::plan) struct Choice {
    /// What is computed again or stored.
    pub(in crate::plan) treatments: Vec<(AllocationId, Treatment)>,
    seconds: f64,
    /// Bytes held, those that are there whatever the plan included.
    held: f64,
}

/// What the relaxation says.
#[derive(Debug)]
pub(in crate::plan) struct Relaxed {
    /// No plan within the target replays for less.
    pub(in crate::plan) added_seconds: f64,
    /// The choices on either side of the best price: above the target, and within it if any is.
    pub(in crate::plan) choices: Vec<Choice>,
}

impl<'p> Relaxation<'p> {
    /// At `op`, where the step with nothing dropped holds `height`.
    pub(in crate::plan) fn new(problem: &'p Problem<'p>, op: usize, height: Bytes) -> Self {
        let mut network = Network::default();
        let (source, sink) = (network.add_node(), network.add_node());
        let seconds: f64 = problem.op_seconds.iter().sum();
        let mut away = vec![false; problem.trace.allocations.len()];
        let mut fixed = height.as_f64();
        for &id in &problem.candidates {
            let range = problem.away(id);
            if range.is_some_and(|(from, until)| from <= op && op < until) {
                away[id.index()] = true;
                fixed -= problem.model.bytes(id).as_f64();
            }
        }
        let mut relaxation = Self {
            problem,
            network,
            source,
            sink,
            standing: standing(problem, op, &away),
            away,
            values: BTreeMap::new(),
            waiting: Vec::new(),
            ops: BTreeMap::new(),
            fixed,
            units_per_second: UNITS / seconds.max(f64::MIN_POSITIVE),
            work: WORK,
        };
        relaxation.lay_out();
        relaxation
    }

    fn lay_out(&mut self) {
        for &id in &self.problem.candidates {
            if self.away[id.index()] && self.problem.is_asked_for(id) {
                let node = self.value(id);
                self.network.add_edge(self.source, node, UNBOUNDED);
            }
        }
        while let Some(id) = self.waiting.pop() {
            let again = self.values[&id].again;
            if again == self.sink {
                continue;
            }
            let asked_for = self.away[id.index()] && self.problem.is_asked_for(id);
            // What is only read needs its first version at least.
            let count = if asked_for { usize::MAX } else { 1 };
            let makers: Vec<OpIndex> = self.problem.needed_makers(id).take(count).collect();
            for maker in makers {
                let op = self.op(maker);
                self.network.add_edge(again, op, UNBOUNDED);
            }
        }
    }

    fn value(&mut self, id: AllocationId) -> u32 {
        if let Some(value) = self.values.get(&id) {
            return value.node;
        }
        let node = self.network.add_node();
        let again = if self.problem.may_drop(id) {
            self.network.add_node()
        } else {
            self.sink
        };
        let held = self.network.add_edge(node, again, 0);
        self.values.insert(id, Value { node, again, held });
        self.waiting.push(id);
        node
    }

    fn op(&mut self, op: OpIndex) -> u32 {
        if let Some(&node) = self.ops.get(&op) {
            return node;
        }
        let node = self.network.add_node();
        let units = self.problem.op_seconds[op.index()] * self.units_per_second;
        self.network.add_edge(node, self.sink, whole(units));
        self.ops.insert(op, node);
        for read in self.problem.model.reads(op) {
            if !self.standing[read.index()] {
                let value = self.value(read);
                self.network.add_edge(node, value, UNBOUNDED);
            }
        }
        node
    }

    /// The best bound over all prices, and the choices that are best at it.
    pub(in crate::plan) fn solve(&mut self, target: Bytes) -> Relaxed {
        let room = target.as_f64() - self.fixed;
        let asked = |id: &&AllocationId| self.away[id.index()] && self.problem.is_asked_for(**id);
        let needed = self.problem.candidates.iter().filter(asked);
        let needed: Bytes = needed.map(|&id| self.problem.model.bytes(id)).sum();
        // Where bytes are free, all is held.
        let mut above = Choice {
            treatments: Vec::new(),
            seconds: 0.0,
            held: needed.as_f64(),
        };
        let mut relaxed = Relaxed {
            added_seconds: 0.0,
            choices: Vec::new(),
        };
        if above.held <= room {
            return relaxed;
        }
        self.work = WORK;
        let dear = 1.1 / self.units_per_second * UNITS;
        let Some(mut within) = self.at_price(dear, room, &mut relaxed) else {
            return relaxed;
        };
        if within.held > room {
            relaxed.choices = vec![within];
            return relaxed;
        }
        for _ in 0..PRICES {
            let price = (within.seconds - above.seconds) / (above.held - within.held);
            let meet = above.seconds + price * (above.held - room);
            if !price.is_finite() || relaxed.added_seconds >= meet * (1.0 - 1e-6) {
                break;
            }
            let Some(next) = self.at_price(price, room, &mut relaxed) else {
                break;
            };
            if next.held > room {
                above = next;
            } else {
                within = next;
            }
        }
        relaxed.choices = vec![above, within];
        relaxed
    }

    /// The best choice where a byte held costs `price` seconds; `None` when the work ran out.
    #[expect(clippy::cast_precision_loss, reason = "a bound needs no more")]
    fn at_price(&mut self, price: f64, room: f64, relaxed: &mut Relaxed) -> Option<Choice> {
        for (id, value) in &self.values {
            let bytes = self.problem.model.bytes(*id).as_f64();
            let seconds = (bytes * price).min(self.problem.least_elsewhere(*id).1);
            let units = (seconds * self.units_per_second).min(UNITS * 1.1);
            self.network.set(value.held, whole(units));
        }
        self.network.clear();
        let flow = self.network.flow(self.source, self.sink, &mut self.work);
        let seconds = flow as f64 / self.units_per_second - price * room;
        // A thousandth of a millionth pays for the rounding of these sums.
        relaxed.added_seconds = relaxed.added_seconds.max(seconds * (1.0 - 1e-9));
        (self.work > 0).then(|| self.choice(price))
    }

    fn choice(&self, price: f64) -> Choice {
        let chosen = |node: u32| node != self.sink && self.network.on_source_side(node);
        let mut choice = Choice {
            treatments: Vec::new(),
            seconds: 0.0,
            held: 0.0,
        };
        for (&id, value) in &self.values {
            let bytes = self.problem.model.bytes(id).as_f64();
            let (elsewhere, elsewhere_seconds) = self.problem.least_elsewhere(id);
            if chosen(value.again) {
                choice.treatments.push((id, Treatment::DROP));
            } else if chosen(value.node) && elsewhere_seconds < bytes * price {
                choice.treatments.push((id, elsewhere));
                choice.seconds += elsewhere_seconds;
            } else if chosen(value.node) {
                choice.held += bytes;
            }
        }
        let again = self.ops.iter().filter(|(_, node)| chosen(**node));
        choice.seconds += again
            .map(|(op, _)| self.problem.op_seconds[op.index()])
            .sum::<f64>();
        choice
    }
}

/// Rounded down, so that no capacity is too large.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "neither negative nor above a few times the units of the whole"
)]
fn whole(units: f64) -> u64 {
    units as u64
}

/// What is held at `op` whatever is dropped.
fn standing(problem: &Problem<'_>, op: usize, away: &[bool]) -> Vec<bool> {
    let trace = problem.trace;
    let during = |start: OpIndex, end: OpIndex| start.index() <= op && op < end.index();
    let mut standing: Vec<bool> = trace
        .allocations
        .iter()
        .map(|allocation| {
            allocation
                .natural
                .iter()
                .any(|&(start, end)| during(start, end))
        })
        .collect();
    for saved in &trace.saved {
        standing[trace.allocation_of(saved.value).index()] |= during(saved.pack, saved.release);
    }
    for (standing, &away) in standing.iter_mut().zip(away) {
        *standing &= !away;
    }
    standing
}

//! The driver: from a problem to an answer that says how good it is.
//!
//! Responsible for the sequence bound, one-pass orders, exact search or search by order, for what is known
//! at each moment (the best placement and the proved lower bound) and for the words of the answer. Not
//! responsible for any of these algorithms.

use super::canonical::{Found, Instance, Stop};
use super::greedy::{self, Fit, Greedy};
use super::local_search::{self, Arrangement, End};
use super::portfolio::{self, Effort, Probe};
use super::prepare::Prepared;
use super::sections;
use super::validate::{InvalidPlacement, validate};
use super::{Placement, Problem};

/// What is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Any placement of at most so many bytes.
    Within(u64),
    /// The lowest placement.
    Lowest,
}

/// A goal and what may be spent on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What is wanted.
    pub goal: Goal,
    /// Threads; the answer does not depend on it.
    pub threads: usize,
    /// Nodes of the exact search; for large problems, steps of placing one allocation. With none there is
    /// only time for a few one-pass placements.
    pub work_limit: u64,
}

impl Request {
    /// Work that takes about ten seconds of one core.
    pub const DEFAULT_WORK: u64 = 100_000;

    /// A request with the default limits, on one thread.
    #[must_use]
    pub const fn new(goal: Goal) -> Self {
        Self {
            goal,
            threads: 1,
            work_limit: Self::DEFAULT_WORK,
        }
    }
}

/// What is known about the goal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The placement is as low as any can be.
    Optimal,
    /// The placement is within the capacity, or the lowest found.
    Feasible,
    /// No placement is within the capacity: proved.
    Infeasible,
    /// Neither a placement within the capacity nor a proof that there is none was found.
    Unknown,
}

/// Why the search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The height is the lower bound.
    ProvedOptimal,
    /// The placement is within the capacity.
    WithinCapacity,
    /// The lower bound is above the capacity.
    ProvedInfeasible,
    /// The work limit was reached.
    WorkLimit,
    /// The caller stopped it.
    TimeLimit,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Answer {
    /// What is known about the goal.
    pub status: Status,
    /// Why the search ended.
    pub stop_reason: StopReason,
    /// The lowest placement found, above the capacity when none is within.
    pub placement: Placement,
    /// No placement is lower, in bytes.
    pub lower_bound: u64,
    /// Work done, in the unit of [`Request::work_limit`].
    pub work: u64,
}

/// Orders tried when there is no time for more.
const QUICK_ORDERS: usize = 3;
/// So many allocations take the first round of the exact search a few milliseconds.
const QUICK_EXACT_ALLOCATIONS: usize = 128;
/// The exact search keeps who overlaps whom, and its depth is the number of allocations.
const EXACT_ITEMS: usize = 6_000;
const EXACT_OVERLAPS: usize = 16_000_000;
/// A step of placing one allocation is worth so many nodes of the exact search.
const STEPS_PER_NODE: u64 = 20;
/// The first bisection ends within this part of the lower bound; each further one within a quarter.
const FIRST_PRECISION: u64 = 256;

/// Places all allocations.
///
/// `stop` is asked now and then whether to give up; what was found until then is the answer.
///
/// # Errors
///
/// A placement that fails its check: a bug in memfit.
pub fn place(
    problem: &Problem,
    request: &Request,
    stop: Stop<'_>,
) -> Result<Answer, InvalidPlacement> {
    let prepared = Prepared::new(problem);
    let mut solver = Solver {
        problem,
        prepared: &prepared,
        request,
        stop,
        best: prepared.placement(problem.allocations().len(), &stacked(&prepared)),
        lower_bound: prepared.lower_bound,
        work: 0,
    };
    let end = solver.run();
    let answer = solver.answer(end);
    validate(problem, &answer.placement)?;
    Ok(answer)
}

/// The lowest of a few one-pass placements, in milliseconds: what an estimate needs. Few allocations are
/// searched exactly too.
///
/// # Errors
///
/// A placement that fails its check: a bug in memfit.
pub fn quick(problem: &Problem) -> Result<Answer, InvalidPlacement> {
    let few = problem.allocations().len() <= QUICK_EXACT_ALLOCATIONS;
    let request = Request {
        work_limit: u64::from(few),
        ..Request::new(Goal::Lowest)
    };
    place(problem, &request, &|| false)
}

/// One on top of the other: there is always a placement.
fn stacked(prepared: &Prepared) -> Vec<u64> {
    let mut top = 0;
    let place = prepared.items.iter().map(|item| {
        let offset = item.align(top);
        top = offset + item.size;
        offset
    });
    place.collect()
}

struct Solver<'s> {
    problem: &'s Problem,
    prepared: &'s Prepared,
    request: &'s Request,
    stop: Stop<'s>,
    best: Placement,
    lower_bound: u64,
    work: u64,
}

/// Why the solver ended, where that does not follow from bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Decided,
    WorkLimit,
    Stopped,
}

impl Solver<'_> {
    fn answer(self, ended: Ended) -> Answer {
        let height = self.best.height;
        let within = match self.request.goal {
            Goal::Within(capacity) => height <= capacity,
            Goal::Lowest => true,
        };
        let ran_out = if ended == Ended::Stopped {
            StopReason::TimeLimit
        } else {
            StopReason::WorkLimit
        };
        let (status, stop_reason) = match self.request.goal {
            _ if within && height <= self.lower_bound => {
                (Status::Optimal, StopReason::ProvedOptimal)
            }
            Goal::Within(_) if within => (Status::Feasible, StopReason::WithinCapacity),
            Goal::Within(capacity) if self.lower_bound > capacity => {
                (Status::Infeasible, StopReason::ProvedInfeasible)
            }
            Goal::Within(_) => (Status::Unknown, ran_out),
            Goal::Lowest => (Status::Feasible, ran_out),
        };
        Answer {
            status,
            stop_reason,
            placement: self.best,
            lower_bound: self.lower_bound,
            work: self.work,
        }
    }

    /// The height at which the goal is reached.
    fn goal(&self) -> u64 {
        match self.request.goal {
            // No placement is higher than that, and limits computed from it do not overflow.
            Goal::Within(capacity) => capacity.min(1 << 63),
            Goal::Lowest => self.lower_bound,
        }
    }

    fn is_decided(&self) -> bool {
        let impossible = match self.request.goal {
            Goal::Within(capacity) => self.lower_bound > capacity,
            Goal::Lowest => false,
        };
        impossible || self.best.height <= self.goal().max(self.lower_bound)
    }

    /// Keeps a placement, in units, if it is the lowest.
    fn offer(&mut self, offsets: &[u64]) {
        let count = self.problem.allocations().len();
        let placement = self.prepared.placement(count, offsets);
        if placement.height < self.best.height {
            self.best = placement;
        }
    }

    fn run(&mut self) -> Ended {
        if self.is_decided() {
            return Ended::Decided;
        }
        let mut greedy = Greedy::new(self.prepared);
        let arrangement = self.one_pass(&mut greedy);
        if self.is_decided() {
            return Ended::Decided;
        }
        if (self.stop)() {
            return Ended::Stopped;
        }
        if self.request.work_limit == 0 {
            return Ended::WorkLimit;
        }
        let small = self.prepared.items.len() <= EXACT_ITEMS
            && sections::overlap_count(&self.prepared.spans()) <= EXACT_OVERLAPS;
        if !small {
            return self.by_order(&mut greedy, arrangement);
        }
        drop(greedy);
        let instance = Instance::new(self.prepared);
        match self.request.goal {
            Goal::Within(capacity) => self.within(&instance, capacity),
            Goal::Lowest => self.lowest(&instance),
        }
    }

    /// All one-pass orders until the goal is reached; the lowest arrangement, if a pass was finished.
    fn one_pass(&mut self, greedy: &mut Greedy<'_>) -> Option<Arrangement> {
        let mut lowest: Option<Arrangement> = None;
        let orders = match self.request.work_limit {
            0 => QUICK_ORDERS,
            _ => usize::MAX,
        };
        for order in greedy::orders(self.prepared).take(orders) {
            for fit in [Fit::First, Fit::Best] {
                let limit = lowest.as_ref().map_or(u64::MAX, |best| best.height - 1);
                if let Some(height) = greedy.place(&order, fit, limit) {
                    self.offer(&greedy.offsets);
                    lowest = Some(Arrangement {
                        order: order.clone(),
                        fit,
                        offsets: greedy.offsets.clone(),
                        height,
                    });
                }
                if self.is_decided() || (self.stop)() {
                    return lowest;
                }
            }
        }
        lowest
    }

    fn by_order(&mut self, greedy: &mut Greedy<'_>, start: Option<Arrangement>) -> Ended {
        let Some(mut best) = start else {
            return Ended::WorkLimit;
        };
        let goal = self.prepared.units_within(self.goal());
        let steps = self.request.work_limit.saturating_mul(STEPS_PER_NODE);
        let end = local_search::improve(self.prepared, greedy, &mut best, goal, steps, self.stop);
        self.offer(&best.offsets);
        match end {
            End::Reached => Ended::Decided,
            End::Limit => Ended::WorkLimit,
            End::Stopped => Ended::Stopped,
        }
    }

    /// One probe; what it finds or proves is kept.
    fn probe(
        &mut self,
        instance: &Instance<'_>,
        capacity: u64,
        rounds: std::ops::Range<u32>,
    ) -> Option<Ended> {
        let Some(limits) = self.prepared.limits(capacity) else {
            return Some(Ended::Decided);
        };
        let effort = Effort {
            threads: self.request.threads,
            stop: self.stop,
        };
        let left = self.request.work_limit.saturating_sub(self.work);
        let Probe { found, nodes } = portfolio::probe(instance, &limits, rounds, left, effort);
        self.work = self.work.saturating_add(nodes);
        match found {
            Found::Placed(offsets) => self.offer(&offsets),
            Found::Impossible => {
                let next = self.prepared.next_height(capacity);
                self.lower_bound = self.lower_bound.max(next);
            }
            Found::Limit if (self.stop)() => return Some(Ended::Stopped),
            Found::Limit if self.work >= self.request.work_limit => {
                return Some(Ended::WorkLimit);
            }
            Found::Limit => {}
        }
        self.is_decided().then_some(Ended::Decided)
    }

    fn within(&mut self, instance: &Instance<'_>, capacity: u64) -> Ended {
        self.probe(instance, capacity, 0..u32::MAX)
            .unwrap_or(Ended::WorkLimit)
    }

    /// In turns with ever more nodes for a probe: first the lower bound itself, then bisection between what
    /// this turn has not found and what is known to be possible.
    fn lowest(&mut self, instance: &Instance<'_>) -> Ended {
        let finest = self.prepared.step();
        let mut precision = (self.lower_bound / FIRST_PRECISION).max(finest);
        for round in 0.. {
            if let Some(ended) = self.probe(instance, self.lower_bound, round..round + 1) {
                return ended;
            }
            let mut failed = self.lower_bound;
            while self.best.height - failed > precision {
                let middle = failed.midpoint(self.best.height);
                let before = self.best.height;
                if let Some(ended) = self.probe(instance, middle, round..round + 1) {
                    return ended;
                }
                if self.best.height == before {
                    failed = middle.max(self.lower_bound);
                }
            }
            precision = (precision / 4).max(finest);
        }
        Ended::WorkLimit
    }
}

//! One combination of outer choices, solved.
//!
//! Responsible for what a combination comes to under the inner search. Not responsible for which combinations there are
//! (`combinations.rs`), for the inner search (`search/`), nor for choosing (`choose.rs`).

use super::bound::bound::{Bound, bound};
use super::context::{Outcome, Planner};
use super::outcomes::at_most_equal;
use super::promise::Class;
use super::search::limits::Share;
use super::search::problem::Problem;
use super::search::search::{Found, nothing_done, search};
use super::technique::{half_parameters, micro_batch};
use crate::cost::Costs;
use crate::step::{Passes, Variant};
use crate::trace::{Allocation, Category, OpIndex, Trace, Way};

/// One combination before it is searched: what it is, and what none of its plans can beat.
struct Begun {
    trace: Trace,
    costs: Costs,
    variant: Variant,
    pieces: u64,
    bound: Bound,
    base_seconds: f64,
}

impl Begun {
    #[expect(clippy::cast_precision_loss, reason = "a handful of pieces")]
    fn bound_seconds(&self) -> f64 {
        self.base_seconds + self.bound.added_seconds * self.pieces as f64
    }
}

impl Planner<'_> {
    /// A combination before it is searched.
    fn begun(&self, variant: Variant, pieces: u64) -> Begun {
        let trace = self.piece(pieces);
        let costs = if pieces > 1 {
            self.costs.scaled(self.trace, &trace)
        } else {
            self.costs.clone()
        };
        let bound = bound(
            &Problem::new(&trace, variant, &costs, self.allowed()),
            self.cap,
        );
        let base_seconds = self.base_seconds(&costs, &trace, variant, pieces);
        Begun {
            trace,
            costs,
            variant,
            pieces,
            bound,
            base_seconds,
        }
    }

    fn outcome(&self, begun: Begun, share: Share<'_>, best_seconds: f64) -> Outcome {
        let Begun {
            trace,
            costs,
            variant,
            pieces,
            bound,
            base_seconds,
        } = begun;
        let allowed = self.allowed();
        let problem = Problem::new(&trace, variant, &costs, allowed);
        #[expect(clippy::cast_precision_loss, reason = "a handful of pieces")]
        let worth = (best_seconds - base_seconds) / pieces as f64;
        let Found {
            best,
            lowest,
            evaluations,
            limited,
            near,
        } = if allowed.any() {
            search(&problem, self.target, &bound, worth, share)
        } else {
            nothing_done(&problem, self.target)
        };
        drop(problem);
        let once = Passes {
            variant,
            pieces,
            replays: &[],
        };
        let counted = |best| self.with_replayed_parameters(&costs, &trace, once, best);
        let best = best.map(counted);
        Outcome {
            trace,
            variant,
            pieces,
            way: Way::default(),
            way_promise: Class::Exact,
            way_index: None,
            best,
            lowest,
            bound,
            base_seconds,
            evaluations,
            limited,
            near,
        }
    }

    /// The step on one piece of the batch. The whole batch stays alive: pieces are views of it. So does, in inference,
    /// what forward returns: all pieces but the first run beside it.
    pub(super) fn piece(&self, pieces: u64) -> Trace {
        if pieces <= 1 {
            return self.trace.alone();
        }
        let scaled = self
            .trace
            .at_batch(micro_batch::piece_items(self.trace, pieces));
        let mut piece = scaled.unwrap_or_else(|_| self.trace.alone());
        for (part, full) in piece.allocations.iter_mut().zip(&self.trace.allocations) {
            if full.category == Category::Input {
                part.bytes = full.bytes;
            }
        }
        if !self.trace.meta.training {
            piece.allocations.push(Allocation {
                bytes: micro_batch::result_bytes(self.trace),
                device: 0,
                category: Category::Temporary,
                producer: None,
                natural: vec![(OpIndex(0), self.trace.end())],
                name: 0,
                law: None,
            });
        }
        piece
    }

    pub(super) fn may_cut_batch(&self) -> bool {
        micro_batch::may_cut(self.trace, self.request)
    }

    /// Some combinations, solved; that which may be fastest is searched first, and one that cannot be faster than
    /// what is known not for its fastest plan.
    pub(super) fn outcomes(
        &self,
        tries: &[(Variant, u64)],
        share: Share<'_>,
        best_seconds: f64,
    ) -> Vec<Outcome> {
        let begun = tries.iter().enumerate();
        let mut begun: Vec<_> = begun
            .map(|(index, &(variant, pieces))| (index, self.begun(variant, pieces)))
            .collect();
        // Where updates may be rounded, those that keep them whole come first, whatever they take.
        if !half_parameters::must_narrow_state(self.trace) {
            begun.sort_by(|(_, a), (_, b)| a.bound_seconds().total_cmp(&b.bound_seconds()));
        }
        let (mut share, mut best) = (share, (best_seconds, 0));
        let mut solved = Vec::new();
        for (number, (index, combination)) in begun.into_iter().enumerate() {
            let own = share.part(number, tries.len());
            let own = own.for_one(index + 1 == tries.len());
            // Equal times go to the earlier.
            let worth = if index < best.1 {
                at_most_equal(best.0)
            } else {
                best.0
            };
            let outcome = self.outcome(combination, own, worth);
            let seconds = outcome.best_seconds().unwrap_or(f64::INFINITY);
            if seconds < worth {
                best = (seconds.min(best.0), index);
            }
            share = share.knowing(outcome.lowest.evaluation.peak_bytes);
            solved.push((index, outcome));
        }
        solved.sort_by_key(|&(index, _)| index);
        solved.into_iter().map(|(_, outcome)| outcome).collect()
    }
}

//! What a plan is chosen by.
//!
//! Responsible for what every combination is tried with (the step, its costs, the request, the limits) and for what is
//! known of one that was solved. Not responsible for solving it (`solve.rs`), for which combinations there are
//! (`combinations.rs`), nor for choosing (`choose.rs`).

use super::bound::bound::Bound;
use super::document::StopReason;
use super::executor;
use super::promise::Class;
use super::request::PlanRequest;
use super::search::limits::Share;
use super::search::problem::Candidate;
use super::technique::addresses::watched_ops;
use super::validate::InvalidPlan;
use crate::bytes::Bytes;
use crate::cost::{CostError, Costs};
use crate::step::Variant;
use crate::trace::{Alternative, Trace, Way};

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The op times cannot be used.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// The plan failed its check: a bug in memfit.
    #[error("internal error: {0}; please report this with the saved trace")]
    Invalid(#[from] InvalidPlan),
}

/// One combination of outer choices, solved.
pub(super) struct Outcome {
    pub(super) trace: Trace,
    pub(super) variant: Variant,
    pub(super) pieces: u64,
    /// The way in which the step runs.
    pub(super) way: Way,
    /// What that promises about numbers.
    pub(super) way_promise: Class,
    /// Its index, see [`Planner::ways`]; none where the step runs plainly.
    pub(super) way_index: Option<usize>,
    pub(super) best: Option<Candidate>,
    pub(super) lowest: Candidate,
    pub(super) bound: Bound,
    /// Seconds of the step without replays and waits for activations.
    pub(super) base_seconds: f64,
    pub(super) evaluations: u64,
    pub(super) limited: Option<StopReason>,
    pub(super) near: bool,
}

impl Outcome {
    /// The promise of one of its plans.
    pub(super) fn class_of(&self, candidate: &Candidate) -> Class {
        let is_narrow = self.variant.eight_bit_state.is_some();
        let of_way = self.way_promise;
        if is_narrow || candidate.treatments.iter().any(|it| it.is_shrink()) {
            Class::Approximate
        } else if self.pieces > 1 {
            of_way.max(Class::Equivalent)
        } else {
            of_way
        }
    }

    /// Seconds of the step by one of its plans.
    #[expect(clippy::cast_precision_loss, reason = "ops of a step")]
    pub(super) fn seconds(&self, candidate: &Candidate) -> f64 {
        let watched = watched_ops(&self.trace, &candidate.treatments) * self.pieces;
        self.seconds_unwatched(candidate)
            + watched as f64 * executor::watch_seconds(&self.trace.meta)
    }

    /// The same without those that watching takes: what the search and its bound weigh.
    #[expect(clippy::cast_precision_loss, reason = "a handful of pieces")]
    pub(super) fn seconds_unwatched(&self, candidate: &Candidate) -> f64 {
        self.base_seconds + candidate.added_seconds * self.pieces as f64
    }

    /// Of its fastest plan that fits, if there is one.
    pub(super) fn best_seconds(&self) -> Option<f64> {
        Some(self.seconds(self.best.as_ref()?))
    }

    #[expect(clippy::cast_precision_loss, reason = "a handful of pieces")]
    pub(super) fn bound_seconds(&self) -> f64 {
        self.base_seconds + self.bound.added_seconds * self.pieces as f64
    }
}

/// The step in another way, and what its ops cost.
pub(super) struct OtherWay<'t> {
    pub(super) alternative: &'t Alternative,
    /// What it promises about numbers.
    pub(super) promise: Class,
    pub(super) costs: Costs,
    /// What may be done with it.
    pub(super) request: PlanRequest,
}

#[derive(Clone, Copy)]
pub(super) struct Planner<'t> {
    pub(super) trace: &'t Trace,
    pub(super) costs: &'t Costs,
    /// The step in other ways.
    pub(super) ways: &'t [OtherWay<'t>],
    pub(super) request: &'t PlanRequest,
    /// What the requests of a plan must stay within.
    pub(super) target: Bytes,
    /// What the device gives, at least `target`.
    pub(super) cap: Bytes,
    pub(super) unplanned_peak: Bytes,
    /// Activations may be held in narrower forms.
    pub(super) may_shrink: bool,
    /// The optimizer's state may be in 8 bits.
    pub(super) may_narrow_state: bool,
    /// Nothing was tried yet with this trace: not even what needs no leave.
    pub(super) is_new: bool,
    pub(super) share: Share<'t>,
}

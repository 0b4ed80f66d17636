//! The choice, written into a plan.
//!
//! Responsible for the check before anything is written, and for the order of the actions. Not responsible for choosing
//! (`choose.rs`), nor for what a technique writes (`technique/`).

use super::choice::Chosen;
use super::context::{OtherWay, Outcome, PlanError, Planner};
use super::search::problem::{Candidate, Problem};
use super::technique::addresses::{Directions, directions};
use super::validate::{InvalidPlan, validate};
use super::{ActionKind, Estimate, Plan, TECHNIQUES, Technique, arena};

impl Planner<'_> {
    /// Fills in what is done and what it leads to, after the check.
    pub(super) fn write(
        &self,
        plan: &mut Plan,
        outcome: &Outcome,
        candidate: &Candidate,
    ) -> Result<(), PlanError> {
        let peak = candidate.evaluation.peak_bytes;
        let treatments = &candidate.treatments;
        validate(&outcome.trace, outcome.variant, treatments, peak)?;
        if peak > self.unplanned_peak {
            let unplanned = self.unplanned_peak;
            return Err(InvalidPlan::Rises {
                planned: peak,
                unplanned,
            }
            .into());
        }
        let seconds = outcome.seconds(candidate);
        plan.planned = Estimate {
            predicted_peak_bytes: peak,
            predicted_step_seconds: seconds,
        };
        plan.predicted_step_ratio = seconds / self.costs.step_seconds().max(f64::MIN_POSITIVE);
        plan.promise = outcome.class_of(candidate);
        if let Some(step) = self.step_of(outcome) {
            step.costs.source().clone_into(&mut plan.cost_source);
        }
        if self.says_how_small() {
            plan.arena = arena::arena(&outcome.trace, outcome.variant, treatments);
        }
        let chosen = Chosen {
            planner: self,
            outcome,
            candidate,
            directions: self.directions(outcome, candidate),
        };
        for technique in used(outcome, candidate) {
            (technique.write)(&chosen, plan);
        }
        Ok(())
    }

    fn directions(&self, outcome: &Outcome, candidate: &Candidate) -> Directions {
        let treatments = &candidate.treatments;
        if treatments.iter().all(|treatment| treatment.is_keep()) {
            return Directions::default();
        }
        let allowed = self.allowed();
        let costs = self.step_of(outcome).map_or(self.costs, |step| &step.costs);
        let problem = Problem::new(&outcome.trace, outcome.variant, costs, allowed);
        directions(&problem, treatments, allowed.offer)
    }

    /// The step in another way that an outcome runs.
    pub(super) fn step_of(&self, outcome: &Outcome) -> Option<&OtherWay<'_>> {
        self.ways.get(outcome.way_index?)
    }
}

/// The techniques that a candidate uses, in the order of a plan's actions.
fn used(outcome: &Outcome, candidate: &Candidate) -> Vec<&'static Technique> {
    let used = TECHNIQUES.iter().copied();
    let mut used: Vec<_> = used.filter(|it| (it.is_used)(outcome, candidate)).collect();
    used.sort_by_key(|technique| technique.acts_on);
    used
}

/// Kinds of action in an outcome that is not exact, to name what it owes its peak to.
pub(super) fn equivalent_kinds(outcome: &Outcome, candidate: &Candidate) -> Vec<ActionKind> {
    let kinds = used(outcome, candidate).into_iter().map(|it| it.kind);
    // An exact plan has it as well, at no cost in time.
    kinds
        .filter(|&kind| kind != ActionKind::FuseOptimizer)
        .collect()
}

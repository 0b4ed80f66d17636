//! Saved activations that backward never needs, let go of at once.
//!
//! Autograd saves what a backward might read: of a branch whose backward never runs, and inputs of which a backward
//! reads the shape alone. Nothing is computed again for them, so letting go of them costs no time but the watch's. The executor keeps a
//! record of how to make each all the same, should the step turn out to be another one.
//!
//! Responsible for whether a plan has any, for the action and for the words. Not responsible for which of a plan's drops
//! they are (`addresses.rs`), nor for finding out what backward asks for: a saved tensor of the trace without an unpack says so.

use super::{ActsOn, Technique, counted};
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan};
use crate::step::Treatment;
use crate::trace::{SavedTensor, Trace};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::UnneededSaves,
    name: "unneeded_saves",
    title: "unneeded saves",
    help: "Let go of saved activations that backward never needs",
    promise: Class::Exact,
    effect: |action| {
        let them = if action.count == 1 { "it" } else { "them" };
        let what = counted(action.count, "saved tensor");
        format!("{what} let go: backward never needs {them}")
    },
    short: Some(|count| format!("{} let go", counted(count, "unneeded save"))),
    acts_on: ActsOn::Activations,
    only_where_needed: false,
    // Most steps have none, and where a request forbids it no step gets slower.
    refusal: |_, _| None,
    is_used: |outcome, candidate| drops(&outcome.trace, &candidate.treatments).0,
    write,
};

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some(unneeded_saves) = chosen.directions.unneeded_saves.clone() else {
        return;
    };
    let count = unneeded_saves.drops.len() as u64;
    let bytes = unneeded_saves.drops.iter().map(|drop| drop.bytes).sum();
    let details = Details::UnneededSaves { unneeded_saves };
    plan.actions.push(Action::new(details, count, bytes));
}

/// Are there drops of what backward never asks for, and others?
pub(super) fn drops(trace: &Trace, treatments: &[Treatment]) -> (bool, bool) {
    let mut is_never_asked_for = vec![false; treatments.len()];
    for saved in &trace.saved {
        is_never_asked_for[trace.allocation_of(saved.value).index()] = true;
    }
    let is_asked = |saved: &&SavedTensor| saved.unpack.is_some() || saved.release >= trace.end();
    for saved in trace.saved.iter().filter(is_asked) {
        is_never_asked_for[trace.allocation_of(saved.value).index()] = false;
    }
    let drops = || {
        let both = treatments.iter().zip(&is_never_asked_for);
        both.filter(|(treatment, _)| treatment.is_drop())
    };
    (drops().any(|(_, &it)| it), drops().any(|(_, &it)| !it))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::{Budget, Bytes};
    use crate::cost::CostSource;
    use crate::plan::{PlanRequest, executor, plan};
    use crate::trace::sample;

    /// The chain of which backward asks for nothing that was made in forward.
    fn never_asked() -> Trace {
        let mut trace = sample::chain();
        for saved in &mut trace.saved {
            saved.unpack = None;
        }
        trace
    }

    fn planned(trace: &Trace, forbid: Vec<ActionKind>) -> Plan {
        let op_seconds = vec![1.0; trace.ops.len()];
        let request = PlanRequest {
            budget: Budget::Absolute(Bytes(1)),
            forbid,
            ..PlanRequest::default()
        };
        plan(trace, &CostSource::profile(op_seconds), &request).unwrap()
    }

    fn kinds(plan: &Plan) -> Vec<ActionKind> {
        plan.actions.iter().map(Action::kind).collect()
    }

    #[test]
    fn what_backward_never_asks_for_goes_at_no_cost_and_without_leave_to_recompute() {
        let trace = never_asked();
        let made = planned(&trace, vec![ActionKind::Remat]);
        assert!(kinds(&made).contains(&ActionKind::UnneededSaves));
        assert!(!kinds(&made).contains(&ActionKind::Remat));
        let watched = made.actions.iter().map(|action| match &action.details {
            Details::UnneededSaves { unneeded_saves } => {
                let active = unneeded_saves.active.iter();
                active.map(|at| at.end.0 - at.start.0).sum()
            }
            _ => 0,
        });
        let watch_seconds = f64::from(watched.sum::<u32>()) * executor::watch_seconds(&trace.meta);
        assert!(watch_seconds > 0.0);
        let step_seconds = made.planned.predicted_step_seconds - watch_seconds;
        assert!(step_seconds / made.unplanned.predicted_step_seconds <= 1.0 + 1e-12);
        let kept = planned(&trace, vec![ActionKind::Remat, ActionKind::UnneededSaves]);
        assert!(!kinds(&kept).contains(&ActionKind::UnneededSaves));
        assert!(made.planned.predicted_peak_bytes < kept.planned.predicted_peak_bytes);
    }

    #[test]
    fn what_backward_asks_for_is_recomputed() {
        let made = planned(&sample::chain(), Vec::new());
        assert!(kinds(&made).contains(&ActionKind::Remat));
        assert!(!kinds(&made).contains(&ActionKind::UnneededSaves));
    }
}

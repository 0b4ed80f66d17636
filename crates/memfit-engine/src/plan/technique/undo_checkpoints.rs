//! A step without the checkpoints that the model has itself.
//!
//! A checkpoint of torch's drops all that its body saves, and has it whole again in backward: one round the whole model
//! saves nothing at the peak. An ordinary forward of the body computes the same bits, and then the plan decides about
//! each tensor.
//!
//! Responsible for when checkpoints may be undone, for the action and for the words. Not responsible for proving that
//! their bodies only compute, nor for the capture without them (the Python package does both), nor for trying it
//! (`plan/ways.rs`).

use super::{ActsOn, Technique, counted};
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::predict;
use crate::trace::{Trace, Way};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::UndoCheckpoints,
    name: "undo_checkpoints",
    title: "checkpoints undone",
    help: "Undo checkpoints of the model's own; the plan recomputes instead",
    promise: Class::Exact,
    effect: |action| {
        format!(
            "{} of the model run as ordinary forward",
            counted(action.count, "checkpoint")
        )
    },
    short: None,
    acts_on: ActsOn::Computation,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.way.undo_checkpoints,
    write,
};

/// The way in which a step runs without its checkpoints, and plainly otherwise.
pub(in crate::plan) fn alone() -> Way {
    Way {
        undo_checkpoints: true,
        ..Way::default()
    }
}

/// Why they stay; `None` where they need not, or where there are none that matter.
fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    let checkpoints = trace.meta.checkpoints.as_ref()?;
    if fits_with(trace, request) {
        return None;
    }
    if request.forbid.contains(&ActionKind::UndoCheckpoints) {
        return Some("forbidden by the request".to_owned());
    }
    if !checkpoints.refusal.is_empty() {
        return Some(format!("of one, {}", checkpoints.refusal));
    }
    let Some(found) = &trace.alternatives else {
        return Some("the step was not captured without its checkpoints".to_owned());
    };
    let is_captured = found.steps.iter().any(|it| it.way.undo_checkpoints);
    (!is_captured).then(|| found.refusals.checkpoints.clone())
}

/// Does the step fit with them as it is, so that there is nothing to plan?
pub(in crate::plan) fn fits_with(trace: &Trace, request: &PlanRequest) -> bool {
    let peak = predict::unplanned_peak(trace);
    let free = request.budget.resolve(peak) - predict::margin(trace, peak);
    peak <= free
}

/// May they be undone?
pub(in crate::plan) fn may(trace: &Trace, request: &PlanRequest) -> bool {
    let checkpoints = trace.meta.checkpoints.as_ref();
    checkpoints.is_some_and(|it| it.refusal.is_empty())
        && !request.forbid.contains(&ActionKind::UndoCheckpoints)
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let checkpoints = chosen.planner.trace.meta.checkpoints.as_ref();
    let count = checkpoints.map_or(0, |it| it.count);
    let less = chosen.peak_in(&Way::default()) - chosen.peak_in(&alone());
    let action = Action::new(Details::UndoCheckpoints {}, count, less);
    plan.actions.push(action);
    plan.notes.push(
        "checkpoints of the model are undone: the plan decides what is recomputed".to_owned(),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::{Budget, Bytes};
    use crate::cost::CostSource;
    use crate::plan::{Verdict, plan, ways};
    use crate::trace::{Alternative, Alternatives, Checkpoints, Refusals, sample};

    /// A step with checkpoints, and the same without, which makes all in half of the bytes.
    fn pair(refusal: &str) -> (Trace, Trace) {
        let mut with = sample::chain();
        let mut without = with.clone();
        with.meta.checkpoints = Some(Checkpoints {
            count: 2,
            refusal: refusal.to_owned(),
        });
        for allocation in &mut without.allocations {
            if allocation.producer.is_some() {
                allocation.bytes = Bytes(allocation.bytes.0 / 2);
            }
        }
        (with, without)
    }

    fn request(budget: Budget, forbid: Vec<ActionKind>) -> PlanRequest {
        PlanRequest {
            budget,
            forbid,
            ..PlanRequest::default()
        }
    }

    fn planned(trace: &Trace, request: &PlanRequest) -> Plan {
        let source = CostSource::profile(vec![1.0; trace.ops.len()]);
        plan(trace, &source, request).unwrap()
    }

    fn captured(with: &Trace, without: Trace) -> Trace {
        let steps = vec![Alternative {
            way: alone(),
            trace: without,
        }];
        let alternatives = Alternatives {
            steps,
            ..Alternatives::default()
        };
        with.with_alternatives(alternatives).unwrap()
    }

    #[test]
    fn a_step_is_captured_without_its_checkpoints_only_where_that_may_help() {
        let tight = request(Budget::Percent(50.0), Vec::new());
        let (with, without) = pair("");
        assert_eq!(ways(&with, &tight, None), [alone()]);
        assert_eq!(ways(&without, &tight, None), []);
        let ample = request(Budget::Percent(200.0), Vec::new());
        assert_eq!(ways(&with, &ample, None), []);
        let forbidden = request(Budget::Percent(50.0), vec![ActionKind::UndoCheckpoints]);
        assert_eq!(ways(&with, &forbidden, None), []);
        let (unsafe_, _) = pair("it writes");
        assert_eq!(ways(&unsafe_, &tight, None), []);
    }

    #[test]
    fn where_nothing_else_fits_the_other_ways_are_still_asked_for() {
        let (with, _) = pair("");
        let mut trace = sample::loss_over_classes(512, None);
        trace.meta.checkpoints = with.meta.checkpoints;
        let tight = request(Budget::Absolute(Bytes(1)), Vec::new());
        assert_eq!(ways(&trace, &tight, None), [alone()]);
        let undone = Trace {
            alternatives: None,
            ..sample::loss_over_classes(512, None)
        };
        let trace = captured(&trace, undone);
        let made = planned(&trace, &tight);
        assert_eq!(made.verdict, Verdict::DoesNotFit);
        let more = ways(&trace, &tight, Some(&made));
        assert!(more.iter().all(|way| way.chunk.is_some()));
        assert!(more.iter().any(|way| way.undo_checkpoints));
        assert!(more.iter().any(|way| !way.undo_checkpoints));
    }

    #[test]
    fn checkpoints_are_undone_where_that_is_the_better_plan() {
        let (with, without) = pair("");
        let trace = captured(&with, without.clone());
        let peak = predict::unplanned_peak(&without);
        let budget =
            Budget::Absolute(peak + predict::margin(&with, predict::unplanned_peak(&with)));
        let made = planned(&trace, &request(budget, vec![ActionKind::Remat]));
        assert_eq!((made.verdict, made.promise), (Verdict::Fits, Class::Exact));
        let kinds: Vec<_> = made.actions.iter().map(Action::kind).collect();
        assert!(kinds.contains(&ActionKind::UndoCheckpoints), "{kinds:?}");
        let is_undone = |it: &&Action| it.kind() == ActionKind::UndoCheckpoints;
        let action = made.actions.iter().find(is_undone).unwrap();
        assert_eq!(action.count, 2);
        assert_eq!(action.bytes, predict::unplanned_peak(&with) - peak);
        assert!(made.notes.iter().any(|note| note.contains("undone")));
        assert!(made.way().undo_checkpoints);
        // And they stay where that is as good.
        let same = captured(
            &with,
            Trace {
                alternatives: None,
                ..sample::chain()
            },
        );
        let made = planned(&same, &request(Budget::Percent(95.0), Vec::new()));
        assert!(!made.way().undo_checkpoints, "{:?}", made.actions);
    }

    #[test]
    fn why_they_stay_is_said_where_there_are_some() {
        let tight = request(Budget::Percent(60.0), Vec::new());
        let reason = |trace: &Trace, request: &PlanRequest| {
            let mut refusals = planned(trace, request).refusals.into_iter();
            let found = refusals.find(|it| it.kind == ActionKind::UndoCheckpoints);
            found.map(|it| it.reason)
        };
        let (with, without) = pair("");
        assert_eq!(reason(&without, &tight), None);
        assert_eq!(
            reason(&with, &request(Budget::Percent(200.0), Vec::new())),
            None
        );
        assert!(reason(&with, &tight).unwrap().contains("not captured"));
        let forbidden = request(Budget::Percent(60.0), vec![ActionKind::UndoCheckpoints]);
        assert_eq!(
            reason(&with, &forbidden).unwrap(),
            "forbidden by the request"
        );
        let (writes, _) = pair("it writes");
        assert_eq!(reason(&writes, &tight).unwrap(), "of one, it writes");
        let alternatives = Alternatives {
            refusals: Refusals {
                checkpoints: "it failed".to_owned(),
                ..Refusals::default()
            },
            ..Alternatives::default()
        };
        let failed = with.with_alternatives(alternatives).unwrap();
        assert_eq!(reason(&failed, &tight).unwrap(), "it failed");
    }
}

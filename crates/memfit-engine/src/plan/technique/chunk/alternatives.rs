//! The outer choice of running part of the step in slices.
//!
//! Responsible for op times of a step in slices, for trying each captured alternative with the inner search,
//! jointly with the other outer choices, and for why there is none. Not responsible for which alternatives
//! are captured (`candidates.rs`) nor for choosing among what comes out (`choose.rs`).

use super::candidates;
use crate::cost::{CostError, CostSource, Costs};
use crate::plan::context::{Outcome, Planner, Sliced};
use crate::plan::search::limits::Share;
use crate::plan::{ActionKind, PlanRequest};
use crate::trace::Trace;

/// Every alternative with its op times. Those of a profiled step are known op by op: an op that both steps
/// have takes the same time, the others take theirs by their work.
pub(in crate::plan) fn sliced<'t>(
    trace: &'t Trace,
    source: &CostSource,
    costs: &Costs,
    request: &PlanRequest,
) -> Result<Vec<Sliced<'t>>, CostError> {
    if request.forbid.contains(&ActionKind::Chunk) {
        return Ok(Vec::new());
    }
    let steps = trace.alternatives().iter().map(|alternative| {
        let costs = match source {
            CostSource::Roofline { .. } => Costs::new(&alternative.trace, source)?,
            CostSource::Profile { .. } => costs.carried_over(trace, &alternative.trace),
        };
        Ok(Sliced { alternative, costs })
    });
    steps.collect()
}

/// Why something, or all, cannot run in slices; `None` when what is worth it can.
pub(in crate::plan) fn why_none(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if request.forbid.contains(&ActionKind::Chunk) {
        return Some("forbidden by the request".to_owned());
    }
    if let Some(found) = &trace.alternatives {
        return match (found.steps.is_empty(), found.refusal.as_str()) {
            (false, "") => None,
            (true, "") => Some("nothing runs in slices".to_owned()),
            (_, reason) => Some(reason.to_owned()),
        };
    }
    let reason = candidates::chunks(trace).err();
    Some(reason.unwrap_or_else(|| "the step was not captured in slices".to_owned()))
}

/// Every alternative, solved: alone, and the one with the smallest slices on pieces of the batch too.
pub(in crate::plan) fn outcomes(
    planner: &Planner<'_>,
    share: Share<'_>,
    mut best_seconds: f64,
) -> Vec<Outcome> {
    let mut found = Vec::new();
    let may_cut = planner.may_cut_batch();
    let count = planner.sliced.len();
    for (index, step) in planner.sliced.iter().enumerate() {
        let own = Planner {
            trace: &step.alternative.trace,
            costs: &step.costs,
            sliced: &[],
            ..*planner
        };
        let share = share.part(index, count);
        let is_cut = index + 1 == count && may_cut && own.trace.couplings.is_some();
        let kinds = 1 + usize::from(is_cut);
        let mut outcomes = own.whole_batch(share.part(0, kinds), best_seconds);
        best_seconds = outcomes
            .iter()
            .filter_map(|outcome| Some(outcome.seconds(outcome.best.as_ref()?)))
            .fold(best_seconds, f64::min);
        if is_cut {
            outcomes.extend(own.micro_batches(share.part(1, kinds), best_seconds));
        }
        for outcome in &mut outcomes {
            outcome.sliced = Some(index);
        }
        found.extend(outcomes);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::{Budget, Bytes};
    use crate::plan::{Class, Details, Verdict, plan, wants_alternatives};
    use crate::predict;
    use crate::trace::{Alternative, Alternatives, Chunk, LossChunk, sample};

    fn request(budget: u64, allow: Class) -> PlanRequest {
        PlanRequest {
            budget: Budget::Absolute(Bytes(budget)),
            allow,
            ..PlanRequest::default()
        }
    }

    fn source(trace: &Trace) -> CostSource {
        CostSource::Profile {
            op_seconds: vec![1.0; trace.ops.len()],
        }
    }

    /// A chain whose alternative makes everything in half of the bytes.
    fn chain() -> Trace {
        let mut trace = sample::chain();
        let mut halved = trace.clone();
        for allocation in &mut halved.allocations {
            if allocation.producer.is_some() {
                allocation.bytes = Bytes(allocation.bytes.0 / 2);
            }
        }
        let loss = LossChunk {
            slices: 8,
            weight: "head.weight".to_owned(),
            rows: 4,
            classes: 8,
            logit_bytes: Bytes(128),
        };
        let chunk = Chunk {
            loss: Some(loss),
            calls: Vec::new(),
        };
        let steps = vec![Alternative {
            chunk,
            trace: halved,
        }];
        let refusal = String::new();
        trace.alternatives = Some(Alternatives { steps, refusal });
        trace
    }

    #[test]
    fn where_nothing_exact_fits_the_step_runs_in_slices_with_its_own_peak() {
        let trace = chain();
        let lowest = plan(&trace, &source(&trace), &request(1, Class::Exact)).unwrap();
        assert_eq!(lowest.verdict, Verdict::DoesNotFit);
        let exact = PlanRequest {
            forbid: vec![ActionKind::Chunk, ActionKind::MicroBatch],
            ..request(1, Class::Exact)
        };
        let exact = plan(&trace, &source(&trace), &exact).unwrap();
        assert!(lowest.minimum_peak_bytes < exact.minimum_peak_bytes);
        let budget = lowest.minimum_budget_bytes();
        let made = plan(&trace, &source(&trace), &request(budget.0, Class::Exact)).unwrap();
        assert_eq!(
            (made.verdict, made.promise),
            (Verdict::Fits, Class::Equivalent)
        );
        let chunk = made
            .actions
            .iter()
            .find(|it| it.kind() == ActionKind::Chunk);
        let action = chunk.expect("only slices fit");
        let Details::Chunk { chunk } = &action.details else {
            panic!("{action:?}")
        };
        assert_eq!(chunk.slices(), 8);
        let saved = predict::unplanned_peak(&trace)
            - predict::unplanned_peak(&trace.alternatives()[0].trace);
        assert_eq!((action.count, action.bytes), (8, saved));
    }

    #[test]
    fn an_exact_plan_that_fits_comes_first_and_a_forbidden_kind_is_left_out() {
        let trace = chain();
        let ample = plan(
            &trace,
            &source(&trace),
            &request(1 << 20, Class::Equivalent),
        )
        .unwrap();
        assert!(ample.actions.is_empty());
        let forbidden = PlanRequest {
            forbid: vec![ActionKind::Chunk],
            ..request(1, Class::Equivalent)
        };
        let made = plan(&trace, &source(&trace), &forbidden).unwrap();
        assert!(made.actions.iter().all(|it| it.kind() != ActionKind::Chunk));
        let refusal = made.refusals.iter().find(|it| it.kind == ActionKind::Chunk);
        assert!(refusal.expect("it is said").reason.contains("forbidden"));
    }

    #[test]
    fn slices_work_inside_the_users_own_loop() {
        let trace = chain();
        let own = PlanRequest {
            own_loop: true,
            forbid: vec![ActionKind::Remat],
            ..request(1, Class::Exact)
        };
        let made = plan(&trace, &source(&trace), &own).unwrap();
        assert!(made.actions.iter().any(|it| it.kind() == ActionKind::Chunk));
    }

    #[test]
    fn a_capture_is_asked_for_only_where_it_may_help() {
        let mut trace = chain();
        assert!(!wants_alternatives(
            &trace,
            &request(1, Class::Equivalent),
            None
        ));
        trace.alternatives = None;
        // This step has no loss over classes.
        assert!(!wants_alternatives(
            &trace,
            &request(1, Class::Equivalent),
            None
        ));
        let reason = why_none(&trace, &request(1, Class::Exact)).unwrap();
        assert!(reason.contains("straight from a linear layer"), "{reason}");
    }
}

//! Inference without the graph that autograd records of it.
//!
//! A forward of inference may turn gradients on, and then autograd keeps activations for a backward that never comes.
//! Run without, it computes the same, with the same bits unless torch has other ops for it (fused attention); what it
//! returns has no graph.
//!
//! Responsible for when a step has a graph that is never used, for the action and for the words. Not responsible for the
//! capture without it (the Python package), which fails where forward needs the graph after all, nor for trying it
//! (`plan/ways.rs`).

use super::{ActsOn, Technique};
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::trace::{Trace, Way};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::NoGraph,
    name: "no_graph",
    title: "no graph",
    help: "Keep autograd off in a forward of inference that turns it on",
    promise: Class::Exact,
    effect: |_| "forward under `torch.no_grad()`: its graph is never used".to_owned(),
    short: None,
    acts_on: ActsOn::Computation,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.way.no_graph,
    write,
};

/// Why a graph that is never used is recorded all the same; `None` where it is not, or where there is none.
fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if !keeps_graph(trace) {
        return None;
    }
    if request.forbid.contains(&ActionKind::NoGraph) {
        return Some("forbidden by the request".to_owned());
    }
    let Some(found) = &trace.alternatives else {
        return Some("the step was not captured without its graph".to_owned());
    };
    let is_captured = found.steps.iter().any(|it| it.way.no_graph);
    (!is_captured).then(|| found.refusals.graph.clone())
}

/// Does autograd record a forward that has no backward? Autocast's casts of weights, which it always does, are none.
fn keeps_graph(trace: &Trace) -> bool {
    let is_cast = |name| trace.string(name) == "aten._to_copy.default";
    let mut recorded = trace.ops.iter().filter(|op| op.node.is_some());
    !trace.meta.training && recorded.any(|op| !is_cast(op.name))
}

/// May it be kept from that?
pub(in crate::plan) fn may(trace: &Trace, request: &PlanRequest) -> bool {
    keeps_graph(trace) && !request.forbid.contains(&ActionKind::NoGraph)
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let alone = Way {
        no_graph: true,
        ..Way::default()
    };
    let less = chosen.peak_in(&Way::default()) - chosen.peak_in(&alone);
    let mut steps = chosen.planner.ways.iter();
    let alone = steps.find(|step| step.alternative.way == alone);
    let promise = alone.map_or(Class::Equivalent, |step| step.promise);
    plan.actions.push(Action {
        promise,
        ..Action::new(Details::NoGraph {}, 1, less)
    });
    plan.notes.push(match promise {
        Class::Exact => "without a graph, what forward returns has the same bits and no gradient".to_owned(),
        _ => "without a graph torch runs other ops for the same (fused attention): what forward returns differs by \
              rounding, and has no gradient"
            .to_owned(),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Budget;
    use crate::cost::CostSource;
    use crate::plan::{Verdict, plan, ways};
    use crate::predict;
    use crate::trace::{Alternative, Alternatives, OpIndex, Refusals, sample};

    /// A forward that keeps all it makes, and the same without its graph.
    fn kept() -> (Trace, Trace) {
        let without = sample::inference(64);
        let mut with = without.clone();
        if let Some(inference) = &mut with.meta.inference {
            inference.has_graph = true;
        }
        let end = with.end();
        for allocation in &mut with.allocations {
            allocation.natural = vec![(allocation.producer.unwrap_or(OpIndex(0)), end)];
        }
        for (node, op) in (0..).zip(&mut with.ops) {
            op.node = Some(node);
        }
        (with, without)
    }

    fn planned(trace: &Trace, forbid: Vec<ActionKind>, percent: f64) -> Plan {
        let request = PlanRequest {
            budget: Budget::Percent(percent),
            forbid,
            ..PlanRequest::default()
        };
        plan(
            trace,
            &CostSource::profile(vec![1.0; trace.ops.len()]),
            &request,
        )
        .unwrap()
    }

    fn captured(with: &Trace, without: &Trace) -> Trace {
        let request = PlanRequest::default();
        let way = ways(with, &request, None).remove(0);
        assert!(way.no_graph && way.chunk.is_none());
        let alternatives = Alternatives {
            steps: vec![Alternative {
                way,
                trace: without.clone(),
            }],
            ..Alternatives::default()
        };
        with.with_alternatives(alternatives).unwrap()
    }

    #[test]
    fn a_graph_that_is_never_used_is_not_recorded() {
        let (with, without) = kept();
        let trace = captured(&with, &without);
        let made = planned(&trace, vec![ActionKind::MicroBatch], 99.0);
        assert_eq!((made.verdict, made.promise), (Verdict::Fits, Class::Exact));
        let peak = predict::unplanned_peak(&without);
        assert_eq!(made.planned.predicted_peak_bytes, peak);
        let kinds: Vec<_> = made.actions.iter().map(Action::kind).collect();
        assert_eq!(kinds, [ActionKind::NoGraph]);
        // And then the batch may be cut.
        let made = planned(&trace, Vec::new(), 40.0);
        let kinds: Vec<_> = made.actions.iter().map(Action::kind).collect();
        assert_eq!(kinds, [ActionKind::NoGraph, ActionKind::MicroBatch]);
        assert_eq!(made.promise, Class::Equivalent);
        let is_of_either = |it: &crate::plan::Refusal| kinds.contains(&it.kind);
        assert!(!made.refusals.iter().any(is_of_either));
    }

    #[test]
    fn other_ops_without_a_graph_promise_less() {
        let (with, mut without) = kept();
        without.strings.push("aten.fused.default".to_owned());
        without.ops[1].name = u32::try_from(without.strings.len() - 1).unwrap();
        let trace = captured(&with, &without);
        let made = planned(&trace, vec![ActionKind::MicroBatch], 99.0);
        assert_eq!(made.actions[0].promise, Class::Equivalent);
        assert_eq!(made.promise, Class::Equivalent);
    }

    #[test]
    fn why_a_graph_stays_is_said_where_there_is_one() {
        let (with, without) = kept();
        let reason = |trace: &Trace, forbid| {
            let mut refusals = planned(trace, forbid, 99.0).refusals.into_iter();
            let found = refusals.find(|it| it.kind == ActionKind::NoGraph);
            found.map(|it| it.reason)
        };
        assert_eq!(reason(&without, Vec::new()), None);
        let forbidden = reason(&captured(&with, &without), vec![ActionKind::NoGraph]);
        assert_eq!(forbidden.unwrap(), "forbidden by the request");
        let not_tried = reason(&with, Vec::new());
        assert!(not_tried.unwrap().contains("not captured"));
        let alternatives = Alternatives {
            refusals: Refusals {
                graph: "it asks for gradients".to_owned(),
                ..Refusals::default()
            },
            ..Alternatives::default()
        };
        let failed = with.with_alternatives(alternatives).unwrap();
        assert_eq!(
            reason(&failed, Vec::new()).unwrap(),
            "it asks for gradients"
        );
    }
}

//! Forward under `torch.autocast`: matrix products, convolutions and attention in 16 bits.
//!
//! It is first of all an action of speed, and may raise a peak: each weight gets a copy in 16 bits that its product
//! saves. With the weight cache such a copy is made once and stays to the end of forward, where no recomputation can
//! touch it; without, it is made at each use and can be dropped like all else. Which of them is less depends on how
//! often weights are used, so that both are captured.
//!
//! Responsible for when it may be, for the ways worth a capture, for the action and for the words. Not responsible for
//! the capture and for which ops compute in which type (the Python package, torch), nor for trying it (`plan/ways.rs`).

use super::{ActsOn, Technique};
use crate::plan::actions::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::trace::{Autocast, Chunk, Op, Phase, Trace, Way};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Autocast,
    name: "autocast",
    title: "autocast",
    help: "Compute matrix products and convolutions in bfloat16 (torch.autocast)",
    promise: Class::Approximate,
    effect: |_| "matrix products and convolutions in 16 bits".to_owned(),
    short: None,
    acts_on: ActsOn::Computation,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.way.autocast.is_some(),
    write,
};

/// Element types that autocast computes in.
const HALVES: [&str; 2] = ["bfloat16", "float16"];

/// Why it cannot be; `None` where it can, or where nobody asked for it.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if !request.asks_for(ActionKind::Autocast) {
        return None;
    }
    if let Some(reason) = step_refusal(trace, request) {
        return Some(reason);
    }
    let found = trace.alternatives.as_ref()?;
    let is_cast = found.steps.iter().any(|step| step.way.autocast.is_some());
    match (is_cast, found.autocast_refusal.as_str()) {
        (true, _) => None,
        (false, "") => Some("the step was not captured under autocast".to_owned()),
        (false, reason) => Some(reason.to_owned()),
    }
}

/// The same by the plain step alone, whatever was captured.
fn step_refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if request.forbid.contains(&ActionKind::Autocast) {
        return Some("forbidden by the request".to_owned());
    }
    if !trace.meta.training {
        return Some("the step does not train".to_owned());
    }
    if trace.meta.captured != "fake" {
        return Some("the step was captured as it ran, and in no other way".to_owned());
    }
    let mut forward = trace.ops.iter().filter(|op| op.phase == Phase::Forward);
    let dtypes = |op: &Op| {
        let made = op.outputs.iter().map(|value| &trace.values[value.index()]);
        made.map(|value| trace.string(value.dtype))
            .collect::<Vec<_>>()
    };
    let half = forward
        .clone()
        .flat_map(dtypes)
        .find(|it| HALVES.contains(it));
    if let Some(half) = half {
        return Some(format!("the step computes in {half} as it is"));
    }
    let is_product = |op: &Op| op.flops > 0 && dtypes(op).contains(&"float32");
    let has_products = forward.any(is_product);
    (!has_products).then(|| "no matrix product or convolution computes in float32".to_owned())
}

/// May it be used, where somebody asked for it?
pub(in crate::plan) fn may(trace: &Trace, request: &PlanRequest) -> bool {
    request.asks_for(ActionKind::Autocast) && step_refusal(trace, request).is_none()
}

/// The ways worth a capture: with the weight cache, without, and without it in slices.
pub(in crate::plan) fn ways(smallest: Option<Chunk>) -> impl Iterator<Item = Way> {
    let way = |chunk, cache| Way {
        chunk,
        autocast: Some(Autocast {
            dtype: HALVES[0].to_owned(),
            cache,
        }),
    };
    let sliced = smallest.map(|chunk| way(Some(chunk), false));
    [way(None, true), way(None, false)]
        .into_iter()
        .chain(sliced)
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some(autocast) = chosen.outcome.way.autocast.clone() else {
        return;
    };
    let alone = Way {
        chunk: None,
        autocast: Some(autocast.clone()),
    };
    let less = chosen.planner.unplanned_peak - chosen.peak_in(&alone);
    let cache = if autocast.cache {
        "copies of weights in that type are kept to the end of forward"
    } else {
        "weights are cast at each use (`cache_enabled=False`)"
    };
    plan.notes.push(format!(
        "autocast: forward under `torch.autocast` in {}; {cache}",
        autocast.dtype
    ));
    plan.actions
        .push(Action::new(Details::Autocast { autocast }, 1, less));
}

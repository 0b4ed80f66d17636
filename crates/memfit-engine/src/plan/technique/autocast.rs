//! Forward under `torch.autocast`: matrix products, convolutions and attention in 16 bits.
//!
//! It is first of all an action of speed, and may raise a peak: each weight gets a copy in 16 bits that its product
//! saves. With the weight cache such a copy is made once and stays to the end of forward, where no recomputation can
//! touch it; without, it is made at each use and can be dropped like all else. Where a weight is used more than once
//! either may be less, so that both are captured.
//!
//! Responsible for when it may be, for the ways worth a capture, for the action and for the words. Not responsible for
//! the capture and for which ops compute in which type (the Python package, torch), nor for trying it (`plan/ways.rs`).

use super::{ActsOn, Technique};
use crate::bytes::Bytes;
use crate::plan::choice::Chosen;
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
    is_used: |outcome, _| is_used(ActionKind::Autocast, &outcome.way),
    write,
};

/// What autocast computes in here.
pub(in crate::plan) const BFLOAT16: &str = "bfloat16";
/// What `autocast_fp16` computes in.
pub(in crate::plan) const FLOAT16: &str = "float16";

/// Which technique casts to a type.
pub(in crate::plan) fn kind_of(autocast: &Autocast) -> ActionKind {
    if autocast.dtype == FLOAT16 {
        ActionKind::AutocastFp16
    } else {
        ActionKind::Autocast
    }
}

fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    refusal_of(ActionKind::Autocast, trace, request)
}

/// Why one of the two techniques cannot be used; `None` where it can, or where it was not asked for.
pub(in crate::plan) fn refusal_of(
    kind: ActionKind,
    trace: &Trace,
    request: &PlanRequest,
) -> Option<String> {
    if !is_asked_for(kind, request) {
        return None;
    }
    if let Some(reason) = step_refusal(kind, trace, request) {
        return Some(reason);
    }
    let found = trace.alternatives.as_ref()?;
    let mut casts = found.steps.iter().filter_map(|it| it.way.autocast.as_ref());
    match (
        casts.any(|it| kind_of(it) == kind),
        found.refusals.autocast.as_str(),
    ) {
        (true, _) => None,
        (false, "") => Some("the step was not captured under autocast".to_owned()),
        (false, reason) => Some(reason.to_owned()),
    }
}

/// Float16 has to be asked for by name: its range is small, so that training needs a loss scale and skips steps that
/// overflow, and large activations of an inference become infinite.
pub(in crate::plan) fn is_asked_for(kind: ActionKind, request: &PlanRequest) -> bool {
    if kind == ActionKind::AutocastFp16 {
        request.allow_kinds.contains(&kind)
    } else {
        request.asks_for(kind)
    }
}

/// The same by the plain step alone, whatever was captured.
pub(in crate::plan) fn step_refusal(
    kind: ActionKind,
    trace: &Trace,
    request: &PlanRequest,
) -> Option<String> {
    if request.forbid.contains(&kind) {
        return Some("forbidden by the request".to_owned());
    }
    if kind == ActionKind::AutocastFp16 && request.own_loop && trace.meta.training {
        return Some("the loss is scaled by the user's own loop, or not at all".to_owned());
    }
    if request.own_loop && trace.meta.training && !request.keep.is_empty() {
        return Some(
            "modules are kept from it until backward has ended, and the loop is the user's own"
                .to_owned(),
        );
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
    let is_half = |it: &&str| [BFLOAT16, FLOAT16].contains(it);
    if let Some(half) = forward.clone().flat_map(dtypes).find(is_half) {
        return Some(format!("the step computes in {half} as it is"));
    }
    let is_product = |op: &Op| op.flops > 0 && dtypes(op).contains(&"float32");
    let has_products = forward.any(is_product);
    (!has_products).then(|| "no matrix product or convolution computes in float32".to_owned())
}

/// May one of the two be used, where somebody asked for it?
pub(in crate::plan) fn may(kind: ActionKind, trace: &Trace, request: &PlanRequest) -> bool {
    is_asked_for(kind, request) && step_refusal(kind, trace, request).is_none()
}

/// May any?
pub(in crate::plan) fn may_any(trace: &Trace, request: &PlanRequest) -> bool {
    let mut kinds = [ActionKind::Autocast, ActionKind::AutocastFp16].into_iter();
    kinds.any(|kind| may(kind, trace, request))
}

/// The ways worth a capture, for each of the two that may be: without the weight cache, with it (which who captures
/// leaves out where no weight is cast twice), and without it in slices.
pub(in crate::plan) fn ways(
    trace: &Trace,
    request: &PlanRequest,
    smallest: Option<&Chunk>,
) -> Vec<Way> {
    let mut ways = Vec::new();
    for (kind, dtype) in [
        (ActionKind::Autocast, BFLOAT16),
        (ActionKind::AutocastFp16, FLOAT16),
    ] {
        let way = |chunk: Option<&Chunk>, cache| Way {
            chunk: chunk.cloned(),
            autocast: Some(Autocast {
                dtype: dtype.to_owned(),
                cache,
                keep: request.keep.clone(),
            }),
            ..Way::default()
        };
        if may(kind, trace, request) {
            ways.extend([way(None, false), way(None, true)]);
            ways.extend(smallest.map(|chunk| way(Some(chunk), false)));
        }
    }
    ways
}

/// Does a way cast as a technique does?
pub(in crate::plan) fn is_used(kind: ActionKind, way: &Way) -> bool {
    way.autocast.as_ref().is_some_and(|it| kind_of(it) == kind)
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    if let Some((autocast, less)) = cast(chosen, plan) {
        plan.actions
            .push(Action::new(Details::Autocast { autocast }, 1, less));
    }
}

/// What a chosen way casts, and what it saves by itself; a note says how.
pub(in crate::plan) fn cast(chosen: &Chosen<'_>, plan: &mut Plan) -> Option<(Autocast, Bytes)> {
    let autocast = chosen.outcome.way.autocast.clone()?;
    let alone = Way {
        autocast: Some(autocast.clone()),
        ..Way::default()
    };
    let less = chosen.planner.unplanned_peak - chosen.peak_in(&alone);
    let cache = if autocast.cache {
        "copies of weights in that type are kept to the end of forward"
    } else {
        "weights are cast at each use (`cache_enabled=False`)"
    };
    if !chosen.planner.trace.meta.training {
        plan.notes
            .push(format!("what is returned may be in {}", autocast.dtype));
    }
    let kept = match autocast.keep.as_slice() {
        [] => String::new(),
        [one] => format!("; `{one}` stays as it is"),
        [first, more @ ..] => format!("; `{first}` and {} more stay as they are", more.len()),
    };
    plan.notes.push(format!(
        "autocast: forward under `torch.autocast` in {}; {cache}{kept}",
        autocast.dtype
    ));
    Some((autocast, less))
}

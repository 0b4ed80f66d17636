//! Activations held in fewer bits between forward and backward.
//!
//! Forward and loss stay what they are, bit for bit; gradients are those of activations that were rounded. Only whole
//! 32-bit floating-point numbers are shrunk. Most go to 8 bits, in blocks with a scale of their own, as in `ActNN` (Chen et
//! al. 2021) and GACT (Liu et al. 2022); what batch normalisation saves goes to `bfloat16` at the narrowest, for
//! its backward takes differences of it. Statistics stay: one number of them stands for a whole row.
//!
//! Responsible for whether they may be, for the action and for the words. Not responsible for which form each may have and
//! what that costs (`search/narrow_forms.rs`), for which are (`search/`), nor for where the executor finds them (`addresses.rs`).

use super::{ActsOn, Technique, counted};
use crate::bytes::Bytes;
use crate::plan::choice::Chosen;
use crate::plan::search::narrow_forms::{LEAST_BYTES, forms};
use crate::plan::{Action, ActionKind, Class, Details, Dropped, Plan, PlanRequest};
use crate::step::{Narrow, StepModel, Variant};
use crate::trace::Trace;

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Shrink,
    name: "shrink",
    title: "fewer bits",
    help: "Hold saved activations in 8 or 16 bits until backward",
    promise: Class::Approximate,
    effect: |action| {
        let what = counted(action.count, "tensor");
        format!("{what} held in fewer bits until backward")
    },
    short: Some(|count| format!("fewer bits for {}", counted(count, "tensor"))),
    acts_on: ActsOn::Activations,
    only_where_needed: false,
    refusal,
    is_used: |_, candidate| candidate.treatments.iter().any(|it| it.is_shrink()),
    write,
};

/// Why nothing can be shrunk; `None` where something can, or where it was not asked for.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if !request.asks_for(ActionKind::Shrink) {
        return None;
    }
    if request.forbid.contains(&ActionKind::Shrink) {
        return Some("forbidden by the request".to_owned());
    }
    if trace.meta.captured == "joint" {
        return Some("a compiled step saves what its compiler chose".to_owned());
    }
    let model = StepModel::new(trace, Variant::default());
    let forms = forms(trace, &model, LEAST_BYTES);
    forms
        .iter()
        .all(Option::is_none)
        .then(|| format!("nothing that autograd saves is 32-bit numbers of {LEAST_BYTES} or more"))
}

/// May it be used, where somebody asked for it?
pub(in crate::plan) fn may(trace: &Trace, request: &PlanRequest) -> bool {
    request.asks_for(ActionKind::Shrink) && refusal(trace, request).is_none()
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some(shrink) = chosen.directions.shrink.clone() else {
        return;
    };
    let saved = |shrunk: &[Dropped], to: Narrow| -> u64 {
        let bytes = shrunk.iter().map(|it| it.bytes.0);
        bytes
            .map(|bytes| bytes.saturating_sub(to.bytes(bytes)))
            .sum()
    };
    let bytes = saved(&shrink.half, Narrow::Half) + saved(&shrink.eight_bit, Narrow::EightBit);
    let count = (shrink.half.len() + shrink.eight_bit.len()) as u64;
    let details = Details::Shrink { shrink };
    plan.actions.push(Action::new(details, count, Bytes(bytes)));
}

//! Forward under `torch.autocast` in float16, in training with a loss scale: for devices that do not compute in bfloat16,
//! and for inference whose numbers are not large, of which it keeps three more bits.
//!
//! Gradients below the range of float16 would become nothing, so the loss is scaled before backward and gradients are
//! scaled back before anybody reads them (Micikevicius et al., *Mixed Precision Training*, 2017). Where the scale was too
//! large a gradient is not finite: the update is skipped and the scale halved. Whether one is, is known only after the
//! last gradient, so that no update may come before.
//!
//! Responsible for the words and for what cannot go with it. Not responsible for when it may be and for what is cast
//! (`autocast.rs`), nor for the scale (the Python package).

use super::{ActsOn, Technique, autocast};
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::AutocastFp16,
    name: "autocast_fp16",
    title: "autocast in float16",
    help: "Autocast in float16, in training with a loss scale; only by name",
    promise: Class::Approximate,
    effect: |_| "matrix products and convolutions in float16".to_owned(),
    short: None,
    acts_on: ActsOn::Computation,
    only_where_needed: false,
    refusal: |trace, request| autocast::refusal_of(ActionKind::AutocastFp16, trace, request),
    is_used: |outcome, _| autocast::is_used(ActionKind::AutocastFp16, &outcome.way),
    write,
};

/// What needs an update before the last gradient is there.
pub(in crate::plan) const NOT_WITH: ActionKind = ActionKind::FuseOptimizer;

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some((autocast_fp16, less)) = autocast::cast(chosen, plan) else {
        return;
    };
    let of_range = if chosen.planner.trace.meta.training {
        "the loss is scaled: a step whose gradients overflow updates nothing and halves the scale; whether one does is \
         known after the last gradient, so the optimizer step stays out of backward"
    } else {
        "float16 ends at 65504: activations beyond it become infinite; `memfit verify` looks at what is returned"
    };
    plan.notes.push(of_range.to_owned());
    if chosen.planner.trace.meta.device_kind == "cpu" {
        plan.notes.push(
            "float16 is slow on a CPU: products take up to several times as long as in float32, the backward of convolutions up to a hundred times"
                .to_owned(),
        );
    }
    let details = Details::AutocastFp16 { autocast_fp16 };
    plan.actions.push(Action::new(details, 1, less));
}

//! Products of linear layers in 8 bits, for inference: weights in 8 bits, and what they multiply quantised each time.
//!
//! torchao quantises each row of an input by its largest number while the step runs, multiplies whole numbers and scales
//! the sums (`Int8DynamicActivationInt8WeightConfig`). What is made of the input and of the sums on the way is several
//! times as large as either, and on some processors the weight is there in 32 bits for a moment, so that a layer takes
//! less or more than with a weight in 8 bits alone: the captured step shows it. Where 8 bits multiply faster than 32 it
//! is the faster of the two.
//!
//! Responsible for the words. Not responsible for which weights, for when and for the way worth a capture
//! (`int8_weights.rs`), nor for which layers have such products (the Python package, torchao).

use super::{ActsOn, Technique, counted, int8_weights};
use crate::plan::actions::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Int8Dynamic,
    name: "int8_dynamic",
    title: "products in 8 bits",
    help: "Compute linear layers of an inference in 8 bits (torchao, dynamic)",
    promise: Class::Approximate,
    effect: |action| {
        format!(
            "{} in 8 bits, and their products",
            counted(action.count, "weight")
        )
    },
    short: None,
    acts_on: ActsOn::Parameters,
    only_where_needed: false,
    refusal: |trace, request| int8_weights::refusal_of(ActionKind::Int8Dynamic, trace, request),
    is_used: |outcome, _| int8_weights::is_used(ActionKind::Int8Dynamic, &outcome.way),
    write,
};

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let Some((int8_dynamic, less)) = int8_weights::held(chosen, plan) else {
        return;
    };
    plan.notes.push(
        "rows of what these layers are given are rounded to 8 bits at each use: outputs are further off than with \
         weights in 8 bits alone; `memfit verify` says how far"
            .to_owned(),
    );
    let count = int8_dynamic.names.len() as u64;
    let details = Details::Int8Dynamic { int8_dynamic };
    plan.actions.push(Action::new(details, count, less));
}

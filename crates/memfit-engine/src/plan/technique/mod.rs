//! The techniques, one room each, and the one table of them.
//!
//! Responsible for the table and for what is generated from it: the kinds of action and their details. A room holds
//! its technique's [`Technique`]: when the technique cannot be used on a step, the action it becomes, the words about
//! it, and what it alone needs to offer its choices. `addresses.rs` is common to those that treat activations: where
//! the executor finds them. Not responsible for what a technique does to memory ([`crate::step`]), for choosing among
//! them (`choose.rs`), nor for the search over single allocations (`search/`).
//!
//! Whatever needs all kinds (arguments, JSON, reports) reads [`TECHNIQUES`]; nothing else lists them.

pub(super) mod addresses;
pub(super) mod allocator_settings;
pub(super) mod autocast;
pub(super) mod autocast_fp16;
pub(super) mod chunk;
pub(super) mod fuse_optimizer;
pub(super) mod half_parameters;
pub(super) mod int8_dynamic;
pub(super) mod int8_weights;
pub(super) mod micro_batch;
pub(super) mod no_graph;
#[cfg(test)]
mod noop;
pub(super) mod offload;
pub(super) mod offload_optimizer;
pub(super) mod offload_parameters;
pub(super) mod one_by_one;
pub(super) mod optimizer_bits;
pub(super) mod remat;
pub(super) mod shrink;
pub(super) mod undo_checkpoints;
pub(super) mod unneeded_saves;
mod weights;

use schemars::JsonSchema;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize};

use super::actions::Chosen;
use super::context::Outcome;
use super::search::problem::Candidate;
use super::{ActionSummary, Class, Plan, PlanRequest};
use crate::trace::{Autocast, Chunk, HalfParameters, Int8Weights, Trace};

/// All that is known of a technique beside what it does to memory.
#[derive(Debug)]
pub struct Technique {
    /// Its kind of action.
    pub kind: ActionKind,
    /// Its name in JSON and on the command line.
    pub name: &'static str,
    /// Its name in reports.
    pub title: &'static str,
    /// What it does, in a line of help.
    pub help: &'static str,
    /// The class of its actions.
    pub promise: Class,
    /// What an action of it does, in words.
    pub effect: fn(&ActionSummary) -> String,
    /// The title with the count, for a plot's label; absent where a plan cannot choose how much of it.
    pub short: Option<fn(u64) -> String>,
    /// Where its action is among those of a plan.
    pub(in crate::plan) acts_on: ActsOn,
    /// Is it looked at only where no exact plan fits, or with leave for its class? Its refusals are said only then.
    pub(in crate::plan) only_where_needed: bool,
    /// Why it cannot be used, as a sentence without full stop; `None` where it can, or where it was not asked for.
    pub(in crate::plan) refusal: fn(&Trace, &PlanRequest) -> Option<String>,
    /// Does a candidate use it?
    pub(in crate::plan) is_used: fn(&Outcome, &Candidate) -> bool,
    /// Adds its action, and the notes that go with it, to the plan of a candidate that uses it.
    pub(in crate::plan) write: fn(&Chosen<'_>, &mut Plan),
}

/// What of a step a technique acts on, in the order that actions have in a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::plan) enum ActsOn {
    Optimizer,
    Parameters,
    Computation,
    Batch,
    Activations,
    Allocator,
}

/// Generates from one list what has to name every technique. An entry is the kind with its description, the field that
/// the executor needs, if it needs one, and the room.
macro_rules! techniques {
    ($(
        $(#[cfg($when:meta)])?
        #[doc = $doc:literal]
        $kind:ident $({ $field:ident: $type:ty })? in $room:ident;
    )*) => {
        /// One technique.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[schemars(rename = "Kind")]
        pub enum ActionKind {
            $($(#[cfg($when)])? #[doc = $doc] $kind,)*
        }

        /// One technique with what the executor needs for it.
        #[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Deserialize)]
        #[serde(tag = "kind", rename_all = "snake_case")]
        pub enum Details {
            $(
                $(#[cfg($when)])?
                #[doc = $doc]
                $kind { $(#[doc = "What the executor needs."] $field: $type,)? },
            )*
        }

        /// Every technique.
        pub static TECHNIQUES: &[&Technique] = &[$($(#[cfg($when)])? &$room::TECHNIQUE,)*];

        impl ActionKind {
            /// What is known of it.
            #[must_use]
            pub const fn technique(self) -> &'static Technique {
                match self {
                    $($(#[cfg($when)])? Self::$kind => &$room::TECHNIQUE,)*
                }
            }
        }

        impl Details {
            /// Which technique.
            #[must_use]
            pub const fn kind(&self) -> ActionKind {
                match self {
                    $($(#[cfg($when)])? Self::$kind { .. } => ActionKind::$kind,)*
                }
            }

            /// Writes the field that its kind has, if it has one.
            pub(in crate::plan) fn serialize_into<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
                match self {
                    $($(#[cfg($when)])? Self::$kind { $($field)? } => {
                        $(map.serialize_entry(stringify!($field), $field)?;)?
                    })*
                }
                Ok(())
            }
        }
    };
}

techniques! {
    /// Drop activations and recompute them in backward.
    Remat { remat: remat::Remat } in remat;
    /// Let go of saved activations that backward never needs.
    UnneededSaves { unneeded_saves: remat::Remat } in unneeded_saves;
    /// Run the optimizer step per parameter inside backward and free its gradient.
    FuseOptimizer in fuse_optimizer;
    /// Update one parameter at a time, after backward.
    OneByOne in one_by_one;
    /// Split the batch and accumulate gradients.
    MicroBatch { micro_batch: Option<micro_batch::MicroBatch> } in micro_batch;
    /// Set up the caching allocator against fragmentation, as in `PYTORCH_CUDA_ALLOC_CONF`.
    AllocatorSettings { settings: String } in allocator_settings;
    /// Offload saved activations in forward and fetch them in backward.
    Offload { offload: offload::Offload } in offload;
    /// Hold saved activations in fewer bits until backward.
    Shrink { shrink: shrink::Shrink } in shrink;
    /// Offload the optimizer's state, and fetch it for one parameter at a time.
    OffloadOptimizer { offload_optimizer: offload_optimizer::OffloadOptimizer } in offload_optimizer;
    /// Hold the optimizer's state in 8 bits, between updates and during them.
    OptimizerBits { optimizer_bits: optimizer_bits::OptimizerBits } in optimizer_bits;
    /// Offload parameters, with a bounded part of them resident.
    OffloadParameters { offload_parameters: offload_parameters::OffloadParameters } in offload_parameters;
    /// Compute matrix products and convolutions in bfloat16.
    Autocast { autocast: Autocast } in autocast;
    /// Compute them in float16, with a loss scale.
    AutocastFp16 { autocast_fp16: Autocast } in autocast_fp16;
    /// Hold weights and their gradients in 16 bits.
    HalfParameters { half_parameters: HalfParameters } in half_parameters;
    /// Hold weights of linear layers in 8 bits, for inference.
    Int8Weights { int8_weights: Int8Weights } in int8_weights;
    /// Compute linear layers in 8 bits, weights among them, for inference.
    Int8Dynamic { int8_dynamic: Int8Weights } in int8_dynamic;
    /// Compute the loss over many classes, wide layers, images and attention in slices of rows.
    Chunk { chunk: Chunk } in chunk;
    /// Keep autograd off in a forward of inference that turns it on.
    NoGraph in no_graph;
    /// Run the checkpoints of the model as ordinary forwards.
    UndoCheckpoints in undo_checkpoints;
    #[cfg(test)]
    /// Do nothing.
    Noop in noop;
}

/// `1 tensor`, `12 tensors`.
#[must_use]
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 {
        format!("1 {noun}")
    } else {
        format!("{count} {noun}s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_technique_has_one_name_everywhere() {
        for technique in TECHNIQUES {
            assert_eq!(technique.kind.technique().name, technique.name);
            let json = serde_json::to_string(&technique.kind).unwrap();
            assert_eq!(json, format!("\"{}\"", technique.name));
        }
    }

    #[test]
    fn help_fits_a_line_and_ends_like_help() {
        for technique in TECHNIQUES {
            assert!(technique.help.len() <= 70 && !technique.help.ends_with('.'));
            assert!(technique.title.len() <= 30);
        }
    }
}

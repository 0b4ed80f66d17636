//! Which techniques there are: the one list of them, and the kinds of action with their details.
//!
//! Responsible for the list and for the two types that are generated from it. Not responsible for what is known of each
//! technique: the table (`mod.rs`) is generated from the same list, and lies above the rooms that it names.

use schemars::JsonSchema;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize};

use crate::plan::instructions::{
    MicroBatch, Offload, OffloadOptimizer, OffloadParameters, OptimizerBits, Remat, Shrink,
};
use crate::trace::{Autocast, Chunk, HalfParameters, Int8Weights};

/// Hands the list of techniques to a macro. An entry is the kind with its description, the field that the executor
/// needs, if it needs one, and the room.
macro_rules! each_technique {
    ($generate:ident) => {
        $generate! {
            /// Drop activations and recompute them in backward.
            Remat { remat: Remat } in remat;
            /// Let go of saved activations that backward never needs.
            UnneededSaves { unneeded_saves: Remat } in unneeded_saves;
            /// Run the optimizer step per parameter inside backward and free its gradient.
            FuseOptimizer in fuse_optimizer;
            /// Update one parameter at a time, after backward.
            OneByOne in one_by_one;
            /// Split the batch and accumulate gradients.
            MicroBatch { micro_batch: Option<MicroBatch> } in micro_batch;
            /// Set up the caching allocator against fragmentation, as in `PYTORCH_CUDA_ALLOC_CONF`.
            AllocatorSettings { settings: String } in allocator_settings;
            /// Offload saved activations in forward and fetch them in backward.
            Offload { offload: Offload } in offload;
            /// Hold saved activations in fewer bits until backward.
            Shrink { shrink: Shrink } in shrink;
            /// Offload the optimizer's state, and fetch it for one parameter at a time.
            OffloadOptimizer { offload_optimizer: OffloadOptimizer } in offload_optimizer;
            /// Hold the optimizer's state in 8 bits, between updates and during them.
            OptimizerBits { optimizer_bits: OptimizerBits } in optimizer_bits;
            /// Offload parameters, with a bounded part of them resident.
            OffloadParameters { offload_parameters: OffloadParameters } in offload_parameters;
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
            /// Compute large losses, wide layers, messages of graphs, images and attention in slices.
            Chunk { chunk: Chunk } in chunk;
            /// Keep autograd off in a forward of inference that turns it on.
            NoGraph in no_graph;
            /// Run the checkpoints of the model as ordinary forwards.
            UndoCheckpoints in undo_checkpoints;
            #[cfg(test)]
            /// Do nothing.
            Noop in noop;
        }
    };
}
pub(super) use each_technique;

/// Generates what only names the techniques.
macro_rules! kinds {
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

each_technique!(kinds);

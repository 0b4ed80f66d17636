//! The techniques, one room each, and the one table of them.
//!
//! Responsible for the table, which is generated from the list of them (`kinds.rs`). A room holds its technique's
//! [`Technique`]: when the technique cannot be used on a step, the action it becomes, the words about
//! it, and what it alone needs to offer its choices. `addresses.rs` is common to those that treat activations: where
//! the executor finds them. Not responsible for what a technique does to memory ([`crate::step`]), for choosing among
//! them (`choose.rs`), nor for the search over single allocations (`search/`).
//!
//! Whatever needs all kinds (arguments, JSON, reports) reads [`TECHNIQUES`]; nothing but `kinds.rs` lists them.

pub(super) mod addresses;
pub(super) mod allocator_settings;
pub(super) mod autocast;
pub(super) mod autocast_fp16;
pub(super) mod chunk;
pub(super) mod fuse_optimizer;
pub(super) mod half_parameters;
pub(super) mod int8_dynamic;
pub(super) mod int8_weights;
pub(super) mod kinds;
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
mod technique;
pub(super) mod undo_checkpoints;
pub(super) mod unneeded_saves;
mod weights;

pub use kinds::{ActionKind, Details};
pub(in crate::plan) use technique::ActsOn;
pub use technique::{Technique, counted};

use kinds::each_technique;

/// Generates what leads from a kind into its room.
macro_rules! table {
    ($(
        $(#[cfg($when:meta)])?
        #[doc = $doc:literal]
        $kind:ident $({ $field:ident: $type:ty })? in $room:ident;
    )*) => {
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
    };
}

each_technique!(table);

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

//! The techniques, a file each.
//!
//! A file of a technique says when the technique cannot be used on a step (`refusal`), and holds what it alone needs to
//! offer its choices. `addresses.rs` is common to those that treat activations: where the executor finds them. Not
//! responsible for what a technique does to memory ([`crate::step`]), for choosing among them (`choose.rs`), nor for
//! the search over single allocations (`search/`).

pub(super) mod addresses;
pub(super) mod allocator_settings;
pub(super) mod chunk;
pub(super) mod fuse_optimizer;
pub(super) mod micro_batch;
pub(super) mod offload;
pub(super) mod offload_optimizer;
pub(super) mod offload_parameters;

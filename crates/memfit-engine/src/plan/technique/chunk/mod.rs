//! Part of a step in slices: the loss, or a module call that treats its rows one by one.
//!
//! Responsible for what is worth a capture in slices (`candidates.rs`), for the proof that a call may be cut
//! (`row_proof.rs`) and for captured steps in slices as a choice (`alternatives.rs`). Not responsible for the capture
//! (the Python package).

pub(in crate::plan) mod alternatives;
pub(in crate::plan) mod candidates;
mod row_proof;

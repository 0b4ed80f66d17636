//! One inner problem and the search for what to do with each allocation.
//!
//! Responsible for the problem as the search sees it (`problem.rs`, `blocks.rs`, `transfers.rs`, `narrow_forms.rs`), for the search
//! (`search.rs`), its starts, moves and limits. Not responsible for the outer choices (`combinations.rs`), nor for what
//! no plan can beat (`bound/`).

mod block_starts;
mod blocks;
mod bottom;
#[cfg(test)]
mod brute_force;
mod improve;
pub(super) mod limits;
mod moves;
pub(super) mod narrow_forms;
pub(super) mod problem;
pub(super) mod search;
pub(super) mod transfers;

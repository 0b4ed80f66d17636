//! What no plan can beat.
//!
//! Responsible for the least peak and the least added time of any treatment of one inner problem (`bound.rs`), by one
//! moment solved exactly (`relaxation.rs`, `min_cut.rs`). Not responsible for finding a plan (`search/`).

pub(super) mod bound;
mod min_cut;
pub(super) mod relaxation;

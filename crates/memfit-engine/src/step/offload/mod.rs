//! What is offloaded throughout a step but for its turn: the optimizer's state, and parameters.
//!
//! Responsible for which of them go, and for when they come and go (`updates.rs`, `parameters.rs`, `room.rs`). Not
//! responsible for activations that are stored (`sweep/transfers.rs`), nor for how long transfers take
//! ([`crate::plan`]).

pub(super) mod parameters;
pub mod room;
pub(super) mod updates;

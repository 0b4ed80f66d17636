//! The transformed trace: what a step does to memory under a plan.
//!
//! The meaning is written once, in `docs/concepts/transformed-trace.md`; this module evaluates it.
//! [`StepModel`] lays a trace out for evaluation, [`Evaluator`] sweeps it under a [`Treatment`] of
//! each allocation, and `naive.rs` does the same with reference-counted objects, slowly and without shared
//! code: every plan passes it before anyone sees it. [`lives`] writes a step out for allocators.
//!
//! Not responsible for time ([`crate::cost`]) nor for choosing what to drop ([`crate::plan`]).

mod column;
mod evaluate;
mod events;
mod incremental;
pub mod lives;
mod model;
pub mod naive;
mod parameters;
#[cfg(test)]
pub(crate) mod random;
pub mod room;
mod state;
mod storable;
mod transfers;
mod treatment;
mod updates;

pub use evaluate::{Evaluation, Evaluator, Holding, Moment, Replay};
pub use incremental::IncrementalEvaluator;
pub use model::{StepModel, Undroppable, Variant};
pub use parameters::{ParametersAway, Passes};
pub use storable::Unstorable;
pub use transfers::Transfer;
pub use treatment::Treatment;
pub use updates::{StateAway, UpdateTurn, update_turns};

//! The transformed trace: what a step does to memory under a plan.
//!
//! The meaning is written once, in `docs/concepts/transformed-trace.md`; this module evaluates it.
//! [`StepModel`] lays a trace out for evaluation, [`Evaluator`] sweeps it under a [`Treatment`] of
//! each allocation, and `naive.rs` does the same with reference-counted objects, slowly and without shared
//! code: every plan passes it before anyone sees it. [`lives`] writes a step out for allocators.
//!
//! Not responsible for time ([`crate::cost`]) nor for choosing what to drop ([`crate::plan`]).

mod by_hand;
mod eight_bit_state;
mod layout;
pub mod lives;
pub mod naive;
pub mod offload;
#[cfg(test)]
pub(crate) mod random;
mod sweep;
mod variant;

pub use by_hand::{EvaluationByHand, EvaluationRequest, NoAllocation, Treated, evaluate_by_hand};
pub use eight_bit_state::NarrowMoment;
pub use layout::model::{StepModel, Undroppable};
pub use layout::treatment::{Narrow, Treatment, Unstorable};
pub use offload::parameters::Passes;
pub use offload::updates::{UpdateTurn, update_turns};
pub use sweep::change::{Moment, Replay};
pub use sweep::evaluate::{Evaluation, Evaluator, Holding};
pub use sweep::incremental::IncrementalEvaluator;
pub use sweep::traffic::Transfer;
pub use variant::{EightBitState, ParametersAway, StateAway, Variant};

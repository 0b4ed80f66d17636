//! A step under treatments that are chosen by hand.
//!
//! Plans do not come this way: it lets tests hold the executor to the evaluation for any treatments, not
//! only for those that a search likes.

use serde::{Deserialize, Serialize};

use super::{Evaluator, Narrow, StepModel, Treatment, Variant};
use crate::bytes::Bytes;
use crate::trace::{AllocationId, OpIndex, Trace};

/// An allocation and its home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Treated(pub u32, pub Option<OpIndex>);

/// What is dropped, stored and shrunk.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct EvaluationRequest {
    /// Allocations that are dropped and computed again.
    pub drops: Vec<Treated>,
    /// Allocations that are written out and fetched.
    pub stores: Vec<Treated>,
    /// Allocations that are held in 16 bits.
    #[serde(default)]
    pub halves: Vec<Treated>,
    /// Allocations that are held in 8 bits.
    #[serde(default)]
    pub eighths: Vec<Treated>,
    /// Most bytes on their way at a time.
    pub window_bytes: Bytes,
}

/// What comes of it, and what else could be chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EvaluationByHand {
    /// The step's peak.
    pub peak_bytes: Bytes,
    /// Whether the step can run so.
    pub is_valid: bool,
    /// Ops that run again.
    pub replayed: usize,
    /// What is fetched, in order.
    pub fetch_order: Vec<AllocationId>,
    /// Allocations that may be dropped.
    pub droppable: Vec<AllocationId>,
    /// Allocations that may be stored.
    pub storable: Vec<AllocationId>,
    /// Allocations that may be held in fewer bits.
    pub shrinkable: Vec<AllocationId>,
    /// Allocations that may have a home.
    pub may_have_home: Vec<AllocationId>,
}

/// A treatment of an allocation that the trace lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there is no allocation {0}")]
pub struct NoAllocation(pub u32);

/// Evaluates a step.
///
/// # Errors
///
/// The request treats an allocation that is not there.
pub fn evaluate_by_hand(
    trace: &Trace,
    request: &EvaluationRequest,
) -> Result<EvaluationByHand, NoAllocation> {
    let variant = Variant {
        window_bytes: request.window_bytes,
        ..Variant::default()
    };
    let model = StepModel::new(trace, variant);
    let mut treatments = vec![Treatment::Keep; trace.allocations.len()];
    for (treated, treatment) in [
        (&request.drops, Treatment::DROP),
        (&request.stores, Treatment::STORE),
        (&request.halves, Treatment::shrunk(Narrow::Half)),
        (&request.eighths, Treatment::shrunk(Narrow::EightBit)),
    ] {
        for &Treated(allocation, home) in treated {
            let place = treatments.get_mut(allocation as usize);
            *place.ok_or(NoAllocation(allocation))? =
                treatment.with_home(home.unwrap_or(Treatment::NO_HOME));
        }
    }
    let mut evaluator = Evaluator::new(&model);
    let evaluation = evaluator.evaluate(&treatments);
    let of = |is_allowed: &dyn Fn(AllocationId) -> bool| {
        let all = 0..u32::try_from(treatments.len()).unwrap_or(u32::MAX);
        all.map(AllocationId).filter(|&id| is_allowed(id)).collect()
    };
    Ok(EvaluationByHand {
        peak_bytes: evaluation.peak_bytes,
        is_valid: evaluation.valid,
        replayed: evaluator.replayed().count(),
        fetch_order: model.fetch_order(&treatments).collect(),
        droppable: of(&|id| model.is_droppable(id)),
        storable: of(&|id| model.is_storable(id)),
        shrinkable: of(&|id| model.is_shrinkable(id)),
        may_have_home: of(&|id| model.may_have_home(id)),
    })
}

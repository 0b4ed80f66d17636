//! The engine's evaluation of a step under treatments chosen by hand.
//!
//! Responsible for conversion, as the rest of the binding. Plans do not come this way: it lets tests hold
//! the executor to the evaluation for any treatments, not only for those that a search likes.

use memfit_engine::bytes::Bytes;
use memfit_engine::step::{Evaluator, StepModel, Treatment, Variant};
use memfit_engine::trace::{AllocationId, OpIndex};
use pyo3::prelude::*;
use serde::{Deserialize, Serialize};

use crate::_native::Trace;
use crate::UsageError;
use crate::value::Value;

/// An allocation and its home.
#[derive(Deserialize)]
struct Treated(u32, Option<OpIndex>);

#[derive(Deserialize)]
pub(crate) struct EvaluationRequest {
    drops: Vec<Treated>,
    stores: Vec<Treated>,
    window_bytes: Bytes,
}

#[derive(Serialize)]
pub(crate) struct Evaluation {
    peak_bytes: Bytes,
    is_valid: bool,
    replayed: usize,
    fetch_order: Vec<AllocationId>,
    droppable: Vec<u32>,
    storable: Vec<u32>,
    may_have_home: Vec<u32>,
}

/// Evaluates a step.
#[pyfunction]
pub(crate) fn evaluate(
    py: Python<'_>,
    trace: &Trace,
    request: Value<EvaluationRequest>,
) -> PyResult<Value<Evaluation>> {
    let usage = |error: &dyn std::fmt::Display| UsageError::new_err(error.to_string());
    let (request, trace) = (request.0, trace.shared());
    py.detach(|| {
        let variant = Variant {
            window_bytes: request.window_bytes,
            ..Variant::default()
        };
        let model = StepModel::new(&trace, variant);
        let mut treatments = vec![Treatment::Keep; trace.allocations.len()];
        for (treated, treatment) in [
            (request.drops, Treatment::DROP),
            (request.stores, Treatment::STORE),
        ] {
            for Treated(allocation, home) in treated {
                let place = treatments.get_mut(allocation as usize);
                *place.ok_or_else(|| usage(&format!("there is no allocation {allocation}")))? =
                    treatment.with_home(home.unwrap_or(Treatment::NO_HOME));
            }
        }
        let mut evaluator = Evaluator::new(&model);
        let evaluation = evaluator.evaluate(&treatments);
        let of = |is_allowed: &dyn Fn(AllocationId) -> bool| {
            let all = 0..u32::try_from(treatments.len()).unwrap_or(u32::MAX);
            all.filter(|&id| is_allowed(AllocationId(id)))
                .collect::<Vec<_>>()
        };
        Ok(Value(Evaluation {
            peak_bytes: evaluation.peak_bytes,
            is_valid: evaluation.valid,
            replayed: evaluator.replayed().count(),
            fetch_order: model.fetch_order(&treatments).collect(),
            droppable: of(&|id| model.is_droppable(id)),
            storable: of(&|id| model.is_storable(id)),
            may_have_home: of(&|id| model.may_have_home(id)),
        }))
    })
}

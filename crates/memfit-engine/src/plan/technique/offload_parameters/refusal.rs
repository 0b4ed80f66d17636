//! Whether parameters may be offloaded.
//!
//! Responsible for the words where they have to stay, and for the smallest that is worth it.

use crate::bytes::Bytes;
use crate::plan::{ActionKind, PlanRequest};
use crate::step::ParametersAway;
use crate::trace::{AllocationId, Trace};

/// Smaller parameters stay in memory: fetching them would take longer than it is worth.
pub(super) const LEAST_PARAMETER: Bytes = Bytes(16_384);

/// Why parameters cannot be offloaded to the place that was named; `None` when they can, or none was.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    request.offload.as_ref()?;
    if request.forbid.contains(&ActionKind::OffloadParameters) {
        return Some("forbidden by the request".to_owned());
    }
    if request.own_loop {
        return Some("the step is run by the user's own loop".to_owned());
    }
    if let Some(reason) = &trace.meta.offloaded_parameters_refusal {
        return Some(reason.clone());
    }
    // Without an optimizer nothing needs all parameters at once.
    let optimizer = (!trace.meta.optimizer.is_empty()).then_some(&trace.meta.per_parameter_refusal);
    if let Some(Some(reason)) = optimizer {
        return Some(reason.clone());
    }
    let away = ParametersAway {
        room_bytes: Bytes::ZERO,
        ahead_bytes: Bytes::ZERO,
        least_bytes: LEAST_PARAMETER,
    };
    if away.of(trace).next().is_some() {
        return None;
    }
    let mut fixed = trace.meta.fixed_parameters.iter();
    let is_large = |id: &AllocationId| trace.allocations[id.index()].bytes >= LEAST_PARAMETER;
    Some(if fixed.any(is_large) {
        "the parameters lie in memory that cannot be let go, of a file that was loaded or mapped, an array or a \
         parkable model, or shared with other processes: copies could (`p.data = p.data.clone()`)"
            .to_owned()
    } else {
        format!("the model has no parameter of {LEAST_PARAMETER} or more")
    })
}

//! The optimizer's state elsewhere between updates.
//!
//! Responsible for whether it may go and for the smallest tensor that is worth it. Not responsible for the windows that
//! are tried (`combinations.rs`), nor for when state moves ([`crate::step`]).

use crate::bytes::Bytes;
use crate::plan::{ActionKind, PlanRequest};
use crate::step::StateAway;
use crate::trace::Trace;

/// Smaller state stays in memory: fetching it would take longer than it is worth.
pub(in crate::plan) const LEAST_STATE: Bytes = Bytes(4096);

/// Why the optimizer's state cannot be offloaded to the place that was named; `None` when it can, or none was.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    request.offload.as_ref()?;
    if request.forbid.contains(&ActionKind::OffloadOptimizer) {
        return Some("forbidden by the request".to_owned());
    }
    if request.own_loop {
        return Some("the optimizer is called by the user's own loop".to_owned());
    }
    if let Some(reason) = &trace.meta.per_parameter_refusal {
        return Some(reason.clone());
    }
    let away = StateAway {
        window_bytes: Bytes::ZERO,
        least_bytes: LEAST_STATE,
    };
    let goes = |update| away.bytes(trace, update) > Bytes::ZERO;
    let none = !trace.updates.iter().any(goes);
    none.then(|| format!("the optimizer keeps no state of {LEAST_STATE} or more for a parameter"))
}

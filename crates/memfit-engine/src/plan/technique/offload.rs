//! Activations elsewhere between forward and backward.
//!
//! Responsible for whether they may go. Not responsible for which go (`search/`), nor for what moving them costs
//! (`search/transfers.rs`).

use crate::plan::{ActionKind, PlanRequest};

/// Why activations cannot be offloaded to the place that was named; `None` when they can, or none was.
pub(in crate::plan) fn refusal(request: &PlanRequest) -> Option<String> {
    let forbidden = request.forbid.contains(&ActionKind::Offload);
    let named = request.offload.is_some();
    (named && forbidden).then(|| "forbidden by the request".to_owned())
}

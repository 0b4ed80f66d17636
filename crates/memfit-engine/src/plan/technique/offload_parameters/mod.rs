//! Parameters offloaded, with a bounded part of them resident.
//!
//! Responsible for the words where they have to stay, for the action, and for the words about it. `resident_sizes.rs` says how
//! much room they may have and what moving them costs. Not responsible for which parameters go or when they move
//! (`step/offload/`).

pub(in crate::plan) mod resident_sizes;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActsOn, Technique, counted};
use crate::bytes::Bytes;
use crate::plan::actions::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest, Tier};
use crate::step::{ParametersAway, Passes};
use crate::trace::{AllocationId, Trace};
use resident_sizes::replays;

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::OffloadParameters,
    name: "offload_parameters",
    title: "parameter offloading",
    help: "Offload parameters, with only some of them resident at a time",
    promise: Class::Exact,
    effect: |action| {
        let resident = action.resident_bytes;
        let most = resident.map_or_else(String::new, |bytes| format!("; at most {bytes} resident"));
        format!("{} offloaded{most}", counted(action.count, "parameter"))
    },
    short: None,
    acts_on: ActsOn::Parameters,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.variant.offload_parameters.is_some(),
    write,
};

/// Smaller parameters stay in memory: fetching them would take longer than it is worth.
pub(super) const LEAST_PARAMETER: Bytes = Bytes(16_384);

/// Which parameters to offload, and how.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OffloadParameters {
    /// Where to.
    pub tier: Tier,
    /// The folder, for files; empty for the host's memory.
    #[serde(default)]
    pub folder: String,
    /// Most bytes of them in memory, or on their way, at a time.
    pub room_bytes: Bytes,
    /// Most of those that are on their way, or came ahead and are not used yet.
    pub ahead_bytes: Bytes,
    /// Names of those that go, one for each storage.
    pub names: Vec<String>,
    /// In which order a step uses them, as places in `names`.
    pub order: Vec<u32>,
}

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

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let outcome = chosen.outcome;
    let (trace, variant) = (&outcome.trace, outcome.variant);
    let offer = chosen.planner.parameters_offer();
    let Some((away, offer)) = variant.offload_parameters.zip(offer) else {
        return;
    };
    let items: Vec<AllocationId> = away.of(trace).collect();
    let name = |id: &AllocationId| trace.string(trace.allocations[id.index()].name).to_owned();
    let passes = Passes {
        variant,
        pieces: outcome.pieces,
        replays: &replays(trace, variant, &chosen.candidate.treatments),
    };
    let order = away.order(trace, passes).into_iter();
    let place = |id: AllocationId| u32::try_from(items.binary_search(&id).ok()?).ok();
    let offload_parameters = OffloadParameters {
        tier: offer.tier,
        folder: offer.folder.clone(),
        room_bytes: away.room_bytes,
        ahead_bytes: away.ahead_bytes,
        names: items.iter().map(name).collect(),
        order: order.filter_map(place).collect(),
    };
    let bytes = away.bytes(trace) - away.held_bytes(trace);
    let details = Details::OffloadParameters { offload_parameters };
    let count = items.len() as u64;
    plan.actions.push(Action::new(details, count, bytes));
}

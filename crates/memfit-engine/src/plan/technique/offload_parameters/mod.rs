//! Parameters offloaded, with a bounded part of them resident.
//!
//! Responsible for the action, and for the words about it. `refusal.rs` says why they have to stay, `resident_sizes.rs` says how
//! much room they may have and what moving them costs. Not responsible for which parameters go or when they move
//! (`step/offload/`).

mod refusal;
pub(in crate::plan) mod resident_sizes;

use super::{ActsOn, Technique, counted};
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, OffloadParameters, Plan};
use crate::step::Passes;
use crate::trace::AllocationId;
use refusal::refusal;
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

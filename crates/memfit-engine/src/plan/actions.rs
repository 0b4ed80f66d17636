//! The choice, written into a plan.
//!
//! Responsible for the check before anything is written, and for each action with its count, its bytes and what the
//! executor needs. Not responsible for choosing (`choose.rs`) nor for addressing allocations
//! (`technique/addresses.rs`).

use super::context::{Outcome, PlanError, Planner, Sliced};
use super::search::problem::{Candidate, Problem};
use super::technique::addresses::directions;
use super::technique::offload_parameters::replays;
use super::validate::{InvalidPlan, validate};
use super::{
    Action, ActionKind, Class, Dropped, Estimate, OffloadOptimizer, OffloadParameters, Plan, arena,
};
use crate::bytes::Bytes;
use crate::predict;
use crate::step::{Passes, Treatment, UpdateTurn, Variant, update_turns};
use crate::trace::{AllocationId, Chunk, ParameterUpdate, Phase, Trace};

const RANDOM_NOTE: &str = "the model draws random numbers (dropout): each piece of the batch draws its \
     own, so the gradients equal the unplanned ones in distribution, not in value";

impl Planner<'_> {
    /// Fills in what is done and what it leads to, after the check.
    pub(super) fn write(
        &self,
        plan: &mut Plan,
        outcome: &Outcome,
        candidate: &Candidate,
    ) -> Result<(), PlanError> {
        let peak = candidate.evaluation.peak_bytes;
        let treatments = &candidate.treatments;
        validate(&outcome.trace, outcome.variant, treatments, peak)?;
        if peak > self.unplanned_peak {
            let unplanned = self.unplanned_peak;
            return Err(InvalidPlan::Rises {
                planned: peak,
                unplanned,
            }
            .into());
        }
        let seconds = outcome.seconds(candidate);
        plan.planned = Estimate {
            predicted_peak_bytes: peak,
            predicted_step_seconds: seconds,
        };
        plan.predicted_step_ratio = seconds / self.costs.step_seconds().max(f64::MIN_POSITIVE);
        plan.class = outcome.class();
        plan.arena = arena::arena(&outcome.trace, outcome.variant, treatments);
        if outcome.variant.fuse_optimizer {
            plan.actions.push(self.fuse_action());
        }
        let away = self.offload_optimizer_action(&outcome.trace, outcome.variant);
        plan.actions.extend(away);
        let away = self.offload_parameters_action(outcome, treatments);
        plan.actions.extend(away);
        if let Some(step) = self.step_of(outcome) {
            plan.actions.push(self.chunk_action(step));
            plan.notes.extend(slice_notes(&step.alternative.chunk));
            step.costs.source().clone_into(&mut plan.cost_source);
        }
        if outcome.pieces > 1 {
            plan.actions.push(self.pieces_action(outcome));
            let mut ops = self.trace.ops.iter();
            if ops.any(|op| op.random && op.phase == Phase::Forward) {
                plan.notes.push(RANDOM_NOTE.to_owned());
            }
        }
        self.write_treatments(plan, outcome, candidate);
        Ok(())
    }

    fn write_treatments(&self, plan: &mut Plan, outcome: &Outcome, candidate: &Candidate) {
        let treatments = &candidate.treatments;
        if treatments.iter().all(|treatment| treatment.is_keep()) {
            return;
        }
        let allowed = self.allowed();
        let costs = self.step_of(outcome).map_or(self.costs, |step| &step.costs);
        let problem = Problem::new(&outcome.trace, outcome.variant, costs, allowed);
        let directions = directions(&problem, treatments, allowed.offer);
        let of = |kind, moved: &[Dropped]| Action {
            count: moved.len() as u64,
            bytes: moved.iter().map(|moved| moved.bytes).sum(),
            ..Action::new(kind, Class::Exact)
        };
        if let Some(remat) = directions.remat {
            plan.actions.push(Action {
                remat: Some(remat.clone()),
                ..of(ActionKind::Remat, &remat.drops)
            });
        }
        if let Some(offload) = directions.offload {
            plan.actions.push(Action {
                offload: Some(offload.clone()),
                ..of(ActionKind::Offload, &offload.stores)
            });
        }
    }

    fn fuse_action(&self) -> Action {
        let gradients = self.trace.updates.iter().map(|update| {
            let gradient = &self.trace.allocations[update.gradient.index()];
            gradient.bytes
        });
        Action {
            count: self.trace.updates.len() as u64,
            bytes: gradients.sum(),
            ..Action::new(ActionKind::FuseOptimizer, Class::Exact)
        }
    }

    /// The state that an outcome keeps elsewhere, if it does.
    fn offload_optimizer_action(&self, trace: &Trace, variant: Variant) -> Option<Action> {
        let (away, offer) = (variant.offload_optimizer?, self.state_offer()?);
        let updates = update_turns(trace, variant).into_iter();
        let updates: Vec<&ParameterUpdate> = updates
            .filter_map(|(_, turn)| match turn {
                UpdateTurn::Out(update) => Some(&trace.updates[update]),
                _ => None,
            })
            .collect();
        let bytes = updates.iter().map(|update| away.bytes(trace, update));
        let parameter = |update: &&ParameterUpdate| {
            let parameter = &trace.allocations[update.parameter.index()];
            trace.string(parameter.name).to_owned()
        };
        Some(Action {
            count: updates.len() as u64,
            bytes: bytes.sum(),
            offload_optimizer: Some(OffloadOptimizer {
                tier: offer.tier,
                folder: offer.folder.clone(),
                window_bytes: away.window_bytes,
                least_bytes: away.least_bytes,
                order: updates.iter().map(parameter).collect(),
            }),
            ..Action::new(ActionKind::OffloadOptimizer, Class::Exact)
        })
    }

    /// The parameters that an outcome keeps elsewhere, if it does.
    fn offload_parameters_action(
        &self,
        outcome: &Outcome,
        treatments: &[Treatment],
    ) -> Option<Action> {
        let (trace, variant) = (&outcome.trace, outcome.variant);
        let (away, offer) = (variant.offload_parameters?, self.parameters_offer()?);
        let items: Vec<AllocationId> = away.of(trace).collect();
        let name = |id: &AllocationId| trace.string(trace.allocations[id.index()].name).to_owned();
        let passes = Passes {
            variant,
            pieces: outcome.pieces,
            replays: &replays(trace, variant, treatments),
        };
        let order = away.order(trace, passes).into_iter();
        let place = |id: AllocationId| u32::try_from(items.binary_search(&id).ok()?).ok();
        Some(Action {
            count: items.len() as u64,
            bytes: away.bytes(trace) - away.held_bytes(trace),
            offload_parameters: Some(OffloadParameters {
                tier: offer.tier,
                folder: offer.folder.clone(),
                room_bytes: away.room_bytes,
                ahead_bytes: away.ahead_bytes,
                names: items.iter().map(name).collect(),
                order: order.filter_map(place).collect(),
            }),
            ..Action::new(ActionKind::OffloadParameters, Class::Exact)
        })
    }

    /// The step in slices that an outcome runs.
    fn step_of(&self, outcome: &Outcome) -> Option<&Sliced<'_>> {
        self.sliced.get(outcome.sliced?)
    }

    fn chunk_action(&self, step: &Sliced<'_>) -> Action {
        let chunk = &step.alternative.chunk;
        Action {
            count: chunk.slices(),
            bytes: self.unplanned_peak - predict::unplanned_peak(&step.alternative.trace),
            chunk: Some(chunk.clone()),
            ..Action::new(ActionKind::Chunk, Class::Equivalent)
        }
    }

    fn pieces_action(&self, outcome: &Outcome) -> Action {
        Action {
            count: outcome.pieces,
            bytes: self.unplanned_peak - predict::unplanned_peak(&outcome.trace),
            ..Action::new(ActionKind::MicroBatch, Class::Equivalent)
        }
    }
}

impl Action {
    /// One that concerns nothing yet.
    pub(super) const fn new(kind: ActionKind, class: Class) -> Self {
        Self {
            kind,
            class,
            count: 0,
            bytes: Bytes::ZERO,
            remat: None,
            offload: None,
            offload_optimizer: None,
            offload_parameters: None,
            settings: None,
            chunk: None,
        }
    }
}

/// What runs in slices, for a reader.
fn slice_notes(chunk: &Chunk) -> Vec<String> {
    let mut parts = Vec::new();
    if let Some(loss) = &chunk.loss {
        parts.push(format!(
            "the loss over `{}` in {}",
            loss.weight, loss.slices
        ));
    }
    if let Some(first) = chunk.calls.first() {
        let others = match chunk.calls.len() - 1 {
            0 => String::new(),
            count => format!(" and {count} more"),
        };
        parts.push(format!("`{}`{others} in {}", first.module, first.slices));
    }
    let mut notes = vec![format!("slices: {}", parts.join(", "))];
    if let Some(call) = chunk.calls.iter().find(|call| call.draws) {
        notes.push(format!(
            "`{}` draws random numbers (dropout): each slice draws its own, so the gradients equal the unplanned ones \
             in distribution, not in value",
            call.module
        ));
    }
    notes
}

/// Kinds of action in an outcome that is not exact.
pub(super) fn equivalent_kinds(outcome: &Outcome, candidate: &Candidate) -> Vec<ActionKind> {
    let treatments = &candidate.treatments;
    let used = [
        (
            outcome.variant.offload_optimizer.is_some(),
            ActionKind::OffloadOptimizer,
        ),
        (
            outcome.variant.offload_parameters.is_some(),
            ActionKind::OffloadParameters,
        ),
        (outcome.sliced.is_some(), ActionKind::Chunk),
        (outcome.pieces > 1, ActionKind::MicroBatch),
        (treatments.iter().any(|it| it.is_drop()), ActionKind::Remat),
        (
            treatments.iter().any(|it| it.is_store()),
            ActionKind::Offload,
        ),
    ];
    let kinds = used.into_iter().filter(|&(is_used, _)| is_used);
    kinds.map(|(_, kind)| kind).collect()
}

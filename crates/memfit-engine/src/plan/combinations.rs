//! Which combinations of outer choices are tried, and what each adds to the step whatever else is done.
//!
//! Responsible for: the optimizer inside backward or not, its state offloaded or not, how much may be on its way at
//! once, and into how many pieces the batch is cut. Not responsible for how much room parameters have
//! (`technique/offload_parameters.rs`), for solving a combination (`context.rs`) or for choosing (`choose.rs`), nor for
//! what may be done at all (`technique/`).

use super::ActionKind;
use super::context::{Outcome, Planner};
use super::search::limits::Share;
use super::search::narrow_forms::LEAST_BYTES;
use super::search::problem::Allowed;
use super::search::transfers::{Offer, Schedule};
use super::technique::offload_optimizer::LEAST_STATE;
use super::technique::{
    fuse_optimizer, half_parameters, micro_batch, offload, offload_optimizer, one_by_one,
    optimizer_bits,
};
use crate::bytes::Bytes;
use crate::cost::Costs;
use crate::step::{ParametersAway, Passes, StateAway, StepModel, Variant};
use crate::trace::{AllocationId, Phase, Trace};

impl Planner<'_> {
    /// The combinations that leave the batch whole.
    pub(super) fn whole_batch(&self, share: Share<'_>, best_seconds: f64) -> Vec<Outcome> {
        let variants = self.variants();
        let tries: Vec<_> = variants.into_iter().map(|variant| (variant, 1)).collect();
        let rooms = self.untried_rooms();
        let kinds = 1 + usize::from(!rooms.is_empty());
        let mut outcomes = self.outcomes(&tries, share.part(0, kinds), best_seconds);
        let seconds = outcomes.iter().filter_map(Outcome::best_seconds);
        let best_seconds = seconds.fold(best_seconds, f64::min);
        let worth: Vec<_> = self.with_rooms(&rooms, best_seconds).collect();
        outcomes.extend(self.outcomes(&worth, share.part(1, kinds), best_seconds));
        outcomes
    }

    /// The combinations that cut the batch into pieces.
    pub(super) fn micro_batches(&self, share: Share<'_>, best_seconds: f64) -> Vec<Outcome> {
        let window_bytes = self.windows().first().copied().unwrap_or_default();
        let plain = Variant {
            accumulate: true,
            window_bytes,
            ..Variant::default()
        };
        let away = self.states_away().first().map(|&away| Variant {
            offload_optimizer: Some(away),
            ..plain
        });
        let usual = [Some(plain), away].into_iter().flatten();
        let variants = self.with_narrow_state(usual.collect(), &[plain]);
        let rooms = self.untried_rooms();
        let kinds = 1 + usize::from(!rooms.is_empty());
        let tries = self.in_pieces(&variants);
        let mut outcomes = self.outcomes(&tries, share.part(0, kinds), best_seconds);
        let seconds = outcomes.iter().filter_map(Outcome::best_seconds);
        let best_seconds = seconds.fold(best_seconds, f64::min);
        let worth = self.pieces_with_rooms(&rooms, away.unwrap_or(plain), best_seconds);
        outcomes.extend(self.outcomes(&worth, share.part(1, kinds), best_seconds));
        outcomes
    }

    /// Rooms for offloaded parameters; none where only state in 8 bits is new, which is not tried with them.
    fn untried_rooms(&self) -> Vec<ParametersAway> {
        let is_known = !self.may_shrink && !self.is_new;
        if self.may_narrow_state && (is_known || half_parameters::must_narrow_state(self.trace)) {
            return Vec::new();
        }
        self.parameters_away()
    }

    /// Some variants with every number of pieces that the batch can be cut into.
    pub(super) fn in_pieces(&self, variants: &[Variant]) -> Vec<(Variant, u64)> {
        let counts = micro_batch::piece_counts(self.trace);
        let tries = counts.flat_map(|pieces| variants.iter().map(move |&it| (it, pieces)));
        tries.collect()
    }

    /// The optimizer in backward or not, its state offloaded or not, and how much may be on its way at once. Where
    /// there are windows for both activations and state, they are wide together and narrow together.
    fn variants(&self) -> Vec<Variant> {
        let (windows, states) = (self.windows(), self.states_away());
        let may_fuse = fuse_optimizer::refusal(self.trace, self.request).is_none();
        let one_by_one_pays = one_by_one::pays(self.trace, self.request);
        let mut variants = Vec::new();
        for width in 0..windows.len().max(states.len()) {
            let window_bytes = windows[width.min(windows.len() - 1)];
            let stays = (width < windows.len()).then_some(None);
            let away = states.get(width).map(|&away| Some(away));
            for offload_optimizer in [stays, away].into_iter().flatten() {
                let plain = Variant {
                    window_bytes,
                    offload_optimizer,
                    ..Variant::default()
                };
                let fused = Variant {
                    fuse_optimizer: true,
                    ..plain
                };
                let one_by_one = Variant {
                    one_by_one: true,
                    ..plain
                };
                variants.push(plain);
                // Offloaded state makes updates come one by one by itself.
                variants
                    .extend((one_by_one_pays && offload_optimizer.is_none()).then_some(one_by_one));
                variants.extend(may_fuse.then_some(fused));
            }
        }
        let narrow: Vec<_> = windows
            .iter()
            .flat_map(|&window_bytes| {
                let plain = Variant {
                    window_bytes,
                    ..Variant::default()
                };
                let fused = Variant {
                    fuse_optimizer: true,
                    ..plain
                };
                [Some(plain), may_fuse.then_some(fused)]
            })
            .flatten()
            .collect();
        self.with_narrow_state(variants, &narrow)
    }

    /// Variants, and some more with state in 8 bits where that may be, in memory or offloaded. If nothing else is
    /// new, only those: the others were tried before.
    fn with_narrow_state(&self, usual: Vec<Variant>, more: &[Variant]) -> Vec<Variant> {
        if !self.may_narrow_state {
            return usual;
        }
        let forms = half_parameters::forms_of_state(self.trace);
        let narrow = forms.iter().flat_map(|&form| {
            more.iter().map(move |&plain| Variant {
                eight_bit_state: Some(form),
                ..plain
            })
        });
        let is_worth_it =
            (self.may_shrink || self.is_new) && !half_parameters::must_narrow_state(self.trace);
        let usual = usual.into_iter().filter(|_| is_worth_it);
        // Offloaded lower halves take no more memory than a slice, so rounding would save nothing.
        let offloaded = self.state_away(Bytes::ZERO).zip(forms.first());
        let offloaded = offloaded.into_iter().flat_map(|(away, &form)| {
            more.iter().map(move |&plain| Variant {
                eight_bit_state: Some(form),
                offload_optimizer: Some(away),
                ..plain
            })
        });
        usual.chain(narrow).chain(offloaded).collect()
    }

    /// Transfers hide behind computing where two of the largest allocations may be on their way; where bytes are
    /// short, none are.
    pub(super) fn windows(&self) -> Vec<Bytes> {
        if self.offer().is_none() {
            return vec![Bytes::ZERO];
        }
        let model = StepModel::new(self.trace, Variant::default());
        let ids = (0..self.trace.allocations.len()).filter_map(|id| u32::try_from(id).ok());
        let storable = ids.map(AllocationId).filter(|&id| model.is_storable(id));
        let largest = storable.map(|id| model.bytes(id)).max();
        vec![
            Bytes(largest.unwrap_or_default().0.saturating_mul(2)),
            Bytes::ZERO,
        ]
    }

    /// Offloaded state, with a window that lets any one update's come ahead, and with none; nothing where the state
    /// has to stay.
    pub(super) fn states_away(&self) -> Vec<StateAway> {
        let Some(narrow) = self.state_away(Bytes::ZERO) else {
            return Vec::new();
        };
        let sizes = self.trace.updates.iter();
        let largest = sizes.map(|update| narrow.bytes(self.trace, update)).max();
        let wide = self.state_away(largest.unwrap_or_default());
        wide.into_iter().chain([narrow]).collect()
    }

    /// Offloaded state with a window of so many bytes; `None` where it has to stay.
    pub(super) fn state_away(&self, window_bytes: Bytes) -> Option<StateAway> {
        self.state_offer()?;
        Some(StateAway {
            window_bytes,
            least_bytes: LEAST_STATE,
        })
    }

    /// The place for activations, if they may be offloaded.
    pub(super) fn offer(&self) -> Option<&Offer> {
        let offer = self.request.offload.as_ref();
        offer.filter(|_| offload::refusal(self.trace, self.request).is_none())
    }

    /// The place for optimizer state, if it may be offloaded.
    pub(super) fn state_offer(&self) -> Option<&Offer> {
        let offer = self.request.offload.as_ref();
        offer.filter(|_| offload_optimizer::refusal(self.trace, self.request).is_none())
    }

    pub(super) fn allowed(&self) -> Allowed<'_> {
        Allowed {
            remat: !self.request.forbid.contains(&ActionKind::Remat),
            unneeded_saves: !self.request.forbid.contains(&ActionKind::UnneededSaves),
            offer: self.offer(),
            shrink: self.may_shrink.then_some(LEAST_BYTES),
        }
    }

    /// Seconds of the step without replays and waits for activations. A transfer of parameters waits for no other
    /// kind of transfer.
    #[expect(clippy::cast_precision_loss, reason = "a handful of pieces")]
    pub(super) fn base_seconds(
        &self,
        costs: &Costs,
        trace: &Trace,
        variant: Variant,
        pieces: u64,
    ) -> f64 {
        let pass = costs.phase_seconds(trace, &[Phase::Forward, Phase::Backward]);
        let gradients: Bytes = trace
            .updates
            .iter()
            .map(|u| trace.allocations[u.gradient.index()].bytes)
            .sum();
        let accumulate = costs.accumulate_seconds(gradients.as_f64()) * (pieces - 1) as f64;
        let update = self.costs.phase_seconds(self.trace, &[Phase::Optimizer]);
        let update = optimizer_bits::update_seconds(trace, costs, variant, update);
        let moved = self.state_offer().map_or(0.0, |offer| {
            let schedule = Schedule::new(trace, offer.clone(), costs);
            schedule.state_seconds(trace, variant, update)
        });
        let once = Passes {
            variant,
            pieces,
            replays: &[],
        };
        let parameters = self.parameter_seconds(costs, trace, once);
        pass * pieces as f64 + accumulate + update + moved + parameters
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        Action, ActionKind, Class, Details, OffloadOptimizer, OffloadParameters, Plan, PlanRequest,
        StopReason, Tier, Verdict, plan,
    };
    use super::*;
    use crate::bytes::Budget;
    use crate::cost::CostSource;
    use crate::trace::sample::Builder;
    use crate::trace::{Category, OpIndex, ParameterUpdate, Phase, Trace, sample};

    const STATE: u64 = 100_000;

    /// The chain, whose weight is updated with a state that is most of what the step holds.
    fn chain_with_state() -> Trace {
        let mut trace = sample::chain();
        let mut state = trace.allocations[0].clone();
        state.category = Category::OptimizerState;
        state.bytes = Bytes(STATE);
        let id = u32::try_from(trace.allocations.len()).unwrap();
        trace.allocations.push(state.clone());
        trace.updates[0].state = vec![AllocationId(id)];
        // More of it, for a parameter that is updated later.
        trace.allocations.push(state);
        let mut update = trace.updates[0].clone();
        update.state = vec![AllocationId(id + 1)];
        trace.updates.push(update);
        assert_eq!(trace.check(), Ok(()));
        trace
    }

    fn request(budget: u64, rate: f64) -> PlanRequest {
        PlanRequest {
            budget: Budget::Absolute(Bytes(budget)),
            offload: Some(Offer {
                tier: Tier::Disk,
                folder: "/scratch".to_owned(),
                write_bytes_per_second: rate,
                read_bytes_per_second: rate,
            }),
            ..PlanRequest::default()
        }
    }

    fn planned(trace: &Trace, request: &PlanRequest) -> Plan {
        let source = CostSource::profile(vec![1.0; trace.ops.len()]);
        plan(trace, &source, request).unwrap()
    }

    fn state_away(action: &Action) -> Option<&OffloadOptimizer> {
        match &action.details {
            Details::OffloadOptimizer { offload_optimizer } => Some(offload_optimizer),
            _ => None,
        }
    }

    fn parameters_away(action: &Action) -> Option<&OffloadParameters> {
        match &action.details {
            Details::OffloadParameters { offload_parameters } => Some(offload_parameters),
            _ => None,
        }
    }

    #[test]
    fn state_goes_where_nothing_else_brings_the_step_under_its_budget() {
        let trace = chain_with_state();
        let plan = planned(&trace, &request(STATE * 3 / 2, 1e6));
        assert_eq!((plan.verdict, plan.promise), (Verdict::Fits, Class::Exact));
        let action = plan
            .actions
            .iter()
            .find(|action| action.kind() == ActionKind::OffloadOptimizer);
        let action = action.expect("only the state is large enough");
        let directions = state_away(action).unwrap();
        assert_eq!((action.count, action.bytes), (2, Bytes(2 * STATE)));
        assert_eq!(directions.order.len(), 2);
        assert_eq!(directions.folder, "/scratch");
        assert_eq!(
            directions.window_bytes,
            Bytes::ZERO,
            "both at once would be too much"
        );
        // Each way of each state takes a tenth of a second, and nothing hides it.
        let added = plan.planned.predicted_step_seconds - plan.unplanned.predicted_step_seconds;
        assert!((0.4..0.41).contains(&added), "{added}");
        assert!(plan.lower_bound_ratio <= plan.predicted_step_ratio);
    }

    #[test]
    fn a_window_is_used_where_there_is_room_for_it() {
        let mut trace = chain_with_state();
        let (state, mut update) = (trace.updates[1].state[0], trace.updates[1].clone());
        for _ in 0..6 {
            let id = u32::try_from(trace.allocations.len()).unwrap();
            let state = trace.allocations[state.index()].clone();
            trace.allocations.push(state);
            update.state = vec![AllocationId(id)];
            trace.updates.push(update.clone());
        }
        let small = planned(&trace, &request(STATE * 3 / 2, 1e6));
        // One in use, one ahead, and one on its way out.
        let large = planned(&trace, &request(STATE * 7 / 2, 1e6));
        let window = |plan: &Plan| {
            let mut directions = plan.actions.iter().filter_map(state_away);
            directions.next().map(|directions| directions.window_bytes)
        };
        assert_eq!(window(&small), Some(Bytes::ZERO));
        assert_eq!(window(&large), Some(Bytes(STATE)));
        let seconds = |plan: &Plan| plan.planned.predicted_step_seconds;
        assert!(seconds(&large) < seconds(&small));
    }

    #[test]
    fn a_slow_place_is_no_place_for_state_where_computing_again_does() {
        let mut trace = chain_with_state();
        trace.meta.probe_threads = 1;
        for allocation in &mut trace.allocations {
            // So large that what a plan keeps free is small beside it.
            allocation.bytes = Bytes(allocation.bytes.0 * 1_000_000);
        }
        let kinds = |plan: &Plan| plan.actions.iter().map(Action::kind).collect::<Vec<_>>();
        let peak = crate::predict::unplanned_peak(&trace).0;
        let slow = planned(&trace, &request(peak, 1.0));
        assert_eq!(slow.verdict, Verdict::Fits);
        assert!(!kinds(&slow).contains(&ActionKind::OffloadOptimizer));
    }

    #[test]
    fn the_smallest_peak_counts_on_state_that_may_go() {
        let trace = chain_with_state();
        let with = planned(&trace, &request(1, 1e6));
        let mut request = request(1, 1e6);
        request.forbid = vec![ActionKind::OffloadOptimizer];
        let without = planned(&trace, &request);
        assert!(without.minimum_peak_bytes >= Bytes(2 * STATE));
        assert!(with.minimum_peak_bytes < Bytes(STATE + 1000));
        let proved = (StopReason::ProvedInfeasible, StopReason::ProvedInfeasible);
        assert_eq!((with.stop_reason, without.stop_reason), proved);
        let says = |plan: &Plan| {
            plan.notes
                .iter()
                .any(|note| note.contains("optimizer state"))
        };
        assert!(says(&without) && !says(&with));
        let refusal = without
            .refusals
            .iter()
            .find(|r| r.kind == ActionKind::OffloadOptimizer);
        assert_eq!(refusal.unwrap().reason, "forbidden by the request");
    }

    #[test]
    fn state_stays_where_an_optimizer_needs_it_and_the_reason_is_said() {
        let mut trace = chain_with_state();
        let reason = |trace: &Trace, request: &PlanRequest| {
            let plan = planned(trace, request);
            let mut refusals = plan.refusals.into_iter();
            let refusal = refusals.find(|r| r.kind == ActionKind::OffloadOptimizer);
            refusal.map(|refusal| refusal.reason)
        };
        let usual = request(STATE, 1e6);
        assert_eq!(reason(&trace, &usual), None);
        let own_loop = PlanRequest {
            own_loop: true,
            ..usual.clone()
        };
        let said = reason(&trace, &own_loop).unwrap();
        assert_eq!(said, "the optimizer is called by the user's own loop");
        trace.meta.per_parameter_refusal = Some("`LBFGS` is not known".to_owned());
        assert_eq!(reason(&trace, &usual).unwrap(), "`LBFGS` is not known");
        let small = sample::chain();
        let said = reason(&small, &usual).unwrap();
        assert_eq!(
            said,
            "the optimizer keeps no state of 4.0 KiB or more for a parameter"
        );
        let nowhere = PlanRequest {
            offload: None,
            ..usual
        };
        assert_eq!(reason(&trace, &nowhere), None);
    }

    /// Layers of one parameter each; parameters are most of what the step holds.
    fn layers(count: usize) -> Trace {
        let mut builder = Builder::new(1);
        let input = builder.allocation(&[4], Category::Input, 0);
        let weights: Vec<_> = (0..count)
            .map(|_| builder.allocation(&[25_000], Category::Parameter, 0))
            .collect();
        let mut value = input;
        for &weight in weights.iter().chain(weights.iter().rev()) {
            let phase = if builder.trace.ops.len() < count {
                Phase::Forward
            } else {
                Phase::Backward
            };
            value = builder.op("aten.a.default", phase, &[value, weight], &[4]);
        }
        builder.finish()
    }

    #[test]
    fn parameters_go_where_nothing_else_brings_the_step_under_its_budget() {
        let trace = layers(8);
        let weight = 100_000;
        // Room for three of eight.
        let plan = planned(&trace, &request(weight * 7 / 2, 1e6));
        assert_eq!((plan.verdict, plan.promise), (Verdict::Fits, Class::Exact));
        let mut actions = plan.actions.iter();
        let action = actions.find_map(parameters_away);
        let directions = action.expect("only parameters are large enough");
        assert_eq!(directions.names.len(), 8);
        assert_eq!(directions.room_bytes, Bytes(2 * weight));
        assert_eq!(directions.ahead_bytes, Bytes(weight));
        let order: Vec<u32> = (0..8).chain((0..7).rev()).collect();
        assert_eq!(directions.order, order, "the last is used twice in a row");
        assert!(plan.lower_bound_ratio <= plan.predicted_step_ratio);
        let narrow = planned(&trace, &request(weight * 3 / 2, 1e6));
        assert_eq!(narrow.verdict, Verdict::Fits);
        assert!(narrow.planned.predicted_peak_bytes < Bytes(weight * 3 / 2));
        let seconds = |plan: &Plan| plan.planned.predicted_step_seconds;
        assert!(seconds(&plan) < seconds(&narrow), "more room moves less");
        let none = planned(&trace, &request(weight / 2, 1e6));
        assert_eq!(none.stop_reason, StopReason::ProvedInfeasible);
        assert!(none.minimum_peak_bytes < Bytes(weight * 3 / 2));
    }

    /// Layers whose gradients, as large as their parameters, an optimizer reads one after the other.
    fn trained_layers(count: usize) -> Trace {
        let mut builder = Builder::new(1);
        builder.trace.meta.optimizer = "SGD".to_owned();
        let mut value = builder.allocation(&[4], Category::Input, 0);
        let weights: Vec<_> = (0..count)
            .map(|_| builder.allocation(&[25_000], Category::Parameter, 0))
            .collect();
        for &weight in &weights {
            value = builder.op("aten.a.default", Phase::Forward, &[value, weight], &[4]);
        }
        let mut complete = Vec::new();
        for &weight in weights.iter().rev() {
            value = builder.op("aten.a.default", Phase::Backward, &[value, weight], &[4]);
            let gradient = builder.op("aten.b.default", Phase::Backward, &[value], &[25_000]);
            complete.push((weight, gradient, builder.trace.ops.len()));
        }
        let end = u32::try_from(builder.trace.ops.len() + count).unwrap();
        for (weight, gradient, ready) in complete {
            builder.op_in_place("aten.add_.Tensor", Phase::Optimizer, weight, &[gradient]);
            builder.keep_until(gradient, end);
            let [parameter, gradient] =
                [weight, gradient].map(|it| builder.trace.allocation_of(it));
            builder.trace.allocations[gradient.index()].category = Category::Gradient;
            builder.trace.updates.push(ParameterUpdate {
                parameter,
                gradient,
                ready: OpIndex(u32::try_from(ready).unwrap()),
                temporary_bytes: Bytes(0),
                moved_bytes: Bytes(300_000),
                state: Vec::new(),
            });
        }
        builder.finish()
    }

    #[test]
    fn in_a_backward_of_the_users_parameters_are_elsewhere_or_updated_but_not_both() {
        let trace = trained_layers(8);
        let kinds = |budget: u64, own_backward: bool| {
            let request = PlanRequest {
                own_backward,
                ..request(budget, 1e6)
            };
            let plan = planned(&trace, &request);
            let fits = plan.verdict == Verdict::Fits;
            let has = |kind| plan.actions.iter().any(|it| it.kind() == kind);
            (
                fits,
                has(ActionKind::FuseOptimizer),
                has(ActionKind::OffloadParameters),
            )
        };
        let both = (true, true, true);
        assert_eq!(
            kinds(450_000, false),
            both,
            "gradients alone are 800,000 bytes"
        );
        assert_eq!(kinds(1_000_000, true), (true, true, false));
        assert_eq!(kinds(1_100_000, true), (true, true, false));
        for budget in [300_000, 450_000, 700_000, 900_000] {
            let (fits, fused, away) = kinds(budget, true);
            assert!(!(fused && away), "{budget}");
            assert!(!fits || away, "{budget}");
        }
    }

    #[test]
    fn parameters_that_cannot_be_let_go_stay_and_count() {
        let mut trace = layers(8);
        let weight = 100_000;
        trace.meta.fixed_parameters = [1, 3, 4].map(crate::trace::AllocationId).to_vec();
        trace.check().unwrap();
        let plan = planned(&trace, &request(weight * 11 / 2, 1e6));
        assert_eq!(plan.verdict, Verdict::Fits);
        let mut actions = plan.actions.iter();
        let action = actions.find_map(parameters_away);
        let directions = action.expect("only parameters are large enough");
        assert_eq!(directions.names.len(), 5);
        // Three stay, and every op finds its own.
        let least = planned(&trace, &request(weight * 7 / 2, 1e6));
        assert_eq!(least.verdict, Verdict::DoesNotFit);
        assert!(least.minimum_peak_bytes >= Bytes(weight * 4));
    }

    #[test]
    fn parameters_stay_where_they_have_to_and_the_reason_is_said() {
        let trace = layers(8);
        let reason = |trace: &Trace, request: &PlanRequest| {
            let mut refusals = planned(trace, request).refusals.into_iter();
            let refusal = refusals.find(|r| r.kind == ActionKind::OffloadParameters);
            refusal.map(|refusal| refusal.reason)
        };
        let usual = request(300_000, 1e6);
        assert_eq!(reason(&trace, &usual), None);
        let own_loop = PlanRequest {
            own_loop: true,
            ..usual.clone()
        };
        let said = reason(&trace, &own_loop).unwrap();
        assert_eq!(said, "the step is run by the user's own loop");
        let said = reason(&sample::chain(), &usual).unwrap();
        assert_eq!(said, "the model has no parameter of 16.0 KiB or more");
        let mut fixed = layers(8);
        let parameters = (1..=8).map(crate::trace::AllocationId);
        fixed.meta.fixed_parameters = parameters.collect();
        let said = reason(&fixed, &usual).unwrap();
        assert!(said.contains("cannot be let go"), "{said}");
        fixed
            .allocations
            .iter_mut()
            .for_each(|a| a.bytes = Bytes(8));
        let said = reason(&fixed, &usual).unwrap();
        assert_eq!(said, "the model has no parameter of 16.0 KiB or more");
        let mut trained = layers(8);
        trained.meta.optimizer = "LBFGS".to_owned();
        trained.meta.per_parameter_refusal = Some("`LBFGS` is not known".to_owned());
        assert_eq!(reason(&trained, &usual).unwrap(), "`LBFGS` is not known");
    }
}

//! The choices of a plan, and the best of them.
//!
//! Responsible for the order in which combinations are tried (`combinations.rs`), for choosing among what they
//! come to, and for what the next class would gain. Not responsible for what one combination comes to
//! (`context.rs`), for what may be done at all (`technique/`), nor for writing the choice down (`actions.rs`).

use super::bottleneck;
use super::context::{OtherWay, Outcome, PlanError, Planner};
use super::outcomes::{at_most_equal, best_seconds, fastest, lowest, lowest_of, lowest_peak};
use super::search::limits::{Limit, Share, with_work_clock};
use super::technique::allocator_settings::{self, Answer};
use super::technique::{half_parameters, int8_weights, optimizer_bits, shrink};
use super::ways::InPieces;
use super::{
    ActionKind, Class, Estimate, NextClass, Plan, PlanRequest, Refusal, SCHEMA_VERSION, StopReason,
    TECHNIQUES, Verdict, actions, arena, ways,
};
use crate::bytes::Bytes;
use crate::cost::{CostSource, Costs};
use crate::predict;
use crate::step::{Treatment, Variant};
use crate::trace::Trace;

/// Plans a step.
///
/// # Errors
///
/// Unusable op times, or a plan that fails its own check.
pub fn plan(trace: &Trace, source: &CostSource, request: &PlanRequest) -> Result<Plan, PlanError> {
    plan_within(trace, source, request, Limit::None)
}

/// Plans a step within a limit: what is best of what was found until then.
///
/// # Errors
///
/// As [`plan`].
pub fn plan_within(
    trace: &Trace,
    source: &CostSource,
    request: &PlanRequest,
    limit: Limit<'_>,
) -> Result<Plan, PlanError> {
    if let Some(offer) = &request.offload {
        offer.check()?;
    }
    let costs = Costs::new(trace, source)?;
    let ways = ways::with_costs(trace, source, &costs, request)?;
    let whole = Planner::new(trace, &costs, &ways, request, Share::FULL);
    if matches!(limit, Limit::Work(_)) {
        // Somebody waits for it, and asks for the smallest peak only where nothing fits.
        let plan = allocated(whole, limit, Smallest::NotSought)?;
        if plan.verdict == Verdict::Fits {
            return Ok(plan);
        }
    }
    allocated(whole, limit, Smallest::Sought)
}

/// The plan that the simulated allocator lets run, made for fewer bytes where it refuses one.
fn allocated(whole: Planner<'_>, limit: Limit<'_>, smallest: Smallest) -> Result<Plan, PlanError> {
    let mut less = Bytes::ZERO;
    let mut attempts = 0;
    loop {
        let (plan, answer) = with_work_clock(|clock| {
            let all = Share::within(limit, clock);
            let share = match smallest {
                Smallest::Sought => all,
                Smallest::NotSought => all.without_bottoms(),
            };
            let planner = Planner {
                target: whole.target - less,
                share,
                ..whole
            };
            let mut plan = planner.empty_plan();
            let answer = planner.solve(&mut plan)?;
            Ok::<_, PlanError>((plan, answer))
        })?;
        if answer == Ran::Yes || attempts == MOST_TIGHTENINGS {
            return Ok(plan);
        }
        attempts += 1;
        less += Bytes((plan.budget_bytes - plan.margin_bytes).0 / TIGHTENING);
    }
}

/// A plan that does not fit, with what leave to change numbers would bring: of the ways of the trace that only such leave
/// opens (`ways::beyond`) and of narrower forms of what the step keeps. Where that would not be enough either, a note says
/// how far it comes.
///
/// # Errors
///
/// As [`plan`].
pub(super) fn beyond(
    trace: &Trace,
    source: &CostSource,
    request: &PlanRequest,
    limit: Limit<'_>,
    made: &Plan,
) -> Result<Plan, PlanError> {
    let costs = Costs::new(trace, source)?;
    let request = ways::with_leave(request);
    let ways = ways::with_costs(trace, source, &costs, &request)?;
    let outcomes = with_work_clock(|clock| {
        let share = Share::within(limit, clock).quarter();
        Planner::new(trace, &costs, &ways, &request, share).approximated(&[])
    });
    let mut plan = made.clone();
    plan.next_class = first_of(&outcomes, &costs, Class::Approximate);
    let least = outcomes.iter().map(|it| it.lowest.evaluation.peak_bytes);
    let least = least.min().unwrap_or(made.minimum_peak_bytes);
    if plan.next_class.is_none() && least < made.minimum_peak_bytes {
        plan.notes.push(format!(
            "with `--allow approximate` the smallest peak found is {least}"
        ));
    }
    Ok(plan)
}

/// Times a plan is made smaller because the allocator refuses a request although the bytes are there.
const MOST_TIGHTENINGS: u32 = 5;
/// The part of the budget by which it gets smaller each time.
const TIGHTENING: u64 = 32;

/// Is the smallest peak of any plan sought?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Smallest {
    Sought,
    NotSought,
}

/// Did the allocator let the plan run?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ran {
    Yes,
    No,
}

impl<'t> Planner<'t> {
    fn new(
        trace: &'t Trace,
        costs: &'t Costs,
        ways: &'t [OtherWay<'t>],
        request: &'t PlanRequest,
        share: Share<'t>,
    ) -> Self {
        let unplanned_peak = predict::unplanned_peak(trace);
        let margin = predict::margin(trace, unplanned_peak);
        let cap = request.budget.resolve(unplanned_peak) - margin;
        Self {
            trace,
            costs,
            ways,
            request,
            target: cap,
            cap,
            unplanned_peak,
            may_shrink: false,
            may_narrow_state: false,
            is_new: false,
            share,
        }
    }
}

impl Planner<'_> {
    /// Whether the plan also says how small the step could be: by another plan, and in one block of memory.
    pub(super) fn says_how_small(&self) -> bool {
        self.share.has_bottoms()
    }

    fn empty_plan(&self) -> Plan {
        let budget = self.request.budget.resolve(self.unplanned_peak);
        let margin = predict::margin(self.trace, self.unplanned_peak);
        let unplanned = Estimate {
            predicted_peak_bytes: self.unplanned_peak,
            predicted_step_seconds: self.costs.step_seconds(),
        };
        Plan {
            schema_version: SCHEMA_VERSION,
            target: self.trace.meta.target.clone(),
            trace_digest: bottleneck::digest(self.trace),
            batch: self.trace.meta.batch,
            budget_bytes: budget,
            margin_bytes: margin,
            verdict: Verdict::Fits,
            promise: Class::Exact,
            unplanned,
            planned: unplanned,
            reserved: None,
            minimum_peak_bytes: self.unplanned_peak,
            arena: None,
            predicted_step_ratio: 1.0,
            lower_bound_ratio: 1.0,
            cost_source: self.costs.source().to_owned(),
            stop_reason: StopReason::LocalOptimum,
            evaluations: 0,
            actions: Vec::new(),
            refusals: self.refusals(false),
            next_class: None,
            bottleneck: None,
            loss_reduction: self.trace.meta.loss_reduction.clone(),
            notes: self.trace.meta.notes.clone(),
        }
    }

    /// Why techniques are not used: those that are looked at only where they are needed, or all the others.
    fn refusals(&self, needed: bool) -> Vec<Refusal> {
        let asked = TECHNIQUES
            .iter()
            .filter(|it| it.only_where_needed == needed);
        let refused = asked.filter_map(|technique| {
            let reason = (technique.refusal)(self.trace, self.request)?;
            let kind = technique.kind;
            Some(Refusal { kind, reason })
        });
        refused.collect()
    }

    fn solve(&self, plan: &mut Plan) -> Result<Ran, PlanError> {
        if self.unplanned_peak <= self.target {
            let nothing = vec![Treatment::Keep; self.trace.allocations.len()];
            let ran = self.ask_allocator(plan, self.trace, Variant::default(), &nothing);
            if ran == Ran::Yes {
                plan.stop_reason = StopReason::NothingToDo;
                if self.says_how_small() {
                    plan.minimum_peak_bytes = self.minimum(plan);
                    plan.arena = arena::arena(self.trace, Variant::default(), &nothing);
                }
            }
            return Ok(ran);
        }
        let approximating = Self {
            may_shrink: shrink::may(self.trace, self.request),
            may_narrow_state: optimizer_bits::may(self.trace, self.request),
            ..*self
        };
        let may_change_numbers = approximating.may_shrink
            || approximating.may_narrow_state
            || ways::may_change_numbers(self.trace, self.request);
        let mut outcomes;
        if self.request.allow >= Class::Approximate && self.casts_are_faster() {
            // First: it makes most of the others hopeless.
            let share = self.share.between(0.0, 1.0 - EXACT_TIME);
            let cast = approximating.under_autocast(&[], share);
            let share = self.share.between(1.0 - EXACT_TIME, AUTOCAST_TIME);
            let share = share.knowing(lowest_peak(&cast));
            outcomes = self.exact(share, at_most_equal(best_seconds(&cast)));
            outcomes.extend(cast);
        } else {
            outcomes = self.exact(self.exact_share(), f64::INFINITY);
            if may_change_numbers {
                let share = self.share.between(EXACT_TIME, AUTOCAST_TIME);
                outcomes.extend(approximating.under_autocast(&outcomes, share));
            }
        }
        // Without leave, equivalent actions are for where no exact plan fits; otherwise they are only
        // looked at, to say what they would gain.
        let exact_fits = outcomes.iter().any(|it| {
            it.best
                .as_ref()
                .is_some_and(|best| it.class_of(best) == Class::Exact)
        });
        let needed = !exact_fits || self.request.allow >= Class::Equivalent;
        let best = best_seconds(&outcomes);
        let (from, until) = if may_change_numbers {
            (AUTOCAST_TIME, EQUIVALENT_TIME)
        } else {
            (EXACT_TIME, 1.0)
        };
        let share = self.share.between(from, until).beside(best);
        let share = share.knowing(lowest_peak(&outcomes));
        let mut next = if needed {
            plan.refusals.extend(self.refusals(true));
            self.equivalent(share, best)
        } else {
            self.equivalent(share.glance(), best * WORTH_TELLING)
        };
        if needed {
            outcomes.append(&mut next);
        }
        if may_change_numbers {
            let share = self.share.between(EQUIVALENT_TIME, 1.0);
            outcomes.extend(approximating.approximate(&outcomes, share));
        }
        plan.evaluations = outcomes
            .iter()
            .chain(&next)
            .map(|outcome| outcome.evaluations)
            .sum();
        plan.minimum_peak_bytes = lowest(&outcomes).evaluation.peak_bytes;
        let (outcome, candidate) = fastest(&outcomes).unwrap_or_else(|| lowest_of(&outcomes));
        self.write(plan, outcome, candidate)?;
        let within = candidate.evaluation.peak_bytes <= self.cap;
        let mut ran = Ran::Yes;
        if within {
            ran = self.ask_allocator(plan, &outcome.trace, outcome.variant, &candidate.treatments);
        }
        if within && ran == Ran::Yes {
            let step = self.costs.step_seconds().max(f64::MIN_POSITIVE);
            let least = outcomes
                .iter()
                .map(Outcome::bound_seconds)
                .fold(f64::INFINITY, f64::min);
            let seconds = outcome.seconds_unwatched(candidate);
            plan.lower_bound_ratio = least.min(seconds) / step;
            plan.stop_reason = stop_reason(outcome, seconds, least);
        } else {
            plan.verdict = Verdict::DoesNotFit;
            self.explain_infeasible(plan, &outcomes);
        }
        let (bottom, lowest) = lowest_of(&outcomes);
        plan.bottleneck = Some(bottleneck::bottleneck(
            &bottom.trace,
            bottom.variant,
            lowest,
        ));
        plan.next_class = self.next_class(plan, &next);
        let may_need_leave = self.request.allow < Class::Approximate;
        if plan.verdict == Verdict::DoesNotFit && may_need_leave && plan.next_class.is_none() {
            plan.next_class = self.with_leave(&outcomes);
        }
        Ok(ran)
    }

    /// Lets the simulated allocator judge what is planned, and writes down what it says.
    fn ask_allocator(
        &self,
        plan: &mut Plan,
        trace: &Trace,
        variant: Variant,
        dropped: &[Treatment],
    ) -> Ran {
        let may_set = !self.request.forbid.contains(&ActionKind::AllocatorSettings);
        match allocator_settings::ask(trace, variant, dropped, self.cap, may_set) {
            Answer::NotAsked => Ran::Yes,
            Answer::Runs(reserved, less) => {
                plan.actions
                    .extend(allocator_settings::action(&reserved, less));
                plan.reserved = Some(reserved);
                Ran::Yes
            }
            Answer::Refuses(reserved) => {
                plan.verdict = Verdict::DoesNotFit;
                plan.notes.push(format!(
                    "the requests of this step fit into {}, but the caching allocator would hold {} \
                     and refuse one of them",
                    self.cap, reserved.peak_reserved_bytes
                ));
                plan.reserved = Some(reserved);
                Ran::No
            }
        }
    }

    /// The smallest peak any allowed plan reaches, when none is needed.
    fn minimum(&self, plan: &mut Plan) -> Bytes {
        let outcomes = self.exact(self.exact_share(), f64::INFINITY);
        plan.evaluations = outcomes.iter().map(|outcome| outcome.evaluations).sum();
        lowest(&outcomes).evaluation.peak_bytes
    }

    /// The exact combinations. One that its bound shows to be slower than one before is not searched for
    /// its fastest plan.
    fn exact(&self, share: Share<'_>, worth: f64) -> Vec<Outcome> {
        let mut outcomes = self.whole_batch(share, worth);
        let best = best_seconds(&outcomes).min(worth);
        let share = share.knowing(lowest_peak(&outcomes));
        outcomes.extend(ways::outcomes(
            self,
            |step| step.promise == Class::Exact,
            InPieces::No,
            share,
            best,
        ));
        outcomes
    }

    /// The time that is for exact plans.
    fn exact_share(&self) -> Share<'_> {
        let wider = !self.ways.is_empty() || self.may_cut_batch();
        self.share
            .between(0.0, if wider { EXACT_TIME } else { 1.0 })
    }

    /// Whether the step takes less time in a way under autocast than as it is.
    fn casts_are_faster(&self) -> bool {
        let plain = self.costs.step_seconds();
        let mut ways = self
            .ways
            .iter()
            .filter(|it| ways::is_cast(&it.alternative.way));
        ways.any(|step| step.costs.step_seconds() < plain)
    }

    /// The combinations that are not exact.
    fn equivalent(&self, share: Share<'_>, best_seconds: f64) -> Vec<Outcome> {
        let kinds = 1 + usize::from(self.may_cut_batch());
        let part = share.part(0, kinds);
        let of = |promise, in_pieces| {
            let is_wanted = |step: &OtherWay<'_>| step.promise == promise;
            ways::outcomes(self, is_wanted, in_pieces, part, best_seconds)
        };
        let mut outcomes = of(Class::Equivalent, InPieces::Too);
        outcomes.extend(of(Class::Exact, InPieces::Only));
        if self.may_cut_batch() {
            let best = fastest(&outcomes).map(|(outcome, best)| outcome.seconds(best));
            let best = best_seconds.min(best.unwrap_or(f64::INFINITY));
            outcomes.extend(self.micro_batches(share.part(1, kinds), best));
        }
        outcomes
    }

    /// The ways of the step under autocast, with activations and state in narrower forms too.
    fn under_autocast(&self, others: &[Outcome], share: Share<'_>) -> Vec<Outcome> {
        let best = best_seconds(others);
        let share = share.beside(best).knowing(lowest_peak(others));
        let is_cast = |step: &OtherWay<'_>| ways::is_cast(&step.alternative.way);
        ways::outcomes(self, is_cast, InPieces::Too, share, best)
    }

    /// The combinations of all classes once more, with activations and state in narrower forms, and the ways with narrow
    /// parameters. Each is searched for what is faster than the best so far, so that leave to change numbers never makes a
    /// plan slower. Narrow parameters are for where nothing else fits, or for those who name them.
    fn approximate(&self, others: &[Outcome], share: Share<'_>) -> Vec<Outcome> {
        let mut best = best_seconds(others);
        let share = share.beside(best).knowing(lowest_peak(others));
        let mut outcomes = Vec::new();
        if self.may_shrink || self.may_narrow_state {
            outcomes = self.whole_batch(share, best);
            best = best.min(best_seconds(&outcomes));
            if best.is_infinite() {
                outcomes.extend(self.equivalent(share, f64::INFINITY));
                best = best_seconds(&outcomes);
            }
        }
        for kinds in [&[ActionKind::HalfParameters][..], &int8_weights::KINDS] {
            let is_wanted = |step: &OtherWay<'_>| {
                let kind = ways::narrowing(&step.alternative.way);
                let mut kinds = kinds.iter().filter(|&&it| kind == Some(it));
                kinds.any(|it| self.request.allow_kinds.contains(it) || best.is_infinite())
            };
            outcomes.extend(ways::outcomes(self, is_wanted, InPieces::Too, share, best));
            best = best.min(best_seconds(&outcomes));
        }
        outcomes
    }

    /// What actions that change numbers would bring where nothing fits without their leave.
    fn with_leave(&self, others: &[Outcome]) -> Option<NextClass> {
        let request = ways::with_leave(self.request);
        let wider = Planner {
            request: &request,
            share: self.share.glance(),
            ..*self
        };
        first_of(&wider.approximated(others), self.costs, Class::Approximate)
    }

    /// The combinations with actions that change numbers, as far as they are allowed.
    fn approximated(&self, others: &[Outcome]) -> Vec<Outcome> {
        let approximating = Self {
            may_shrink: shrink::may(self.trace, self.request),
            may_narrow_state: optimizer_bits::may(self.trace, self.request),
            ..*self
        };
        let mut outcomes = approximating.under_autocast(others, self.share);
        if best_seconds(&outcomes).is_infinite() {
            outcomes.extend(approximating.approximate(others, self.share));
        }
        outcomes
    }

    fn explain_infeasible(&self, plan: &mut Plan, outcomes: &[Outcome]) {
        let least = outcomes
            .iter()
            .map(|outcome| outcome.bound.peak_bytes)
            .min();
        let proved = least.is_some_and(|least| least > self.cap);
        plan.stop_reason = if proved {
            StopReason::ProvedInfeasible
        } else {
            StopReason::NotFound
        };
        let least = Variant {
            offload_optimizer: self.state_away(Bytes::ZERO),
            offload_parameters: self.narrowest_room(),
            eight_bit_state: optimizer_bits::may(self.trace, self.request)
                .then_some(optimizer_bits::STATE),
            ..Variant::default()
        };
        let (lowest, _) = lowest_of(outcomes);
        let trace = match ways::narrowing(&lowest.way) {
            Some(_) => &lowest.trace,
            None => self.trace,
        };
        let note = bottleneck::standing_note(trace, least, self.cap, plan.budget_bytes);
        plan.notes.extend(note);
        plan.notes.extend(self.narrower_weights());
    }

    /// Which weights of an inference leave to change numbers would hold in fewer bits.
    fn narrower_weights(&self) -> Option<String> {
        if self.trace.meta.training {
            return None;
        }
        let half = half_parameters::with_leave(self.trace, self.request).map(|bytes| {
            format!("`--allow half_parameters` would hold {bytes} of weights in half of that")
        });
        // Which of them are a linear layer's the trace does not know.
        let eight = int8_weights::with_leave(self.trace, self.request)
            .map(|bytes| format!("`--allow int8_weights` would hold those of `nn.Linear`, up to {bytes}, in a quarter"));
        let told: Vec<_> = half.into_iter().chain(eight).collect();
        (!told.is_empty()).then(|| told.join("; "))
    }

    fn next_class(&self, plan: &Plan, next: &[Outcome]) -> Option<NextClass> {
        let next = first_of(next, self.costs, Class::Equivalent)?;
        let gains = next.predicted_step_ratio < plan.predicted_step_ratio * WORTH_TELLING;
        gains.then_some(next)
    }
}

/// What the fastest plan of some combinations brings, if there is one.
fn first_of(outcomes: &[Outcome], costs: &Costs, promise: Class) -> Option<NextClass> {
    let (outcome, candidate) = fastest(outcomes)?;
    Some(NextClass {
        promise,
        predicted_peak_bytes: candidate.evaluation.peak_bytes,
        predicted_step_ratio: outcome.seconds(candidate)
            / costs.step_seconds().max(f64::MIN_POSITIVE),
        kinds: actions::equivalent_kinds(outcome, candidate),
    })
}

/// Part of the plan's time below which a looser class is worth a word.
const WORTH_TELLING: f64 = 0.995;
/// Part of a time limit that is for exact plans, where there may be others.
const EXACT_TIME: f64 = 0.6;
/// Where that of plans under autocast ends, with leave for actions that change numbers.
const AUTOCAST_TIME: f64 = 0.75;
/// And that of equivalent plans; the rest is for the other plans that change numbers.
const EQUIVALENT_TIME: f64 = 0.85;

fn stop_reason(outcome: &Outcome, seconds: f64, least: f64) -> StopReason {
    if seconds <= least * (1.0 + 1e-9) {
        StopReason::ProvedOptimal
    } else if outcome.near {
        StopReason::NearBound
    } else {
        outcome.limited.unwrap_or(StopReason::LocalOptimum)
    }
}

#[cfg(test)]
mod tests;

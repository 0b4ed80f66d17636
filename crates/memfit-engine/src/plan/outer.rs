//! The outer choices: optimizer inside backward or not, and into how many pieces to cut the batch.
//!
//! Responsible for trying each allowed combination with the inner search, for choosing among them, and
//! for the words of a plan: refusals, what the next class would gain, what stops the peak. Not
//! responsible for which allocations to drop.

use super::bound::{Bound, bound};
use super::problem::{Candidate, Problem};
use super::search::{Effort, Found, search};
use super::validate::{InvalidPlan, validate};
use super::{
    Action, ActionKind, Bottleneck, Class, Estimate, NextClass, Plan, PlanRequest, Refusal,
    StopReason, Verdict, emit,
};
use crate::bytes::{Budget, BudgetError, Bytes};
use crate::cost::{CostError, CostSource, Costs};
use crate::predict;
use crate::step::{Evaluator, Variant};
use crate::trace::{Category, CouplingKind, Phase, SCHEMA_VERSION, Trace};

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The budget cannot be read.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// The op times cannot be used.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// The plan failed its check: a bug in memfit.
    #[error("internal error: {0}; please report this with the saved trace")]
    Invalid(#[from] InvalidPlan),
}

/// One combination of outer choices, solved.
struct Outcome {
    trace: Trace,
    variant: Variant,
    pieces: u64,
    best: Option<Candidate>,
    lowest: Candidate,
    bound: Bound,
    /// Seconds of the step without replays.
    base_seconds: f64,
    evaluations: u64,
    limited: bool,
}

impl Outcome {
    fn class(&self) -> Class {
        if self.pieces > 1 {
            Class::Equivalent
        } else {
            Class::Exact
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a handful of pieces")]
    fn seconds(&self, candidate: &Candidate) -> f64 {
        self.base_seconds + candidate.replay_seconds * self.pieces as f64
    }

    #[expect(clippy::cast_precision_loss, reason = "a handful of pieces")]
    fn bound_seconds(&self) -> f64 {
        self.base_seconds + self.bound.replay_seconds * self.pieces as f64
    }
}

/// Plans a step.
///
/// # Errors
///
/// A budget that cannot be read, unusable op times, or a plan that fails its own check.
pub fn plan(trace: &Trace, source: &CostSource, request: &PlanRequest) -> Result<Plan, PlanError> {
    let costs = Costs::new(trace, source)?;
    let unplanned_peak = predict::unplanned_peak(trace);
    let budget = Budget::parse(&request.budget)?.resolve(unplanned_peak);
    let margin = predict::margin(trace, unplanned_peak);
    let target = budget - margin;
    let planner = Planner {
        trace,
        costs: &costs,
        request,
        target,
        unplanned_peak,
    };
    let mut plan = planner.empty_plan(budget, margin);
    if unplanned_peak <= target {
        plan.stop_reason = StopReason::NothingToDo;
        plan.minimum_peak_bytes = planner.minimum(&mut plan);
        return Ok(plan);
    }
    planner.solve(&mut plan)?;
    Ok(plan)
}

struct Planner<'t> {
    trace: &'t Trace,
    costs: &'t Costs,
    request: &'t PlanRequest,
    target: Bytes,
    unplanned_peak: Bytes,
}

impl Planner<'_> {
    fn empty_plan(&self, budget: Bytes, margin: Bytes) -> Plan {
        let unplanned = Estimate {
            predicted_peak_bytes: self.unplanned_peak,
            predicted_step_seconds: self.costs.step_seconds(),
        };
        let fuse = self.fuse_refusal();
        let pieces = self.pieces_refusal();
        let refusal = |kind, reason: Option<String>| reason.map(|reason| Refusal { kind, reason });
        let refusals = [
            refusal(ActionKind::FuseOptimizer, fuse),
            refusal(ActionKind::MicroBatch, pieces),
        ];
        Plan {
            schema_version: SCHEMA_VERSION,
            target: self.trace.meta.target.clone(),
            trace_digest: digest(self.trace),
            batch: self.trace.meta.batch,
            budget_bytes: budget,
            margin_bytes: margin,
            verdict: Verdict::Fits,
            class: Class::Exact,
            unplanned,
            planned: unplanned,
            minimum_peak_bytes: self.unplanned_peak,
            predicted_step_ratio: 1.0,
            lower_bound_ratio: 1.0,
            cost_source: self.costs.source().to_owned(),
            stop_reason: StopReason::LocalOptimum,
            evaluations: 0,
            actions: Vec::new(),
            refusals: refusals.into_iter().flatten().collect(),
            next_class: None,
            bottleneck: None,
            loss_reduction: self.trace.meta.loss_reduction.clone(),
            notes: self.trace.meta.notes.clone(),
        }
    }

    fn solve(&self, plan: &mut Plan) -> Result<(), PlanError> {
        let mut outcomes: Vec<Outcome> = self
            .variants()
            .into_iter()
            .map(|variant| self.outcome(variant, 1, Effort::Full))
            .collect();
        let exact_fits = outcomes.iter().any(|outcome| outcome.best.is_some());
        let wider = self.pieces_refusal().is_none();
        let mut next: Vec<Outcome> = Vec::new();
        if wider {
            // Without leave, equivalent actions are for where no exact plan fits; otherwise they are
            // only looked at, to say what they would gain.
            let needed = !exact_fits || self.request.allow >= Class::Equivalent;
            next = self.micro_batches(if needed { Effort::Full } else { Effort::Glance });
            if needed {
                outcomes.append(&mut next);
            }
        }
        plan.evaluations = outcomes
            .iter()
            .chain(&next)
            .map(|outcome| outcome.evaluations)
            .sum();
        plan.minimum_peak_bytes = lowest(&outcomes).evaluation.peak_bytes;
        let chosen = fastest(&outcomes);
        let (outcome, candidate) = chosen.unwrap_or_else(|| lowest_of(&outcomes));
        if chosen.is_none() {
            plan.verdict = Verdict::DoesNotFit;
            self.explain_infeasible(plan, &outcomes);
        } else {
            let step = self.costs.step_seconds().max(f64::MIN_POSITIVE);
            let least = outcomes
                .iter()
                .map(Outcome::bound_seconds)
                .fold(f64::INFINITY, f64::min);
            plan.lower_bound_ratio = least.min(outcome.seconds(candidate)) / step;
            plan.stop_reason = stop_reason(outcome, outcome.seconds(candidate), least);
        }
        self.write(plan, outcome, candidate)?;
        let (bottom, lowest) = lowest_of(&outcomes);
        plan.bottleneck = Some(bottleneck(bottom, lowest));
        plan.next_class = self.next_class(plan, &next);
        Ok(())
    }

    /// The smallest peak any allowed plan reaches, when none is needed.
    fn minimum(&self, plan: &mut Plan) -> Bytes {
        let outcomes: Vec<Outcome> = self
            .variants()
            .into_iter()
            .map(|variant| self.outcome(variant, 1, Effort::Full))
            .collect();
        plan.evaluations = outcomes.iter().map(|outcome| outcome.evaluations).sum();
        lowest(&outcomes).evaluation.peak_bytes
    }

    fn variants(&self) -> Vec<Variant> {
        let mut variants = vec![Variant::default()];
        if self.fuse_refusal().is_none() {
            variants.push(Variant {
                fuse_optimizer: true,
                ..Variant::default()
            });
        }
        variants
    }

    fn outcome(&self, variant: Variant, pieces: u64, effort: Effort) -> Outcome {
        let trace = self.piece(pieces);
        let costs = if pieces > 1 {
            self.costs.scaled(self.trace, &trace)
        } else {
            self.costs.clone()
        };
        let problem = Problem::new(&trace, variant, &costs);
        let forbidden = self.request.forbid.contains(&ActionKind::Remat);
        let Found {
            best,
            lowest,
            evaluations,
            limited,
        } = if forbidden {
            nothing_dropped(&problem, self.target)
        } else {
            search(&problem, self.target, effort)
        };
        let bound = bound(&problem, self.target);
        drop(problem);
        let base_seconds = self.base_seconds(&costs, &trace, pieces);
        Outcome {
            trace,
            variant,
            pieces,
            best,
            lowest,
            bound,
            base_seconds,
            evaluations,
            limited,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a handful of pieces")]
    fn base_seconds(&self, costs: &Costs, trace: &Trace, pieces: u64) -> f64 {
        let passes = costs.phase_seconds(trace, &[Phase::Forward, Phase::Backward]) * pieces as f64;
        let gradients: Bytes = trace
            .updates
            .iter()
            .map(|u| trace.allocations[u.gradient.index()].bytes)
            .sum();
        let accumulate = costs.accumulate_seconds(gradients.as_f64()) * (pieces - 1) as f64;
        passes + accumulate + self.costs.phase_seconds(self.trace, &[Phase::Optimizer])
    }

    /// The step on one piece of the batch. The whole batch stays alive: pieces are views of it.
    fn piece(&self, pieces: u64) -> Trace {
        if pieces <= 1 {
            return self.trace.clone();
        }
        let scaled = self.trace.at_batch(self.trace.meta.batch / pieces);
        let mut piece = scaled.unwrap_or_else(|_| self.trace.clone());
        for (part, full) in piece.allocations.iter_mut().zip(&self.trace.allocations) {
            if full.category == Category::Input {
                part.bytes = full.bytes;
            }
        }
        piece
    }

    fn micro_batches(&self, effort: Effort) -> Vec<Outcome> {
        let variant = Variant {
            accumulate: true,
            ..Variant::default()
        };
        let counts = self.piece_counts().take(MOST_DIVISORS);
        counts
            .map(|pieces| self.outcome(variant, pieces, effort))
            .collect()
    }

    /// Numbers of pieces that the trace speaks for. On a batch of one, torch runs other ops (a size of one
    /// needs no copy), so a piece of one item counts only where one was captured.
    fn piece_counts(&self) -> impl Iterator<Item = u64> + '_ {
        let meta = &self.trace.meta;
        let divisors = (2..=meta.batch).filter(|pieces| meta.batch.is_multiple_of(*pieces));
        divisors.filter(|pieces| meta.batch / pieces > 1 || meta.second_batch == 1)
    }

    fn fuse_refusal(&self) -> Option<String> {
        let trace = self.trace;
        if self.request.forbid.contains(&ActionKind::FuseOptimizer) {
            return Some("forbidden by the request".to_owned());
        }
        if self.request.own_loop {
            return Some("the optimizer is called by the user's own loop".to_owned());
        }
        if let Some(reason) = &trace.meta.fused_optimizer_refusal {
            return Some(reason.clone());
        }
        if trace.updates.is_empty() || trace.meta.optimizer.is_empty() {
            return Some("the step has no optimizer".to_owned());
        }
        let late_read = trace.updates.iter().find(|update| {
            trace.ops[update.ready.index().min(trace.ops.len())..]
                .iter()
                .any(|op| {
                    op.phase == Phase::Backward
                        && op
                            .reads
                            .iter()
                            .any(|&read| trace.allocation_of(read) == update.parameter)
                })
        });
        late_read.map(|update| {
            let parameter = &trace.allocations[update.parameter.index()];
            format!(
                "parameter `{}` is read in backward after its gradient is complete",
                trace.string(parameter.name)
            )
        })
    }

    fn pieces_refusal(&self) -> Option<String> {
        let trace = self.trace;
        if self.request.forbid.contains(&ActionKind::MicroBatch) {
            return Some("forbidden by the request".to_owned());
        }
        if self.request.own_loop {
            return Some("the batch is fed by the user's own loop".to_owned());
        }
        if !trace.meta.training {
            return Some("the step does not train".to_owned());
        }
        if trace.meta.batch < 2 {
            return Some("the batch cannot be cut".to_owned());
        }
        if trace.couplings.is_some() && self.piece_counts().next().is_none() {
            return Some(format!(
                "a batch of {} cannot be cut evenly",
                trace.meta.batch
            ));
        }
        let Some(couplings) = &trace.couplings else {
            return Some("the step was captured at one batch size only".to_owned());
        };
        if let Some(coupling) = couplings.first() {
            let op = &trace.ops[coupling.op.index().min(trace.ops.len() - 1)];
            let how = match coupling.kind {
                CouplingKind::Statistic => "computes a statistic over the batch",
                CouplingKind::Cross => "compares the items of the batch with each other",
                CouplingKind::Along => "works along the batch dimension",
            };
            let place = [trace.string(op.module), trace.string(op.source)];
            let place = place
                .into_iter()
                .find(|text| !text.is_empty())
                .unwrap_or("the loss");
            return Some(format!("`{}` in `{place}` {how}", trace.string(op.name)));
        }
        if trace.meta.loss_reduction.is_empty() {
            return Some("how the loss reduces over the batch was not recognised".to_owned());
        }
        None
    }

    /// Fills in what is done and what it leads to, after the check.
    fn write(
        &self,
        plan: &mut Plan,
        outcome: &Outcome,
        candidate: &Candidate,
    ) -> Result<(), PlanError> {
        let peak = candidate.evaluation.peak_bytes;
        validate(&outcome.trace, outcome.variant, &candidate.dropped, peak)?;
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
        if outcome.variant.fuse_optimizer {
            plan.actions.push(self.fuse_action());
        }
        if outcome.pieces > 1 {
            plan.actions.push(self.pieces_action(outcome));
            if self
                .trace
                .ops
                .iter()
                .any(|op| op.random && op.phase == Phase::Forward)
            {
                plan.notes.push(RANDOM_NOTE.to_owned());
            }
        }
        if candidate.dropped.iter().any(|&drop| drop) {
            let problem = Problem::new(&outcome.trace, outcome.variant, self.costs);
            let remat = emit::remat(&problem, &candidate.dropped);
            plan.actions.push(Action {
                kind: ActionKind::Remat,
                class: Class::Exact,
                count: remat.drops.len() as u64,
                bytes: remat.drops.iter().map(|drop| drop.bytes).sum(),
                remat: Some(remat),
            });
        }
        Ok(())
    }

    fn fuse_action(&self) -> Action {
        let gradients = self
            .trace
            .updates
            .iter()
            .map(|update| update.gradient.index());
        Action {
            kind: ActionKind::FuseOptimizer,
            class: Class::Exact,
            count: self.trace.updates.len() as u64,
            bytes: gradients
                .map(|gradient| self.trace.allocations[gradient].bytes)
                .sum(),
            remat: None,
        }
    }

    fn pieces_action(&self, outcome: &Outcome) -> Action {
        Action {
            kind: ActionKind::MicroBatch,
            class: Class::Equivalent,
            count: outcome.pieces,
            bytes: self.unplanned_peak - predict::unplanned_peak(&outcome.trace),
            remat: None,
        }
    }

    fn explain_infeasible(&self, plan: &mut Plan, outcomes: &[Outcome]) {
        let least = outcomes
            .iter()
            .map(|outcome| outcome.bound.peak_bytes)
            .min();
        let proved = least.is_some_and(|least| least > self.target);
        plan.stop_reason = if proved {
            StopReason::ProvedInfeasible
        } else {
            StopReason::NotFound
        };
        let standing = standing_bytes(self.trace);
        let total: Bytes = standing.iter().map(|&(_, bytes)| bytes).sum();
        if total > self.target {
            let terms: Vec<String> = standing
                .iter()
                .map(|(category, bytes)| format!("{} {bytes}", category.name()))
                .collect();
            plan.notes.push(format!(
                "{} = {total} are alive throughout the step, above the budget of {}",
                terms.join(" + "),
                plan.budget_bytes
            ));
        }
    }

    fn next_class(&self, plan: &Plan, next: &[Outcome]) -> Option<NextClass> {
        let (outcome, candidate) = fastest(next)?;
        let ratio = outcome.seconds(candidate) / self.costs.step_seconds().max(f64::MIN_POSITIVE);
        let gains = ratio < plan.predicted_step_ratio * 0.995;
        let mut kinds = vec![ActionKind::MicroBatch];
        if candidate.dropped.iter().any(|&drop| drop) {
            kinds.push(ActionKind::Remat);
        }
        gains.then_some(NextClass {
            class: Class::Equivalent,
            predicted_peak_bytes: candidate.evaluation.peak_bytes,
            predicted_step_ratio: ratio,
            kinds,
        })
    }
}

/// Divisors of the batch tried as number of pieces.
const MOST_DIVISORS: usize = 6;

const RANDOM_NOTE: &str = "the model draws random numbers (dropout): each piece of the batch draws its \
     own, so the gradients equal the unplanned ones in distribution, not in value";

fn fastest(outcomes: &[Outcome]) -> Option<(&Outcome, &Candidate)> {
    let fitting = outcomes
        .iter()
        .filter_map(|outcome| Some((outcome, outcome.best.as_ref()?)));
    // Equal times go to the earlier outcome: fewer actions.
    fitting.reduce(|a, b| {
        let gain = a.0.seconds(a.1) - b.0.seconds(b.1);
        if gain > 1e-9 * a.0.seconds(a.1) { b } else { a }
    })
}

fn lowest_of(outcomes: &[Outcome]) -> (&Outcome, &Candidate) {
    let pairs = outcomes.iter().map(|outcome| (outcome, &outcome.lowest));
    pairs
        .reduce(|a, b| {
            if b.1.evaluation.peak_bytes < a.1.evaluation.peak_bytes {
                b
            } else {
                a
            }
        })
        .expect("the plain variant is always tried")
}

fn lowest(outcomes: &[Outcome]) -> &Candidate {
    lowest_of(outcomes).1
}

fn nothing_dropped(problem: &Problem<'_>, target: Bytes) -> Found {
    let mut scorer = super::problem::Scorer::new(problem);
    let only = scorer.score(vec![false; problem.trace.allocations.len()]);
    let best = (only.evaluation.peak_bytes <= target).then(|| only.clone());
    Found {
        best,
        lowest: only,
        evaluations: 1,
        limited: false,
    }
}

fn stop_reason(outcome: &Outcome, seconds: f64, least: f64) -> StopReason {
    if seconds <= least * (1.0 + 1e-9) {
        StopReason::ProvedOptimal
    } else if outcome.limited {
        StopReason::MoveLimit
    } else {
        StopReason::LocalOptimum
    }
}

fn bottleneck(outcome: &Outcome, candidate: &Candidate) -> Bottleneck {
    let trace = &outcome.trace;
    let model = crate::step::StepModel::new(trace, outcome.variant);
    let holdings = Evaluator::new(&model).holdings_at_peak(&candidate.dropped);
    let mut breakdown: Vec<(Category, Bytes)> = Vec::new();
    for holding in holdings {
        let category = trace.allocations[holding.allocation.index()].category;
        match breakdown.iter_mut().find(|(known, _)| *known == category) {
            Some((_, bytes)) => *bytes += holding.bytes,
            None => breakdown.push((category, holding.bytes)),
        }
    }
    breakdown.sort_by_key(|&(category, bytes)| (std::cmp::Reverse(bytes), category));
    let moment = candidate.evaluation.moment;
    let op = trace
        .ops
        .get(moment.replay.unwrap_or(moment.position).index());
    let phase = trace
        .ops
        .get(moment.position.index())
        .map_or(Phase::Backward, |op| op.phase);
    let text = |index: Option<u32>| index.map_or(String::new(), |i| trace.string(i).to_owned());
    Bottleneck {
        op: text(op.map(|op| op.name)),
        module: text(op.map(|op| op.module)),
        source: text(op.map(|op| op.source)),
        phase,
        breakdown,
    }
}

/// What is alive from the first op to the last, by category.
fn standing_bytes(trace: &Trace) -> Vec<(Category, Bytes)> {
    let mut standing: Vec<(Category, Bytes)> = Vec::new();
    for allocation in &trace.allocations {
        let throughout =
            allocation.natural.first() == Some(&(crate::trace::OpIndex(0), trace.end()));
        if !throughout {
            continue;
        }
        match standing
            .iter_mut()
            .find(|(known, _)| *known == allocation.category)
        {
            Some((_, bytes)) => *bytes += allocation.bytes,
            None => standing.push((allocation.category, allocation.bytes)),
        }
    }
    standing.sort_by_key(|&(category, bytes)| (std::cmp::Reverse(bytes), category));
    standing
}

/// FNV-1a over sizes and op names: tells whether a plan belongs to a trace, not who wrote it.
fn digest(trace: &Trace) -> String {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut eat = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for op in &trace.ops {
        eat(trace.string(op.name).as_bytes());
    }
    for allocation in &trace.allocations {
        eat(&allocation.bytes.0.to_le_bytes());
    }
    format!("{hash:016x}")
}

//! Step time against peak over all budgets: the Pareto front.
//!
//! Responsible for which budgets are planned, for what of it is on the front, and for what is shown to be out of
//! reach. Not responsible for any single plan (`choose.rs`): every point is what [`plan`] answers at its budget.
//!
//! Two sweeps, one for each class: a plan of a stricter class is worth something even where a looser one is faster.
//! A sweep starts with budgets at equal distances between the smallest peak and the unplanned one. Between two
//! neighbours the front is only known to lie in a rectangle: from what the lower budget allows to the peak of the
//! plan above it, and between their times. The largest rectangles are cut in two, until all are small or the number
//! of plans is reached; so budgets gather where the front bends.
//!
//! Invariants: no point is dominated by one of its own or a stricter class; the number of threads changes nothing.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Action, ActionKind, ActionSummary, Class, Estimate, Offer, Plan, PlanError, PlanRequest,
    Refusal, SCHEMA_VERSION, StopReason, TECHNIQUES, Technique, Verdict, plan,
};
use crate::bytes::{Budget, Bytes};
use crate::cost::{CostSource, Costs};
use crate::predict;
use crate::predict::reserved::Reserved;
use crate::trace::Trace;

/// What a user asks for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FrontRequest {
    /// A budget to plan for, in addition to those that the front needs.
    pub budget: Option<Budget>,
    /// As in [`PlanRequest`].
    pub own_loop: bool,
    /// As in [`PlanRequest`].
    pub forbid: Vec<ActionKind>,
    /// As in [`PlanRequest`].
    pub keep: Vec<String>,
    /// As in [`PlanRequest`].
    pub offload: Option<Offer>,
    /// Threads that plan; the answer is the same with any number.
    pub threads: usize,
}

impl Default for FrontRequest {
    fn default() -> Self {
        Self {
            budget: None,
            own_loop: false,
            forbid: Vec::new(),
            keep: Vec::new(),
            offload: None,
            threads: 1,
        }
    }
}

/// Why no more budgets were planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FrontStop {
    /// What is left between neighbours is too small to see.
    Resolved,
    /// The limit on the number of plans was reached.
    PlanLimit,
}

/// A plan on the front.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct FrontPoint {
    /// The budget: planning for it gives this plan.
    pub budget_bytes: Bytes,
    /// What was allowed then.
    pub allow: Class,
    /// Loosest class among the actions.
    #[serde(alias = "class")]
    pub promise: Class,
    /// Peak of allocated bytes.
    pub predicted_peak_bytes: Bytes,
    /// Step time under the front's cost source.
    pub predicted_step_seconds: f64,
    /// Planned over unplanned step time.
    pub predicted_step_ratio: f64,
    /// No plan allowed within the budget can be faster than this ratio.
    pub lower_bound_ratio: f64,
    /// Why the plan's search ended.
    pub stop_reason: StopReason,
    /// What is done.
    pub actions: Vec<ActionSummary>,
    /// What the caching allocator holds; absent where there is none.
    pub reserved: Option<Reserved>,
}

/// What no plan can beat.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct FrontBound {
    /// No plan of any class on the front whose peak is at most this ...
    pub peak_bytes: Bytes,
    /// ... takes less than this ratio; absent where there is no such plan at all.
    pub ratio: Option<f64>,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Front {
    /// Version of this shape.
    pub schema_version: u32,
    /// The trace's target.
    pub target: String,
    /// Batch size of the step.
    pub batch: u64,
    /// Kind of device captured for.
    pub device_kind: String,
    /// The budget asked for.
    pub budget_bytes: Option<Bytes>,
    /// What every plan keeps free below its budget.
    pub margin_bytes: Bytes,
    /// Without a plan.
    pub unplanned: Estimate,
    /// Smallest peak found over all plans.
    pub minimum_peak_bytes: Bytes,
    /// The plans, those of the strictest class first, by ascending peak.
    pub points: Vec<FrontPoint>,
    /// Ascending in bytes, not ascending in ratio.
    pub bound: Vec<FrontBound>,
    /// Where the costs come from.
    pub cost_source: String,
    /// Why no more budgets were planned.
    pub stop_reason: FrontStop,
    /// Budgets planned for.
    pub plans: u64,
    /// Candidates evaluated for all of them.
    pub evaluations: u64,
    /// What was not possible, and why.
    pub refusals: Vec<Refusal>,
    /// Words to the user.
    pub notes: Vec<String>,
}

/// Budgets in a sweep before it looks where the front bends.
const FIRST_PLANS: u64 = 6;
/// Budgets in a sweep. The limit is on work, so that the answer does not depend on the clock.
const MOST_PLANS: usize = 16;
/// Rectangles cut in one round. A fixed number: the rounds must not depend on the threads.
const CUT_AT_ONCE: usize = 4;
/// Part of the plot that a rectangle covers when it is too small to be cut.
const SMALL: f64 = 1.0 / 1000.0;
/// Time counts in relation to the range of ratios, but a range below this is a flat front.
const LEAST_RANGE: f64 = 0.02;

/// Plans a step for many budgets.
///
/// # Errors
///
/// As [`plan`].
pub fn front(
    trace: &Trace,
    source: &CostSource,
    request: &FrontRequest,
) -> Result<Front, PlanError> {
    let costs = Costs::new(trace, source)?;
    let unplanned_peak = predict::unplanned_peak(trace);
    let margin = predict::margin(trace, unplanned_peak);
    let budget = request.budget.map(|budget| budget.resolve(unplanned_peak));
    let fronts = Fronts {
        trace,
        source,
        request,
        margin,
        wanted: budget.map(|budget| budget - margin),
    };
    let exact = fronts.sweep(Class::Exact)?;
    let equivalent = if fronts.has_equivalent() {
        fronts.sweep(Class::Equivalent)?
    } else {
        Sweep::default()
    };
    let widest = if equivalent.rungs.is_empty() {
        &exact
    } else {
        &equivalent
    };
    let bound = bound_of(&widest.rungs);
    let stopped = [&exact, &equivalent];
    let is_limited = stopped.iter().any(|sweep| sweep.is_limited);
    let refusals = widest
        .rungs
        .first()
        .map_or_else(Vec::new, |rung| rung.plan.refusals.clone());
    let mut rungs = exact.rungs;
    rungs.extend(equivalent.rungs);
    let minimum = rungs
        .iter()
        .map(|rung| rung.plan.minimum_peak_bytes)
        .fold(unplanned_peak, Bytes::min);
    let mut notes = trace.meta.notes.clone();
    for rung in rungs.iter().filter(|rung| rung.fits()) {
        for note in &rung.plan.notes {
            if !notes.contains(note) {
                notes.push(note.clone());
            }
        }
    }
    Ok(Front {
        schema_version: SCHEMA_VERSION,
        target: trace.meta.target.clone(),
        batch: trace.meta.batch,
        device_kind: trace.meta.device_kind.clone(),
        budget_bytes: budget,
        margin_bytes: margin,
        unplanned: Estimate {
            predicted_peak_bytes: unplanned_peak,
            predicted_step_seconds: costs.step_seconds(),
        },
        minimum_peak_bytes: minimum,
        bound,
        cost_source: costs.source().to_owned(),
        stop_reason: if is_limited {
            FrontStop::PlanLimit
        } else {
            FrontStop::Resolved
        },
        plans: rungs.len() as u64,
        evaluations: rungs.iter().map(|rung| rung.plan.evaluations).sum(),
        points: undominated(&rungs),
        refusals,
        notes,
    })
}

/// One budget, planned.
struct Rung {
    allow: Class,
    plan: Plan,
}

impl Rung {
    fn fits(&self) -> bool {
        self.plan.verdict == Verdict::Fits
    }

    /// What a plan must stay within.
    fn cap(&self) -> Bytes {
        self.plan.budget_bytes - self.plan.margin_bytes
    }

    /// Is the plan one of the sweep's class? Where nothing exact fits, planning goes on to the next class.
    fn is_of_sweep(&self) -> bool {
        self.fits() && self.plan.promise <= self.allow
    }

    /// The least cap at which the plan would still fit.
    fn held(&self) -> Bytes {
        let reserved = self.plan.reserved.as_ref();
        let reserved = reserved.map_or(Bytes::ZERO, |reserved| reserved.peak_reserved_bytes);
        self.plan.planned.predicted_peak_bytes.max(reserved)
    }
}

/// Budgets of one class, ascending.
#[derive(Default)]
struct Sweep {
    rungs: Vec<Rung>,
    is_limited: bool,
}

struct Fronts<'t> {
    trace: &'t Trace,
    source: &'t CostSource,
    request: &'t FrontRequest,
    margin: Bytes,
    /// Cap of the budget asked for.
    wanted: Option<Bytes>,
}

impl Fronts<'_> {
    fn plan_request(&self, allow: Class, cap: Bytes) -> PlanRequest {
        PlanRequest {
            budget: Budget::Absolute((cap + self.margin).max(Bytes(1))),
            allow,
            allow_kinds: Vec::new(),
            own_loop: self.request.own_loop,
            own_backward: false,
            forbid: self.request.forbid.clone(),
            keep: self.request.keep.clone(),
            offload: self.request.offload.clone(),
        }
    }

    /// Is there any action that is not exact?
    fn has_equivalent(&self) -> bool {
        let request = self.plan_request(Class::Equivalent, Bytes::ZERO);
        looser().any(|technique| (technique.refusal)(self.trace, &request).is_none())
    }

    fn sweep(&self, allow: Class) -> Result<Sweep, PlanError> {
        let (low, high) = (self.lowest(allow)?, self.highest());
        let span = (high - low).0;
        let steps = if span == 0 { 0 } else { FIRST_PLANS - 1 };
        let part = |step: u64| {
            // 128 bits: a product of two sizes does not fit into 64.
            let bytes = u128::from(span) * u128::from(step) / u128::from(steps.max(1));
            low + Bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
        };
        let mut caps: Vec<Bytes> = (0..steps).map(part).chain([high]).collect();
        caps.extend(self.wanted);
        caps.sort_unstable();
        caps.dedup();
        let mut rungs = self.plans(allow, &caps)?;
        loop {
            let room = MOST_PLANS.saturating_sub(rungs.len());
            let mut cuts = cuts(&rungs, span);
            if cuts.is_empty() || room == 0 {
                let is_limited = !cuts.is_empty();
                return Ok(Sweep { rungs, is_limited });
            }
            cuts.truncate(room.min(CUT_AT_ONCE));
            rungs.extend(self.plans(allow, &cuts)?);
            rungs.sort_by_key(Rung::cap);
        }
    }

    /// Where a sweep begins: the smallest peak that a search for it alone finds.
    fn lowest(&self, allow: Class) -> Result<Bytes, PlanError> {
        let mut request = self.plan_request(allow, Bytes::ZERO);
        request.budget = Budget::Absolute(Bytes(1));
        if allow == Class::Exact {
            // Otherwise planning goes on to the next class.
            request
                .forbid
                .extend(looser().map(|technique| technique.kind));
        }
        Ok(plan(self.trace, self.source, &request)?.minimum_peak_bytes)
    }

    /// Where it ends: nothing needs to be done any more.
    fn highest(&self) -> Bytes {
        let prediction = predict::predict(self.trace, &predict::PredictRequest::default());
        let reserved = prediction.ok().and_then(|prediction| prediction.reserved);
        let reserved = reserved.map_or(Bytes::ZERO, |reserved| reserved.peak_reserved_bytes);
        predict::unplanned_peak(self.trace).max(reserved)
    }

    /// Plans for all caps, in their order.
    fn plans(&self, allow: Class, caps: &[Bytes]) -> Result<Vec<Rung>, PlanError> {
        let next = AtomicUsize::new(0);
        let answers: Mutex<Vec<(usize, Result<Plan, PlanError>)>> = Mutex::new(Vec::new());
        let work = || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(&cap) = caps.get(number) else { return };
                let answer = plan(self.trace, self.source, &self.plan_request(allow, cap));
                let mut answers = answers
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                answers.push((number, answer));
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.request.threads.min(caps.len()) {
                // A thread that the system refuses leaves the work to the others.
                let _refused = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        let mut answers = answers
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        answers.sort_by_key(|&(number, _)| number);
        let rungs = answers.into_iter().map(|(_, plan)| {
            let plan = plan?;
            Ok(Rung { allow, plan })
        });
        rungs.collect()
    }
}

/// The techniques that are equivalent. Fronts have none that change numbers: what those are worth is no matter of bytes
/// and time alone.
fn looser() -> impl Iterator<Item = &'static Technique> {
    let all = TECHNIQUES.iter().copied();
    all.filter(|technique| technique.promise == Class::Equivalent)
}

/// Caps in the middle of the rectangles worth a plan, the largest rectangle first.
fn cuts(rungs: &[Rung], span: u64) -> Vec<Bytes> {
    let ratios = rungs.iter().filter(|rung| rung.is_of_sweep());
    let range = ratios
        .map(|rung| rung.plan.predicted_step_ratio - 1.0)
        .fold(LEAST_RANGE, f64::max);
    let mut found: Vec<(f64, Bytes)> = Vec::new();
    for pair in rungs.windows(2) {
        let [below, above] = pair else { continue };
        if !above.is_of_sweep() {
            continue;
        }
        let width = above.held() - below.cap();
        let height = if below.is_of_sweep() {
            (below.plan.predicted_step_ratio - above.plan.predicted_step_ratio) / range
        } else {
            1.0
        };
        let area = width.as_f64() / Bytes(span).as_f64().max(1.0) * height;
        if area > SMALL && width.0 >= 2 {
            found.push((area, below.cap() + Bytes(width.0 / 2)));
        }
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    found.into_iter().map(|(_, cap)| cap).collect()
}

/// Of each class the plans that no other of the same or a stricter class beats.
fn undominated(rungs: &[Rung]) -> Vec<FrontPoint> {
    let mut points: Vec<FrontPoint> = rungs
        .iter()
        .filter(|rung| rung.fits())
        .map(|rung| point(rung.allow, &rung.plan))
        .collect();
    let rest = |point: &FrontPoint| (point.promise, point.allow, point.budget_bytes);
    points.sort_by(|a, b| {
        let peaks = a.predicted_peak_bytes.cmp(&b.predicted_peak_bytes);
        let times = a.predicted_step_ratio.total_cmp(&b.predicted_step_ratio);
        peaks.then(times).then(rest(a).cmp(&rest(b)))
    });
    let mut kept = Vec::new();
    for class in [Class::Exact, Class::Equivalent, Class::Approximate] {
        let mut fastest = f64::INFINITY;
        for point in points.iter().filter(|point| point.promise <= class) {
            // Sums of the same times in another order differ by rounding.
            if point.predicted_step_ratio < fastest * (1.0 - 1e-9) {
                fastest = point.predicted_step_ratio;
                if point.promise == class {
                    kept.push(point.clone());
                }
            }
        }
    }
    kept
}

fn point(allow: Class, plan: &Plan) -> FrontPoint {
    FrontPoint {
        budget_bytes: plan.budget_bytes,
        allow,
        promise: plan.promise,
        predicted_peak_bytes: plan.planned.predicted_peak_bytes,
        predicted_step_seconds: plan.planned.predicted_step_seconds,
        predicted_step_ratio: plan.predicted_step_ratio,
        lower_bound_ratio: plan.lower_bound_ratio,
        stop_reason: plan.stop_reason,
        actions: plan.actions.iter().map(Action::summary).collect(),
        reserved: plan.reserved.clone(),
    }
}

/// What the plans' lower bounds say together. A bound for a budget holds for every smaller one.
fn bound_of(rungs: &[Rung]) -> Vec<FrontBound> {
    let mut least = 0.0_f64;
    let mut bounds: Vec<FrontBound> = rungs
        .iter()
        .rev()
        .map(|rung| {
            if rung.fits() {
                least = least.max(rung.plan.lower_bound_ratio);
            }
            let is_impossible = rung.plan.stop_reason == StopReason::ProvedInfeasible;
            FrontBound {
                peak_bytes: rung.cap(),
                ratio: (!is_impossible).then_some(least),
            }
        })
        .collect();
    bounds.reverse();
    bounds
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::strategy::{Strategy, ValueTree};
    use proptest::test_runner::TestRunner;

    use super::*;
    use crate::step::random;
    use crate::trace::sample;

    fn source(trace: &Trace) -> CostSource {
        CostSource::profile(vec![1.0; trace.ops.len()])
    }

    /// Traces with something to plan; every second one for CUDA, in sizes that its allocator tells apart.
    fn traces(count: usize) -> Vec<Trace> {
        let mut runner = TestRunner::deterministic();
        let next = || random::recipes().new_tree(&mut runner).unwrap().current();
        let mut traces: Vec<Trace> = std::iter::repeat_with(next)
            .map(|(recipe, _, _)| random::build(&recipe))
            .take(count)
            .collect();
        for trace in traces.iter_mut().step_by(2) {
            trace.meta.device_kind = "cuda".into();
            for allocation in &mut trace.allocations {
                allocation.bytes = Bytes(allocation.bytes.0 * 1_000_000);
            }
        }
        traces
    }

    /// Two dozen traces, each with its front.
    static FRONTS: LazyLock<Vec<(Trace, Front)>> = LazyLock::new(|| {
        let with_front = |trace| {
            let front = made(&trace, 1);
            (trace, front)
        };
        traces(24).into_iter().map(with_front).collect()
    });

    fn made(trace: &Trace, threads: usize) -> Front {
        let request = FrontRequest {
            threads,
            ..FrontRequest::default()
        };
        front(trace, &source(trace), &request).unwrap()
    }

    #[test]
    fn no_point_is_dominated_and_every_point_is_the_plan_at_its_budget() {
        let (mut seen, mut longest) = (0, 0);
        for (trace, front) in &*FRONTS {
            longest = longest.max(front.points.len());
            for (number, point) in front.points.iter().enumerate() {
                for (other, better) in front.points.iter().enumerate() {
                    let beats = better.predicted_peak_bytes <= point.predicted_peak_bytes
                        && better.predicted_step_ratio <= point.predicted_step_ratio
                        && better.promise <= point.promise;
                    assert!(number == other || !beats, "{better:?} beats {point:?}");
                }
                let request = PlanRequest {
                    budget: Budget::Absolute(point.budget_bytes),
                    allow: point.allow,
                    ..PlanRequest::default()
                };
                let alone = plan(trace, &source(trace), &request).unwrap();
                assert_eq!(alone.verdict, Verdict::Fits);
                assert_eq!(*point, super::point(point.allow, &alone));
                seen += 1;
            }
        }
        assert!(seen > 60 && longest > 4, "{seen} {longest}");
    }

    #[test]
    fn the_front_reaches_from_the_unplanned_step_to_the_smallest_peak() {
        for (trace, front) in &*FRONTS {
            let first = front.points.first().unwrap();
            let fastest = front.points.iter().map(|point| point.predicted_step_ratio);
            assert!(fastest.fold(f64::INFINITY, f64::min) <= 1.0 + 1e-9);
            let peaks = front.points.iter().map(|point| point.predicted_peak_bytes);
            assert!(front.minimum_peak_bytes <= peaks.min().unwrap());
            // The allocator may refuse what would fit by bytes.
            if trace.meta.device_kind == "cpu" {
                assert_eq!(front.minimum_peak_bytes, first.predicted_peak_bytes);
            }
            assert!(front.plans <= 2 * MOST_PLANS as u64);
        }
    }

    #[test]
    fn no_point_lies_where_none_can_be() {
        for (_, front) in &*FRONTS {
            assert!(front.bound.is_sorted_by_key(|bound| bound.peak_bytes));
            for point in &front.points {
                for bound in &front.bound {
                    if point.predicted_peak_bytes <= bound.peak_bytes {
                        let ratio = bound.ratio.expect("there is a plan");
                        assert!(ratio <= point.predicted_step_ratio + 1e-9);
                    }
                }
            }
        }
    }

    #[test]
    fn threads_change_nothing() {
        for (trace, front) in &FRONTS[..12] {
            let one = serde_json::to_string(front).unwrap();
            assert_eq!(one, serde_json::to_string(&made(trace, 5)).unwrap());
        }
    }

    #[test]
    fn a_budget_asked_for_is_planned_for() {
        let trace = sample::chain();
        let request = FrontRequest {
            budget: Some(Budget::Absolute(Bytes(771))),
            ..FrontRequest::default()
        };
        let front = front(&trace, &source(&trace), &request).unwrap();
        assert_eq!(front.budget_bytes, Some(Bytes(771)));
        let cap = Bytes(771) - front.margin_bytes;
        assert!(front.bound.iter().any(|bound| bound.peak_bytes == cap));
    }

    #[test]
    fn a_step_that_cannot_be_planned_has_one_point() {
        let trace = sample::chain();
        let kinds = [
            ActionKind::Remat,
            ActionKind::FuseOptimizer,
            ActionKind::MicroBatch,
        ];
        let request = FrontRequest {
            forbid: kinds.to_vec(),
            ..FrontRequest::default()
        };
        let front = front(&trace, &source(&trace), &request).unwrap();
        let [only] = front.points.as_slice() else {
            panic!("{front:?}")
        };
        assert!(only.actions.is_empty());
        assert_eq!(front.stop_reason, FrontStop::Resolved);
    }
}

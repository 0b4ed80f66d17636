//! The JSON documents: what `--format json` prints. `docs/reference/json.md` describes them.
//!
//! Responsible for the shapes, which are a contract: fields are added, and `schema_version`
//! rises when one changes its name or meaning. Integers are bytes unless the name says
//! otherwise. Not responsible for how the values come about.

use memfit_engine::bytes::Bytes;
use memfit_engine::placement::{self, Status};
use memfit_engine::plan::{
    Action, ActionSummary, Arena, Bottleneck, Class, Front, NextClass, Plan, Refusal, StopReason,
    Verdict,
};
use memfit_engine::predict::reserved::Reserved;
use memfit_engine::predict::{Breakdown, Prediction};
use memfit_engine::trace::{Category, Coupling, Phase, Trace};
use schemars::JsonSchema;
use serde::Serialize;

use super::approximation::Approximation;
use super::comparison::Comparison;
use super::compiled::CompiledFacts;
use super::output_error::OutputError;

/// Version of every shape in this file. 2: `class` of actions became `promise`, that of comparisons `agreement`.
pub(crate) const SCHEMA_VERSION: u32 = 2;

/// `memfit predict --format json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PredictDocument {
    /// Everything the engine says, `schema_version` and `target` first.
    #[serde(flatten)]
    pub(crate) prediction: Prediction,
    /// The budget, when one was given; what the GPU has room for, when one was named.
    pub(crate) budget_bytes: Option<Bytes>,
    /// Whether the unplanned step fits it.
    pub(crate) verdict: Option<Verdict>,
    /// The same words as in the other documents.
    pub(crate) unplanned: PredictedPeak,
    /// Time the capture took; absent for a saved trace.
    pub(crate) capture_seconds: Option<f64>,
}

/// `memfit predict --largest` and `memfit plan --largest`, with `--format json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct LargestDocument {
    /// Version of this shape.
    pub(crate) schema_version: u32,
    /// The target.
    pub(crate) target: String,
    /// The argument whose largest value was asked for.
    pub(crate) argument: String,
    /// What the step may take.
    pub(crate) budget_bytes: Bytes,
    /// Captures made.
    pub(crate) captures: u64,
    /// What is allowed, the least first.
    pub(crate) rows: Vec<LargestRow>,
}

/// The largest value under what is allowed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct LargestRow {
    /// The widest class of plans; absent for the step as it is.
    pub(crate) promise: Option<Class>,
    /// The value; 0 where not even 1 fits.
    pub(crate) value: u64,
    /// Predicted peak with that value.
    pub(crate) predicted_peak_bytes: Option<Bytes>,
    /// Predicted step time with that value, in step times of the unplanned step.
    pub(crate) predicted_step_ratio: Option<f64>,
    /// Whether one more was tried, and does not fit.
    pub(crate) is_largest: bool,
    /// Why one more fails by itself, where it does.
    pub(crate) next_fails: Option<String>,
}

/// A peak without a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct PredictedPeak {
    pub(crate) predicted_peak_bytes: Bytes,
}

/// `memfit plan --format json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PlanDocument {
    pub(crate) schema_version: u32,
    pub(crate) target: String,
    /// Batch size of the step.
    pub(crate) batch: u64,
    pub(crate) budget_bytes: Bytes,
    /// Kept free below the budget for what the prediction is not sure of.
    pub(crate) margin_bytes: Bytes,
    pub(crate) verdict: Verdict,
    pub(crate) unplanned: memfit_engine::plan::Estimate,
    pub(crate) planned: memfit_engine::plan::Estimate,
    pub(crate) minimum_peak_bytes: Bytes,
    /// The budget to ask for where this one is too small.
    pub(crate) minimum_budget_bytes: Bytes,
    pub(crate) arena: Option<Arena>,
    /// What the caching allocator holds for the planned step; `null` where there is none.
    pub(crate) reserved: Option<Reserved>,
    pub(crate) plan: PlanSummary,
    /// Where the costs come from.
    pub(crate) cost_source: String,
    pub(crate) stop_reason: StopReason,
    pub(crate) evaluations: u64,
    pub(crate) refusals: Vec<Refusal>,
    pub(crate) next_class: Option<NextClass>,
    pub(crate) bottleneck: Option<Bottleneck>,
    pub(crate) notes: Vec<String>,
    /// Who owns the bytes at the unplanned peak.
    pub(crate) breakdown: Option<Breakdown>,
    pub(crate) capture_seconds: Option<f64>,
    pub(crate) plan_seconds: Option<f64>,
}

/// A plan without what only the executor needs.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize)]
pub(crate) struct PlanSummary {
    /// Loosest class among the actions; the reports read it, the JSON has it on each action.
    #[serde(skip)]
    pub(crate) promise: Class,
    pub(crate) actions: Vec<ActionSummary>,
    /// Planned over unplanned step time.
    pub(crate) predicted_step_ratio: f64,
    /// No allowed plan within the budget can be faster than this.
    pub(crate) lower_bound_ratio: f64,
}

impl PlanSummary {
    pub(crate) fn of(plan: &Plan) -> Self {
        Self {
            promise: plan.promise,
            actions: plan.actions.iter().map(Action::summary).collect(),
            predicted_step_ratio: plan.predicted_step_ratio,
            lower_bound_ratio: plan.lower_bound_ratio,
        }
    }
}

impl PlanDocument {
    pub(crate) fn of(plan: &Plan) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            target: plan.target.clone(),
            batch: plan.batch,
            budget_bytes: plan.budget_bytes,
            margin_bytes: plan.margin_bytes,
            verdict: plan.verdict,
            unplanned: plan.unplanned,
            planned: plan.planned,
            minimum_peak_bytes: plan.minimum_peak_bytes,
            minimum_budget_bytes: plan.minimum_budget_bytes(),
            arena: plan.arena,
            reserved: plan.reserved.clone(),
            plan: PlanSummary::of(plan),
            cost_source: plan.cost_source.clone(),
            stop_reason: plan.stop_reason,
            evaluations: plan.evaluations,
            refusals: plan.refusals.clone(),
            next_class: plan.next_class.clone(),
            bottleneck: plan.bottleneck.clone(),
            notes: plan.notes.clone(),
            breakdown: None,
            capture_seconds: None,
            plan_seconds: None,
        }
    }
}

/// `memfit plan --pareto FILE --format json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct FrontDocument {
    /// Everything the engine says, `schema_version` and `target` first.
    #[serde(flatten)]
    pub(crate) front: Front,
    pub(crate) capture_seconds: Option<f64>,
    /// All plans together.
    pub(crate) plan_seconds: f64,
}

/// `memfit verify --format json`.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize)]
#[schemars(rename = "Verification")]
pub(crate) struct VerifyDocument {
    pub(crate) schema_version: u32,
    pub(crate) target: String,
    pub(crate) budget_bytes: Bytes,
    /// `fits` when the measured planned peak is within the budget.
    pub(crate) verdict: Verdict,
    /// Whether peak and numbers are what the plan promises; `null` when nothing ran.
    pub(crate) holds: Option<bool>,
    pub(crate) unplanned: StepFacts,
    pub(crate) planned: StepFacts,
    pub(crate) minimum_peak_bytes: Bytes,
    /// Absent when nothing ran.
    pub(crate) gradients: Option<Comparison>,
    /// Absent when nothing ran.
    pub(crate) loss: Option<Comparison>,
    /// How far gradients are off; absent for a plan that does not change them, and when nothing ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) approximation: Option<Approximation>,
    /// How far outputs are off; absent for a plan that does not change them or trains, and when nothing ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) outputs: Option<OutputError>,
    /// The eager plan; `null` where the step ran compiled.
    pub(crate) plan: Option<PlanSummary>,
    /// With `--compile`, where the step ran so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compiled: Option<CompiledFacts>,
    /// With `--compile`, why the step ran eager.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) not_compiled: Option<String>,
    pub(crate) capture_seconds: f64,
    pub(crate) plan_seconds: f64,
    /// Whether the step only infers: `loss` is then what its forward returns, for the words of the report.
    #[serde(skip)]
    pub(crate) infers: bool,
}

/// One way to run the step: what was predicted and what was measured.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize)]
pub(crate) struct StepFacts {
    pub(crate) predicted_peak_bytes: Bytes,
    /// Absent when nothing ran.
    pub(crate) measured_peak_bytes: Option<Bytes>,
    /// Absent when nothing ran.
    pub(crate) step_cpu_seconds: Option<f64>,
}

impl VerifyDocument {
    /// Whether the peak and the loss and gradients are what the plan promises.
    pub(crate) fn keeps_its_word(&self) -> bool {
        let kept = |comparison: &Option<Comparison>| {
            comparison.is_some_and(|comparison| comparison.keeps(self.class()))
        };
        let is_near = self.class() != Class::Approximate
            || match (&self.approximation, &self.outputs) {
                (Some(found), _) => found.holds(),
                (None, Some(found)) => found.holds(),
                (None, None) => false,
            };
        let has_its_loss =
            self.approximation.is_none() || self.loss.is_some_and(Approximation::is_its_loss);
        self.verdict == Verdict::Fits
            && kept(&self.gradients)
            && kept(&self.loss)
            && is_near
            && has_its_loss
    }

    /// What was promised; compiled code promises that numbers are equal up to rounding.
    pub(crate) fn class(&self) -> Class {
        let plan = self.plan.as_ref();
        plan.map_or(Class::Equivalent, |plan| plan.promise)
    }
}

/// `memfit show --format json` on a trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct TraceDocument {
    pub(crate) schema_version: u32,
    /// Always `trace`.
    pub(crate) kind: &'static str,
    pub(crate) target: String,
    pub(crate) torch_version: String,
    pub(crate) device_kind: String,
    pub(crate) optimizer: String,
    pub(crate) batch: u64,
    pub(crate) training: bool,
    /// `fake` or `real`.
    pub(crate) captured: String,
    pub(crate) op_count: u64,
    pub(crate) phases: Vec<PhaseSummary>,
    pub(crate) categories: Vec<CategorySummary>,
    pub(crate) value_count: u64,
    pub(crate) saved_tensor_count: u64,
    pub(crate) region_count: u64,
    pub(crate) parameter_update_count: u64,
    /// Whether the sizes are known at every batch size.
    pub(crate) batch_law_known: bool,
    /// Why the batch cannot be split; absent when only one batch size was captured.
    pub(crate) couplings: Option<Vec<Coupling>>,
    pub(crate) notes: Vec<String>,
}

/// One phase of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct PhaseSummary {
    pub(crate) phase: Phase,
    pub(crate) op_count: u64,
    pub(crate) random_op_count: u64,
    pub(crate) flops: u64,
    pub(crate) moved_bytes: Bytes,
}

/// One category of a trace's allocations. Not all are alive at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct CategorySummary {
    pub(crate) category: Category,
    pub(crate) allocation_count: u64,
    pub(crate) bytes: Bytes,
}

impl TraceDocument {
    pub(crate) fn of(trace: &Trace) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            kind: "trace",
            target: trace.meta.target.clone(),
            torch_version: trace.meta.torch_version.clone(),
            device_kind: trace.meta.device_kind.clone(),
            optimizer: trace.meta.optimizer.clone(),
            batch: trace.meta.batch,
            training: trace.meta.training,
            captured: trace.meta.captured.clone(),
            op_count: trace.ops.len() as u64,
            phases: phases(trace),
            categories: categories(trace),
            value_count: trace.values.len() as u64,
            saved_tensor_count: trace.saved.len() as u64,
            region_count: trace.regions.len() as u64,
            parameter_update_count: trace.updates.len() as u64,
            batch_law_known: trace
                .allocations
                .iter()
                .all(|allocation| allocation.law.is_some()),
            couplings: trace.couplings.clone(),
            notes: trace.meta.notes.clone(),
        }
    }
}

/// `memfit replay --format json`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
#[schemars(rename = "Replay")]
pub(crate) struct ReplayDocument {
    pub(crate) schema_version: u32,
    pub(crate) source: String,
    pub(crate) devices: Vec<ReplayedDevice>,
    /// What was asked for and can change nothing, in sentences.
    pub(crate) notes: Vec<String>,
}

/// One device's requests, replayed.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub(crate) struct ReplayedDevice {
    pub(crate) index: u32,
    pub(crate) events: u64,
    /// Addresses of allocations that the simulated allocator predicts under the recording's settings.
    pub(crate) allocations: ReplayedCount,
    /// New segments that it predicts.
    pub(crate) segments: ReplayedCount,
    /// Segments that end up with the same blocks.
    pub(crate) final_segments: ReplayedCount,
    /// The best first, the recording's own among them.
    pub(crate) replays: Vec<ReplayedSettings>,
}

/// Settings, and what came of the requests under them.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub(crate) struct ReplayedSettings {
    /// As in `PYTORCH_CUDA_ALLOC_CONF`; empty for PyTorch's defaults.
    pub(crate) settings: String,
    pub(crate) is_recorded: bool,
    pub(crate) peak_reserved_bytes: Bytes,
    pub(crate) peak_allocated_bytes: Bytes,
    pub(crate) num_alloc_retries: u64,
    pub(crate) device_calls: u64,
    pub(crate) is_refused: bool,
    /// `null` where no OOM was recorded.
    pub(crate) oom_avoided: Option<bool>,
}

/// How many of how many are as recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub(crate) struct ReplayedCount {
    pub(crate) matched: u64,
    pub(crate) total: u64,
}

/// `memfit place --format json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PlaceDocument {
    pub(crate) schema_version: u32,
    pub(crate) status: Status,
    /// Of the placement in `offsets`: above the capacity when none within it was found.
    pub(crate) height: Bytes,
    /// No placement is lower.
    pub(crate) lower_bound: Bytes,
    /// Processor time is not known here: this is time on the clock.
    pub(crate) seconds: f64,
    pub(crate) stop_reason: placement::StopReason,
    /// By id, in the order of the file.
    #[serde(serialize_with = "in_order")]
    pub(crate) offsets: Vec<(String, u64)>,
}

/// What `memfit place` was asked; only the text shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) file: String,
    /// Absent when the lowest placement is wanted.
    pub(crate) capacity: Option<Bytes>,
}

/// Pairs as a map that keeps their order.
fn in_order<S: serde::Serializer>(pairs: &[(String, u64)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(pairs.iter().map(|(id, offset)| (id, offset)))
}

fn phases(trace: &Trace) -> Vec<PhaseSummary> {
    let mut summaries: Vec<PhaseSummary> = Vec::new();
    for phase in [Phase::Forward, Phase::Backward, Phase::Optimizer] {
        let empty = PhaseSummary {
            phase,
            op_count: 0,
            random_op_count: 0,
            flops: 0,
            moved_bytes: Bytes::ZERO,
        };
        let ops = trace.ops.iter().filter(|op| op.phase == phase);
        let summary = ops.fold(empty, |sum, op| PhaseSummary {
            phase,
            op_count: sum.op_count + 1,
            random_op_count: sum.random_op_count + u64::from(op.random),
            flops: sum.flops.saturating_add(op.flops),
            moved_bytes: sum.moved_bytes + op.moved_bytes,
        });
        if summary.op_count > 0 {
            summaries.push(summary);
        }
    }
    summaries
}

fn categories(trace: &Trace) -> Vec<CategorySummary> {
    let mut sums: std::collections::BTreeMap<Category, (u64, Bytes)> =
        std::collections::BTreeMap::new();
    for allocation in &trace.allocations {
        let sum = sums.entry(allocation.category).or_default();
        *sum = (sum.0 + 1, sum.1 + allocation.bytes);
    }
    let mut summaries: Vec<CategorySummary> = sums
        .into_iter()
        .map(|(category, (allocation_count, bytes))| CategorySummary {
            category,
            allocation_count,
            bytes,
        })
        .collect();
    summaries.sort_by_key(|summary| (std::cmp::Reverse(summary.bytes), summary.category));
    summaries
}

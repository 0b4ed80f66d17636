//! What an unplanned step takes, and who takes it.
//!
//! Responsible for the breakdown at the peak, the timeline and the largest batch.
//! Pure: a trace in, a [`Prediction`] out. Not responsible for the peak itself and its interval (`unplanned.rs`), nor for the
//! devices that the step fits on (`gpu.rs`).

mod error;
mod gpu;
mod pruned;
pub mod reserved;
mod unneeded;
mod unplanned;
mod wide;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use error::PredictError;
pub use gpu::{DeviceFit, GpuFit};
pub use unneeded::UnneededSaves;
pub use unplanned::{margin, unplanned_peak};
pub use wide::{WideReason, WideTensors};

use crate::allocator::Settings;
use crate::bytes::{Budget, Bytes};
use crate::cost::devices::Device;
use crate::predict::reserved::{Requests, Reserved};
use crate::step::lives::lives;
use crate::step::{Evaluator, Holding, StepModel, Treatment, Variant};
use crate::trace::{AllocationId, Category, OpIndex, Phase, SCHEMA_VERSION, Trace};

/// What to predict.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PredictRequest {
    /// Another batch size than the captured one.
    pub batch: Option<u64>,
    /// A budget, to answer which batch is the largest that fits.
    pub budget: Option<Budget>,
    /// A GPU of the table as people write its name; what it has room for takes the place of the budget.
    pub gpu: Option<String>,
}

/// What a prediction says. One struct: the text report, the JSON and Python read the same fields.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Prediction {
    /// Version of this shape.
    pub schema_version: u32,
    /// The trace's target.
    pub target: String,
    /// Batch size predicted for.
    pub batch: u64,
    /// Device kind.
    pub device_kind: String,
    /// Peak of allocated bytes.
    pub predicted_peak_bytes: Bytes,
    /// The peak lies in `[low, high]`; what makes it uncertain is in `uncertainty`.
    pub interval_bytes: (Bytes, Bytes),
    /// One sentence for each uncertain term.
    pub uncertainty: Vec<String>,
    /// What the caching allocator takes from the device, under PyTorch's default settings; absent
    /// where there is none.
    #[serde(default)]
    pub reserved: Option<Reserved>,
    /// Where the peak is.
    pub peak: PeakPoint,
    /// Who owns the bytes alive at the peak.
    pub breakdown: Breakdown,
    /// The largest allocations alive at the peak.
    pub top: Vec<TopAllocation>,
    /// What autograd saves and backward never needs, by the line that saves it, most bytes first.
    #[serde(default)]
    pub unneeded_saves: Vec<UnneededSaves>,
    /// What is held at the peak in wider elements than its use asks for, by the line that makes it, most savings first;
    /// only what is at least 1 % of the peak.
    #[serde(default)]
    pub wide_tensors: Vec<WideTensors>,
    /// The peak of the same ops if nothing were wide for these reasons; absent where nothing is.
    #[serde(default)]
    pub narrower_peak_bytes: Option<Bytes>,
    /// Bytes at each op, thinned to at most 512 points; each is the maximum of its stretch.
    pub timeline: Vec<TimelinePoint>,
    /// Peak in each phase.
    pub phases: Vec<(Phase, Bytes)>,
    /// Largest batch within the budget, when one was given and the law is known; 0 when none fits.
    pub largest_batch: Option<u64>,
    /// Which devices of the table it fits on, unplanned.
    pub devices: Vec<DeviceFit>,
    /// Whether it fits on the GPU that was asked about, when one was.
    #[serde(default)]
    pub gpu: Option<GpuFit>,
    /// What the capture had to say, and what pruning adds.
    pub notes: Vec<String>,
}

/// Where the peak is.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct PeakPoint {
    /// Index of the op.
    pub op_index: u32,
    /// Its name.
    pub op: String,
    /// Part of the step.
    pub phase: Phase,
    /// Module path.
    pub module: String,
    /// `file:line`.
    pub source: String,
}

/// Bytes alive at the peak; each list sums to the peak, largest first.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Breakdown {
    /// By category.
    pub category: Vec<Share>,
    /// By the module that made them.
    pub module: Vec<Share>,
    /// By the source line that made them.
    pub source: Vec<Share>,
}

/// One owner.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Share {
    /// Its name; `(before the step)` for what no op of the step made.
    pub name: String,
    /// Its bytes.
    pub bytes: Bytes,
    /// Its allocations.
    pub count: u64,
}

/// One allocation alive at the peak.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TopAllocation {
    /// Its size.
    pub bytes: Bytes,
    /// Its role.
    pub category: Category,
    /// Name of the parameter or batch entry, if it is one.
    pub name: String,
    /// The op that made it.
    pub op: String,
    /// Module of that op.
    pub module: String,
    /// Source line of that op.
    pub source: String,
    /// Shape of the first value in it.
    pub shape: Vec<u64>,
    /// Its element type.
    pub dtype: String,
}

/// One point of the timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TimelinePoint {
    /// Index of the first op of the stretch.
    pub op_index: u32,
    /// Most bytes alive in it.
    pub bytes: Bytes,
}

impl Prediction {
    /// What the device must have for the step: on CUDA whole segments, elsewhere what is allocated.
    #[must_use]
    pub fn needed_bytes(&self) -> Bytes {
        self.reserved
            .as_ref()
            .map_or(self.predicted_peak_bytes, |it| it.peak_reserved_bytes)
    }
}

const TOP: usize = 10;
const TIMELINE_POINTS: usize = 512;
/// No batch larger than this is tried.
const LARGEST_BATCH: u64 = 1 << 24;

/// Predicts the unplanned step.
///
/// # Errors
///
/// Another batch than the trace can be scaled to, a GPU that is not known or not the step's kind of device, or a GPU
/// and a budget.
pub fn predict(trace: &Trace, request: &PredictRequest) -> Result<Prediction, PredictError> {
    let gpu = match &request.gpu {
        Some(_) if request.budget.is_some() => return Err(PredictError::TwoBudgets),
        Some(name) => Some(gpu::asked(name, &trace.meta.device_kind)?),
        None => None,
    };
    let scaled;
    let at = match request.batch {
        Some(batch) if batch != trace.meta.batch => {
            scaled = trace.at_batch(batch)?;
            &scaled
        }
        _ => trace,
    };
    let model = StepModel::new(at, Variant::default());
    let mut evaluator = Evaluator::new(&model);
    let none = vec![Treatment::Keep; at.allocations.len()];
    let evaluation = evaluator.evaluate(&none);
    let peak_bytes = evaluation.peak_bytes;
    let holdings = evaluator.holdings_at_peak(&none);
    let position = evaluation.moment.position;
    let workspace = at
        .ops
        .get(position.index())
        .map_or(Bytes::ZERO, |op| op.workspace_bytes);
    let heights = evaluator.timeline(&none);
    let reserved = reserved(at, &model);
    let needed_bytes = reserved
        .as_ref()
        .map_or(peak_bytes, |it| it.peak_reserved_bytes);
    let budget = request.budget.map(|budget| budget.resolve(peak_bytes));
    let budget = budget.or_else(|| gpu.map(Device::room_bytes));
    let largest_batch = budget.and_then(|budget| largest_batch(trace, budget));
    let (interval_bytes, uncertainty) = unplanned::interval(at, peak_bytes);
    let (wide_tensors, narrower_peak_bytes) = wide::wide_tensors(at, &holdings, peak_bytes);
    Ok(Prediction {
        schema_version: SCHEMA_VERSION,
        target: at.meta.target.clone(),
        batch: at.meta.batch,
        device_kind: at.meta.device_kind.clone(),
        predicted_peak_bytes: peak_bytes,
        interval_bytes,
        uncertainty,
        reserved,
        peak: peak_point(at, position),
        breakdown: breakdown(at, &holdings, workspace, position),
        top: holdings
            .iter()
            .take(TOP)
            .map(|holding| top_allocation(at, holding))
            .collect(),
        unneeded_saves: unneeded::unneeded_saves(at),
        wide_tensors,
        narrower_peak_bytes,
        timeline: thin(&heights),
        phases: phase_peaks(at, &heights),
        largest_batch,
        devices: gpu::device_fits(needed_bytes),
        gpu: gpu.map(|device| GpuFit::new(device, peak_bytes, needed_bytes)),
        notes: [
            at.meta.notes.clone(),
            Vec::from_iter(pruned::pruning_note(at, peak_bytes)),
        ]
        .concat(),
    })
}

/// What the caching allocator takes for the unplanned step.
fn reserved(trace: &Trace, model: &StepModel) -> Option<Reserved> {
    reserved_for(trace, model, |_| true)
}

/// What the caching allocator takes for the unplanned step where the model's parameters and module buffers lie
/// in other memory, as those of a model that can be parked do; absent where there is none.
#[must_use]
pub fn reserved_beside_model(trace: &Trace) -> Option<Bytes> {
    let model = StepModel::new(trace, Variant::default());
    let is_models = |category| matches!(category, Category::Parameter | Category::ModuleBuffer);
    let found = reserved_for(trace, &model, |category| !is_models(category));
    found.map(|reserved| reserved.peak_reserved_bytes)
}

/// What it takes for all that has no category, or one of these.
fn reserved_for(
    trace: &Trace,
    model: &StepModel,
    counts: impl Fn(Category) -> bool,
) -> Option<Reserved> {
    (trace.meta.device_kind == "cuda").then(|| {
        let all_kept = vec![Treatment::Keep; trace.allocations.len()];
        let mut lives = lives(trace, model, &all_kept);
        lives.retain(|life| {
            let category = |id: AllocationId| trace.allocations[id.index()].category;
            life.allocation.map(category).is_none_or(&counts)
        });
        Requests::new(trace, &lives).reserved(&Settings::default(), "")
    })
}

fn peak_point(trace: &Trace, position: OpIndex) -> PeakPoint {
    let op = trace.ops.get(position.index());
    let text = |index: Option<u32>| index.map_or(String::new(), |i| trace.string(i).to_owned());
    PeakPoint {
        op_index: position.0,
        op: text(op.map(|op| op.name)),
        phase: op.map_or(Phase::Forward, |op| op.phase),
        module: text(op.map(|op| op.module)),
        source: text(op.map(|op| op.source)),
    }
}

fn add<'a>(owners: &mut BTreeMap<&'a str, (Bytes, u64)>, name: &'a str, bytes: Bytes) {
    let entry = owners.entry(name).or_insert((Bytes::ZERO, 0));
    entry.0 += bytes;
    entry.1 += 1;
}

/// Sums what is alive by owner; the peak op's workspace is an owner too, so that each list adds up.
fn breakdown(trace: &Trace, holdings: &[Holding], workspace: Bytes, at: OpIndex) -> Breakdown {
    let mut category: BTreeMap<&str, (Bytes, u64)> = BTreeMap::new();
    let mut module: BTreeMap<&str, (Bytes, u64)> = BTreeMap::new();
    let mut source: BTreeMap<&str, (Bytes, u64)> = BTreeMap::new();
    for holding in holdings {
        let allocation = &trace.allocations[holding.allocation.index()];
        let op = allocation.producer.map(|op| &trace.ops[op.index()]);
        add(&mut category, allocation.category.name(), holding.bytes);
        let owner = op.map_or(BEFORE, |op| or_none(trace.string(op.module)));
        add(&mut module, owner, holding.bytes);
        add(
            &mut source,
            op.map_or(BEFORE, |op| or_none(trace.string(op.source))),
            holding.bytes,
        );
    }
    if workspace > Bytes::ZERO {
        let op = trace.ops.get(at.index());
        add(&mut category, Category::Workspace.name(), workspace);
        add(
            &mut module,
            op.map_or("", |op| or_none(trace.string(op.module))),
            workspace,
        );
        add(
            &mut source,
            op.map_or("", |op| or_none(trace.string(op.source))),
            workspace,
        );
    }
    Breakdown {
        category: shares(category),
        module: shares(module),
        source: shares(source),
    }
}

const BEFORE: &str = "(before the step)";

fn or_none(name: &str) -> &str {
    if name.is_empty() { "(none)" } else { name }
}

fn shares(owners: BTreeMap<&str, (Bytes, u64)>) -> Vec<Share> {
    let mut shares: Vec<Share> = owners
        .into_iter()
        .map(|(name, (bytes, count))| Share {
            name: name.to_owned(),
            bytes,
            count,
        })
        .collect();
    shares.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    shares
}

fn top_allocation(trace: &Trace, holding: &Holding) -> TopAllocation {
    let allocation = &trace.allocations[holding.allocation.index()];
    let op = allocation.producer.map(|op| &trace.ops[op.index()]);
    let value = trace
        .values
        .iter()
        .find(|value| value.allocation == holding.allocation);
    let text = |index: Option<u32>| index.map_or(String::new(), |i| trace.string(i).to_owned());
    TopAllocation {
        bytes: holding.bytes,
        category: allocation.category,
        name: trace.string(allocation.name).to_owned(),
        op: text(op.map(|op| op.name)),
        module: text(op.map(|op| op.module)),
        source: text(op.map(|op| op.source)),
        shape: value.map_or(Vec::new(), |value| value.shape.clone()),
        dtype: text(value.map(|value| value.dtype)),
    }
}

fn thin(heights: &[Bytes]) -> Vec<TimelinePoint> {
    let stretch = heights.len().div_ceil(TIMELINE_POINTS).max(1);
    let points = heights
        .chunks(stretch)
        .enumerate()
        .map(|(i, chunk)| TimelinePoint {
            op_index: u32::try_from(i * stretch).unwrap_or(u32::MAX),
            bytes: chunk.iter().copied().max().unwrap_or(Bytes::ZERO),
        });
    points.collect()
}

fn phase_peaks(trace: &Trace, heights: &[Bytes]) -> Vec<(Phase, Bytes)> {
    let peak_of = |phase: Phase| {
        let heights = trace
            .ops
            .iter()
            .zip(heights)
            .filter(|(op, _)| op.phase == phase);
        heights
            .map(|(_, &height)| height)
            .max()
            .map(|peak| (phase, peak))
    };
    [Phase::Forward, Phase::Backward, Phase::Optimizer]
        .into_iter()
        .filter_map(peak_of)
        .collect()
}

/// The peak grows with the batch, so the largest that fits is found by bisection.
fn largest_batch(trace: &Trace, budget: Bytes) -> Option<u64> {
    trace.couplings.as_ref()?;
    let fits = |batch: u64| {
        trace.at_batch(batch).is_ok_and(|at| {
            let model = StepModel::new(&at, Variant::default());
            let (interval, _) = unplanned::interval(&at, unplanned_peak(&at));
            interval
                .1
                .max(reserved(&at, &model).map_or(Bytes::ZERO, |r| r.peak_reserved_bytes))
                <= budget
        })
    };
    if !fits(1) {
        return Some(0);
    }
    let mut low = 1;
    while low < LARGEST_BATCH && fits(low * 2) {
        low *= 2;
    }
    let mut high = low * 2;
    while high - low > 1 {
        let middle = low.midpoint(high);
        if fits(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    Some(low)
}

impl Category {
    /// The word used in reports and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameter",
            Self::ModuleBuffer => "module_buffer",
            Self::Gradient => "gradient",
            Self::OptimizerState => "optimizer_state",
            Self::Input => "input",
            Self::Activation => "activation",
            Self::Temporary => "temporary",
            Self::Workspace => "workspace",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample;

    #[test]
    fn the_peak_of_a_chain_is_what_a_hand_computes() {
        // Batch 4, rows of 8 floats: 128 bytes an activation; weight 256, input 128, loss 4. The peak is first
        // reached at `mean` (op 3): weight, input, a and b (saved), c, and the loss.
        let peak = Bytes(256 + 128 + 128 + 128 + 4 + 128);
        let prediction = predict(&sample::chain(), &PredictRequest::default()).unwrap();
        assert_eq!(prediction.predicted_peak_bytes, peak);
        assert_eq!(prediction.peak.op, "aten.mean.default");
        for list in [&prediction.breakdown.category, &prediction.breakdown.module] {
            assert_eq!(list.iter().map(|share| share.bytes).sum::<Bytes>(), peak);
        }
    }

    #[test]
    fn on_cuda_whole_segments_are_needed() {
        let on_cpu = predict(&sample::chain(), &PredictRequest::default()).unwrap();
        assert_eq!(on_cpu.needed_bytes(), on_cpu.predicted_peak_bytes);
        let mut trace = sample::chain();
        trace.meta.device_kind = "cuda".into();
        let on_cuda = predict(&trace, &PredictRequest::default()).unwrap();
        assert_eq!(on_cuda.predicted_peak_bytes, on_cpu.predicted_peak_bytes);
        assert_eq!(on_cuda.needed_bytes(), Bytes(2 << 20), "one small segment");
    }

    #[test]
    fn beside_a_model_that_lies_elsewhere_only_the_rest_takes_segments() {
        let mut trace = sample::chain();
        assert_eq!(reserved_beside_model(&trace), None);
        trace.meta.device_kind = "cuda".into();
        assert_eq!(reserved_beside_model(&trace), Some(Bytes(2 << 20)));
        for allocation in &mut trace.allocations {
            if allocation.category == Category::Parameter {
                allocation.bytes = Bytes(50 << 20);
            }
        }
        let needed = predict(&trace, &PredictRequest::default()).unwrap();
        assert!(needed.needed_bytes() >= Bytes(52 << 20));
        assert_eq!(reserved_beside_model(&trace), Some(Bytes(2 << 20)));
    }

    #[test]
    fn the_largest_batch_fits_and_the_next_does_not() {
        let trace = sample::batched_chain(4)
            .with_second(&sample::batched_chain(2))
            .unwrap();
        let request = PredictRequest {
            budget: Some(Budget::Absolute(Bytes(3000))),
            ..Default::default()
        };
        let batch = predict(&trace, &request).unwrap().largest_batch.unwrap();
        let high = |batch| {
            let request = PredictRequest {
                batch: Some(batch),
                ..Default::default()
            };
            predict(&trace, &request).unwrap().interval_bytes.1
        };
        assert!(
            high(batch) <= Bytes(3000) && high(batch + 1) > Bytes(3000),
            "{batch}"
        );
    }

    #[test]
    fn a_timeline_is_thin_and_keeps_the_peak() {
        let heights: Vec<Bytes> = (0..10_000).map(|i| Bytes(i % 777)).collect();
        let points = thin(&heights);
        assert!(points.len() <= TIMELINE_POINTS);
        assert_eq!(points.iter().map(|p| p.bytes).max(), Some(Bytes(776)));
    }
}

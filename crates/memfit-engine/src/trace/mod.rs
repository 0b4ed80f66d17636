//! What one step does to memory: the type everything else reads.
//!
//! Responsible for the vocabulary (allocations, values, ops, saved tensors, regions) and its validity
//! rules ([`Trace::check`]). Not responsible for how a trace is recorded (the Python package does
//! that), for what it costs ([`crate::cost`]) or for what a plan makes of it ([`crate::step`]).
//!
//! # Time
//!
//! Time is the op index. A *position* `p` lies just before op `p`; `ops.len()` is the end of the step.
//! Ranges are half-open: an allocation with range `[start, end)` is alive *during* op `i` when
//! `start <= i < end`. An op's own outputs start at its index. No clock enters a trace.
//!
//! # Why holds and natural ranges are kept apart
//!
//! A tensor lives because somebody refers to it. Autograd's saved tensors are one such somebody, and
//! the only one memfit can talk out of it. So each allocation carries its *natural* ranges (alive even
//! if autograd had saved nothing) and each [`SavedTensor`] its own interval. The unplanned life of an
//! allocation is the union of both; see [`crate::step`] for the life it leads under a plan.
//!
//! ```text
//! op          0    1    2    3  |  4    5    6        y = gelu(x); z = mm(y, w); ...
//! y natural        [---------)                        last Python reference dies before op 3
//! y saved by mm         [----------------)            packed before op 2, released before op 6
//! y unplanned      [---------------------)            the union
//! ```

mod alternative;
mod batch;
mod captured;
mod check;
mod elementwise;
#[cfg(test)]
pub(crate) mod sample;
mod sizes;
mod way;

pub use batch::BatchError;
pub use captured::{CaptureError, CapturedWay};
pub use check::TraceError;
pub(crate) use elementwise::ELEMENTWISE;
pub use sizes::SizesError;
pub use way::{
    Autocast, CallChunk, Chunk, Edges, HalfParameters, Head, Int8Weights, LossChunk, Refusals,
    Strips, Way,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;

/// Version of the trace and plan schema this build writes. Readers accept this and every older one.
pub const SCHEMA_VERSION: u32 = 1;

macro_rules! index_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The index as `usize`, for slices.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

index_type!(
    /// Index into [`Trace::allocations`].
    AllocationId
);
index_type!(
    /// Index into [`Trace::values`].
    ValueId
);
index_type!(
    /// Index into [`Trace::ops`]; as a position it means "just before that op".
    OpIndex
);

pub(crate) fn op_index(index: usize) -> OpIndex {
    OpIndex(u32::try_from(index).unwrap_or(u32::MAX))
}

/// One recorded step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// Where the trace comes from.
    pub meta: Meta,
    /// Device names (`cpu`, `cuda:0`), indexed by [`Allocation::device`].
    pub devices: Vec<String>,
    /// Interned strings: op names, module paths, source lines, op arguments. Index 0 is the empty string.
    pub strings: Vec<String>,
    /// Every allocation of the step, in order of first appearance.
    pub allocations: Vec<Allocation>,
    /// Every value read or written.
    pub values: Vec<Value>,
    /// Every op, in execution order.
    pub ops: Vec<Op>,
    /// Every tensor that autograd held between forward and backward.
    pub saved: Vec<SavedTensor>,
    /// Module calls as op intervals.
    pub regions: Vec<Region>,
    /// The trainable parameters, in the order their gradients became ready.
    pub updates: Vec<ParameterUpdate>,
    /// Why the batch cannot be split; empty when it can, absent when only one batch size was captured.
    #[serde(default)]
    pub couplings: Option<Vec<Coupling>>,
    /// The step in slices; absent when not tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alternatives: Option<Alternatives>,
    /// What its ops take on pieces of the batch, where somebody has asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<Piece>,
}

/// Where a trace comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// What was captured, as the user named it (`examples/gpt2.py:build`).
    pub target: String,
    /// `torch.__version__`.
    pub torch_version: String,
    /// Device kind the step runs on: `cpu` or `cuda`.
    pub device_kind: String,
    /// Class name of the optimizer (`AdamW`), empty without one.
    pub optimizer: String,
    /// Batch size of this trace: the common leading dimension of the batch tensors; 0 when there is none.
    pub batch: u64,
    /// The other batch size captured, when the batch dimension is known; 0 otherwise.
    #[serde(default)]
    pub second_batch: u64,
    /// Whether the step trains (backward ran) or only infers.
    pub training: bool,
    /// How it was captured: `fake` (no memory taken), `real` (one real step) or `joint` (a joint graph of
    /// `torch.compile`, in which what runs again is compiled like all else).
    pub captured: String,
    /// Number of threads that the workspace probes ran with; 0 when they did not run, or not all could.
    #[serde(default)]
    pub probe_threads: u32,
    /// Why the optimizer step cannot run inside backward (`AdamW is called with ...`); absent when it can.
    #[serde(default)]
    pub fused_optimizer_refusal: Option<String>,
    /// Why the optimizer step cannot run parameter by parameter once all gradients are there; absent when it can.
    #[serde(default = "unknown_optimizer")]
    pub per_parameter_refusal: Option<String>,
    /// Why the optimizer's state has no form in 8 bits; absent when it has.
    #[serde(default = "unknown_optimizer")]
    pub eight_bit_refusal: Option<String>,
    /// Parameters were narrowed for this recording, see [`Way::half_parameters`]: who runs the step holds the state of
    /// those that train in a form of its own, not in that of the recorded optimizer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub half_parameters: bool,
    /// Why the batch cannot be cut for reasons that its ops do not show, such as hooks on gradients; absent when it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch_refusal: Option<String>,
    /// Why parameters cannot be offloaded with the torch that captured the step; absent when they can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offloaded_parameters_refusal: Option<String>,
    /// Batch size at which workspaces were probed; 0 when it is `batch`.
    #[serde(default)]
    pub probed_batch: u64,
    /// How the loss reduces over the batch: `mean`, `sum`, `token_mean` (a mean over targets that are
    /// not ignored), or empty when it was not recognised.
    #[serde(default)]
    pub loss_reduction: String,
    /// Parameters in memory that belongs to somebody else (a mapped file, an array, other processes), so that it
    /// cannot be let go; ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fixed_parameters: Vec<AllocationId>,
    /// What a forward of inference returns; absent in training, and where it was not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inference: Option<Inference>,
    /// The model's own checkpoints (`torch.utils.checkpoint`); absent where it has none, or a capture does not look for any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<Checkpoints>,
    /// Things the reader should know, one sentence each (fallbacks taken, ops not understood).
    #[serde(default)]
    pub notes: Vec<String>,
}

/// A model's own checkpoints (`torch.utils.checkpoint`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoints {
    /// How many run in forward.
    pub count: u64,
    /// Why their bodies may not run as ordinary forwards, as a clause about one of them; empty where they may.
    pub refusal: String,
}

/// What a step is that only infers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inference {
    /// The tensors that its forward returns, in order.
    pub returns: Vec<ValueId>,
    /// Whether forward is one call of the model with the entries of the batch, and nothing else.
    pub is_model_call: bool,
    /// Whether a tensor that it returns has a graph.
    #[serde(default)]
    pub has_graph: bool,
}

#[expect(clippy::unnecessary_wraps, reason = "the default of an optional field")]
fn unknown_optimizer() -> Option<String> {
    Some("the trace was recorded before memfit knew whether the optimizer allows it".to_owned())
}

/// What an allocation is for. Bound when the step has ended, when its role is known.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// A parameter of the model.
    Parameter,
    /// A buffer of the model, in the sense of `nn.Module.register_buffer`.
    ModuleBuffer,
    /// The gradient of a parameter.
    Gradient,
    /// State of the optimizer.
    OptimizerState,
    /// A tensor of the batch.
    Input,
    /// Held by autograd between forward and backward.
    Activation,
    /// Everything else an op produced.
    Temporary,
    /// Scratch inside one op, invisible to the dispatcher.
    Workspace,
}

/// One request to the allocator: a storage. Views share it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// Size asked for.
    pub bytes: Bytes,
    /// Index into [`Trace::devices`].
    pub device: u32,
    /// Its role.
    pub category: Category,
    /// The op that created it; absent for what existed before the step.
    pub producer: Option<OpIndex>,
    /// Ranges in which something other than a saved tensor holds it; sorted, disjoint, non-empty each.
    /// What existed before the step starts at 0; what outlives it ends at `ops.len()`.
    pub natural: Vec<(OpIndex, OpIndex)>,
    /// Name of the parameter or buffer or batch entry, index into [`Trace::strings`]; 0 for none.
    pub name: u32,
    /// How the size depends on the batch; absent when unknown.
    #[serde(default)]
    pub law: Option<Law>,
}

/// A tensor as an op sees it: an allocation, at a version, through a view.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Value {
    /// The storage.
    pub allocation: AllocationId,
    /// How many in-place writes the storage had seen in this step.
    pub version: u32,
    /// Elements from the storage's start.
    pub offset: u64,
    /// Sizes, outermost first.
    pub shape: Vec<u64>,
    /// Strides in elements.
    pub stride: Vec<i64>,
    /// Element type without the `torch.` prefix, index into [`Trace::strings`].
    pub dtype: u32,
    /// How much each size grows with one more item in the batch; empty when none does or it is unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shape_per_item: Vec<i64>,
}

/// Part of the step an op belongs to.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Model and loss.
    Forward,
    /// `loss.backward()`.
    Backward,
    /// `optimizer.step()` and `zero_grad()`.
    Optimizer,
}

/// One op as the dispatcher saw it.
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent facts about an op"
)]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Op {
    /// Overload name (`aten.addmm.default`), index into [`Trace::strings`].
    pub name: u32,
    /// Part of the step.
    pub phase: Phase,
    /// Path of the innermost module (`transformer.h.0.mlp`), index into [`Trace::strings`]; 0 outside
    /// any. Backward ops carry the module of the forward op they differentiate.
    pub module: u32,
    /// `file:line` that called it, index into [`Trace::strings`]; 0 when unknown.
    pub source: u32,
    /// Arguments that are not tensors, as text (`dim=-1`), index into [`Trace::strings`].
    pub arguments: u32,
    /// Whether `arguments` change with the batch size (`size=[32,10]`); false where only one size was captured.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub arguments_vary: bool,
    /// Autograd node: made by this op in forward, running it in backward.
    pub node: Option<u32>,
    /// Tensors read, in argument order; what is written in place is read too.
    pub reads: Vec<ValueId>,
    /// Tensors written in place, at the version they have afterwards.
    pub writes: Vec<ValueId>,
    /// Tensors returned, in order. Fresh ones name this op as their allocation's producer.
    pub outputs: Vec<ValueId>,
    /// Floating-point operations; 0 for what `torch.utils.flop_counter` does not count.
    pub flops: u64,
    /// Bytes read plus bytes written, each value once.
    pub moved_bytes: Bytes,
    /// How much `flops` grows with one more item in the batch; 0 when unknown.
    #[serde(default)]
    pub flops_per_item: i64,
    /// How much `moved_bytes` grows with one more item in the batch; 0 when unknown.
    #[serde(default)]
    pub moved_bytes_per_item: i64,
    /// Scratch inside the op above what lives before and after it, as probed.
    pub workspace_bytes: Bytes,
    /// How much `workspace_bytes` grows with one more item in the batch; `None` when it was probed at one batch size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_per_item: Option<i64>,
    /// Draws random numbers.
    pub random: bool,
    /// Only makes a view: no bytes, no work.
    pub view: bool,
    /// Can be run again from its inputs with the same result. False for collectives, ops that return
    /// no tensor, ops that write to several tensors, ops that draw from a generator we cannot restore.
    pub replayable: bool,
    /// Reads the shape and the type of its first tensor but none of its elements (`aten.empty_like`), so that running
    /// it again needs no more of the tensor than that. False in traces recorded before this was written down.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shape_only: bool,
}

/// A tensor that autograd packed in forward and gives back in backward.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedTensor {
    /// What is saved.
    pub value: ValueId,
    /// The node that saved it.
    pub node: u32,
    /// Position of the pack.
    pub pack: OpIndex,
    /// Position at which backward asks for it; absent when it never does.
    pub unpack: Option<OpIndex>,
    /// Position at which the node lets go.
    pub release: OpIndex,
}

/// One call of one module: the ops it spans.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Module path, index into [`Trace::strings`].
    pub module: u32,
    /// Class name, index into [`Trace::strings`].
    pub class: u32,
    /// How many times this module had been entered before in the step.
    pub call: u32,
    /// First op of the forward call.
    pub start: OpIndex,
    /// One past its last op.
    pub end: OpIndex,
}

/// What the optimizer does for one parameter, if it may do it alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterUpdate {
    /// The parameter.
    pub parameter: AllocationId,
    /// Its gradient.
    pub gradient: AllocationId,
    /// Position in backward at which the gradient is complete (`AccumulateGrad` has run).
    pub ready: OpIndex,
    /// Peak of temporaries while the optimizer updates this parameter alone.
    pub temporary_bytes: Bytes,
    /// Bytes moved by that update.
    pub moved_bytes: Bytes,
    /// The optimizer's state for this parameter alone; empty in traces recorded before this was known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub state: Vec<AllocationId>,
}

/// What the ops of a step take on a piece of the batch, as probed there: scratch follows no line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Items of the piece.
    pub items: u64,
    /// Scratch of each op.
    pub workspace_bytes: Vec<Bytes>,
}

/// A step in another way, as captured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// The way.
    #[serde(flatten)]
    pub way: Way,
    /// The step then.
    pub trace: Trace,
}

/// What a step can be run as instead.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Alternatives {
    /// In the order in which they were asked for: from the least to the most that runs in slices.
    pub steps: Vec<Alternative>,
    /// Why there are not those that were asked for and are not among them.
    #[serde(flatten)]
    pub refusals: Refusals,
}

/// `bytes(batch) = fixed + per_item * batch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Law {
    /// Bytes at batch 0.
    pub fixed: i64,
    /// Bytes for each item.
    pub per_item: i64,
}

impl Law {
    /// The size at `batch`, never below zero.
    #[must_use]
    pub fn at(self, batch: u64) -> Bytes {
        let bytes = i128::from(self.fixed) + i128::from(self.per_item) * i128::from(batch);
        Bytes(u64::try_from(bytes.max(0)).unwrap_or(u64::MAX))
    }
}

/// How an op mixes the items of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CouplingKind {
    /// It computes a statistic over the batch (batch normalisation).
    Statistic,
    /// It compares every item with every other (contrastive losses).
    Cross,
    /// It works along the batch dimension (softmax, sort, indexing).
    Along,
}

/// An op that mixes the items of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coupling {
    /// The op.
    pub op: OpIndex,
    /// How.
    pub kind: CouplingKind,
}

/// Bytes of one element of a real type; `None` for others.
pub(crate) fn element_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "float64" | "int64" => Some(8),
        "float32" | "int32" => Some(4),
        "float16" | "bfloat16" | "int16" => Some(2),
        "bool" | "uint8" | "int8" => Some(1),
        _ => None,
    }
}

impl Trace {
    /// End of the step as a position.
    #[must_use]
    pub fn end(&self) -> OpIndex {
        OpIndex(u32::try_from(self.ops.len()).unwrap_or(u32::MAX))
    }

    /// The interned string at `index`; empty when out of range, which [`Trace::check`] excludes.
    #[must_use]
    pub fn string(&self, index: u32) -> &str {
        self.strings.get(index as usize).map_or("", String::as_str)
    }

    /// The names of the ops, in order.
    #[must_use]
    pub fn op_names(&self) -> Vec<&str> {
        self.ops.iter().map(|op| self.string(op.name)).collect()
    }

    /// The allocation behind a value.
    #[must_use]
    pub fn allocation_of(&self, value: ValueId) -> AllocationId {
        self.values[value.index()].allocation
    }

    /// Position at which backward starts: the first op that is not forward, or the end.
    #[must_use]
    pub fn forward_end(&self) -> OpIndex {
        let end = self.ops.iter().position(|op| op.phase != Phase::Forward);
        OpIndex(u32::try_from(end.unwrap_or(self.ops.len())).unwrap_or(u32::MAX))
    }
}

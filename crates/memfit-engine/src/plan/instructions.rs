//! What the executor needs to carry out each technique's action, beside its name.
//!
//! Responsible for the types, which are part of a plan's JSON. Not responsible for filling them in (`technique/`), nor
//! for those that a way of running the step has already ([`crate::trace::Way`]).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;
use crate::trace::OpIndex;

/// Where bytes go that leave a device.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// The host's memory: for devices that have one of their own.
    Host,
    /// Files.
    Disk,
}

/// One dropped or stored allocation.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Dropped {
    /// Index of the forward op that creates it.
    pub op: OpIndex,
    /// Position among the tensors that op returns.
    pub output: u32,
    /// Shape of that tensor, for the executor's check.
    pub shape: Vec<u64>,
    /// Its size.
    pub bytes: Bytes,
    /// Module path, for people.
    pub module: String,
    /// Forward op from which on requests for other values let it pass: it is computed or fetched for them
    /// and let go. Absent: it stays once it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<OpIndex>,
}

/// A module call that the executor watches.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize)]
pub struct ActiveRegion {
    /// Module path; empty for the whole forward.
    pub module: String,
    /// How many times the module had been entered before in the step.
    pub call: u32,
    /// Index of its first op in forward.
    pub start: OpIndex,
    /// One past its last.
    pub end: OpIndex,
}

/// Where to drop, addressed by the order of ops in forward.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize, Default)]
pub struct Remat {
    /// The dropped allocations, by creating op, ascending.
    pub drops: Vec<Dropped>,
    /// Module calls in which the executor must watch; disjoint, ascending. A region with an empty
    /// module path stands for the whole forward, the loss function included.
    pub active: Vec<ActiveRegion>,
    /// Distinct op names of forward.
    pub names: Vec<String>,
    /// Forward op by op: index into `names`. The executor compares it with what really runs.
    pub forward: Vec<u32>,
}

/// What to offload, addressed like [`Remat`](crate::plan::Remat). Where a plan holds both, both watch the same regions.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Offload {
    /// Where to.
    pub tier: Tier,
    /// The folder, for files; empty for the host's memory.
    #[serde(default)]
    pub folder: String,
    /// Most bytes on their way out, and most fetched ahead.
    pub window_bytes: Bytes,
    /// The stored allocations, by creating op, ascending.
    pub stores: Vec<Dropped>,
    /// In which order they are fetched ahead, as places in `stores`. The others are fetched when asked for.
    #[serde(default)]
    pub order: Vec<u32>,
    /// As in [`Remat::active`](crate::plan::Remat::active).
    pub active: Vec<ActiveRegion>,
    /// As in [`Remat::names`](crate::plan::Remat::names).
    pub names: Vec<String>,
    /// As in [`Remat::forward`](crate::plan::Remat::forward).
    pub forward: Vec<u32>,
}

/// What to shrink, addressed like [`Remat`](crate::plan::Remat).
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Shrink {
    /// The allocations held in `bfloat16`, by creating op, ascending.
    pub half: Vec<Dropped>,
    /// The allocations held in 8 bits, likewise.
    pub eight_bit: Vec<Dropped>,
    /// As in [`Remat::active`](crate::plan::Remat::active).
    pub active: Vec<ActiveRegion>,
    /// As in [`Remat::names`](crate::plan::Remat::names).
    pub names: Vec<String>,
    /// As in [`Remat::forward`](crate::plan::Remat::forward).
    pub forward: Vec<u32>,
}

/// The ops that the proof is about: each treats the items of the batch alike and apart.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize, Default)]
pub struct MicroBatch {
    /// Distinct ops of forward: name, a space and the arguments, or `*` where another batch size changes them.
    pub names: Vec<String>,
    /// Forward op by op: index into `names`. The executor compares it with what really runs.
    pub forward: Vec<u32>,
    /// How the model's call alone runs in pieces, where the rest of the step is a script's own; absent where the whole
    /// step does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<CallInPieces>,
    /// Of inference: for each tensor that forward returns, the dimension along which those of the pieces are put
    /// together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub results: Vec<u64>,
}

/// What a model's call needs to run on one piece of its batch after the other.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize, Default)]
pub struct CallInPieces {
    /// The tensors that are cut, by their places among those that it is given; the others go to every piece whole.
    /// None for those of the batch that the step was planned with.
    pub cut: Vec<u64>,
    /// For each op that draws random numbers, in order, whether it draws for every item of the batch. A piece gets
    /// those numbers of the whole draw that are its own.
    pub draws: Vec<bool>,
    /// The loss, where the call computes it; absent where all that it returns has an entry for each item.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossOfPieces>,
}

/// A loss that a model's call returns, put together from those of the pieces.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct LossOfPieces {
    /// Its place among the tensors that the call returns.
    pub place: u64,
    /// How it reduces over the batch, see `Meta.loss_reduction`.
    pub reduction: String,
}

/// Which of the optimizer's state to offload, and how.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OffloadOptimizer {
    /// Where to.
    pub tier: Tier,
    /// The folder, for files; empty for the host's memory.
    #[serde(default)]
    pub folder: String,
    /// Most bytes fetched ahead of their update, and most on their way out.
    pub window_bytes: Bytes,
    /// Smallest tensor that goes.
    pub least_bytes: Bytes,
    /// Names of the parameters with offloaded state, in the order of their updates; those with state in 8 bits come slice by
    /// slice, in no order.
    pub order: Vec<String>,
}

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

/// Whose state is in 8 bits.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OptimizerBits {
    /// Names of the parameters, in the order of the trace's updates.
    pub names: Vec<String>,
    /// Whether lower halves of those that are held in `bfloat16` are kept, so that updates have 32 bits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lower_halves: bool,
}

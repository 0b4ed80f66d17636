//! A way to run the same step: what a plan may choose apart from what it may change.
//!
//! Responsible for the types, and for what is no nonsense in them. Not responsible for steps that were captured in such
//! ways (`alternative.rs`), for which ways are worth a capture ([`crate::plan::ways`]) nor for choosing one
//! (`plan/ways.rs`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;

/// How a step runs, where not plainly; one of these at least.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Way {
    /// What runs in slices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<Chunk>,
    /// The types that ops compute in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autocast: Option<Autocast>,
    /// Which parameters are in 16 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub half_parameters: Option<HalfParameters>,
    /// Which weights of linear layers are in 8 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub int8_weights: Option<Int8Weights>,
    /// Whether autograd is kept from recording a forward of inference that turns it on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_graph: bool,
    /// Whether the checkpoints that the model has itself run as ordinary forwards.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub undo_checkpoints: bool,
    /// Asks for the step on so many items instead, for what its ops take on a piece of the batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub items: Option<u64>,
}

/// Forward under `torch.autocast`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Autocast {
    /// Element type of what it casts to, `bfloat16`.
    pub dtype: String,
    /// Whether the narrow copies of parameters are kept to the end of forward, for further uses.
    pub cache: bool,
    /// Paths of modules in which nothing is cast.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keep: Vec<String>,
}

/// Parameters held in 16 bits, their gradients with them.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct HalfParameters {
    /// Names of the parameters in the type that autocast casts to beside it.
    pub names: Vec<String>,
}

/// Weights of linear layers held in 8 bits, with a scale for each row.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Int8Weights {
    /// Names of the parameters that are quantised.
    pub names: Vec<String>,
    /// Those of them whose products are in 8 bits too: what they multiply is quantised at each use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dynamic: Vec<String>,
}

/// What of a step runs in slices, or for some rows alone; one of these at least.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Chunk {
    /// The loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossChunk>,
    /// Module calls, in order; none inside another.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<CallChunk>,
    /// Of inference: logits that are computed for those rows alone that are used, as the last of each sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<Head>,
    /// Of inference: large tensors between convolutions, and scores of attention, a strip of rows at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strips: Option<Strips>,
    /// Of training: messages along the edges of a graph, a row for each, that are summed into nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edges: Option<Edges>,
}

/// Rows gathered for the edges of a graph, and what is computed of them row by row, in slices.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Edges {
    /// Slices of the edges, at most.
    pub slices: u64,
    /// Size of the gathered rows that are put off, at least.
    pub least_bytes: Bytes,
    /// Gathers of that size, by number, that are not put off, as something looks at all of their rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<u64>,
}

/// Large tensors that convolutions and products take a strip of rows at a time.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Strips {
    /// Strips of a tensor, at most.
    pub strips: u64,
    /// Size of the tensors that are put off, at least; of one item, where a batch of images has several.
    pub least_bytes: Bytes,
    /// Calls that take strips, by number, whose results are not written over what they take, as that is used again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<u64>,
}

/// A linear layer over many classes of whose rows not all are used.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Head {
    /// The parameter that makes logits of hidden values, by its qualified name.
    pub weight: String,
    /// Size of the whole logits.
    pub logit_bytes: Bytes,
}

/// A module call that treats the rows of its input one by one, computed for some rows at a time.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CallChunk {
    /// Path of the module.
    pub module: String,
    /// The dimension of its input that is cut.
    pub dim: u64,
    /// Number of slices, at most.
    pub slices: u64,
    /// Whether it draws random numbers: each slice draws its own, so a seed gives others than without.
    #[serde(default)]
    pub draws: bool,
    /// The ops of the whole call in order, which the proof is about: each its name, a space and its arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ops: Vec<String>,
}

/// A loss over many classes in slices of rows: its logits never exist as a whole.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct LossChunk {
    /// Number of slices, at most.
    pub slices: u64,
    /// The parameter that makes logits of hidden values, by its qualified name.
    pub weight: String,
    /// Rows of the logits.
    pub rows: u64,
    /// Classes they are over.
    pub classes: u64,
    /// Size of the whole logits.
    pub logit_bytes: Bytes,
}

/// Why a step was not captured in ways that were asked for; empty where nothing failed.
#[derive(Debug, Clone, PartialEq, Default, JsonSchema, Serialize, Deserialize)]
pub struct Refusals {
    /// In slices, or in no more.
    #[serde(default, rename = "refusal")]
    pub slices: String,
    /// Under autocast.
    #[serde(
        default,
        rename = "autocast_refusal",
        skip_serializing_if = "String::is_empty"
    )]
    pub autocast: String,
    /// With parameters in 16 bits.
    #[serde(
        default,
        rename = "half_refusal",
        skip_serializing_if = "String::is_empty"
    )]
    pub half_parameters: String,
    /// With weights in 8 bits.
    #[serde(
        default,
        rename = "int8_refusal",
        skip_serializing_if = "String::is_empty"
    )]
    pub int8_weights: String,
    /// Without autograd's graph.
    #[serde(
        default,
        rename = "graph_refusal",
        skip_serializing_if = "String::is_empty"
    )]
    pub graph: String,
    /// Without the model's checkpoints.
    #[serde(
        default,
        rename = "checkpoints_refusal",
        skip_serializing_if = "String::is_empty"
    )]
    pub checkpoints: String,
}

impl Refusals {
    /// Takes those of a later capture on, which count where both have one.
    pub(super) fn add(&mut self, later: Self) {
        let Self {
            slices,
            autocast,
            half_parameters,
            int8_weights,
            graph,
            checkpoints,
        } = later;
        for (known, new) in [
            (&mut self.slices, slices),
            (&mut self.autocast, autocast),
            (&mut self.half_parameters, half_parameters),
            (&mut self.int8_weights, int8_weights),
            (&mut self.graph, graph),
            (&mut self.checkpoints, checkpoints),
        ] {
            if !new.is_empty() {
                *known = new;
            }
        }
    }
}

impl Way {
    /// A step of which some runs in slices.
    #[must_use]
    pub fn in_slices(chunk: Chunk) -> Self {
        Self {
            chunk: Some(chunk),
            ..Self::default()
        }
    }

    /// Whether it says anything, and no nonsense.
    pub(super) fn is_valid(&self) -> bool {
        let is_narrow = self.autocast.is_some()
            || self.half_parameters.is_some()
            || self.int8_weights.is_some();
        let is_other = self.chunk.is_some() || is_narrow || self.no_graph || self.undo_checkpoints;
        is_other && self.items.is_none() && self.chunk.as_ref().is_none_or(Chunk::is_valid)
    }
}

impl Chunk {
    /// The most slices that anything runs in.
    #[must_use]
    pub fn slices(&self) -> u64 {
        let calls = self.calls.iter().map(|call| call.slices);
        calls
            .chain(self.loss.iter().map(|loss| loss.slices))
            .chain(self.head.iter().map(|_| 1))
            .chain(self.strips.iter().map(|strips| strips.strips))
            .chain(self.edges.iter().map(|edges| edges.slices))
            .max()
            .unwrap_or(0)
    }

    /// Whether nothing runs in no slice at all.
    fn is_valid(&self) -> bool {
        let mut slices = self
            .calls
            .iter()
            .map(|call| call.slices)
            .chain(self.loss.iter().map(|loss| loss.slices))
            .chain(self.strips.iter().map(|strips| strips.strips))
            .chain(self.edges.iter().map(|edges| edges.slices));
        self.slices() > 0 && slices.all(|count| count > 0)
    }
}

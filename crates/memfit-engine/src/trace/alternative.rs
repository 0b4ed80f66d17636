//! The same step run in another way: what a plan may choose apart from what it may change.
//!
//! Responsible for the types, and for what an alternative must have in common with its trace. Not
//! responsible for which ways are worth a capture ([`crate::plan::ways`]) nor for choosing one (`plan/ways.rs`).
//!
//! Slices, autocast and parameters in 16 bits change which ops run, and autograd what stays, so their memory is not derived
//! from the plain trace: the step is captured once more in that way, and that trace is as good as any.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Trace, TraceError};
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

/// What the ops of a step take on a piece of the batch, as probed there: scratch follows no line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Items of the piece.
    pub items: u64,
    /// Scratch of each op.
    pub workspace_bytes: Vec<Bytes>,
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
    fn is_valid(&self) -> bool {
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
            .chain(self.strips.iter().map(|strips| strips.strips));
        self.slices() > 0 && slices.all(|count| count > 0)
    }
}

impl Trace {
    /// The trace without its alternatives.
    #[must_use]
    pub fn alone(&self) -> Self {
        Self {
            meta: self.meta.clone(),
            devices: self.devices.clone(),
            strings: self.strings.clone(),
            allocations: self.allocations.clone(),
            values: self.values.clone(),
            ops: self.ops.clone(),
            saved: self.saved.clone(),
            regions: self.regions.clone(),
            updates: self.updates.clone(),
            couplings: self.couplings.clone(),
            alternatives: None,
            pieces: self.pieces.clone(),
        }
    }

    /// The trace with these alternatives instead of its own.
    ///
    /// # Errors
    ///
    /// As [`Trace::check`].
    pub fn with_alternatives(&self, alternatives: Alternatives) -> Result<Self, TraceError> {
        let whole = Self {
            alternatives: Some(alternatives),
            ..self.alone()
        };
        whole.check()?;
        Ok(whole)
    }

    /// The step in a way, as captured; `None` where it was not.
    #[must_use]
    pub fn in_way(&self, way: &Way) -> Option<&Self> {
        if *way == Way::default() {
            return Some(self);
        }
        let mut steps = self.alternatives().iter();
        Some(&steps.find(|step| step.way == *way)?.trace)
    }

    /// The trace with the scratch of the step on fewer items, in the way that was asked for.
    ///
    /// # Errors
    ///
    /// That step is not known, or runs other ops on so many items.
    pub fn with_piece(&self, way: &Way, recorded: &Self) -> Result<Self, String> {
        let whole_way = Way {
            items: None,
            ..way.clone()
        };
        let mut made = self.clone();
        let is_plain = whole_way == Way::default();
        let steps = made.alternatives.iter_mut().flat_map(|it| &mut it.steps);
        let own = steps.filter(|step| step.way == whole_way);
        let own = own.map(|step| &mut step.trace).next();
        let Some(own) = (if is_plain { Some(&mut made) } else { own }) else {
            return Err("the step was not captured in that way".to_owned());
        };
        let names = |trace: &'_ Self| -> Vec<String> {
            let ops = trace.ops.iter();
            ops.map(|op| trace.string(op.name).to_owned()).collect()
        };
        if names(own) != names(recorded) {
            return Err(format!(
                "it runs other ops on {} items",
                recorded.meta.batch
            ));
        }
        own.pieces.push(Piece {
            items: recorded.meta.batch,
            workspace_bytes: recorded.ops.iter().map(|op| op.workspace_bytes).collect(),
        });
        Ok(made)
    }

    /// The alternatives captured; none where none was tried.
    #[must_use]
    pub fn alternatives(&self) -> &[Alternative] {
        self.alternatives
            .as_ref()
            .map_or(&[], |found| found.steps.as_slice())
    }

    /// Checks every alternative, and that it is one of this step.
    pub(super) fn check_alternatives(&self) -> Result<(), TraceError> {
        for (index, step) in self.alternatives().iter().enumerate() {
            let wrong = |rule| TraceError::Disorder {
                owner: format!("alternative {index}"),
                rule,
            };
            let (own, other) = (&self.meta, &step.trace.meta);
            if step.trace.alternatives.is_some() {
                return Err(wrong("an alternative has no alternatives"));
            }
            if (own.batch, own.training, &own.device_kind)
                != (other.batch, other.training, &other.device_kind)
            {
                return Err(wrong("an alternative is of the same step"));
            }
            if !step.way.is_valid() {
                return Err(wrong("what runs in slices runs in one at least"));
            }
            step.trace.check()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample;

    fn with(steps: Vec<Alternative>) -> Trace {
        let alternatives = Alternatives {
            steps,
            ..Alternatives::default()
        };
        Trace {
            alternatives: Some(alternatives),
            ..sample::chain()
        }
    }

    fn sliced(trace: Trace, slices: u64) -> Alternative {
        let loss = LossChunk {
            slices,
            weight: "head".to_owned(),
            rows: 4,
            classes: 8,
            logit_bytes: Bytes(128),
        };
        let chunk = Chunk {
            loss: Some(loss),
            ..Chunk::default()
        };
        Alternative {
            way: Way::in_slices(chunk),
            trace,
        }
    }

    fn cast(trace: Trace) -> Alternative {
        let autocast = Autocast {
            dtype: "bfloat16".to_owned(),
            cache: false,
            keep: Vec::new(),
        };
        let way = Way {
            autocast: Some(autocast),
            ..Way::default()
        };
        Alternative { way, trace }
    }

    #[test]
    fn an_alternative_is_a_valid_trace_of_the_same_step() {
        assert!(with(vec![sliced(sample::chain(), 2)]).check().is_ok());
        assert!(with(vec![cast(sample::chain())]).check().is_ok());
        let plain = Alternative {
            way: Way::default(),
            trace: sample::chain(),
        };
        let mut other_batch = sample::chain();
        other_batch.meta.batch += 1;
        let mut broken = sample::chain();
        broken.strings.clear();
        let nested = with(Vec::new());
        for wrong in [
            sliced(other_batch, 2),
            sliced(broken, 2),
            sliced(nested, 2),
            sliced(sample::chain(), 0),
            plain,
        ] {
            assert!(with(vec![wrong]).check().is_err());
        }
    }

    #[test]
    fn a_file_without_alternatives_is_read_and_one_with_them_comes_back_as_it_was() {
        let plain = serde_json::to_string(&sample::chain()).unwrap();
        assert!(!plain.contains("alternatives"));
        assert_eq!(
            serde_json::from_str::<Trace>(&plain).unwrap(),
            sample::chain()
        );
        let rich = with(vec![sliced(sample::chain(), 2), cast(sample::chain())]);
        let file = crate::file::encode(&rich);
        assert_eq!(crate::file::decode(&file).unwrap(), rich);
        assert_eq!(rich.alone(), sample::chain());
    }
}

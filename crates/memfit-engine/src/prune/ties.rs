//! Which dimensions each op makes belong together, and which have to stay.
//!
//! Responsible for what ops mean for channels, one rule for each kind of op. Not responsible for views, which need none
//! ([`super::axes`]), nor for what follows for channels ([`super::channels`]).
//!
//! Two dimensions are tied where index `i` of the one cannot go without index `i` of the other. A dimension stays where
//! what remains would be another number without its channel: a mean over it, a softmax. What no rule knows stays whole.

use super::axes::Part;
use crate::trace::{ELEMENTWISE, Op, Trace};

/// Why channels stay, the weightiest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Why {
    /// A dimension of the batch.
    Input,
    /// A dimension of what the model returns.
    Output,
    /// A tensor that is no parameter and no buffer of the model.
    Constant,
    /// The user's code says the size; it was tried.
    InCode(usize),
    /// No rule knows the op.
    NotUnderstood(usize),
    /// The op makes one number of all of it.
    Reduced(usize),
    /// Views split it in ways that do not go together.
    Split,
    /// Code takes one index of it.
    Picked,
    /// A view splits it, and it is the inner part.
    Inner,
    /// The step does not read it.
    Unread,
    /// Positions, not channels: a convolution's kernel, pixels.
    Position,
}

/// A part of a dimension of a value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Side {
    pub(super) value: usize,
    pub(super) dimension: usize,
    pub(super) part: Part,
}

/// What the ops of a forward say.
#[derive(Debug, Default)]
pub(super) struct Ties {
    pub(super) pairs: Vec<(Side, Side)>,
    pub(super) stays: Vec<(Side, Why)>,
    /// What stays because it was tried, whatever else was chosen for that.
    pub(super) tried: Vec<(Side, Why)>,
}

/// And those that only pruning takes so.
const ALSO_ELEMENTWISE: [&str; 12] = [
    "_prelu_kernel",
    "_to_copy",
    "addcdiv",
    "addcmul",
    "celu",
    "clone",
    "copy",
    "detach",
    "dropout",
    "lift_fresh",
    "relu6",
    "threshold",
];

/// Ops that treat each channel of each image apart.
const PER_CHANNEL: &[&str] = &[
    "_adaptive_avg_pool2d",
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "avg_pool2d",
    "max_pool2d_with_indices",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
];

const BATCH_NORMS: &[&str] = &[
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update",
    "_batch_norm_no_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
];

const ATTENTIONS: &[&str] = &[
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
];

impl Ties {
    /// What the ops say; `through_norms` lets channels go that a norm takes its mean over.
    pub(super) fn of(trace: &Trace, forward: usize, through_norms: bool) -> Self {
        let mut ties = Self::default();
        for (index, op) in trace.ops[..forward].iter().enumerate() {
            if !op.view {
                Rules {
                    trace,
                    op,
                    index,
                    through_norms,
                    ties: &mut ties,
                }
                .apply();
            }
        }
        ties
    }

    /// Has all of an op's dimensions stay because it was tried.
    pub(super) fn stay_tried(&mut self, trace: &Trace, op: &Op, index: usize) {
        self.tried
            .extend(sides_of(trace, op).map(|side| (side, Why::InCode(index))));
    }
}

/// All dimensions of what an op reads and returns.
fn sides_of<'a>(trace: &'a Trace, op: &'a Op) -> impl Iterator<Item = Side> + 'a {
    let values = op.reads.iter().chain(&op.outputs).map(|id| id.index());
    values.flat_map(|value| {
        (0..trace.values[value].shape.len()).map(move |dimension| Side {
            value,
            dimension,
            part: Part::All,
        })
    })
}

/// The rules, at one op.
struct Rules<'a> {
    trace: &'a Trace,
    op: &'a Op,
    index: usize,
    through_norms: bool,
    ties: &'a mut Ties,
}

/// A kernel's name without namespace, overload and the mark of writing in place.
pub(super) fn short_name<'a>(trace: &'a Trace, op: &Op) -> &'a str {
    let name = trace.string(op.name);
    let name = name.split('.').nth(1).unwrap_or(name);
    match name.strip_suffix('_') {
        Some(plain) if !plain.is_empty() => plain,
        _ => name,
    }
}

pub(super) fn is_elementwise(name: &str) -> bool {
    ELEMENTWISE.contains(&name) || ALSO_ELEMENTWISE.contains(&name)
}

impl Rules<'_> {
    fn apply(&mut self) {
        let name = short_name(self.trace, self.op);
        let understood = match name {
            "convolution" => self.convolution(),
            "mm" | "bmm" | "addmm" | "baddbmm" => self.product(),
            "native_layer_norm" | "_fused_rms_norm" => self.layer_norm(),
            "native_group_norm" => self.group_norm(),
            "mean" | "sum" | "amax" | "amin" => self.reduction(name),
            "_softmax" | "_log_softmax" | "_safe_softmax" | "cumsum" => self.along_one(),
            "cat" => self.cat(),
            "stack" => self.stack(),
            "embedding" => self.embedding(),
            "constant_pad_nd" => self.pad(),
            "as_strided" => self.strides(),
            "new_empty" | "new_zeros" | "new_ones" | "new_full" => self.made(),
            _ if BATCH_NORMS.contains(&name) => self.batch_norm(),
            _ if ATTENTIONS.contains(&name) => self.attention(),
            _ if PER_CHANNEL.contains(&name) => self.per_channel(),
            _ if is_elementwise(name) => self.elementwise(),
            _ => None,
        };
        if understood.is_none() {
            let why = Why::NotUnderstood(self.index);
            self.ties
                .stays
                .extend(sides_of(self.trace, self.op).map(|side| (side, why)));
        }
    }

    fn shape(&self, value: usize) -> &[u64] {
        &self.trace.values[value].shape
    }

    fn read(&self, place: usize) -> Option<usize> {
        self.op.reads.get(place).map(|id| id.index())
    }

    /// The first output, or what is written where nothing is returned.
    fn out(&self) -> Option<usize> {
        let out = self.op.outputs.first().or_else(|| self.op.writes.first());
        out.map(|id| id.index())
    }

    /// What a norm reads beside its input.
    fn weights(&self) -> Vec<usize> {
        let reads = self.op.reads.iter().skip(1);
        reads.map(|id| id.index()).collect()
    }

    /// What a norm returns beside its result.
    fn statistics(&self) -> Vec<usize> {
        let outputs = self.op.outputs.iter().skip(1);
        outputs.map(|id| id.index()).collect()
    }

    fn tie(&mut self, left: (usize, usize), right: (usize, usize)) {
        self.tie_parts(left, Part::All, right, Part::All);
    }

    fn tie_parts(&mut self, left: (usize, usize), a: Part, right: (usize, usize), b: Part) {
        let left = Side {
            value: left.0,
            dimension: left.1,
            part: a,
        };
        let right = Side {
            value: right.0,
            dimension: right.1,
            part: b,
        };
        self.ties.pairs.push((left, right));
    }

    fn stay(&mut self, value: usize, dimension: usize, why: Why) {
        let side = Side {
            value,
            dimension,
            part: Part::All,
        };
        self.ties.stays.push((side, why));
    }

    /// Ties every dimension of two values of one shape, but for those of which `apart` is true.
    fn tie_like(&mut self, left: usize, right: usize, apart: impl Fn(usize) -> bool) -> Option<()> {
        let rank = self.shape(left).len();
        if rank != self.shape(right).len() {
            return None;
        }
        for dimension in (0..rank).filter(|&it| !apart(it)) {
            self.tie((left, dimension), (right, dimension));
        }
        Some(())
    }

    fn elementwise(&mut self) -> Option<()> {
        let out = self.out()?;
        let outputs = self.op.outputs.iter().chain(&self.op.writes);
        let others: Vec<_> = outputs.chain(&self.op.reads).map(|id| id.index()).collect();
        let rank = self.shape(out).len();
        for other in others.into_iter().filter(|&other| other != out) {
            let shape = self.shape(other).to_vec();
            let shift = rank.checked_sub(shape.len())?;
            for (dimension, size) in shape.into_iter().enumerate() {
                if size != 1 {
                    self.tie((other, dimension), (out, dimension + shift));
                }
            }
        }
        Some(())
    }

    fn convolution(&mut self) -> Option<()> {
        let (input, weight, out) = (self.read(0)?, self.read(1)?, self.out()?);
        let groups: u64 = self.argument("groups")?.parse().ok().filter(|&it| it > 0)?;
        // The weight is (out, in / groups, ...), and (in, out / groups, ...) where it is transposed.
        let is_transposed = self.argument("transposed") == Some("True");
        let (whole, part) = if is_transposed {
            (input, out)
        } else {
            (out, input)
        };
        if let Some(bias) = self.read(2) {
            self.tie((bias, 0), (out, 1));
        }
        self.tie((input, 0), (out, 0));
        self.tie((weight, 0), (whole, 1));
        if groups == 1 {
            self.tie((weight, 1), (part, 1));
        } else {
            let of = |size: u64| size.checked_div(groups).filter(|it| it * groups == size);
            let inside = of(*self.shape(part).get(1)?)?;
            let inside_whole = of(*self.shape(whole).get(1)?)?;
            let outside = Part::Outside;
            self.tie_parts(
                (part, 1),
                outside(inside),
                (whole, 1),
                outside(inside_whole),
            );
            self.tie_parts((part, 1), Part::Inside(inside), (weight, 1), Part::All);
        }
        for value in [input, weight, out] {
            for dimension in 2..self.shape(value).len() {
                self.stay(value, dimension, Why::Position);
            }
        }
        Some(())
    }

    /// Products of two matrices, each last but one dimension by last, with something added or not.
    fn product(&mut self) -> Option<()> {
        let place = self.op.reads.len().checked_sub(2)?;
        let (left, right, out) = (self.read(place)?, self.read(place + 1)?, self.out()?);
        let rank = self.shape(out).len();
        if self.shape(left).len() != rank || self.shape(right).len() != rank || rank < 2 {
            return None;
        }
        self.tie((left, rank - 1), (right, rank - 2));
        self.tie((left, rank - 2), (out, rank - 2));
        self.tie((right, rank - 1), (out, rank - 1));
        if rank == 3 {
            self.tie((left, 0), (out, 0));
            self.tie((right, 0), (out, 0));
        }
        if place == 1 {
            let added = self.read(0)?;
            let shape = self.shape(added).to_vec();
            let shift = rank.checked_sub(shape.len())?;
            for (dimension, _) in shape.into_iter().enumerate().filter(|(_, size)| *size != 1) {
                self.tie((added, dimension), (out, dimension + shift));
            }
        }
        Some(())
    }

    fn batch_norm(&mut self) -> Option<()> {
        let (input, out) = (self.read(0)?, self.out()?);
        self.tie_like(input, out, |_| false)?;
        self.per_index(out, 1);
        Some(())
    }

    /// Ties the vectors among what is read and returned to a dimension.
    fn per_index(&mut self, out: usize, dimension: usize) {
        let all = self
            .op
            .reads
            .iter()
            .chain(&self.op.outputs)
            .map(|id| id.index());
        let all: Vec<_> = all.filter(|&value| self.shape(value).len() == 1).collect();
        for vector in all {
            self.tie((vector, 0), (out, dimension));
        }
    }

    fn layer_norm(&mut self) -> Option<()> {
        let (input, out) = (self.read(0)?, self.out()?);
        let rank = self.shape(out).len();
        let normalised = self.numbers("normalized_shape")?.len();
        let first = rank.checked_sub(normalised)?;
        self.tie_like(input, out, |_| false)?;
        for weight in self.weights() {
            for dimension in 0..self.shape(weight).len() {
                self.tie((weight, dimension), (out, first + dimension));
            }
        }
        for statistic in self.statistics() {
            for dimension in 0..first {
                self.tie((statistic, dimension), (out, dimension));
            }
        }
        if !(self.through_norms && normalised == 1) {
            for dimension in first..rank {
                self.stay(out, dimension, Why::Reduced(self.index));
            }
        }
        Some(())
    }

    /// Whole groups may go: a group's mean is over the channels of the group.
    fn group_norm(&mut self) -> Option<()> {
        let (input, out) = (self.read(0)?, self.out()?);
        let groups: u64 = self.argument("group")?.parse().ok().filter(|&it| it > 0)?;
        let channels = *self.shape(out).get(1)?;
        self.tie_like(input, out, |_| false)?;
        for weight in self.weights() {
            self.tie((weight, 0), (out, 1));
        }
        let inside = Part::Inside(channels / groups);
        let side = Side {
            value: out,
            dimension: 1,
            part: inside,
        };
        self.ties.stays.push((side, Why::Reduced(self.index)));
        for statistic in self.statistics() {
            self.tie_parts(
                (statistic, 1),
                Part::All,
                (out, 1),
                Part::Outside(channels / groups),
            );
        }
        for dimension in 2..self.shape(out).len() {
            self.stay(out, dimension, Why::Position);
        }
        Some(())
    }

    fn reduction(&mut self, name: &str) -> Option<()> {
        let (input, out) = (self.read(0)?, self.out()?);
        let rank = self.shape(input).len();
        let reduced = match self.numbers("dim") {
            Some(dimensions) if !dimensions.is_empty() => dimensions
                .into_iter()
                .map(|it| index_of(it, rank))
                .collect::<Option<Vec<_>>>()?,
            _ => (0..rank).collect(),
        };
        let keeps = self.argument("keepdim") == Some("True");
        // The mean of squares in a norm that is written out.
        let is_norm = self.through_norms
            && name == "mean"
            && keeps
            && reduced.first().copied() == rank.checked_sub(1)
            && reduced.len() == 1;
        let mut place = 0;
        for dimension in 0..rank {
            if reduced.contains(&dimension) {
                if !is_norm {
                    self.stay(input, dimension, Why::Reduced(self.index));
                }
                place += usize::from(keeps);
            } else {
                self.tie((input, dimension), (out, place));
                place += 1;
            }
        }
        Some(())
    }

    /// Ops in which the elements along one dimension depend on each other.
    fn along_one(&mut self) -> Option<()> {
        let (input, out) = (self.read(0)?, self.out()?);
        let along = index_of(*self.numbers("dim")?.first()?, self.shape(out).len())?;
        self.tie_like(input, out, |_| false)?;
        self.stay(out, along, Why::Reduced(self.index));
        Some(())
    }

    fn cat(&mut self) -> Option<()> {
        let out = self.out()?;
        let along = self.numbers("dim").unwrap_or_else(|| vec![0]);
        let along = index_of(*along.first()?, self.shape(out).len())?;
        let parts: Vec<_> = self.op.reads.iter().map(|id| id.index()).collect();
        let mut start = 0;
        for part in parts {
            let Some(&size) = self.shape(part).get(along) else {
                continue; // torch passes over an empty tensor of one dimension
            };
            self.tie_like(part, out, |dimension| dimension == along)?;
            let range = Part::Range(start, size);
            self.tie_parts((part, along), Part::All, (out, along), range);
            start = start.saturating_add(size);
        }
        Some(())
    }

    fn stack(&mut self) -> Option<()> {
        let out = self.out()?;
        let along = self.numbers("dim").unwrap_or_else(|| vec![0]);
        let along = index_of(*along.first()?, self.shape(out).len())?;
        let parts: Vec<_> = self.op.reads.iter().map(|id| id.index()).collect();
        for part in parts {
            for dimension in 0..self.shape(part).len() {
                self.tie(
                    (part, dimension),
                    (out, dimension + usize::from(dimension >= along)),
                );
            }
        }
        self.stay(out, along, Why::Picked);
        Some(())
    }

    fn embedding(&mut self) -> Option<()> {
        let (weight, indices, out) = (self.read(0)?, self.read(1)?, self.out()?);
        let rank = self.shape(indices).len();
        for dimension in 0..rank {
            self.tie((indices, dimension), (out, dimension));
        }
        self.tie((weight, 1), (out, rank));
        self.stay(weight, 0, Why::Input);
        Some(())
    }

    fn pad(&mut self) -> Option<()> {
        let (input, out) = (self.read(0)?, self.out()?);
        let padded = self.numbers("pad")?.len() / 2;
        let first = self.shape(out).len().checked_sub(padded)?;
        for dimension in first..self.shape(out).len() {
            self.stay(input, dimension, Why::Reduced(self.index));
            self.stay(out, dimension, Why::Reduced(self.index));
        }
        self.tie_like(input, out, |dimension| dimension >= first)
    }

    /// Other strides for dimensions of one index, which they mean nothing for.
    fn strides(&mut self) -> Option<()> {
        let (input, out) = (self.read(0)?, self.out()?);
        let (input, out) = (&self.trace.values[input], &self.trace.values[out]);
        let strides = input.stride.iter().zip(&out.stride).zip(&input.shape);
        let is_same = input.shape == out.shape
            && input.offset == out.offset
            && strides.clone().all(|((a, b), &size)| size == 1 || a == b);
        is_same.then_some(())
    }

    /// A new tensor of a size that code says; what is read only lends its type.
    fn made(&mut self) -> Option<()> {
        let out = self.out()?;
        for dimension in 0..self.shape(out).len() {
            self.stay(out, dimension, Why::NotUnderstood(self.index));
        }
        Some(())
    }

    fn per_channel(&mut self) -> Option<()> {
        let input = self.read(0)?;
        let outputs: Vec<_> = self.op.outputs.iter().map(|id| id.index()).collect();
        for out in outputs {
            self.tie_like(input, out, |dimension| dimension > 1)?;
            for dimension in 2..self.shape(out).len() {
                self.stay(out, dimension, Why::Position);
            }
        }
        for dimension in 2..self.shape(input).len() {
            self.stay(input, dimension, Why::Position);
        }
        Some(())
    }

    /// Heads belong together; the size of a head is in the scale, and a softmax runs over the keys.
    fn attention(&mut self) -> Option<()> {
        let (query, key, value) = (self.read(0)?, self.read(1)?, self.read(2)?);
        let out = self.out()?;
        let is_plain = [query, key, value, out]
            .iter()
            .all(|&it| self.shape(it).len() == 4);
        if !is_plain || self.op.reads.len() > 3 {
            return None;
        }
        let heads = |value: usize| self.shape(value).get(1).copied().filter(|&heads| heads > 0);
        let (of_queries, of_keys) = (heads(query)?, heads(key)?);
        if !of_queries.is_multiple_of(of_keys) || heads(value) != Some(of_keys) {
            return None;
        }
        self.tie((query, 1), (out, 1));
        for other in [query, key, value] {
            self.tie((other, 0), (out, 0));
        }
        for other in [key, value] {
            // So many heads of queries share one of keys and values.
            self.tie_parts(
                (other, 1),
                Part::All,
                (out, 1),
                Part::Outside(of_queries / of_keys),
            );
        }
        if let Some(sums) = self.op.outputs.get(1).map(|id| id.index()) {
            for dimension in 0..self.shape(sums).len().min(3) {
                self.tie((sums, dimension), (out, dimension));
            }
        }
        self.tie((query, 2), (out, 2));
        self.tie((key, 2), (value, 2));
        self.tie((query, 3), (key, 3));
        self.tie((value, 3), (out, 3));
        self.stay(key, 2, Why::Reduced(self.index));
        self.stay(query, 3, Why::Reduced(self.index));
        Some(())
    }

    /// The text of an argument that is no tensor.
    fn argument(&self, name: &str) -> Option<&str> {
        let all = self.trace.string(self.op.arguments).split(", ");
        all.filter_map(|it| it.split_once('='))
            .find(|it| it.0 == name)
            .map(|it| it.1)
    }

    /// An argument that is a number or a list of them.
    fn numbers(&self, name: &str) -> Option<Vec<i64>> {
        let text = self.argument(name)?;
        let text = text.trim_start_matches('[').trim_end_matches(']');
        let all = text.split(',').filter(|it| !it.is_empty());
        all.map(|it| it.trim().parse().ok()).collect()
    }
}

/// A dimension as torch counts it, from the front or from the back.
fn index_of(dimension: i64, rank: usize) -> Option<usize> {
    let rank = i64::try_from(rank).ok()?;
    let dimension = if dimension < 0 {
        dimension + rank
    } else {
        dimension
    };
    (0..rank)
        .contains(&dimension)
        .then(|| usize::try_from(dimension).ok())?
}

//! The batch dimension, learnt from two captures of the same step at two batch sizes.
//!
//! Responsible for aligning the two op for op, for the affine law of every size, for scaling a trace to
//! another batch, and for saying which ops mix the items of a batch. Not responsible for choosing a
//! batch.
//!
//! # What counts as mixing
//!
//! A dimension that differs between the captures is a *batch dimension*. Splitting the batch changes
//! nothing but rounding if every op treats items alike and apart, up to a scalar loss. An op breaks that
//! when it makes something batch-free but not scalar out of batched input (batch statistics), has two
//! batch dimensions in its output (every item against every other), feeds a scalar taken over the batch
//! back into batched values, or works *along* a batch dimension (softmax, sort, indexing).

use super::{Coupling, CouplingKind, Law, Op, OpIndex, Phase, Trace, Value, ValueId};
use crate::bytes::Bytes;

/// Why two captures cannot be aligned, or a trace not be scaled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// Both captures have the same batch size.
    #[error("both captures have batch size {0}: two different ones are needed")]
    SameBatch(u64),
    /// The op streams differ.
    #[error(
        "the step runs other ops at batch {second} than at batch {first}: op {op} is `{found}`, not `{wanted}`"
    )]
    OtherOps {
        /// Batch of the first capture.
        first: u64,
        /// Batch of the second.
        second: u64,
        /// First op that differs.
        op: usize,
        /// Its name in the first.
        wanted: String,
        /// Its name in the second.
        found: String,
    },
    /// The op streams are the same, and an op's results are other tensors.
    #[error("op {op}, `{name}`, makes other tensors at batch {second} than at batch {first}")]
    OtherResults {
        /// Batch of the first capture.
        first: u64,
        /// Batch of the second.
        second: u64,
        /// First op whose results differ.
        op: usize,
        /// Its name.
        name: String,
    },
    /// An allocation's size is no affine function with whole coefficients.
    #[error("the size of allocation {0} does not grow evenly with the batch")]
    NotAffine(usize),
    /// The step would not fit any memory at that batch size.
    #[error("the step is beyond any memory at batch {0}")]
    TooLarge(u64),
    /// The trace carries no law.
    #[error("the trace was captured at one batch size only")]
    NoLaw,
}

impl Trace {
    /// Adds what a second capture at another batch size tells: laws and couplings.
    ///
    /// # Errors
    ///
    /// The two cannot be aligned; the first alone is still good for its own batch size.
    pub fn with_second(mut self, second: &Self) -> Result<Self, BatchError> {
        let (first_batch, second_batch) = (self.meta.batch, second.meta.batch);
        if first_batch == second_batch {
            return Err(BatchError::SameBatch(first_batch));
        }
        self.check_aligned(second)?;
        let step = i128::from(second_batch) - i128::from(first_batch);
        for (i, (a, b)) in self
            .allocations
            .iter_mut()
            .zip(&second.allocations)
            .enumerate()
        {
            let rise = i128::from(b.bytes.0) - i128::from(a.bytes.0);
            let per_item = whole_quotient(rise, step).ok_or(BatchError::NotAffine(i))?;
            let fixed = i128::from(a.bytes.0) - i128::from(per_item) * i128::from(first_batch);
            let fixed = i64::try_from(fixed).map_err(|_| BatchError::NotAffine(i))?;
            a.law = Some(Law { fixed, per_item });
        }
        let is_probed = self.meta.probe_threads != 0 && second.meta.probe_threads != 0;
        let strings = &self.strings;
        for (a, b) in self.ops.iter_mut().zip(&second.ops) {
            a.arguments_vary = strings[a.arguments as usize] != second.string(b.arguments);
            a.flops_per_item = rate(a.flops, b.flops, step);
            a.moved_bytes_per_item = rate(a.moved_bytes.0, b.moved_bytes.0, step);
            a.workspace_per_item =
                is_probed.then(|| rate(a.workspace_bytes.0, b.workspace_bytes.0, step));
        }
        self.add_shape_laws(second, step);
        self.meta.second_batch = second_batch;
        self.couplings = Some(self.find_couplings());
        Ok(self)
    }

    /// The same step at another batch size. Workspaces are those of the captures, between them by a line, below them
    /// no smaller, and above them grown by the line or in proportion, whichever is more: kernels differ, and this is
    /// meant as an upper bound.
    ///
    /// # Errors
    ///
    /// The trace has no law.
    pub fn at_batch(&self, batch: u64) -> Result<Self, BatchError> {
        if batch == self.meta.batch {
            return Ok(self.clone());
        }
        if self.couplings.is_none() {
            return Err(BatchError::NoLaw);
        }
        let mut scaled = self.alone();
        let change = i128::from(batch) - i128::from(self.meta.batch);
        for (i, allocation) in scaled.allocations.iter_mut().enumerate() {
            allocation.bytes = allocation.law.ok_or(BatchError::NotAffine(i))?.at(batch);
        }
        scaled.pieces.clear();
        let probed = self.pieces.iter().find(|piece| piece.items == batch);
        for (i, op) in scaled.ops.iter_mut().enumerate() {
            op.flops = shifted(op.flops, op.flops_per_item, change);
            op.moved_bytes = Bytes(shifted(op.moved_bytes.0, op.moved_bytes_per_item, change));
            op.workspace_bytes = match probed {
                Some(piece) => piece.workspace_bytes[i],
                None => self.workspace_at(op, batch),
            };
        }
        for value in &mut scaled.values {
            for (size, &per_item) in value.shape.iter_mut().zip(&value.shape_per_item) {
                *size = shifted(*size, per_item, change);
            }
        }
        if scaled.meta.probed_batch == 0 && probed.is_none() {
            scaled.meta.probed_batch = self.meta.batch;
        }
        scaled.meta.batch = batch;
        if scaled.is_addable() {
            Ok(scaled)
        } else {
            Err(BatchError::TooLarge(batch))
        }
    }

    fn workspace_at(&self, op: &Op, batch: u64) -> Bytes {
        let (probed, first) = (op.workspace_bytes.0, self.meta.batch);
        // Below the smaller capture, what was probed there: some of it shrinks no further.
        let nearest = batch.max(self.meta.second_batch.min(first));
        let change = i128::from(nearest) - i128::from(first);
        let by_line = shifted(probed, op.workspace_per_item.unwrap_or_default(), change);
        if batch <= first {
            return Bytes(by_line);
        }
        let grown = u128::from(probed) * u128::from(batch) / u128::from(first.max(1));
        Bytes(by_line.max(u64::try_from(grown).unwrap_or(u64::MAX)))
    }

    /// The trace of a step from its captures: one at any batch size, another to learn the batch
    /// dimension from, and the batch size wanted. What cannot be had is said in the notes.
    #[must_use]
    pub fn from_captures(first: Self, second: Option<&Self>, batch: u64) -> Self {
        let unknown = |mut trace: Self, error: &BatchError| {
            trace
                .meta
                .notes
                .push(format!("nothing is known about other batch sizes: {error}"));
            trace
        };
        let joined = match second.map(|second| first.clone().with_second(second)) {
            None => first,
            Some(Ok(joined)) => joined,
            Some(Err(error)) => unknown(first, &error),
        };
        if batch == 0 || batch == joined.meta.batch {
            return joined;
        }
        match joined.at_batch(batch) {
            Ok(scaled) => scaled,
            Err(error) => unknown(joined, &error),
        }
    }

    fn check_aligned(&self, second: &Self) -> Result<(), BatchError> {
        let other = |op: usize, wanted: &str, found: &str| BatchError::OtherOps {
            first: self.meta.batch,
            second: second.meta.batch,
            op,
            wanted: wanted.to_owned(),
            found: found.to_owned(),
        };
        for (i, (a, b)) in self.ops.iter().zip(&second.ops).enumerate() {
            let (wanted, found) = (self.string(a.name), second.string(b.name));
            let producers = |trace: &Self, op: &Op| -> Vec<_> {
                op.outputs
                    .iter()
                    .map(|&value| trace.allocation_of(value))
                    .collect()
            };
            if wanted != found {
                return Err(other(i, wanted, found));
            }
            if producers(self, a) != producers(second, b) {
                return Err(BatchError::OtherResults {
                    first: self.meta.batch,
                    second: second.meta.batch,
                    op: i,
                    name: found.to_owned(),
                });
            }
        }
        let (a, b) = (self.ops.len(), second.ops.len());
        if a != b || self.allocations.len() != second.allocations.len() {
            return Err(other(
                a.min(b),
                "end of the step",
                "more ops or allocations",
            ));
        }
        Ok(())
    }

    /// Values are interned in order of first use, so equal op streams usually give equal tables; where
    /// they do not, the ops' own lists align them.
    fn add_shape_laws(&mut self, second: &Self, step: i128) {
        let mut laws: Vec<Option<Vec<i64>>> = vec![None; self.values.len()];
        let mut add = |u: ValueId, v: ValueId| {
            let (one, two) = (
                &self.values[u.index()].shape,
                &second.values[v.index()].shape,
            );
            if one.len() == two.len() && one != two {
                let law = one
                    .iter()
                    .zip(two)
                    .map(|(&m, &n)| rate(m, n, step))
                    .collect();
                laws[u.index()] = Some(law);
            }
        };
        for (a, b) in self.ops.iter().zip(&second.ops) {
            let pairs = a.reads.iter().zip(&b.reads);
            let pairs = pairs.chain(a.writes.iter().zip(&b.writes));
            for (&u, &v) in pairs.chain(a.outputs.iter().zip(&b.outputs)) {
                add(u, v);
            }
        }
        if let (Some(a), Some(b)) = (&self.meta.inference, &second.meta.inference) {
            for (&u, &v) in a.returns.iter().zip(&b.returns) {
                add(u, v);
            }
        }
        for (value, law) in self.values.iter_mut().zip(laws) {
            value.shape_per_item = law.unwrap_or_default();
        }
    }

    fn find_couplings(&self) -> Vec<Coupling> {
        // Whether a value was computed from the batch without carrying a batch dimension any more.
        let mut reduced = vec![false; self.allocations.len()];
        let mut couplings = Vec::new();
        for (i, op) in self.ops.iter().enumerate() {
            if op.phase != Phase::Forward {
                break;
            }
            if let Some(kind) = self.coupling_of(op, &mut reduced) {
                let op = OpIndex(u32::try_from(i).unwrap_or(u32::MAX));
                couplings.push(Coupling { op, kind });
            }
        }
        couplings
    }

    fn coupling_of(&self, op: &Op, reduced: &mut [bool]) -> Option<CouplingKind> {
        let value = |id: &ValueId| &self.values[id.index()];
        let batched_in = op.reads.iter().map(value).any(Value::is_batched);
        let reduced_in = op
            .reads
            .iter()
            .any(|id| reduced[value(id).allocation.index()]);
        if !batched_in && !reduced_in {
            return None;
        }
        let mut kind = None;
        for output in op.outputs.iter().map(value) {
            if output.batch_dimensions() > 1 {
                kind = kind.or(Some(CouplingKind::Cross));
            } else if output.is_batched() {
                if reduced_in {
                    kind = kind.or(Some(CouplingKind::Statistic));
                }
            } else {
                reduced[output.allocation.index()] = true;
                if output.numel() > 1 {
                    kind = kind.or(Some(CouplingKind::Statistic));
                }
            }
        }
        kind.or_else(|| self.works_along_batch(op).then_some(CouplingKind::Along))
    }

    fn works_along_batch(&self, op: &Op) -> bool {
        let name = self.string(op.name);
        let base = name
            .split('.')
            .nth(1)
            .unwrap_or(name)
            .trim_end_matches('_')
            .trim_start_matches('_');
        let Some(input) = op.reads.first().map(|id| &self.values[id.index()]) else {
            return false;
        };
        let Some(batch_dim) = input.shape_per_item.iter().position(|&rate| rate != 0) else {
            return false;
        };
        match base {
            "softmax" | "log_softmax" | "cumsum" | "cumprod" | "logcumsumexp" | "cummax"
            | "cummin" | "sort" | "topk" | "argsort" | "flip" | "roll" | "gather" | "scatter"
            | "index_select" | "scatter_add" | "kthvalue" | "median" | "mode" => {
                let rank = i64::try_from(input.shape.len()).unwrap_or(0);
                dimensions(self.string(op.arguments)).is_none_or(|dims| {
                    dims.iter().any(|&dim| {
                        let dim = if dim < 0 { dim + rank } else { dim };
                        usize::try_from(dim).is_ok_and(|dim| dim == batch_dim)
                    })
                })
            }
            "index" => !self.indexes_items_in_order(op, batch_dim),
            // An index tensor into a batched tensor may permute its items; nothing in the shapes tells.
            "index_put" | "take" | "put" | "masked_select" | "nonzero" | "unique2" => true,
            _ => false,
        }
    }
}

impl Trace {
    /// Whether `x[i, j, ...]` takes the items of the batch one by one, in order: every dimension has an
    /// index tensor, and the one of the batch dimension is `arange(batch)` (masks are built like this).
    fn indexes_items_in_order(&self, op: &Op, batch_dim: usize) -> bool {
        let values: Vec<&Value> = op.reads.iter().map(|id| &self.values[id.index()]).collect();
        let Some((input, indices)) = values.split_first() else {
            return false;
        };
        if indices.len() != input.shape.len() || !self.string(op.arguments).is_empty() {
            return false;
        }
        indices.iter().enumerate().all(|(dim, index)| {
            let rows = self.allocations[index.allocation.index()].producer;
            let counts_up = rows.map(|op| &self.ops[op.index()]).is_some_and(|op| {
                let arguments = self.string(op.arguments);
                let end = arguments
                    .strip_prefix("end=")
                    .and_then(|text| text.split(',').next());
                self.string(op.name) == "aten.arange.default"
                    && end.and_then(|end| end.parse().ok()) == Some(input.shape[batch_dim])
            });
            if dim == batch_dim {
                counts_up && index.version == 0 && index.numel() == input.shape[batch_dim]
            } else {
                !index.is_batched()
            }
        })
    }
}

impl Value {
    /// Number of dimensions that grow with the batch.
    #[must_use]
    pub fn batch_dimensions(&self) -> usize {
        self.shape_per_item
            .iter()
            .filter(|&&rate| rate != 0)
            .count()
    }

    /// Does any dimension grow with the batch?
    #[must_use]
    pub fn is_batched(&self) -> bool {
        self.batch_dimensions() > 0
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.shape
            .iter()
            .fold(1, |product: u64, &size| product.saturating_mul(size))
    }
}

/// Reads `dim=-1` or `dim=[0, 1]` out of an op's argument text; `None` when there is none to read.
fn dimensions(arguments: &str) -> Option<Vec<i64>> {
    let (_, rest) = ["dim=", "dims="]
        .iter()
        .find_map(|key| arguments.split_once(key))?;
    let text = match rest.strip_prefix('[') {
        Some(list) => list.split(']').next()?,
        None => rest.split(',').next()?,
    };
    text.split(',')
        .map(|part| part.trim().parse().ok())
        .collect()
}

fn whole_quotient(rise: i128, step: i128) -> Option<i64> {
    if rise % step == 0 {
        i64::try_from(rise / step).ok()
    } else {
        None
    }
}

fn rate(first: u64, second: u64, step: i128) -> i64 {
    i64::try_from((i128::from(second) - i128::from(first)) / step).unwrap_or(0)
}

fn shifted(amount: u64, per_item: i64, change: i128) -> u64 {
    let shifted = i128::from(amount) + i128::from(per_item) * change;
    u64::try_from(shifted.max(0)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample;

    #[test]
    fn sizes_follow_the_affine_law_and_scale() {
        let trace = sample::batched_chain(4)
            .with_second(&sample::batched_chain(2))
            .unwrap();
        let other = trace.at_batch(7).unwrap();
        let truth = sample::batched_chain(7);
        let sizes = |t: &Trace| t.allocations.iter().map(|a| a.bytes).collect::<Vec<_>>();
        assert_eq!(sizes(&other), sizes(&truth));
        let shapes = |t: &Trace| t.values.iter().map(|v| v.shape.clone()).collect::<Vec<_>>();
        assert_eq!(shapes(&other), shapes(&truth));
        assert_eq!(trace.couplings, Some(vec![]));
    }

    #[test]
    fn workspaces_shrink_as_probed_and_grow_in_proportion() {
        let probed = |batch, bytes| {
            let mut trace = sample::batched_chain(batch);
            trace.meta.probe_threads = 1;
            trace.ops[1].workspace_bytes = Bytes(bytes);
            trace
        };
        let of = |trace: &Trace, batch| trace.at_batch(batch).unwrap().ops[1].workspace_bytes;
        // 10 bytes whatever the batch, and 5 for each item.
        let trace = probed(8, 50).with_second(&probed(4, 30)).unwrap();
        let found = [1, 4, 6, 8, 16].map(|batch| of(&trace, batch).0);
        assert_eq!(found, [30, 30, 40, 50, 100]);
        // A kernel that takes more on fewer items, and one that was probed once.
        let other = probed(8, 50).with_second(&probed(4, 70)).unwrap();
        let mut second = probed(4, 0);
        second.meta.probe_threads = 0;
        let once = probed(8, 50).with_second(&second).unwrap();
        assert_eq!((of(&other, 4), of(&once, 4)), (Bytes(70), Bytes(50)));
        // A kernel that takes nothing on one item.
        let real = probed(1, 0).with_second(&probed(2, 40)).unwrap();
        assert_eq!([1, 2, 4].map(|batch| of(&real, batch).0), [0, 40, 120]);
    }

    #[test]
    fn captures_that_do_not_align_leave_a_note() {
        let first = sample::batched_chain(1);
        let truth = sample::batched_chain(5);
        let scaled = Trace::from_captures(first.clone(), Some(&sample::batched_chain(2)), 5);
        assert_eq!(scaled.allocations[2].bytes, truth.allocations[2].bytes);
        assert_eq!((scaled.meta.batch, scaled.meta.probed_batch), (5, 1));
        let mut other = sample::batched_chain(2);
        other.ops[1].name = other.ops[2].name;
        let alone = Trace::from_captures(first, Some(&other), 5);
        assert_eq!((alone.meta.batch, alone.meta.notes.len()), (1, 2));
    }

    #[test]
    fn other_ops_and_equal_batches_are_refused() {
        let trace = sample::batched_chain(4);
        assert_eq!(
            trace.clone().with_second(&trace),
            Err(BatchError::SameBatch(4))
        );
        let mut second = sample::batched_chain(2);
        second.ops[1].name = second.ops[2].name;
        let error = trace.clone().with_second(&second).unwrap_err();
        assert!(
            matches!(error, BatchError::OtherOps { op: 1, .. }),
            "{error}"
        );
        assert_eq!(trace.at_batch(9), Err(BatchError::NoLaw));
    }

    #[test]
    fn an_op_that_makes_other_tensors_is_named_once() {
        let trace = sample::batched_chain(4);
        let mut second = sample::batched_chain(2);
        let of_an_earlier_op = second.ops[0].outputs.clone();
        second.ops[1].outputs = of_an_earlier_op;
        let error = trace.clone().with_second(&second).unwrap_err();
        let name = trace.string(trace.ops[1].name);
        let wanted = format!("op 1, `{name}`, makes other tensors at batch 2 than at batch 4");
        assert_eq!(error.to_string(), wanted);
    }

    #[test]
    fn a_batch_statistic_is_a_coupling() {
        let with_statistic = |batch| {
            let mut trace = sample::batched_chain(batch);
            // The second op's output loses its batch dimension: a mean over the batch.
            let value = trace.ops[1].outputs[0];
            trace.values[value.index()].shape = vec![8];
            trace
        };
        let trace = with_statistic(4).with_second(&with_statistic(2)).unwrap();
        let couplings = trace.couplings.unwrap();
        assert_eq!(
            couplings[0],
            Coupling {
                op: OpIndex(1),
                kind: CouplingKind::Statistic
            }
        );
    }

    #[test]
    fn an_index_in_order_couples_nothing_and_any_other_does() {
        let indexed = |batch: u64, arguments: &str| {
            let mut builder = sample::Builder::new(batch);
            let input = builder.allocation(&[batch], crate::trace::Category::Input, 0);
            let rows = builder.op("aten.arange.default", Phase::Forward, &[], &[batch]);
            builder.trace.ops[0].arguments =
                builder.string(&arguments.replace('B', &batch.to_string()));
            builder.op(
                "aten.index.Tensor",
                Phase::Forward,
                &[input, rows],
                &[batch],
            );
            builder.finish()
        };
        let couplings = |arguments| {
            indexed(4, arguments)
                .with_second(&indexed(2, arguments))
                .unwrap()
                .couplings
                .unwrap()
        };
        assert_eq!(couplings("end=B, device=cpu"), vec![]);
        assert_eq!(
            couplings("start=B, end=0, step=-1")[0].kind,
            CouplingKind::Along
        );
    }

    #[test]
    fn dimensions_are_read_from_argument_text() {
        assert_eq!(dimensions("dim=-1, half_to_float=False"), Some(vec![-1]));
        assert_eq!(dimensions("dims=[0, 2]"), Some(vec![0, 2]));
        assert_eq!(dimensions("True"), None);
    }
}

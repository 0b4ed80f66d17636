//! Which module calls treat the rows of their input one by one.
//!
//! Responsible for the proof that a call may run on some rows at a time. Not responsible for which calls are
//! worth that (`candidates.rs`).
//!
//! # The proof
//!
//! A call takes one tensor that is not the module's own; with shape `[.., d]` its `rows` are the product of all
//! sizes but the last. A value of the call is *by rows* if its elements, in logical order, fall into `rows`
//! groups of one size, group `i` depending on nothing but row `i` of the input and on values that are *whole*:
//! made from parameters, buffers and constants alone. The input is by rows. Each op is then asked whether what
//! it returns is by rows or whole again; the rules below answer for ops that are known, and one that is not
//! known ends the proof. If the call's result is by rows and has the input's leading sizes, running it on part
//! of the rows gives that part of the result.
//!
//! A value by rows has a *lead*: the fewest leading dimensions whose sizes multiply to a multiple of `rows`.
//! Every cell of those dimensions lies in one group, so an op that keeps the cells of the lead apart, and in
//! their order, keeps rows apart. That is all the rules ask:
//!
//! - changes of shape that keep the logical order keep the groups;
//! - other views must leave size and stride of each dimension of the lead;
//! - element-wise ops take operands with the same lead, or whole ones that do not vary along it;
//! - products multiply rows (at most one dimension of lead) by a whole matrix, or matrices of a batch that is
//!   the lead;
//! - what works along dimensions works along those after the lead.
//!
//! Sizes do not tell an accident from a rule: code that computes with `x.shape`, or branches on it, may do
//! something else for fewer rows. So the step is captured again in slices, and what fails there is refused.

use crate::trace::{AllocationId, Category, ELEMENTWISE, Op, Region, Trace, ValueId};

/// A call that may run on some rows at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::plan) struct ByRows {
    /// What it takes.
    pub(in crate::plan) input: ValueId,
    /// What it returns.
    pub(in crate::plan) output: ValueId,
    /// Whether it draws random numbers: in slices it draws others.
    pub(in crate::plan) draws: bool,
}

/// Proves that a call treats rows one by one.
///
/// # Errors
///
/// What it does instead, as a clause.
pub(super) fn by_rows(trace: &Trace, region: &Region) -> Result<ByRows, String> {
    let mut proof = Proof::new(trace, region)?;
    let ops = &trace.ops[region.start.index()..region.end.index()];
    for op in ops {
        proof.take(op)?;
    }
    let output = proof.output()?;
    Ok(ByRows {
        input: proof.input,
        output,
        draws: ops.iter().any(|op| op.random),
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Made from parameters, buffers and constants alone.
    Whole,
    /// Falls into rows.
    Rows,
}

struct Proof<'t> {
    trace: &'t Trace,
    region: &'t Region,
    input: ValueId,
    rows: u64,
    /// What is known, by position in [`Trace::values`].
    kinds: Vec<(ValueId, Kind)>,
}

impl<'t> Proof<'t> {
    fn new(trace: &'t Trace, region: &'t Region) -> Result<Self, String> {
        let mut inputs = inputs(trace, region).into_iter();
        let input = inputs.next().ok_or("takes no tensor")?;
        if let Some(other) = inputs.find(|&read| !same_view(trace, read, input)) {
            let shape = &trace.values[other.index()].shape;
            return Err(format!("takes another tensor of shape {shape:?} beside"));
        }
        let shape = &trace.values[input.index()].shape;
        let rows = shape
            .split_last()
            .map_or(1, |(_, lead)| lead.iter().product());
        if shape.len() < 2 || rows < 2 {
            return Err(format!("takes a tensor of shape {shape:?}: no rows"));
        }
        Ok(Self {
            trace,
            region,
            input,
            rows,
            kinds: vec![(input, Kind::Rows)],
        })
    }

    /// Follows one op.
    fn take(&mut self, op: &Op) -> Result<(), String> {
        for &write in &op.writes {
            if !is_made_in(self.trace, self.region, self.trace.allocation_of(write)) {
                return Err(format!("`{}` writes to what it is given", self.name(op)));
            }
        }
        let kinds = op
            .reads
            .iter()
            .map(|&read| self.kind(read))
            .collect::<Option<Vec<_>>>();
        let kinds = kinds.ok_or_else(|| self.mixes(op))?;
        let is_whole = kinds.iter().all(|&kind| kind == Kind::Whole);
        let made = op.outputs.iter().chain(&op.writes).copied();
        if is_whole {
            self.kinds.extend(made.map(|value| (value, Kind::Whole)));
            return Ok(());
        }
        let ruled = rule(self.trace.string(op.name)).ok_or_else(|| {
            format!(
                "runs `{}`, of which nothing is known here",
                self.trace.string(op.name)
            )
        })?;
        for value in made {
            if !self.keeps(ruled, op, &kinds, value) {
                return Err(self.mixes(op));
            }
            self.kinds.push((value, Kind::Rows));
        }
        Ok(())
    }

    /// Whether what an op with a value by rows among its operands makes is by rows.
    fn keeps(&self, ruled: Rule, op: &Op, kinds: &[Kind], made: ValueId) -> bool {
        let shape = &self.trace.values[made.index()].shape;
        match ruled {
            Rule::SameOrder => {
                let from = &self.trace.values[op.reads[0].index()].shape;
                self.lead(shape).is_some()
                    && from.iter().product::<u64>() == shape.iter().product::<u64>()
            }
            Rule::View => self.leaves_lead(op.reads[0], made),
            Rule::Elementwise => self.lead(shape).is_some_and(|lead| {
                let mut operands = op.reads.iter().zip(kinds);
                operands.all(|(&read, &kind)| self.broadcasts(read, kind, shape, lead))
            }),
            Rule::Product { first } => {
                let (bias, factors) = op.reads.split_at(first.min(op.reads.len()));
                let kinds = &kinds[bias.len()..];
                factors.len() == 2
                    && kinds == [Kind::Rows, Kind::Whole]
                    && self.is_by_first(factors[0])
                    && bias
                        .iter()
                        .all(|&it| self.is_constant_along_rows(it, shape))
            }
            Rule::Batch { operands } => {
                let rows = &kinds[..operands.min(kinds.len())];
                let size = self.first_size(op.reads[0]);
                rows.len() == operands
                    && rows.iter().all(|&kind| kind == Kind::Rows)
                    && op.reads[..operands]
                        .iter()
                        .all(|&read| self.is_by_first(read) && self.first_size(read) == size)
                    && kinds[operands..].iter().all(|&kind| kind == Kind::Whole)
                    && shape.first().copied() == size
            }
            Rule::Along => self.works_after_lead(op, kinds, shape, &["dim"]),
            Rule::Normalized => self.works_after_lead(op, kinds, shape, &[]),
            Rule::Lookup => {
                let indices = &self.trace.values[op.reads[1].index()].shape;
                kinds == [Kind::Whole, Kind::Rows] && shape.starts_with(indices)
            }
        }
    }

    /// The fewest leading dimensions that tell rows apart.
    fn lead(&self, shape: &[u64]) -> Option<usize> {
        let mut cells = 1_u64;
        for (count, &size) in shape.iter().enumerate() {
            cells = cells.checked_mul(size)?;
            if cells == 0 {
                return None;
            }
            if cells.is_multiple_of(self.rows) {
                return Some(count + 1);
            }
        }
        None
    }

    fn shape(&self, value: ValueId) -> &[u64] {
        &self.trace.values[value.index()].shape
    }

    fn first_size(&self, value: ValueId) -> Option<u64> {
        self.shape(value).first().copied()
    }

    fn is_by_first(&self, value: ValueId) -> bool {
        self.lead(self.shape(value)) == Some(1)
    }

    /// Whether a view leaves size and stride of what tells rows apart.
    fn leaves_lead(&self, from: ValueId, to: ValueId) -> bool {
        let (from, to) = (
            &self.trace.values[from.index()],
            &self.trace.values[to.index()],
        );
        self.lead(&from.shape).is_some_and(|lead| {
            from.shape.get(..lead) == to.shape.get(..lead)
                && from.stride.get(..lead) == to.stride.get(..lead)
        })
    }

    /// Whether an operand of an element-wise op meets each row of the result with its own row, or all rows with
    /// the same.
    fn broadcasts(&self, operand: ValueId, kind: Kind, result: &[u64], lead: usize) -> bool {
        match kind {
            Kind::Rows => self.has_lead(operand, result, lead),
            Kind::Whole => self.is_constant_along(operand, result.len(), lead),
        }
    }

    fn has_lead(&self, operand: ValueId, result: &[u64], lead: usize) -> bool {
        let shape = self.shape(operand);
        shape.len() == result.len() && shape[..lead] == result[..lead]
    }

    fn is_constant_along_rows(&self, operand: ValueId, result: &[u64]) -> bool {
        self.lead(result).is_some_and(|lead| {
            self.kind(operand) == Some(Kind::Whole)
                && self.is_constant_along(operand, result.len(), lead)
        })
    }

    /// Whether a whole operand is the same along the first dimensions of a result, aligned at the last ones.
    fn is_constant_along(&self, operand: ValueId, dimensions: usize, lead: usize) -> bool {
        let shape = self.shape(operand);
        let missing = dimensions.saturating_sub(shape.len());
        shape
            .iter()
            .take(lead.saturating_sub(missing))
            .all(|&size| size == 1)
    }

    /// Whether an op that works along some dimensions leaves those that tell rows apart. Without names, it works
    /// along as many of the last as its `normalized_shape` has.
    fn works_after_lead(&self, op: &Op, kinds: &[Kind], result: &[u64], names: &[&str]) -> bool {
        let arguments = self.trace.string(op.arguments);
        op.reads.iter().zip(kinds).all(|(&read, &kind)| {
            if kind == Kind::Whole {
                // Weight and bias of a normalization; an operand of its own of anything else.
                return names.is_empty();
            }
            let shape = self.shape(read);
            let Some(lead) = self.lead(shape) else {
                return false;
            };
            let first = match names {
                [] => numbers(arguments, "normalized_shape")
                    .and_then(|sizes| shape.len().checked_sub(sizes.len())),
                names => names
                    .iter()
                    .find_map(|name| numbers(arguments, name))
                    .and_then(|dims| first_dimension(&dims, shape.len())),
            };
            first.is_some_and(|first| first >= lead) && result.get(..lead) == shape.get(..lead)
        })
    }

    /// What a value is, if that is known. Another version of a view that is known is known too: what does not
    /// keep rows apart is not written.
    fn kind(&self, value: ValueId) -> Option<Kind> {
        let known =
            |&&(other, _): &&(ValueId, Kind)| other == value || same_view(self.trace, other, value);
        if let Some(&(_, kind)) = self.kinds.iter().rev().find(known) {
            return Some(kind);
        }
        let allocation = self.trace.allocation_of(value);
        (!is_made_in(self.trace, self.region, allocation)).then_some(Kind::Whole)
    }

    /// The one tensor that the rest of the step takes from the call.
    fn output(&self) -> Result<ValueId, String> {
        let trace = self.trace;
        let later = &trace.ops[self.region.end.index()..trace.forward_end().index()];
        let mut taken: Vec<AllocationId> = later
            .iter()
            .flat_map(|op| &op.reads)
            .map(|&read| trace.allocation_of(read))
            .filter(|&allocation| is_made_in(trace, self.region, allocation))
            .collect();
        taken.sort_unstable();
        taken.dedup();
        let [one] = taken[..] else {
            return Err(format!("gives {} tensors", taken.len()));
        };
        let lead = self.shape(self.input).len() - 1;
        let wanted = &self.shape(self.input)[..lead];
        let found = self
            .kinds
            .iter()
            .rev()
            .find(|(value, kind)| *kind == Kind::Rows && trace.allocation_of(*value) == one);
        match found {
            Some(&(value, _)) if self.shape(value).get(..lead) == Some(wanted) => Ok(value),
            _ => Err("gives something that does not have its rows".to_owned()),
        }
    }

    fn name(&self, op: &Op) -> &'t str {
        self.trace.string(op.name)
    }

    fn mixes(&self, op: &Op) -> String {
        format!("`{}` does not keep rows apart", self.name(op))
    }
}

/// What the ops of a call read that neither they made nor the module owns, in order.
fn inputs(trace: &Trace, region: &Region) -> Vec<ValueId> {
    let mut made = Vec::new();
    let mut found = Vec::new();
    for op in &trace.ops[region.start.index()..region.end.index()] {
        for &read in &op.reads {
            let allocation = trace.allocation_of(read);
            let is_own = matches!(
                trace.allocations[allocation.index()].category,
                Category::Parameter | Category::ModuleBuffer
            );
            if !is_own && !is_made_in(trace, region, allocation) && !made.contains(&read) {
                found.push(read);
            }
        }
        made.extend(&op.outputs);
    }
    found
}

fn is_made_in(trace: &Trace, region: &Region, allocation: AllocationId) -> bool {
    trace.allocations[allocation.index()]
        .producer
        .is_some_and(|producer| region.start <= producer && producer < region.end)
}

/// Whether two values are the same part of the same storage, at any version.
fn same_view(trace: &Trace, a: ValueId, b: ValueId) -> bool {
    let (a, b) = (&trace.values[a.index()], &trace.values[b.index()]);
    (a.allocation, a.offset, &a.shape, &a.stride) == (b.allocation, b.offset, &b.shape, &b.stride)
}

/// The whole numbers of an argument: `dim=[-1]`, `dim=3`.
fn numbers(arguments: &str, name: &str) -> Option<Vec<i64>> {
    let start = arguments.split(", ").find_map(|part| {
        part.strip_prefix(name)
            .and_then(|rest| rest.strip_prefix('='))
    })?;
    let inside = start.trim_start_matches('[').trim_end_matches(']');
    inside
        .split(',')
        .map(|number| number.trim().parse().ok())
        .collect()
}

fn first_dimension(dims: &[i64], count: usize) -> Option<usize> {
    let count = i64::try_from(count).ok()?;
    let normal = |&dim: &i64| usize::try_from(if dim < 0 { dim + count } else { dim }).ok();
    dims.iter()
        .map(normal)
        .collect::<Option<Vec<_>>>()?
        .into_iter()
        .min()
}

/// How an op treats rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Gives the elements of its first operand in their logical order.
    SameOrder,
    /// Another view of its first operand.
    View,
    /// Each element of the result from the elements that broadcasting puts beside it.
    Elementwise,
    /// Rows times a matrix, after `first` operands that are added.
    Product {
        /// Operands before the factors.
        first: usize,
    },
    /// Works on each item of the first dimension of its first `operands`.
    Batch {
        /// Operands that have that dimension.
        operands: usize,
    },
    /// Works along the dimensions it names.
    Along,
    /// Works along the last dimensions, as many as it is told sizes of.
    Normalized,
    /// Rows of a table, by indices.
    Lookup,
}

fn rule(name: &str) -> Option<Rule> {
    let name = name.strip_prefix("aten.")?.split('.').next()?;
    let in_place = name.strip_suffix('_').unwrap_or(name);
    let listed = |names: &[&str]| names.contains(&in_place);
    match name {
        "mm" => return Some(Rule::Product { first: 0 }),
        "addmm" => return Some(Rule::Product { first: 1 }),
        "bmm" => return Some(Rule::Batch { operands: 2 }),
        "embedding" => return Some(Rule::Lookup),
        "native_layer_norm" | "_fused_rms_norm" => return Some(Rule::Normalized),
        _ => {}
    }
    if listed(&SAME_ORDER) {
        Some(Rule::SameOrder)
    } else if listed(&VIEWS) {
        Some(Rule::View)
    } else if listed(&ALONG) {
        Some(Rule::Along)
    } else if listed(&ELEMENTWISE) || listed(&ALSO_ELEMENTWISE) {
        Some(Rule::Elementwise)
    } else if name.starts_with("_scaled_dot_product_") {
        Some(Rule::Batch { operands: 3 })
    } else {
        None
    }
}

const SAME_ORDER: [&str; 13] = [
    "_reshape_alias",
    "_to_copy",
    "_unsafe_view",
    "alias",
    "clone",
    "contiguous",
    "detach",
    "flatten",
    "reshape",
    "squeeze",
    "unflatten",
    "unsqueeze",
    "view",
];

const VIEWS: [&str; 12] = [
    "chunk",
    "expand",
    "narrow",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "t",
    "transpose",
    "unbind",
    "unsafe_split",
];

const ALONG: [&str; 15] = [
    "_log_softmax",
    "_softmax",
    "amax",
    "amin",
    "cat",
    "cumsum",
    "glu",
    "linalg_vector_norm",
    "logsumexp",
    "mean",
    "prod",
    "std",
    "sum",
    "var",
    "var_mean",
];

/// And those that only this proof knows.
const ALSO_ELEMENTWISE: [&str; 6] = ["ceil", "expm1", "floor", "isnan", "round", "sign"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample::Builder;
    use crate::trace::{OpIndex, Phase};

    const FORWARD: Phase = Phase::Forward;

    /// A call on `[4, 6, 8]` that ends with a tensor of the same rows, which the rest of the step reads.
    struct Call {
        builder: Builder,
        input: ValueId,
        weight: ValueId,
    }

    impl Call {
        fn new() -> Self {
            let mut builder = Builder::new(4);
            let weight = builder.allocation(&[8, 8], Category::Parameter, 0);
            let input = builder.allocation(&[4, 6, 8], Category::Input, 0);
            Self {
                builder,
                input,
                weight,
            }
        }

        fn op(&mut self, name: &str, reads: &[ValueId], shape: &[u64]) -> ValueId {
            self.builder.op(name, FORWARD, reads, shape)
        }

        fn told(
            &mut self,
            name: &str,
            arguments: &str,
            reads: &[ValueId],
            shape: &[u64],
        ) -> ValueId {
            let made = self.op(name, reads, shape);
            let arguments = self.builder.string(arguments);
            self.builder.trace.ops.last_mut().unwrap().arguments = arguments;
            made
        }

        fn judge(mut self, result: ValueId) -> Result<ByRows, String> {
            let end = u32::try_from(self.builder.trace.ops.len()).unwrap();
            self.op("aten.sum.default", &[result], &[]);
            let region = Region {
                module: 0,
                class: 0,
                call: 0,
                start: OpIndex(0),
                end: OpIndex(end),
            };
            by_rows(&self.builder.finish(), &region)
        }
    }

    #[test]
    fn a_product_with_a_matrix_keeps_rows_apart_and_one_with_rows_does_not() {
        let mut call = Call::new();
        let rows = call.op("aten.view.default", &[call.input], &[24, 8]);
        let product = call.op("aten.mm.default", &[rows, call.weight], &[24, 8]);
        let result = call.op("aten._unsafe_view.default", &[product], &[4, 6, 8]);
        let (input, proved) = (call.input, call.judge(result).unwrap());
        assert_eq!((proved.input, proved.output), (input, result));
        assert!(!proved.draws);

        let mut call = Call::new();
        let rows = call.op("aten.view.default", &[call.input], &[24, 8]);
        let product = call.op("aten.mm.default", &[rows, rows], &[24, 8]);
        let result = call.op("aten._unsafe_view.default", &[product], &[4, 6, 8]);
        assert!(call.judge(result).unwrap_err().contains("aten.mm"));
    }

    #[test]
    fn a_whole_operand_may_vary_along_features_and_not_along_rows() {
        for (shape, is_fine) in [(vec![8], true), (vec![1, 1, 8], true), (vec![6, 8], false)] {
            let mut call = Call::new();
            let whole = call.op("aten.arange.default", &[], &shape);
            let result = call.op("aten.add.Tensor", &[call.input, whole], &[4, 6, 8]);
            assert_eq!(call.judge(result).is_ok(), is_fine, "{shape:?}");
        }
    }

    #[test]
    fn what_works_along_dimensions_works_along_features() {
        for (dim, is_fine) in [
            ("dim=-1", true),
            ("dim=2", true),
            ("dim=1", false),
            ("", false),
        ] {
            let mut call = Call::new();
            let result = call.told("aten._softmax.default", dim, &[call.input], &[4, 6, 8]);
            assert_eq!(call.judge(result).is_ok(), is_fine, "{dim}");
        }
        for (sizes, is_fine) in [("[8]", true), ("[6,8]", false)] {
            let mut call = Call::new();
            let arguments = format!("normalized_shape={sizes}, eps=1e-05");
            let reads = [call.input, call.weight];
            let result = call.told(
                "aten.native_layer_norm.default",
                &arguments,
                &reads,
                &[4, 6, 8],
            );
            assert_eq!(call.judge(result).is_ok(), is_fine, "{sizes}");
        }
    }

    #[test]
    fn an_unknown_op_a_write_to_the_input_and_a_second_tensor_end_the_proof() {
        let mut call = Call::new();
        let result = call.op("mine.op.default", &[call.input], &[4, 6, 8]);
        assert!(
            call.judge(result)
                .unwrap_err()
                .contains("`mine.op.default`")
        );

        let mut call = Call::new();
        let written = call
            .builder
            .op_in_place("aten.relu_.default", FORWARD, call.input, &[]);
        let result = call.op("aten.neg.default", &[written], &[4, 6, 8]);
        assert!(
            call.judge(result)
                .unwrap_err()
                .contains("writes to what it is given")
        );

        let mut call = Call::new();
        let other = call.builder.allocation(&[4, 6, 8], Category::Activation, 0);
        let result = call.op("aten.add.Tensor", &[call.input, other], &[4, 6, 8]);
        assert!(call.judge(result).unwrap_err().contains("another tensor"));
    }

    #[test]
    fn a_result_without_the_rows_of_the_input_is_refused() {
        let mut call = Call::new();
        let result = call.op("aten.view.default", &[call.input], &[24, 8]);
        assert!(call.judge(result).is_err());
    }
}

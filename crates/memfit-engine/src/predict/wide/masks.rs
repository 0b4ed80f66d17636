//! Tensors that can only be masks: made of comparisons and constants.
//!
//! Responsible for what they are made of and for which ops would take a `bool` instead. Values are not in a trace, so
//! that only ops show what a tensor can hold. Not responsible for what is said of them (`mod.rs`).

use std::collections::BTreeSet;

use crate::trace::{Op, Phase, Trace, ValueId, element_bytes};

/// Ops that make a tensor of one number, whatever they read.
const FILLS: &[&str] = &[
    "full",
    "full_like",
    "new_full",
    "zeros",
    "zeros_like",
    "new_zeros",
    "ones",
    "ones_like",
    "new_ones",
    "scalar_tensor",
    "fill_",
    "zero_",
];
/// Ops that make a mask of constants and masks.
const CHOICES: &[&str] = &[
    "triu",
    "triu_",
    "tril",
    "tril_",
    "masked_fill",
    "masked_fill_",
    "where",
    "scatter",
    "scatter_",
    "cat",
    "stack",
    "copy_",
];
/// Ops that make of one mask, and of numbers, another.
const MAPS: &[&str] = &[
    "_to_copy", "clone", "mul", "mul_", "add", "add_", "sub", "sub_", "rsub", "div", "neg",
    "repeat",
];
/// Ops beside those above that take a `bool` where they take a mask, or that a `masked_fill` stands in for.
const TAKES_BOOL: &[&str] = &[
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_not",
    "sum",
    "any",
    "all",
];
/// What torch's own attention calls at the line that calls it. It makes numbers of a `bool` mask, so that one saves
/// nothing there.
const ATTENTION: &[&str] = &[
    "_safe_softmax",
    "_scaled_dot_product",
    "_fused_sdp_choice",
    "baddbmm",
];

/// What an allocation can hold, as far as ops show it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Unknown,
    Constant,
    Mask,
}

/// Which allocations are masks.
pub(super) struct Masks {
    contents: Vec<Content>,
    /// The name of each op without namespace and overload, interned with the trace's strings.
    names: Vec<String>,
    /// Source lines at which torch's attention runs.
    attention: BTreeSet<u32>,
}

impl Masks {
    pub(super) fn new(trace: &Trace) -> Self {
        let names: Vec<String> = trace.strings.iter().map(|name| bare(name)).collect();
        let is_attention = |op: &&Op| {
            let name = names.get(op.name as usize);
            name.is_some_and(|name| ATTENTION.iter().any(|it| name.starts_with(it)))
        };
        let attention = trace.ops.iter().filter(is_attention);
        let attention = attention.map(|op| op.source).collect();
        let mut masks = Self {
            contents: vec![Content::Unknown; trace.allocations.len()],
            names,
            attention,
        };
        for op in &trace.ops {
            masks.follow(trace, op);
        }
        masks
    }

    /// Whether an allocation holds nothing but a mask.
    pub(super) fn is_mask(&self, at: usize) -> bool {
        self.contents[at] == Content::Mask
    }

    /// Whether an op could take a `bool` in the place of the mask it reads.
    pub(super) fn takes_bool(&self, op: &Op) -> bool {
        let is_known = [CHOICES, MAPS, TAKES_BOOL]
            .iter()
            .any(|names| self.is_one_of(op, names));
        let divides = self.is_one_of(op, &["div"]) && op.reads.len() > 1;
        is_known && !divides && !self.attention.contains(&op.source)
    }

    /// What an op makes of what its tensors hold.
    fn follow(&mut self, trace: &Trace, op: &Op) {
        if op.view {
            return;
        }
        let content = self.made(trace, op);
        for &value in op.outputs.iter().chain(&op.writes) {
            let at = trace.allocation_of(value).index();
            self.contents[at] = content;
        }
    }

    fn made(&self, trace: &Trace, op: &Op) -> Content {
        if op.phase != Phase::Forward || self.attention.contains(&op.source) || op.random {
            return Content::Unknown;
        }
        if self.is_one_of(op, FILLS) {
            return self.filled(trace, op);
        }
        let mut reads = op.reads.iter().map(|&value| self.content(trace, value));
        match op.reads.as_slice() {
            [_] if self.is_one_of(op, MAPS) => reads.next().unwrap_or(Content::Unknown),
            [_, ..] if self.is_one_of(op, CHOICES) && reads.all(|it| it != Content::Unknown) => {
                Content::Mask
            }
            _ => Content::Unknown,
        }
    }

    /// What is there after a fill: of a part of a constant, two numbers.
    fn filled(&self, trace: &Trace, op: &Op) -> Content {
        let Some(&target) = op.writes.first() else {
            return Content::Constant;
        };
        let value = &trace.values[target.index()];
        let all_bytes = trace.allocations[value.allocation.index()].bytes.0;
        let dtype = trace.string(value.dtype);
        let bytes = element_bytes(dtype).map(|one| value.numel().saturating_mul(one));
        match self.contents[value.allocation.index()] {
            _ if bytes == Some(all_bytes) => Content::Constant,
            Content::Unknown => Content::Unknown,
            Content::Constant | Content::Mask => Content::Mask,
        }
    }

    fn content(&self, trace: &Trace, value: ValueId) -> Content {
        let value = &trace.values[value.index()];
        match trace.string(value.dtype) {
            "bool" => Content::Mask,
            _ => self.contents[value.allocation.index()],
        }
    }

    fn is_one_of(&self, op: &Op, names: &[&str]) -> bool {
        let name = self.names.get(op.name as usize);
        name.is_some_and(|name| names.contains(&name.as_str()))
    }
}

/// `aten.masked_fill.Scalar` as `masked_fill`; empty for what is no op of torch's own.
fn bare(name: &str) -> String {
    let name = name.strip_prefix("aten.").unwrap_or("");
    name.split('.').next().unwrap_or("").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample::Builder;
    use crate::trace::{Category, ValueId};

    fn is_mask(builder: Builder, value: ValueId) -> bool {
        let trace = builder.finish();
        Masks::new(&trace).is_mask(trace.allocation_of(value).index())
    }

    #[test]
    fn a_triangle_of_a_constant_is_a_mask_and_a_constant_is_none() {
        let mut builder = Builder::new(1);
        let full = builder.op("aten.full.default", Phase::Forward, &[], &[4, 4]);
        let triangle = builder.op("aten.triu.default", Phase::Forward, &[full], &[4, 4]);
        let trace = builder.finish();
        let masks = Masks::new(&trace);
        assert!(masks.is_mask(trace.allocation_of(triangle).index()));
        assert!(!masks.is_mask(trace.allocation_of(full).index()));
    }

    #[test]
    fn what_an_input_or_an_unknown_op_enters_is_none() {
        let mut builder = Builder::new(1);
        let input = builder.allocation(&[4, 4], Category::Input, 0);
        let product = builder.op("aten.mul.Tensor", Phase::Forward, &[input], &[4, 4]);
        let triangle = builder.op("aten.triu.default", Phase::Forward, &[product], &[4, 4]);
        assert!(!is_mask(builder, triangle));
    }

    #[test]
    fn a_write_of_other_numbers_ends_it() {
        for (name, is_still) in [("aten.mul_.Tensor", true), ("aten.bernoulli_.float", false)] {
            let mut builder = Builder::new(1);
            let full = builder.op("aten.ones.default", Phase::Forward, &[], &[4, 4]);
            let triangle = builder.op("aten.tril.default", Phase::Forward, &[full], &[4, 4]);
            let after = builder.op_in_place(name, Phase::Forward, triangle, &[]);
            assert_eq!(is_mask(builder, after), is_still, "{name}");
        }
    }

    #[test]
    fn a_constant_filled_in_part_with_another_number_is_a_mask() {
        let mut builder = Builder::new(1);
        let zeros = builder.op("aten.zeros.default", Phase::Forward, &[], &[4, 4]);
        let allocation = builder.trace.allocation_of(zeros);
        let half = builder.value(allocation, 0, &[2, 4]);
        let after = builder.op_in_place("aten.fill_.Scalar", Phase::Forward, half, &[]);
        assert!(is_mask(builder, after));
    }
}

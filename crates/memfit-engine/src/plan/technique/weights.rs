//! Parameters that may be held in fewer bits.
//!
//! Responsible for which parameters of a step certain ops alone read, for their names and their bytes, common to the
//! techniques that narrow them. Not responsible for which ops those are, nor for how many bits (`half_parameters.rs`,
//! `int8_weights.rs`).

use std::collections::BTreeSet;

use crate::bytes::Bytes;
use crate::trace::{AllocationId, Category, Trace};

/// The note about a model of inference whose weights are rounded.
pub(super) const ROUNDED: &str = "weights are rounded once: closing the fitted workload makes them float32 again, \
                                  with the values that they were rounded to";

/// The allocations of `float32` values alone that forward reads by these ops, and by nothing else beside views.
pub(super) fn read_alone(trace: &Trace, ops: &[&str]) -> BTreeSet<AllocationId> {
    let mut read = BTreeSet::new();
    let mut other = BTreeSet::new();
    for value in &trace.values {
        if trace.string(value.dtype) != "float32" {
            other.insert(value.allocation);
        }
    }
    for op in &trace.ops[..trace.forward_end().index()] {
        let is_one = op.view || ops.contains(&trace.string(op.name));
        for &value in &op.reads {
            let id = trace.allocation_of(value);
            read.insert(id);
            if !is_one {
                other.insert(id);
            }
        }
    }
    &read - &other
}

/// Names of the parameters of a size or more that are memfit's to narrow, in none of the modules that are kept, and suit;
/// in the trace's order.
pub(super) fn names(
    trace: &Trace,
    keep: &[String],
    least_bytes: u64,
    suits: impl Fn(AllocationId) -> bool,
) -> Vec<String> {
    let ids = (0..).map(AllocationId).zip(&trace.allocations);
    let suit = ids.filter(|&(id, allocation)| {
        allocation.category == Category::Parameter
            && allocation.bytes.0 >= least_bytes
            && allocation.name != 0
            && !trace.meta.fixed_parameters.contains(&id)
            && suits(id)
    });
    let names = suit.map(|(_, allocation)| trace.string(allocation.name));
    let is_kept = |name: &&str| keep.iter().any(|module| is_in(name, module));
    names
        .filter(|name| !is_kept(name))
        .map(str::to_owned)
        .collect()
}

/// Is something of a name in a module?
fn is_in(name: &str, module: &str) -> bool {
    let rest = name.strip_prefix(module);
    module.is_empty() || rest.is_some_and(|rest| rest.starts_with('.'))
}

/// What all parameters of a step take.
pub(super) fn all_bytes(trace: &Trace) -> Bytes {
    let all = trace.allocations.iter();
    let parameters = all.filter(|it| it.category == Category::Parameter);
    parameters.map(|it| it.bytes).sum()
}

/// What the parameters of these names take in a step.
pub(super) fn bytes(trace: &Trace, names: &[String]) -> Bytes {
    let names: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let parameters = trace.allocations.iter();
    let chosen = parameters
        .filter(|it| it.category == Category::Parameter && names.contains(trace.string(it.name)));
    chosen.map(|it| it.bytes).sum()
}

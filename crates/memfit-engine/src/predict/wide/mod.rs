//! Tensors at the peak whose elements take more bytes than their use asks for.
//!
//! Responsible for finding them, for grouping them by the line that makes them, and for the peak with narrower ones.
//! Not responsible for which tensors are masks (`masks.rs`), nor for whether a model trains as well in fewer bits.

mod masks;

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::unneeded::common_module;
use crate::bytes::Bytes;
use crate::step::Holding;
use crate::trace::{AllocationId, Category, Op, Trace, element_bytes};
use masks::Masks;

/// What is less than the peak by this factor is not told.
const LEAST_PART: u64 = 100;
/// Indices of a table of this many rows fit 32 bits.
const ROWS_OF_INT32: u64 = 1 << 31;

/// Why fewer bytes an element would do.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum WideReason {
    /// Numbers of 64 bits.
    Float64,
    /// Made of comparisons and constants alone, and only multiplied, added, compared or filled with.
    Mask,
    /// There before the step, and only compared with a number or made a `bool`.
    Compared,
    /// A module buffer named a mask that is only added to something; a `bool` does if it holds 0 and -inf alone.
    NamedMask,
    /// Only looks up rows of tables whose sizes are known.
    Index,
}

/// What one line holds at the peak in wider elements than its use asks for.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct WideTensors {
    /// Why fewer bytes would do.
    pub reason: WideReason,
    /// Element type that it has.
    pub dtype: String,
    /// Element type that would do.
    pub narrower_dtype: String,
    /// Role of these tensors.
    pub category: Category,
    /// `file:line` of the ops that make them; empty for what is there before the step.
    pub source: String,
    /// The module that holds all of these ops; empty for the model.
    pub module: String,
    /// Name of the module buffer or batch entry, where it is one.
    pub name: String,
    /// How many allocations.
    pub count: u64,
    /// Their bytes at the peak.
    pub bytes: Bytes,
    /// What the narrower type would save of these.
    pub saved_bytes: Bytes,
}

/// A type that would do for an allocation, and what it would take.
#[derive(Clone, Copy)]
struct Narrower<'t> {
    reason: WideReason,
    from: &'t str,
    to: &'static str,
    bytes: Bytes,
}

/// What is wider than needed at a peak, most savings first, and the peak if none of it were; absent where nothing is.
pub(super) fn wide_tensors(
    trace: &Trace,
    holdings: &[Holding],
    peak_bytes: Bytes,
) -> (Vec<WideTensors>, Option<Bytes>) {
    let narrower = Uses::new(trace).narrower();
    let mut groups = grouped(trace, holdings, &narrower);
    groups.retain(|group| group.bytes.0 >= (peak_bytes.0 / LEAST_PART).max(1));
    if groups.is_empty() {
        return (groups, None);
    }
    let reasons: BTreeSet<WideReason> = groups.iter().map(|group| group.reason).collect();
    let mut other = trace.clone();
    for (allocation, narrower) in other.allocations.iter_mut().zip(&narrower) {
        if let Some(narrower) = narrower.filter(|it| reasons.contains(&it.reason)) {
            allocation.bytes = narrower.bytes;
        }
    }
    (groups, Some(super::unplanned::unplanned_peak(&other)))
}

/// The wide allocations of a peak by the line that makes them.
fn grouped(trace: &Trace, holdings: &[Holding], narrower: &[Option<Narrower>]) -> Vec<WideTensors> {
    let mut found: BTreeMap<_, (WideTensors, Vec<&str>)> = BTreeMap::new();
    for holding in holdings {
        let Some(one) = narrower[holding.allocation.index()] else {
            continue;
        };
        let allocation = &trace.allocations[holding.allocation.index()];
        let op = allocation.producer.map(|op| &trace.ops[op.index()]);
        let source = op.map_or("", |op| trace.string(op.source));
        // Parameters are many, and say nothing one by one.
        let name = match allocation.category {
            Category::Input | Category::ModuleBuffer => trace.string(allocation.name),
            _ => "",
        };
        let key = (one.reason, allocation.category, source, one.from, name);
        let (group, modules) = found.entry(key).or_insert_with(|| {
            let group = WideTensors {
                reason: one.reason,
                dtype: one.from.to_owned(),
                narrower_dtype: one.to.to_owned(),
                category: allocation.category,
                source: source.to_owned(),
                module: String::new(),
                name: name.to_owned(),
                count: 0,
                bytes: Bytes::ZERO,
                saved_bytes: Bytes::ZERO,
            };
            (group, Vec::new())
        });
        group.count += 1;
        group.bytes += holding.bytes;
        group.saved_bytes += allocation.bytes - one.bytes;
        modules.push(op.map_or("", |op| trace.string(op.module)));
    }
    let mut groups: Vec<WideTensors> = found
        .into_values()
        .map(|(group, modules)| WideTensors {
            module: common_module(&modules),
            ..group
        })
        .collect();
    // The map is sorted and the sort is stable: equal savings stay in the order of their keys.
    groups.sort_by_key(|group| std::cmp::Reverse(group.saved_bytes));
    groups
}

/// What reads each allocation, and in which element types.
struct Uses<'t> {
    trace: &'t Trace,
    /// Ops that read or write it and do more than make a view; its producer is none of them.
    ops: Vec<Vec<&'t Op>>,
    /// Its element type; absent where values differ in it.
    dtype: Vec<Option<&'t str>>,
    masks: Masks,
}

impl<'t> Uses<'t> {
    fn new(trace: &'t Trace) -> Self {
        let count = trace.allocations.len();
        let mut dtypes: Vec<Option<Option<&str>>> = vec![None; count];
        for value in &trace.values {
            let dtype = trace.string(value.dtype);
            let known = &mut dtypes[value.allocation.index()];
            *known = Some(known.map_or(Some(dtype), |it| it.filter(|&it| it == dtype)));
        }
        let mut ops: Vec<Vec<&Op>> = vec![Vec::new(); count];
        for op in trace.ops.iter().filter(|op| !op.view) {
            let touched = op.reads.iter().chain(&op.writes);
            let touched: BTreeSet<AllocationId> =
                touched.map(|&value| trace.allocation_of(value)).collect();
            for allocation in touched {
                ops[allocation.index()].push(op);
            }
        }
        Self {
            trace,
            ops,
            dtype: dtypes.into_iter().map(Option::flatten).collect(),
            masks: Masks::new(trace),
        }
    }

    /// The narrower type of each allocation that has one.
    fn narrower(&self) -> Vec<Option<Narrower<'t>>> {
        let allocations = 0..self.trace.allocations.len();
        allocations.map(|at| self.narrower_of(at)).collect()
    }

    fn narrower_of(&self, at: usize) -> Option<Narrower<'t>> {
        let allocation = &self.trace.allocations[at];
        let from = self.dtype[at]?;
        let (reason, to, factor) = match from {
            "float64" => (WideReason::Float64, "float32", 2),
            "complex128" => (WideReason::Float64, "complex64", 2),
            _ => match (self.use_as_bool(at), element_bytes(from)) {
                (Some(reason), Some(element_bytes @ 2..)) => (reason, "bool", element_bytes),
                _ if from == "int64" && self.is_index(at) => (WideReason::Index, "int32", 2),
                _ => return None,
            },
        };
        Some(Narrower {
            reason,
            from,
            to,
            bytes: Bytes(allocation.bytes.0.div_ceil(factor)),
        })
    }

    /// Why a `bool` would do.
    fn use_as_bool(&self, at: usize) -> Option<WideReason> {
        let allocation = &self.trace.allocations[at];
        let ops = &self.ops[at];
        let all = |is: &dyn Fn(&Op) -> bool| !ops.is_empty() && ops.iter().all(|&op| is(op));
        let is_there_before = matches!(
            allocation.category,
            Category::Input | Category::ModuleBuffer
        ) && allocation.producer.is_none();
        if !is_there_before {
            let is_mask = self.masks.is_mask(at) && all(&|op| self.masks.takes_bool(op));
            return is_mask.then_some(WideReason::Mask);
        }
        if all(&|op| self.is_comparison(op)) {
            return Some(WideReason::Compared);
        }
        let is_named = allocation.category == Category::ModuleBuffer
            && last_part(self.trace.string(allocation.name)).contains("mask")
            && self.dtype[at].is_some_and(|it| it.contains("float"));
        let is_added = |op: &Op| self.masks.takes_bool(op) && self.is_named(op, "aten.add");
        (is_named && all(&is_added)).then_some(WideReason::NamedMask)
    }

    /// Whether an op compares one tensor with a number, or makes a `bool` of it.
    fn is_comparison(&self, op: &Op) -> bool {
        let is_bool = |value: &crate::trace::ValueId| {
            self.trace
                .string(self.trace.values[value.index()].dtype)
                .eq("bool")
        };
        let [_] = op.reads.as_slice() else {
            return false;
        };
        op.writes.is_empty() && !op.outputs.is_empty() && op.outputs.iter().all(is_bool)
    }

    /// Whether it is only compared and used to look up rows of tables that 32 bits can count.
    fn is_index(&self, at: usize) -> bool {
        let looks_up = |op: &Op| {
            let reads: Vec<usize> = op.reads.iter().map(|&it| self.allocation(it)).collect();
            let table = op.reads.first().map(|it| &self.trace.values[it.index()]);
            let rows = table.and_then(|table| table.shape.first());
            self.is_named(op, "aten.embedding.")
                && reads.get(1) == Some(&at)
                && reads.first() != Some(&at)
                && rows.is_some_and(|&rows| rows <= ROWS_OF_INT32)
        };
        let ops = &self.ops[at];
        ops.iter().any(|op| looks_up(op))
            && ops.iter().all(|op| {
                looks_up(op)
                    || self.is_comparison(op)
                    || self.is_named(op, "aten.embedding_dense_backward")
            })
    }

    fn allocation(&self, value: crate::trace::ValueId) -> usize {
        self.trace.allocation_of(value).index()
    }

    fn is_named(&self, op: &Op, start: &str) -> bool {
        self.trace.string(op.name).starts_with(start)
    }
}

fn last_part(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

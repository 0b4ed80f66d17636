//! Tensors that autograd saves and backward never needs.
//!
//! Responsible for finding them and for grouping them by the line that saves them. Not responsible for letting go of
//! them (`plan/technique/unneeded_saves.rs`).

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;
use crate::trace::{OpIndex, Phase, SavedTensor, Trace};

/// What one line saves for nothing.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct UnneededSaves {
    /// `file:line` of the ops that save them.
    pub source: String,
    /// The module that holds all of these ops; empty for the model.
    pub module: String,
    /// How many allocations.
    pub count: u64,
    /// Their bytes. Nothing but autograd holds them in the end.
    pub bytes: Bytes,
    /// Whether backward runs there, and reads the shapes alone; otherwise it does not run there at all.
    pub is_shape_needed: bool,
}

/// What a step saves for nothing, most bytes first.
pub(super) fn unneeded_saves(trace: &Trace) -> Vec<UnneededSaves> {
    let mut found: BTreeMap<(&str, bool), (Vec<&str>, u64, Bytes)> = BTreeMap::new();
    let runs = nodes_of_backward(trace);
    for (allocation, saved) in by_allocation(trace).into_iter().enumerate() {
        let Some(last) = saved.iter().max_by_key(|saved| saved.release) else {
            continue;
        };
        let natural = trace.allocations[allocation].natural.last();
        let is_held_anyway =
            last.release >= trace.end() || natural.is_some_and(|&(_, end)| end >= last.release);
        if is_held_anyway || saved.iter().any(|saved| saved.unpack.is_some()) {
            continue;
        }
        let op = saver(trace, last);
        let is_shape_needed = runs.binary_search(&last.node).is_ok();
        let group = found.entry((op.0, is_shape_needed)).or_default();
        group.0.push(op.1);
        group.1 += 1;
        group.2 += trace.allocations[allocation].bytes;
    }
    let groups = found.into_iter();
    let mut groups: Vec<UnneededSaves> = groups
        .map(
            |((source, is_shape_needed), (modules, count, bytes))| UnneededSaves {
                source: source.to_owned(),
                module: common_module(&modules),
                count,
                bytes,
                is_shape_needed,
            },
        )
        .collect();
    groups.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.source.cmp(&b.source)));
    groups
}

/// The saved tensors of each allocation.
fn by_allocation(trace: &Trace) -> Vec<Vec<&SavedTensor>> {
    let mut saved = vec![Vec::new(); trace.allocations.len()];
    for one in &trace.saved {
        saved[trace.allocation_of(one.value).index()].push(one);
    }
    saved
}

/// The nodes that backward runs, ascending.
fn nodes_of_backward(trace: &Trace) -> Vec<u32> {
    let ops = trace.ops.iter().filter(|op| op.phase == Phase::Backward);
    let mut nodes: Vec<u32> = ops.filter_map(|op| op.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

/// Line and module of the op that a tensor is saved for: inputs are packed just before it, outputs just after.
fn saver<'t>(trace: &'t Trace, saved: &SavedTensor) -> (&'t str, &'t str) {
    let makes = |at: &usize| {
        let op = trace.ops.get(*at);
        op.is_some_and(|op| op.node == Some(saved.node))
    };
    let pack = saved.pack;
    let near = [Some(pack.index()), pack.index().checked_sub(1)];
    let at = near.into_iter().flatten().find(makes);
    let at = at.map_or(pack, |at| OpIndex(u32::try_from(at).unwrap_or(u32::MAX)));
    let op = trace.ops.get(at.index());
    op.map_or(("", ""), |op| {
        (trace.string(op.source), trace.string(op.module))
    })
}

/// The innermost module that all of some are in.
pub(super) fn common_module(modules: &[&str]) -> String {
    let mut common: Vec<&str> = modules
        .first()
        .map_or(Vec::new(), |it| it.split('.').collect());
    for module in modules {
        let same = common.iter().zip(module.split('.'));
        let same = same.take_while(|&(&one, other)| one == other).count();
        common.truncate(same);
    }
    common.join(".")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample;

    #[test]
    fn what_backward_asks_for_is_needed() {
        assert!(unneeded_saves(&sample::chain()).is_empty());
    }

    #[test]
    fn what_it_never_asks_for_is_said_by_line() {
        let mut trace = sample::chain();
        for saved in &mut trace.saved {
            saved.unpack = None;
        }
        let found = unneeded_saves(&trace);
        assert!(!found.is_empty());
        assert!(
            found
                .iter()
                .all(|it| it.count > 0 && it.bytes > Bytes::ZERO)
        );
        assert!(found.windows(2).all(|pair| pair[0].bytes >= pair[1].bytes));
    }

    #[test]
    fn modules_have_the_innermost_one_in_common() {
        assert_eq!(common_module(&["a.b.c", "a.b", "a.bc"]), "a");
        assert_eq!(common_module(&["teacher.0", "teacher.0"]), "teacher.0");
        assert_eq!(common_module(&["x", ""]), "");
    }
}

//! Repeated blocks of a model, by the names of its modules.
//!
//! Responsible for where they meet and for what is alive there. Not responsible for the plans that a chain of them
//! suggests (`block_starts.rs`).

use std::collections::BTreeMap;

use crate::trace::{AllocationId, OpIndex, Trace};

/// Kinds of blocks looked at.
const MOST_KINDS: usize = 3;

/// Repeated blocks of one kind, in the order they run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::plan) struct Blocks {
    /// First op of each, ascending.
    pub(in crate::plan) starts: Vec<usize>,
    /// One past the last op of the last.
    end: usize,
    /// Per block, the allocations alive at its start that may be treated.
    pub(super) boundaries: Vec<Vec<AllocationId>>,
}

impl Blocks {
    /// The op after the block in which `op` is; `None` outside of all.
    pub(in crate::plan) fn home(&self, op: OpIndex) -> Option<OpIndex> {
        let op = op.index();
        let after = self.starts.partition_point(|&start| start <= op);
        if after == 0 || op >= self.end {
            return None;
        }
        let home = self.starts.get(after).copied().unwrap_or(self.end);
        u32::try_from(home).ok().map(OpIndex)
    }

    /// The op after the run of `length` blocks in which the block `number` is.
    pub(super) fn home_of_run(&self, number: usize, length: usize) -> OpIndex {
        let next = (number / length + 1) * length;
        let home = self.starts.get(next).copied().unwrap_or(self.end);
        OpIndex(u32::try_from(home).unwrap_or(u32::MAX))
    }
}

/// Kinds of repeated blocks (same module path but for numbers), the coarsest first. Of what is alive at their
/// boundaries, only `candidates` count.
pub(in crate::plan) fn kinds(trace: &Trace, candidates: &[AllocationId]) -> Vec<Blocks> {
    let mut spans: BTreeMap<String, Vec<(usize, usize)>> = BTreeMap::new();
    for region in &trace.regions {
        let path = trace.string(region.module);
        let is_forward = region.end <= trace.forward_end();
        if is_forward && path.bytes().any(|byte| byte.is_ascii_digit()) && region.start < region.end
        {
            let kind: String = path
                .chars()
                .map(|c| if c.is_ascii_digit() { '#' } else { c })
                .collect();
            let span = (region.start.index(), region.end.index());
            spans.entry(kind.replace("##", "#")).or_default().push(span);
        }
    }
    let mut all: Vec<Blocks> = Vec::new();
    for mut spans in spans.into_values().filter(|spans| spans.len() >= 2) {
        spans.sort_unstable();
        let end = spans.iter().map(|&(_, end)| end).max().unwrap_or(0);
        let mut starts: Vec<usize> = spans.into_iter().map(|(start, _)| start).collect();
        starts.dedup();
        let boundaries: Vec<_> = starts
            .iter()
            .map(|&start| alive_at(trace, candidates, start))
            .collect();
        if all.iter().all(|known| known.boundaries != boundaries) {
            all.push(Blocks {
                starts,
                end,
                boundaries,
            });
        }
    }
    all.sort_by_key(|blocks| blocks.starts.len());
    all.truncate(MOST_KINDS);
    all
}

fn alive_at(trace: &Trace, candidates: &[AllocationId], start: usize) -> Vec<AllocationId> {
    let alive = |id: &&AllocationId| {
        let natural = &trace.allocations[id.index()].natural;
        natural
            .iter()
            .any(|(from, until)| from.index() < start && start < until.index())
    };
    candidates.iter().filter(alive).copied().collect()
}

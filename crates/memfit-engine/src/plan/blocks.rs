//! Repeated blocks of a model, by the names of its modules.
//!
//! Responsible for where they meet, and for the plans that a chain of blocks suggests, as starts of the search: which
//! boundaries to keep, which to compute again once, and where what is inside of a block is at home. Not responsible
//! for what becomes of them.

use std::collections::BTreeMap;

use super::problem::Problem;
use crate::step::Treatment;
use crate::trace::{AllocationId, OpIndex};

/// Kinds of blocks looked at.
const MOST_KINDS: usize = 3;

/// Repeated blocks of one kind, in the order they run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blocks {
    /// First op of each, ascending.
    starts: Vec<usize>,
    /// One past the last op of the last.
    end: usize,
    /// Per block, the allocations alive at its start that may be treated.
    boundaries: Vec<Vec<AllocationId>>,
}

impl Blocks {
    /// The op after the block in which `op` is; `None` outside of all.
    pub(super) fn home(&self, op: OpIndex) -> Option<OpIndex> {
        let op = op.index();
        let after = self.starts.partition_point(|&start| start <= op);
        if after == 0 || op >= self.end {
            return None;
        }
        let home = self.starts.get(after).copied().unwrap_or(self.end);
        u32::try_from(home).ok().map(OpIndex)
    }
}

/// Kinds of repeated blocks (same module path but for numbers), the coarsest first.
pub(super) fn kinds(problem: &Problem<'_>) -> Vec<Blocks> {
    let trace = problem.trace;
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
            .map(|&start| alive_at(problem, start))
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

fn alive_at(problem: &Problem<'_>, start: usize) -> Vec<AllocationId> {
    let alive = |id: &&AllocationId| {
        let natural = &problem.trace.allocations[id.index()].natural;
        natural
            .iter()
            .any(|(from, until)| from.index() < start && start < until.index())
    };
    problem.candidates.iter().filter(alive).copied().collect()
}

/// Every how many blocks a boundary is kept, and every how many it is computed again once; at the others, and
/// inside of blocks, allocations pass. 1 for the second: all boundaries stay once they are there.
const LEVELS: [(usize, usize); 10] = [
    (1, 1),
    (2, 1),
    (3, 1),
    (4, 1),
    (6, 1),
    (8, 1),
    (12, 1),
    (8, 2),
    (16, 4),
    (32, 6),
];

/// Everything dropped but some of the boundaries. Without `homes`, nothing passes.
pub(super) fn starts(problem: &Problem<'_>, blocks: &Blocks, homes: bool) -> Vec<Vec<Treatment>> {
    let mut all = Vec::new();
    for (kept, once) in LEVELS {
        let few = kept > 1 && blocks.starts.len() < 2 * kept;
        if few || (!homes && (once > 1 || kept > 3)) {
            continue;
        }
        let mut treatments = vec![Treatment::Keep; problem.trace.allocations.len()];
        for &id in &problem.candidates {
            let home = blocks.home(problem.model.makers(id).next().unwrap_or(OpIndex(0)));
            treatments[id.index()] = passing(problem, id, home.filter(|_| homes && kept > 1));
        }
        for (number, boundary) in blocks.boundaries.iter().enumerate() {
            for &id in boundary {
                treatments[id.index()] = if number % kept == 0 {
                    Treatment::Keep
                } else if number % once == 0 {
                    passing(problem, id, None)
                } else {
                    passing(problem, id, Some(blocks.home_of_run(number, once)))
                };
            }
        }
        all.push(treatments);
    }
    all
}

/// Out of memory, with a home where it may have one.
fn passing(problem: &Problem<'_>, id: AllocationId, home: Option<OpIndex>) -> Treatment {
    let treatment = problem.away_from_memory(id);
    match home.filter(|&home| problem.may_have_home(id, home)) {
        Some(home) => treatment.with_home(home),
        None => treatment,
    }
}

impl Blocks {
    /// The op after the run of `length` blocks in which the block `number` is.
    fn home_of_run(&self, number: usize, length: usize) -> OpIndex {
        let next = (number / length + 1) * length;
        let home = self.starts.get(next).copied().unwrap_or(self.end);
        OpIndex(u32::try_from(home).unwrap_or(u32::MAX))
    }
}

//! Repeated blocks of a model, by the names of its modules.
//!
//! Responsible for where they meet, as starts of the search. Not responsible for what becomes of them.

use std::collections::BTreeMap;

use super::problem::Problem;
use crate::trace::AllocationId;

/// For each kind of repeated block (same module path but for numbers), the allocations alive at the
/// start of each block that the block or a later op reads.
pub(super) fn block_boundaries(problem: &Problem<'_>) -> Vec<Vec<Vec<AllocationId>>> {
    let trace = problem.trace;
    let mut kinds: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for region in &trace.regions {
        let path = trace.string(region.module);
        if path.bytes().any(|byte| byte.is_ascii_digit()) && region.start < region.end {
            let kind: String = path
                .chars()
                .map(|c| if c.is_ascii_digit() { '#' } else { c })
                .collect();
            kinds
                .entry(kind.replace("##", "#"))
                .or_default()
                .push(region.start.index());
        }
    }
    let mut all = Vec::new();
    for mut starts in kinds.into_values().filter(|starts| starts.len() >= 2) {
        starts.sort_unstable();
        starts.dedup();
        let boundary = |&start: &usize| -> Vec<AllocationId> {
            let alive = |id: &&AllocationId| {
                let natural = &trace.allocations[id.index()].natural;
                natural
                    .iter()
                    .any(|(from, until)| from.index() < start && start < until.index())
            };
            problem.candidates.iter().filter(alive).copied().collect()
        };
        let boundaries: Vec<_> = starts.iter().map(boundary).collect();
        if !all.contains(&boundaries) {
            all.push(boundaries);
        }
    }
    // The coarsest kinds (fewest blocks) first; a handful is enough.
    all.sort_by_key(Vec::len);
    all.truncate(3);
    all
}

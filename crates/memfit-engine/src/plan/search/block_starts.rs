//! The plans that a chain of repeated blocks suggests, as starts of the search.
//!
//! Responsible for which boundaries to keep, which to compute again once, and where what is inside of a block is at
//! home. Not responsible for where blocks meet (`blocks.rs`), nor for what becomes of the starts.

use super::blocks::Blocks;
use super::problem::Problem;
use crate::step::Treatment;
use crate::trace::{AllocationId, OpIndex};

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
pub(in crate::plan) fn starts(
    problem: &Problem<'_>,
    blocks: &Blocks,
    homes: bool,
) -> Vec<Vec<Treatment>> {
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

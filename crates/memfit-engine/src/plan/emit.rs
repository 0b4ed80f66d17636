//! From a set of dropped allocations to what the executor needs.
//!
//! Responsible for addressing drops by forward op and for the smallest set of module calls in which the
//! executor has to watch. Not responsible for choosing the set.

use std::collections::BTreeMap;

use super::problem::Problem;
use super::{ActiveRegion, Dropped, Remat};
use crate::step::Treatment;
use crate::trace::{AllocationId, OpIndex, Trace};

/// The `remat` part of an action.
pub(super) fn remat(problem: &Problem<'_>, dropped: &[Treatment]) -> Remat {
    let trace = problem.trace;
    let mut drops: Vec<Dropped> = (0..dropped.len())
        .filter(|&index| dropped[index].is_drop())
        .filter_map(|index| dropped_allocation(trace, AllocationId(u32::try_from(index).ok()?)))
        .collect();
    drops.sort_by_key(|drop| (drop.op, drop.output));
    let mut indices = BTreeMap::new();
    let mut names = Vec::new();
    let forward = trace.ops[..trace.forward_end().index()].iter().map(|op| {
        *indices.entry(op.name).or_insert_with(|| {
            names.push(trace.string(op.name).to_owned());
            u32::try_from(names.len() - 1).unwrap_or(u32::MAX)
        })
    });
    let forward = forward.collect();
    Remat {
        drops,
        active: active_regions(problem, dropped),
        names,
        forward,
    }
}

fn dropped_allocation(trace: &Trace, id: AllocationId) -> Option<Dropped> {
    let allocation = &trace.allocations[id.index()];
    let op_index = allocation.producer?;
    let op = &trace.ops[op_index.index()];
    let output = op
        .outputs
        .iter()
        .position(|&value| trace.allocation_of(value) == id)?;
    Some(Dropped {
        op: op_index,
        output: u32::try_from(output).ok()?,
        shape: trace.values[op.outputs[output].index()].shape.clone(),
        bytes: allocation.bytes,
        module: trace.string(op.module).to_owned(),
        home: None,
    })
}

/// The innermost module calls that hold every op the executor must see: those that make, write, view or
/// save a dropped allocation.
fn active_regions(problem: &Problem<'_>, dropped: &[Treatment]) -> Vec<ActiveRegion> {
    let trace = problem.trace;
    let forward_end = trace.forward_end();
    let is_dropped = |value| dropped[trace.allocation_of(value).index()].is_drop();
    let mut seen = vec![false; forward_end.index()];
    for (i, op) in trace.ops[..forward_end.index()].iter().enumerate() {
        let makes = op
            .outputs
            .iter()
            .chain(&op.writes)
            .any(|&value| is_dropped(value));
        seen[i] = makes;
    }
    for saved in trace.saved.iter().filter(|saved| is_dropped(saved.value)) {
        // A node packs its inputs just before its op and its outputs just after.
        let pack = saved.pack.index();
        let makes = |i: usize| {
            trace
                .ops
                .get(i)
                .is_some_and(|op| op.node == Some(saved.node))
        };
        let op = if pack > 0 && !makes(pack) {
            pack - 1
        } else {
            pack
        };
        if let Some(seen) = seen.get_mut(op) {
            *seen = true;
        }
    }
    let mut regions: Vec<ActiveRegion> = Vec::new();
    for i in (0..seen.len()).filter(|&i| seen[i]) {
        let at = OpIndex(u32::try_from(i).unwrap_or(u32::MAX));
        if regions
            .last()
            .is_some_and(|region| region.start <= at && at < region.end)
        {
            continue;
        }
        let region = innermost(trace, at, forward_end);
        // A parent entered later in the list swallows the children before it.
        regions.retain(|other| !(region.start <= other.start && other.end <= region.end));
        regions.push(region);
    }
    regions
}

fn innermost(trace: &Trace, at: OpIndex, forward_end: OpIndex) -> ActiveRegion {
    let around = trace.regions.iter().filter(|region| {
        region.start <= at && at < region.end && region.module != 0 && region.end <= forward_end
    });
    let smallest = around.min_by_key(|region| region.end.0 - region.start.0);
    match smallest {
        Some(region) => ActiveRegion {
            module: trace.string(region.module).to_owned(),
            call: region.call,
            start: region.start,
            end: region.end,
        },
        None => ActiveRegion {
            module: String::new(),
            call: 0,
            start: OpIndex(0),
            end: forward_end,
        },
    }
}

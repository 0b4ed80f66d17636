//! From what is done to each allocation to what the executor needs.
//!
//! Responsible for addressing allocations by forward op, for which drops nothing is computed again for, and for the smallest set of module calls in which the
//! executor has to watch. Not responsible for choosing the set.

use std::collections::BTreeMap;

use crate::plan::search::problem::Problem;
use crate::plan::search::transfers::Offer;
use crate::plan::{ActiveRegion, Dropped, Offload, Remat, Shrink};
use crate::step::{Narrow, Treatment};
use crate::trace::{AllocationId, OpIndex, Trace};

/// What the executor needs for a set of treatments.
#[derive(Default)]
pub(in crate::plan) struct Directions {
    /// To compute again; absent where nothing is.
    pub(in crate::plan) remat: Option<Remat>,
    /// To let go of, since nothing is computed again for it; absent where nothing is.
    pub(in crate::plan) unneeded_saves: Option<Remat>,
    /// To offload; absent where nothing is.
    pub(in crate::plan) offload: Option<Offload>,
    /// To hold in fewer bits; absent where nothing is.
    pub(in crate::plan) shrink: Option<Shrink>,
}

/// The directions for `treatments`.
pub(in crate::plan) fn directions(
    problem: &Problem<'_>,
    treatments: &[Treatment],
    offer: Option<&Offer>,
) -> Directions {
    let unneeded = unneeded(problem, treatments);
    let drops = addressed(problem, treatments, Treatment::is_drop);
    let (unneeded, drops): (Vec<_>, Vec<_>) =
        drops.into_iter().partition(|(id, _)| unneeded[id.index()]);
    let stores = addressed(problem, treatments, Treatment::is_store);
    let narrowed = |narrow| {
        let is_meant = move |it| matches!(it, Treatment::Shrink { to, .. } if to == narrow);
        let found = addressed(problem, treatments, is_meant).into_iter();
        found.map(|(_, shrunk)| shrunk).collect::<Vec<_>>()
    };
    let (half, eight_bit) = (narrowed(Narrow::Half), narrowed(Narrow::EightBit));
    let watch = Watch::new(problem, treatments);
    let dropping = |drops: Vec<(AllocationId, Dropped)>| {
        (!drops.is_empty()).then(|| Remat {
            drops: drops.into_iter().map(|(_, drop)| drop).collect(),
            active: watch.active.clone(),
            names: watch.names.clone(),
            forward: watch.forward.clone(),
        })
    };
    let remat = dropping(drops);
    let unneeded_saves = dropping(unneeded);
    let shrink = (!half.is_empty() || !eight_bit.is_empty()).then(|| Shrink {
        half,
        eight_bit,
        active: watch.active.clone(),
        names: watch.names.clone(),
        forward: watch.forward.clone(),
    });
    let offload = offer.filter(|_| !stores.is_empty()).map(|offer| {
        let place = |id| stores.iter().position(|&(stored, _)| stored == id);
        let order = problem.model.fetch_order(treatments).filter_map(place);
        Offload {
            tier: offer.tier,
            folder: offer.folder.clone(),
            window_bytes: problem.model.variant.window_bytes,
            order: order
                .filter_map(|place| u32::try_from(place).ok())
                .collect(),
            stores: stores.iter().map(|(_, store)| store.clone()).collect(),
            active: watch.active,
            names: watch.names,
            forward: watch.forward,
        }
    });
    Directions {
        remat,
        unneeded_saves,
        offload,
        shrink,
    }
}

/// Which drops nothing is computed again for: backward asks neither for them nor for anything dropped that is made
/// from them.
fn unneeded(problem: &Problem<'_>, treatments: &[Treatment]) -> Vec<bool> {
    let is_dropped = |id: AllocationId| treatments[id.index()].is_drop();
    let ids = (0..treatments.len()).filter_map(|index| u32::try_from(index).ok());
    let dropped: Vec<AllocationId> = ids.map(AllocationId).filter(|&id| is_dropped(id)).collect();
    let mut unneeded = vec![false; treatments.len()];
    for id in &dropped {
        unneeded[id.index()] = true;
    }
    let asked_for = dropped.iter().filter(|&&id| problem.may_be_asked_for(id));
    let mut queue: Vec<AllocationId> = asked_for.copied().collect();
    while let Some(id) = queue.pop() {
        if std::mem::replace(&mut unneeded[id.index()], false) {
            queue.extend(&problem.inputs[id.index()]);
        }
    }
    unneeded
}

/// Where the executor watches, and what it sees there.
struct Watch {
    active: Vec<ActiveRegion>,
    names: Vec<String>,
    forward: Vec<u32>,
}

impl Watch {
    fn new(problem: &Problem<'_>, treatments: &[Treatment]) -> Self {
        let trace = problem.trace;
        let ops = trace.ops[..trace.forward_end().index()].iter();
        let (names, forward) = interned(ops.map(|op| trace.string(op.name).to_owned()));
        Self {
            active: active_regions(trace, treatments),
            names,
            forward,
        }
    }
}

/// How many ops of forward the executor watches.
pub(in crate::plan) fn watched_ops(trace: &Trace, treatments: &[Treatment]) -> u64 {
    if treatments.iter().all(|treatment| treatment.is_keep()) {
        return 0;
    }
    let regions = active_regions(trace, treatments);
    regions
        .iter()
        .map(|region| u64::from(region.end.0 - region.start.0))
        .sum()
}

/// Texts in order, as the distinct ones and an index into them for each.
pub(super) fn interned(texts: impl Iterator<Item = String>) -> (Vec<String>, Vec<u32>) {
    let mut indices = BTreeMap::new();
    let mut distinct = Vec::new();
    let order = texts.map(|text| {
        *indices.entry(text).or_insert_with_key(|text| {
            distinct.push(text.clone());
            u32::try_from(distinct.len() - 1).unwrap_or(u32::MAX)
        })
    });
    let order = order.collect();
    (distinct, order)
}

/// The allocations of one kind of treatment by creating op, ascending.
fn addressed(
    problem: &Problem<'_>,
    treatments: &[Treatment],
    is_meant: impl Fn(Treatment) -> bool,
) -> Vec<(AllocationId, Dropped)> {
    let mut found: Vec<(AllocationId, Dropped)> = (0..treatments.len())
        .filter(|&index| is_meant(treatments[index]))
        .filter_map(|index| {
            let id = AllocationId(u32::try_from(index).ok()?);
            let mut dropped = dropped_allocation(problem.trace, id)?;
            let home = treatments[index].home();
            dropped.home = (home != Treatment::NO_HOME).then_some(home);
            Some((id, dropped))
        })
        .collect();
    found.sort_by_key(|(_, drop)| (drop.op, drop.output));
    found
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
/// save an allocation that is not simply kept.
fn active_regions(trace: &Trace, treatments: &[Treatment]) -> Vec<ActiveRegion> {
    let forward_end = trace.forward_end();
    let is_treated = |value| !treatments[trace.allocation_of(value).index()].is_keep();
    let mut seen = vec![false; forward_end.index()];
    for (i, op) in trace.ops[..forward_end.index()].iter().enumerate() {
        let makes = op
            .outputs
            .iter()
            .chain(&op.writes)
            .any(|&value| is_treated(value));
        seen[i] = makes;
    }
    for saved in trace.saved.iter().filter(|saved| is_treated(saved.value)) {
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

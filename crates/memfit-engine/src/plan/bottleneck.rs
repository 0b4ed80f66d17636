//! What a plan says about itself apart from its actions.
//!
//! Responsible for the moment that stops the peak from going lower, for what no plan can move, and for
//! telling which trace a plan belongs to.

use std::collections::{BTreeMap, BTreeSet};

use super::Bottleneck;
use super::search::problem::Candidate;
use crate::bytes::Bytes;
use crate::step::{Evaluator, StepModel, Variant};
use crate::trace::{AllocationId, Category, OpIndex, Phase, Trace};

/// What is alive at the peak of a candidate.
pub(super) fn bottleneck(trace: &Trace, variant: Variant, candidate: &Candidate) -> Bottleneck {
    let model = StepModel::new(trace, variant);
    let holdings = Evaluator::new(&model).holdings_at_peak(&candidate.treatments);
    let mut breakdown: Vec<(Category, Bytes)> = Vec::new();
    if let Some(away) = variant.offload_parameters {
        breakdown.push((Category::Parameter, away.held_bytes(trace)));
    }
    for holding in holdings {
        let category = trace.allocations[holding.allocation.index()].category;
        match breakdown.iter_mut().find(|(known, _)| *known == category) {
            Some((_, bytes)) => *bytes += holding.bytes,
            None => breakdown.push((category, holding.bytes)),
        }
    }
    breakdown.sort_by_key(|&(category, bytes)| (std::cmp::Reverse(bytes), category));
    let moment = candidate.evaluation.moment;
    let op = trace
        .ops
        .get(moment.replay.unwrap_or(moment.position).index());
    let phase = trace
        .ops
        .get(moment.position.index())
        .map_or(Phase::Backward, |op| op.phase);
    let text = |index: Option<u32>| index.map_or(String::new(), |i| trace.string(i).to_owned());
    Bottleneck {
        op: text(op.map(|op| op.name)),
        module: text(op.map(|op| op.module)),
        source: text(op.map(|op| op.source)),
        phase,
        breakdown,
    }
}

/// A sentence about what is alive throughout the step, where that alone is above the cap. It counts what the `least`
/// variant holds: nothing for state and parameters that are offloaded, a byte a number for state in 8 bits.
pub(super) fn standing_note(
    trace: &Trace,
    least: Variant,
    cap: Bytes,
    budget: Bytes,
) -> Option<String> {
    let standing = standing_bytes(trace, least);
    let total: Bytes = standing.iter().map(|&(_, bytes)| bytes).sum();
    let terms: Vec<String> = standing
        .iter()
        .map(|(category, bytes)| format!("{} {bytes}", category.name().replace('_', " ")))
        .collect();
    (total > cap).then(|| {
        format!(
            "{} = {total} are alive throughout the step, above the budget of {budget}",
            terms.join(" + "),
        )
    })
}

/// What is alive from the first op to the last, by category.
fn standing_bytes(trace: &Trace, least: Variant) -> Vec<(Category, Bytes)> {
    let mut standing: Vec<(Category, Bytes)> = Vec::new();
    let updates = trace.updates.iter();
    let mut away: BTreeSet<AllocationId> = least
        .offload_optimizer
        .into_iter()
        .flat_map(|away| {
            updates
                .clone()
                .flat_map(move |update| away.of(trace, update))
        })
        .collect();
    if let Some(parameters) = least.offload_parameters {
        away.extend(parameters.of(trace));
        standing.push((Category::Parameter, parameters.held_bytes(trace)));
    }
    let moments = least.eight_bit_state.map(|narrow| narrow.moments(trace));
    let moments = moments.into_iter().flatten().flatten();
    let narrow: BTreeMap<AllocationId, Bytes> =
        moments.map(|moment| (moment.state, moment.bytes)).collect();
    let ids = (0..).map(AllocationId);
    for (id, allocation) in ids.zip(&trace.allocations) {
        let throughout = allocation.natural.first() == Some(&(OpIndex(0), trace.end()));
        if !throughout || away.contains(&id) {
            continue;
        }
        let bytes = narrow.get(&id).copied().unwrap_or(allocation.bytes);
        match standing
            .iter_mut()
            .find(|(known, _)| *known == allocation.category)
        {
            Some((_, sum)) => *sum += bytes,
            None => standing.push((allocation.category, bytes)),
        }
    }
    standing.sort_by_key(|&(category, bytes)| (std::cmp::Reverse(bytes), category));
    standing
}

/// FNV-1a over sizes and op names: tells whether a plan belongs to a trace, not who wrote it.
pub(super) fn digest(trace: &Trace) -> String {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut eat = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for op in &trace.ops {
        eat(trace.string(op.name).as_bytes());
    }
    for allocation in &trace.allocations {
        eat(&allocation.bytes.0.to_le_bytes());
    }
    format!("{hash:016x}")
}

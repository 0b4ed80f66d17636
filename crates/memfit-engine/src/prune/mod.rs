//! Structured pruning: which channels of a model can go, and what goes with them.
//!
//! Responsible for the groups of channels that a trace shows, for why others stay, and for whether the step of a pruned
//! model is the one that was meant. Not responsible for scores, for how much goes, nor for cutting parameters: that is the
//! Python package's, which has the weights.
//!
//! # What a channel is
//!
//! All indices that have to go together, of parameters, buffers and activations: an output of one layer, its bias, what a
//! norm has of it, the input of the next layer. Without it the rest of the model computes what it would if all of the
//! channel's parameters were zero. Where views split a dimension the channel is one index of the outermost part that may
//! go: a whole head, with all rows of `q`, `k` and `v`.
//!
//! ```text
//! fc1.weight [1536, 384]  --mm-->  [n, 1536]  --gelu-->  [n, 1536]  --mm-->  fc2.weight [384, 1536]
//!        dimension 0  ~  dimension 1  ~  dimension 1  ~  dimension 1: one group of 1,536 channels
//! ```
//!
//! # Right or loud
//!
//! An op without a rule has its dimensions stay. A size that code says (`reshape(n, 3, 12, 64)`) is not in a trace: so the
//! pruned model is recorded again, and [`Separation::deviation`] names the op at which the step is another than meant.
//! Asked again with that op among [`Request::stays`], its channels stay.

mod axes;
mod channels;
#[cfg(test)]
mod tests;
mod ties;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use self::axes::{Axes, Dimension, Part};
use self::channels::Channels;
use self::ties::{Ties, Why, is_elementwise, short_name};
use crate::trace::{Allocation, Category, Op, Phase, Trace};

/// What may be pruned.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Whether channels may go that a norm takes its mean over, so that the rest is normalised anew.
    #[serde(default)]
    pub through_norms: bool,
    /// Ops whose dimensions stay, by index: found to have sizes that code says.
    #[serde(default)]
    pub stays: Vec<usize>,
}

/// Channels of one kind: of the same dimensions, so that one can go as well as another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Group {
    /// How many there are.
    pub channels: usize,
    /// What each of them has of parameters and buffers.
    pub members: Vec<Member>,
}

/// What the channels of a group have of one dimension of one parameter or buffer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Member {
    /// Name of the parameter or buffer.
    pub name: String,
    /// The dimension.
    pub dimension: usize,
    /// Elements of the dimension that go together: 1, or the size of a head.
    pub unit: u64,
    /// Positions along the dimension, of which element `x` is at `x / unit % count`.
    pub count: u64,
    /// By channel, its positions.
    pub positions: Vec<Vec<u64>>,
}

/// Dimensions that stay, for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stay {
    /// The reason, as a clause.
    pub why: String,
    /// The parameters, in order.
    pub parameters: Vec<String>,
}

/// What of a model can be pruned.
#[derive(Debug, Clone)]
pub struct Separation {
    /// The groups, in the order of the first parameter of each.
    pub groups: Vec<Group>,
    /// What stays although it is a dimension of channels.
    pub stays: Vec<Stay>,
    axes: Axes,
    /// By node, its channel.
    roots: Vec<usize>,
    /// By group, its channels.
    channels: Vec<Vec<usize>>,
}

/// Finds the groups of a step.
#[must_use]
pub fn separate(trace: &Trace, request: &Request) -> Separation {
    let forward = forward_ops(trace);
    let values = values_of(&trace.ops[..forward]);
    let mut axes = Axes::of(trace, &values);
    let mut ties = Ties::of(trace, forward, request.through_norms);
    stay_as_tried(trace, forward, request, &mut ties);
    let mut channels = Channels::of(trace, &mut axes, &ties, &values);
    stay_outside(trace, &axes, &mut channels, forward);
    channels.choose_outer(&axes);
    for side in &ties.tried {
        channels.stay(&axes, &side.0, side.1);
    }
    let stays = stays(trace, &axes, &mut channels);
    let (groups, roots_of_groups) = groups(trace, &axes, &mut channels);
    Separation {
        groups,
        stays,
        roots: (0..axes.nodes).map(|node| channels.root(node)).collect(),
        axes,
        channels: roots_of_groups,
    }
}

fn forward_ops(trace: &Trace) -> usize {
    let ops = trace.ops.iter();
    ops.take_while(|op| op.phase == Phase::Forward).count()
}

/// The values of ops, in the order in which they appear.
fn values_of(ops: &[Op]) -> Vec<usize> {
    let mut seen = BTreeSet::new();
    let mut values = Vec::new();
    for op in ops {
        for id in op.reads.iter().chain(&op.outputs).chain(&op.writes) {
            if seen.insert(id.index()) {
                values.push(id.index());
            }
        }
    }
    values
}

/// Has the dimensions of ops stay that were tried, and of all ops of their kind at the same line in the same module of
/// other layers.
fn stay_as_tried(trace: &Trace, forward: usize, request: &Request, ties: &mut Ties) {
    let kind = |op: &Op| (op.name, op.source, without_numbers(trace.string(op.module)));
    let tried = request
        .stays
        .iter()
        .filter_map(|&index| trace.ops.get(index));
    let tried: BTreeSet<_> = tried.map(kind).collect();
    for (index, op) in trace.ops[..forward].iter().enumerate() {
        if tried.contains(&kind(op)) {
            ties.stay_tried(trace, op, index);
        }
    }
}

/// A module's path without the numbers of layers.
fn without_numbers(path: &str) -> Vec<&str> {
    let parts = path.split('.');
    parts.filter(|part| part.parse::<u64>().is_err()).collect()
}

/// Has what comes from outside stay, and what goes there.
fn stay_outside(trace: &Trace, axes: &Axes, channels: &mut Channels, forward: usize) {
    let ends = outermost_ends(trace, forward);
    for (index, allocation) in trace.allocations.iter().enumerate() {
        let why = match allocation.category {
            Category::Input => Why::Input,
            Category::Parameter | Category::ModuleBuffer if allocation.name != 0 => continue,
            _ if allocation.producer.is_none() => Why::Constant,
            _ if ends.iter().any(|&end| outlives(allocation, end)) => Why::Output,
            _ => continue,
        };
        for &axis in axes.of_allocation(index) {
            for node in axes.atoms(axis).iter().flat_map(axes::Atom::nodes) {
                channels.mark(node, why);
            }
        }
    }
}

/// The positions at which calls of modules end that are inside no other.
fn outermost_ends(trace: &Trace, forward: usize) -> Vec<usize> {
    let mut calls: Vec<_> = trace.regions.iter().collect();
    calls.sort_by_key(|region| (region.start, std::cmp::Reverse(region.end)));
    let mut ends: Vec<usize> = Vec::new();
    for call in calls {
        let (start, end) = (call.start.index(), call.end.index());
        if end <= forward && ends.last().is_none_or(|&last| start >= last) {
            ends.push(end);
        }
    }
    ends
}

/// Whether somebody holds it on from before a position.
fn outlives(allocation: &Allocation, position: usize) -> bool {
    let is_before = allocation.producer.is_some_and(|op| op.index() < position);
    let mut natural = allocation.natural.iter();
    is_before && natural.any(|(start, end)| start.index() < position && position < end.index())
}

/// Parameters and buffers with their axes, in order.
fn named(trace: &Trace) -> impl Iterator<Item = (usize, &str)> {
    let all = trace.allocations.iter().enumerate();
    all.filter_map(|(index, allocation)| match allocation.category {
        Category::Parameter | Category::ModuleBuffer if allocation.name != 0 => {
            Some((index, trace.string(allocation.name)))
        }
        _ => None,
    })
}

/// The groups, and the channels of each.
fn groups(trace: &Trace, axes: &Axes, channels: &mut Channels) -> (Vec<Group>, Vec<Vec<usize>>) {
    // Two channels are of one kind where they are indices of the same atoms.
    let mut atoms_of: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for axis in 0..axes.all.len() {
        for atom in axes.atoms(axis) {
            for node in atom.nodes() {
                if channels.why(node).is_none() {
                    let atoms = atoms_of.entry(channels.root(node)).or_default();
                    if atoms.last() != Some(&atom.first_node) {
                        atoms.push(atom.first_node);
                    }
                }
            }
        }
    }
    let mut kinds: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
    for (root, atoms) in atoms_of {
        kinds.entry(atoms).or_default().push(root);
    }
    let mut place_of = BTreeMap::new();
    for (kind, roots) in kinds.values().enumerate() {
        for (channel, &root) in roots.iter().enumerate() {
            place_of.insert(root, (kind, channel));
        }
    }
    let kinds: Vec<_> = kinds.into_values().collect();
    let mut members: Vec<Vec<Member>> = vec![Vec::new(); kinds.len()];
    for (allocation, name) in named(trace) {
        for &axis in axes.of_allocation(allocation) {
            for atom in axes.atoms(axis) {
                let mut here: BTreeMap<usize, Member> = BTreeMap::new();
                for (position, node) in (0_u64..).zip(atom.nodes()) {
                    let Some(&(kind, channel)) = place_of.get(&channels.root(node)) else {
                        continue;
                    };
                    let member = here.entry(kind).or_insert_with(|| Member {
                        name: name.to_owned(),
                        dimension: axes.all[axis].dimension,
                        unit: atom.unit,
                        count: atom.count,
                        positions: vec![Vec::new(); kinds[kind].len()],
                    });
                    member.positions[channel].push(position);
                }
                for (kind, member) in here {
                    members[kind].push(member);
                }
            }
        }
    }
    let found = members.into_iter().zip(kinds);
    // What one parameter has alone nothing reads: it is no channel between layers.
    let mut found: Vec<_> = found
        .filter(|(members, roots)| members.len() > 1 && roots.len() > 1)
        .collect();
    let order: BTreeMap<_, _> = named(trace)
        .enumerate()
        .map(|(at, (_, name))| (name, at))
        .collect();
    found.sort_by_key(|(members, _)| order.get(members[0].name.as_str()).copied());
    let group = |(members, roots): (Vec<Member>, Vec<usize>)| {
        (
            Group {
                channels: roots.len(),
                members,
            },
            roots,
        )
    };
    found.into_iter().map(group).unzip()
}

/// What stays, by reason: dimensions of parameters none of whose channels may go.
fn stays(trace: &Trace, axes: &Axes, channels: &mut Channels) -> Vec<Stay> {
    let mut by_reason: BTreeMap<Why, Vec<String>> = BTreeMap::new();
    for (allocation, name) in named(trace) {
        if trace.allocations[allocation].category != Category::Parameter {
            continue;
        }
        if !axes.has(allocation) {
            by_reason
                .entry(Why::Unread)
                .or_default()
                .push(name.to_owned());
        }
        for &axis in axes.of_allocation(allocation) {
            let atoms = axes.atoms(axis);
            let nodes = atoms.iter().rev().flat_map(axes::Atom::nodes);
            let whys: Option<Vec<_>> = nodes.map(|node| channels.why(node)).collect();
            let is_inner = |why: &Why| matches!(why, Why::Position | Why::Inner | Why::Picked);
            let whys = whys.unwrap_or_default();
            let Some(&why) = whys.iter().find(|why| !is_inner(why)) else {
                continue;
            };
            let names = by_reason.entry(why).or_default();
            if names.last().is_none_or(|last| last != name) {
                names.push(name.to_owned());
            }
        }
    }
    let mut told: Vec<Stay> = Vec::new();
    for (why, parameters) in by_reason {
        let why = reason(trace, why);
        match told.iter_mut().find(|stay| stay.why == why) {
            Some(stay) => stay.parameters.extend(parameters),
            None => told.push(Stay { why, parameters }),
        }
    }
    told
}

fn reason(trace: &Trace, why: Why) -> String {
    let at = |index: usize| {
        let op = &trace.ops[index];
        let source = trace.string(op.source);
        let place = source.rsplit(['/', '\\']).next().unwrap_or(source);
        (
            short_name(trace, op),
            if place.is_empty() {
                "an unknown line"
            } else {
                place
            },
        )
    };
    match why {
        Why::Input => "the batch has it, or its values choose an index of it".to_owned(),
        Why::Output => "the model returns it".to_owned(),
        Why::Constant => "a tensor has it that is not the model's".to_owned(),
        Why::InCode(op) => format!("code says its size at {}", at(op).1),
        Why::NotUnderstood(op) => format!("`{}` is not understood, at {}", at(op).0, at(op).1),
        Why::Reduced(op) => format!("`{}` takes all of it together, at {}", at(op).0, at(op).1),
        Why::Picked => "code takes one index of it".to_owned(),
        Why::Unread => "the step does not read it".to_owned(),
        Why::Split | Why::Inner | Why::Position => {
            "views split it in ways that do not go together".to_owned()
        }
    }
}

impl Separation {
    /// The first op of the forward that is another than it should be in the step of the pruned model; none where all are
    /// as meant.
    ///
    /// `removed` has for each group the channels that are gone, `again` is the pruned model's step. Views and copies are
    /// passed over: how many there are may depend on sizes.
    #[must_use]
    pub fn deviation(&self, trace: &Trace, removed: &[Vec<usize>], again: &Trace) -> Option<usize> {
        let mut gone = BTreeSet::new();
        for (roots, removed) in self.channels.iter().zip(removed) {
            gone.extend(
                removed
                    .iter()
                    .filter_map(|&channel| roots.get(channel).copied()),
            );
        }
        let meant = work(trace);
        let mut found = work(again).into_iter().map(|(_, op)| op);
        let mut last = 0;
        for (index, op) in meant {
            last = index;
            let Some(other) = found.next() else {
                return Some(index);
            };
            if !self.is_as_meant(trace, op, &gone, again, other) {
                return Some(index);
            }
        }
        found.next().map(|_| last)
    }

    fn is_as_meant(
        &self,
        trace: &Trace,
        op: &Op,
        gone: &BTreeSet<usize>,
        again: &Trace,
        other: &Op,
    ) -> bool {
        let name = short_name(trace, op);
        if trace.string(op.name) != again.string(other.name)
            || op.reads.len() != other.reads.len()
            || op.outputs.len() != other.outputs.len()
            || is_elementwise(name) && trace.string(op.arguments) != again.string(other.arguments)
        {
            return false;
        }
        let values = op.reads.iter().chain(&op.outputs);
        let others = other.reads.iter().chain(&other.outputs);
        values.zip(others).all(|(value, other)| {
            let found = &again.values[other.index()].shape;
            let before = &trace.values[value.index()].shape;
            found.len() == before.len()
                && (0..found.len()).all(|dimension| {
                    let size = self.size(value.index(), dimension, before[dimension], gone);
                    size.is_none_or(|size| size == found[dimension])
                })
        })
    }

    /// The size of a dimension without what is gone; none where it goes with any.
    fn size(
        &self,
        value: usize,
        dimension: usize,
        before: u64,
        gone: &BTreeSet<usize>,
    ) -> Option<u64> {
        if *self.axes.dimension(value, dimension) == Dimension::Repeated {
            return None;
        }
        let Some(pieces) = self.axes.resolve(value, dimension, Part::All) else {
            return Some(before);
        };
        let left = pieces.iter().map(|piece| match self.axes.nodes_of(piece) {
            Some(nodes) => nodes
                .filter(|&node| !gone.contains(&self.roots[node]))
                .count() as u64,
            None => piece.count,
        });
        Some(axes::product(left))
    }
}

/// The ops of a forward that compute, by index.
fn work(trace: &Trace) -> Vec<(usize, &Op)> {
    let ops = trace.ops[..forward_ops(trace)].iter().enumerate();
    ops.filter(|(_, op)| !op.view && short_name(trace, op) != "clone")
        .collect()
}

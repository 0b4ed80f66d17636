//! Channels: what goes together when one index of one dimension goes.
//!
//! Responsible for joining indices that are tied, and for which of them stay. Not responsible for what ops say
//! ([`super::ties`]).

use super::axes::{Axes, Dimension, Part, Piece};
use super::ties::{Side, Ties, Why};
use crate::trace::Trace;

/// The channels of a forward: sets of nodes, each an index of an atom of an axis.
#[derive(Debug, Clone)]
pub(super) struct Channels {
    parents: Vec<u32>,
    /// By root, why the channel stays.
    stays: Vec<Option<Why>>,
}

impl Channels {
    /// Joins what is tied, after cutting axes until both sides of each tie are cut alike.
    pub(super) fn of(trace: &Trace, axes: &mut Axes, ties: &Ties, values: &[usize]) -> Self {
        cut_alike(axes, ties);
        axes.number();
        let nodes = axes.nodes;
        let mut channels = Self {
            parents: (0..u32::try_from(nodes).unwrap_or(u32::MAX)).collect(),
            stays: vec![None; nodes],
        };
        let mut stays: Vec<(Side, Why)> = ties.stays.clone();
        for (left, right) in &ties.pairs {
            if channels.tie(axes, left, right).is_none() {
                // Whatever the reason, what cannot be followed stays on both sides.
                stays.extend([(*left, Why::Split), (*right, Why::Split)]);
            }
        }
        for (side, why) in &stays {
            channels.stay(axes, side, *why);
        }
        for axis in axes.broken() {
            for atom in axes.atoms(axis) {
                atom.nodes()
                    .for_each(|node| channels.mark(node, Why::Split));
            }
        }
        for &value in values {
            for atom in axes.picked(trace, value) {
                atom.nodes()
                    .for_each(|node| channels.mark(node, Why::Picked));
            }
        }
        channels
    }

    /// The channel of a node.
    pub(super) fn root(&mut self, node: usize) -> usize {
        let mut root = node;
        while self.parents[root] as usize != root {
            root = self.parents[root] as usize;
        }
        let mut at = node;
        while self.parents[at] as usize != root {
            at = std::mem::replace(
                &mut self.parents[at],
                u32::try_from(root).unwrap_or(u32::MAX),
            ) as usize;
        }
        root
    }

    /// Why the channel of a node stays; none where it may go.
    pub(super) fn why(&mut self, node: usize) -> Option<Why> {
        let root = self.root(node);
        self.stays[root]
    }

    /// Has the channel of a node stay.
    pub(super) fn mark(&mut self, node: usize, why: Why) {
        let root = self.root(node);
        let before = self.stays[root];
        self.stays[root] = Some(before.map_or(why, |before| before.min(why)));
    }

    /// Has the channels along a dimension stay.
    pub(super) fn stay(&mut self, axes: &Axes, side: &Side, why: Why) {
        let pieces = match axes.resolve(side.value, side.dimension, side.part) {
            Some(pieces) => pieces,
            // A part that is not to be had: all of it stays.
            None => axes
                .resolve(side.value, side.dimension, Part::All)
                .unwrap_or_default(),
        };
        for node in pieces
            .iter()
            .filter_map(|piece| axes.nodes_of(piece))
            .flatten()
        {
            self.mark(node, why);
        }
    }

    /// Joins both sides, index by index; none where they cannot be laid side by side.
    fn tie(&mut self, axes: &Axes, left: &Side, right: &Side) -> Option<()> {
        let is_repeated =
            |side: &Side| *axes.dimension(side.value, side.dimension) == Dimension::Repeated;
        if is_repeated(left) || is_repeated(right) {
            return Some(()); // the same element again and again goes with any
        }
        let left = axes.resolve(left.value, left.dimension, left.part)?;
        let right = axes.resolve(right.value, right.dimension, right.part)?;
        if !is_alike(&left, &right) {
            return None;
        }
        let nodes = |piece: &Piece| axes.nodes_of(piece);
        let left: Vec<_> = left.iter().map(nodes).collect::<Option<_>>()?;
        let right: Vec<_> = right.iter().map(nodes).collect::<Option<_>>()?;
        for (left, right) in left.into_iter().zip(right) {
            for (a, b) in left.zip(right) {
                self.join(a, b);
            }
        }
        Some(())
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.root(a), self.root(b));
        let (first, second) = (a.min(b), a.max(b));
        self.parents[second] = u32::try_from(first).unwrap_or(u32::MAX);
    }

    /// Of an axis that views split, lets only the outermost part of its channels go: a head is whole, and where heads stay
    /// their size stays too.
    pub(super) fn choose_outer(&mut self, axes: &Axes) {
        for axis in 0..axes.all.len() {
            let mut atoms = axes.atoms(axis);
            if atoms.len() < 2 {
                continue;
            }
            atoms.reverse();
            let mut is_chosen = false;
            for atom in atoms {
                if is_chosen {
                    atom.nodes().for_each(|node| self.mark(node, Why::Inner));
                } else {
                    let whys: Vec<_> = atom.nodes().map(|node| self.why(node)).collect();
                    // What is outside of the channels by nature: the batch, pixels, q, k and v in one.
                    let is_outside = |why: &Option<Why>| {
                        matches!(why, Some(Why::Input | Why::Picked | Why::Position))
                    };
                    is_chosen = !whys.iter().all(is_outside);
                }
            }
        }
    }
}

/// Whether both have the same factors.
fn is_alike(left: &[Piece], right: &[Piece]) -> bool {
    left.len() == right.len() && left.iter().zip(right).all(|(a, b)| a.count == b.count)
}

/// Cuts axes where the other side of a tie is cut, until nothing changes: each cut divides its axis, so that ends.
fn cut_alike(axes: &mut Axes, ties: &Ties) {
    loop {
        let mut changes = false;
        for (left, right) in &ties.pairs {
            for side in [left, right] {
                if let (Part::Outside(count) | Part::Inside(count), Dimension::Along(_)) =
                    (side.part, axes.dimension(side.value, side.dimension))
                {
                    let pieces = axes.resolve(side.value, side.dimension, Part::All);
                    changes |= axes.cut(&pieces.unwrap_or_default(), count);
                }
            }
            let a = axes.resolve(left.value, left.dimension, left.part);
            let b = axes.resolve(right.value, right.dimension, right.part);
            let (Some(a), Some(b)) = (a, b) else { continue };
            for (from, to) in [(&a, &b), (&b, &a)] {
                let mut product = 1_u64;
                for piece in from.iter().rev() {
                    product = product.saturating_mul(piece.count);
                    changes |= axes.cut(to, product);
                }
            }
        }
        for (side, _) in &ties.stays {
            if let Part::Inside(count) = side.part {
                let pieces = axes.resolve(side.value, side.dimension, Part::All);
                changes |= axes.cut(&pieces.unwrap_or_default(), count);
            }
        }
        if !changes {
            return;
        }
    }
}

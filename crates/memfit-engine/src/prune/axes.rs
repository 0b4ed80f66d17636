//! Dimensions of tensors as parts of the dimensions of what was allocated.
//!
//! Responsible for the axes of each allocation, for what part of them a dimension of a value runs along, and for where
//! axes are cut because views or ops see several dimensions in one. Not responsible for which dimensions belong together.
//!
//! A trace says of each value where it lies: allocation, offset, shape, strides. So a transposed weight needs no rule, nor
//! does a view: a dimension of size 12 and stride 64 in an axis of size 768 and stride 1 is the axis cut at 64, and its
//! outer part.
//!
//! ```text
//! axis of 2304, stride 1                     cuts 1, 64
//! split into three, the second               piece: unit 1, count 768, start 768
//! ... viewed as [12, 64]                     pieces: unit 64, count 12, start 768; unit 1, count 64, start 768
//! ```

use std::collections::BTreeMap;

use crate::trace::{Trace, Value};

/// More channels than this no dimension has that is worth pruning; such axes stay.
const MOST_CHANNELS: u64 = 1 << 21;
/// Most channels of a trace altogether: what lies beyond stays.
const MOST_NODES: usize = 1 << 25;

/// One dimension of an allocation, of a size above 1.
#[derive(Debug, Clone)]
pub(super) struct Axis {
    /// Which dimension of the value that the allocation was made as.
    pub(super) dimension: usize,
    pub(super) size: u64,
    stride: u64,
    /// Ascending divisors of one another, the first is 1: from each to the next is an atom.
    cuts: Vec<u64>,
    /// Whether views see it in ways that do not go together.
    is_broken: bool,
    first_node: Option<usize>,
}

/// A part of an axis that is one factor of its size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Atom {
    /// Elements of the axis from one index to the next.
    pub(super) unit: u64,
    pub(super) count: u64,
    pub(super) first_node: usize,
}

impl Atom {
    /// Its channels.
    pub(super) fn nodes(&self) -> std::ops::Range<usize> {
        self.first_node..self.first_node + usize::try_from(self.count).unwrap_or_default()
    }
}

/// What a dimension of a value runs along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) axis: usize,
    pub(super) unit: u64,
    pub(super) count: u64,
    /// Where the value begins along the axis.
    start: u64,
}

/// A dimension of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Dimension {
    /// Pieces, the outermost first; none for a size of 1.
    Along(Vec<Piece>),
    /// The same elements again and again: a size that code says.
    Repeated,
    /// A view that has no such form.
    Unknown,
}

/// Which part of a dimension is meant.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    All,
    /// So many from there.
    Range(u64, u64),
    /// What is outside of so many.
    Outside(u64),
    /// So many, innermost.
    Inside(u64),
}

/// The axes of all that a forward touches.
#[derive(Debug, Clone)]
pub(super) struct Axes {
    pub(super) all: Vec<Axis>,
    of_allocation: BTreeMap<usize, Vec<usize>>,
    dimensions: BTreeMap<usize, Vec<Dimension>>,
    pub(super) nodes: usize,
}

impl Axes {
    /// The axes of the values, which are those that ops of the forward touch.
    pub(super) fn of(trace: &Trace, values: &[usize]) -> Self {
        let mut found = Self {
            all: Vec::new(),
            of_allocation: BTreeMap::new(),
            dimensions: BTreeMap::new(),
            nodes: 0,
        };
        for &index in values {
            let value = &trace.values[index];
            let allocation = value.allocation.index();
            if !found.of_allocation.contains_key(&allocation) {
                let whole = trace.allocations[allocation].bytes.0;
                found.add_axes(allocation, value, whole);
            }
        }
        for &index in values {
            let dimensions = found.dimensions_of(&trace.values[index]);
            found.dimensions.insert(index, dimensions);
        }
        found.cut_at_units(values);
        found
    }

    /// Takes the axes of an allocation from the first value of it, if that is all of it.
    fn add_axes(&mut self, allocation: usize, value: &Value, whole_bytes: u64) {
        let elements = product(value.shape.iter().copied()).max(1);
        let is_whole = value.offset == 0
            && value.stride.len() == value.shape.len()
            && whole_bytes.is_multiple_of(elements)
            && matches!(whole_bytes / elements, 1 | 2 | 4 | 8 | 16);
        let mut rows = Vec::new();
        for (dimension, (&size, &stride)) in value.shape.iter().zip(&value.stride).enumerate() {
            if size > 1 {
                rows.push((u64::try_from(stride).unwrap_or(0), size, dimension));
            }
        }
        rows.sort_unstable_by(|a, b| b.cmp(a));
        let is_nested = rows.windows(2).all(|pair| {
            let ((outer, ..), (inner, size, _)) = (pair[0], pair[1]);
            inner > 0 && outer.is_multiple_of(inner) && outer / inner >= size
        });
        let is_plain = is_whole && is_nested && rows.iter().all(|row| row.0 > 0);
        let first = self.all.len();
        if is_plain {
            self.all
                .extend(rows.into_iter().map(|(stride, size, dimension)| Axis {
                    dimension,
                    size,
                    stride,
                    cuts: vec![1],
                    is_broken: false,
                    first_node: None,
                }));
        }
        self.of_allocation
            .insert(allocation, (first..self.all.len()).collect());
    }

    fn dimensions_of(&mut self, value: &Value) -> Vec<Dimension> {
        let axes = self.of_allocation.get(&value.allocation.index());
        let axes = axes.cloned().unwrap_or_default();
        let mut left = value.offset;
        let mut starts = BTreeMap::new();
        for &axis in &axes {
            let stride = self.all[axis].stride;
            starts.insert(axis, left / stride);
            left %= stride;
        }
        let strides = value.stride.iter().copied().chain(std::iter::repeat(-1));
        let dimensions: Vec<_> = value
            .shape
            .iter()
            .zip(strides)
            .map(|(&size, stride)| {
                let Ok(stride) = u64::try_from(stride) else {
                    return Dimension::Unknown;
                };
                match (size, stride) {
                    (0, _) => Dimension::Unknown,
                    (1, _) => Dimension::Along(Vec::new()),
                    (_, 0) => Dimension::Repeated,
                    _ => match self.pieces(&axes, &starts, size, stride) {
                        Some(pieces) => Dimension::Along(pieces),
                        None => Dimension::Unknown,
                    },
                }
            })
            .collect();
        if left > 0 || dimensions.contains(&Dimension::Unknown) {
            for axis in axes {
                self.all[axis].is_broken = true;
            }
        }
        dimensions
    }

    /// What a dimension of that size and stride runs along; the axes are those of its allocation, outermost first.
    fn pieces(
        &self,
        axes: &[usize],
        starts: &BTreeMap<usize, u64>,
        size: u64,
        stride: u64,
    ) -> Option<Vec<Piece>> {
        let mut at = axes
            .iter()
            .rposition(|&axis| self.all[axis].stride > stride);
        at = at.map_or(Some(0), |outer| Some(outer + 1));
        let mut at = at?;
        let (mut stride, mut left) = (stride, size);
        let mut pieces = Vec::new();
        loop {
            let index = *axes.get(at)?;
            let here = &self.all[index];
            if !stride.is_multiple_of(here.stride) {
                return None;
            }
            let unit = stride / here.stride;
            let start = starts.get(&index).copied().unwrap_or_default();
            let ends = unit.checked_mul(left - 1)?.checked_add(start)?;
            if ends < here.size {
                pieces.push(Piece {
                    axis: index,
                    unit,
                    count: left,
                    start,
                });
                break;
            }
            // It goes on along the next axis, of which it has to see all.
            let count = here.size / unit;
            let outer = at.checked_sub(1)?;
            let next = self.all[axes[outer]].stride;
            let is_joint = here.size.is_multiple_of(unit)
                && start / unit == 0
                && left.is_multiple_of(count)
                && here.stride.checked_mul(here.size)? == next;
            if !is_joint {
                return None;
            }
            if count > 1 {
                pieces.push(Piece {
                    axis: index,
                    unit,
                    count,
                    start,
                });
            }
            (left, stride, at) = (left / count, next, outer);
            if left == 1 {
                break;
            }
        }
        pieces.reverse();
        Some(pieces)
    }

    fn cut_at_units(&mut self, values: &[usize]) {
        for index in values {
            let dimensions = self.dimensions.get(index).cloned().unwrap_or_default();
            for dimension in dimensions {
                let Dimension::Along(pieces) = dimension else {
                    continue;
                };
                for piece in pieces {
                    if !self.cut_axis(piece.axis, piece.unit) {
                        self.all[piece.axis].is_broken = true;
                    }
                }
            }
        }
    }

    /// Cuts an axis, if that goes with its other cuts.
    fn cut_axis(&mut self, axis: usize, cut: u64) -> bool {
        let axis = &mut self.all[axis];
        let Err(place) = axis.cuts.binary_search(&cut) else {
            return true;
        };
        let divides = |inner: u64, outer: u64| outer.is_multiple_of(inner);
        let fits = axis.cuts[..place].iter().all(|&inner| divides(inner, cut))
            && axis.cuts[place..].iter().all(|&outer| divides(cut, outer))
            && divides(cut, axis.size);
        if fits {
            axis.cuts.insert(place, cut);
        }
        fits
    }

    /// The dimension of a value as written down, before it is cut.
    pub(super) fn dimension(&self, value: usize, dimension: usize) -> &Dimension {
        let found = self
            .dimensions
            .get(&value)
            .and_then(|all| all.get(dimension));
        found.unwrap_or(&Dimension::Unknown)
    }

    /// How many dimensions a value has.
    pub(super) fn rank(&self, value: usize) -> usize {
        self.dimensions.get(&value).map_or(0, Vec::len)
    }

    /// The pieces of a part of a dimension, each within one atom; none where it has no such form.
    pub(super) fn resolve(&self, value: usize, dimension: usize, part: Part) -> Option<Vec<Piece>> {
        let Dimension::Along(pieces) = self.dimension(value, dimension) else {
            return None;
        };
        let pieces = self.refine(pieces)?;
        match part {
            Part::All => Some(pieces),
            Part::Range(start, count) => self.refine(&range(&pieces, start, count)?),
            Part::Outside(count) => Some(pieces[..boundary(&pieces, count)?].to_vec()),
            Part::Inside(count) => Some(pieces[boundary(&pieces, count)?..].to_vec()),
        }
    }

    /// Cuts the pieces where their axes are cut.
    fn refine(&self, pieces: &[Piece]) -> Option<Vec<Piece>> {
        let mut refined = Vec::new();
        for piece in pieces {
            let axis = &self.all[piece.axis];
            if axis.is_broken {
                return None;
            }
            let mut rest = *piece;
            let mut inner = Vec::new();
            let end = piece.unit.checked_mul(piece.count)?;
            for &cut in axis
                .cuts
                .iter()
                .filter(|&&cut| piece.unit < cut && cut < end)
            {
                let count = cut / rest.unit;
                let is_aligned = rest.count.is_multiple_of(count)
                    && (rest.start / rest.unit).is_multiple_of(count);
                if !is_aligned {
                    return None;
                }
                inner.push(Piece { count, ..rest });
                rest = Piece {
                    unit: cut,
                    count: rest.count / count,
                    ..rest
                };
            }
            if rest.count > 1 {
                inner.push(rest);
            }
            inner.reverse();
            refined.extend(inner);
        }
        Some(refined)
    }

    /// Cuts the dimension so that its innermost parts have `count` elements; whether an axis was cut.
    pub(super) fn cut(&mut self, pieces: &[Piece], count: u64) -> bool {
        let mut product = 1_u64;
        for piece in pieces.iter().rev() {
            let next = product.saturating_mul(piece.count);
            if product < count && count < next {
                let inner = count / product;
                let is_aligned = count.is_multiple_of(product)
                    && piece.count.is_multiple_of(inner)
                    && (piece.start / piece.unit).is_multiple_of(inner);
                let cut = piece.unit.saturating_mul(inner);
                let is_new = self.all[piece.axis].cuts.binary_search(&cut).is_err();
                return is_aligned && is_new && self.cut_axis(piece.axis, cut);
            }
            product = next;
        }
        false
    }

    /// Numbers the channels of all axes, when no more cuts are to come.
    pub(super) fn number(&mut self) {
        for axis in &mut self.all {
            let atoms = factors(axis);
            let nodes: u64 = atoms
                .iter()
                .map(|&(_, count)| count)
                .fold(0, u64::saturating_add);
            let nodes = usize::try_from(nodes).unwrap_or(usize::MAX);
            let is_small = atoms.iter().all(|&(_, count)| count <= MOST_CHANNELS);
            if is_small && nodes <= MOST_NODES - self.nodes {
                axis.first_node = Some(self.nodes);
                self.nodes += nodes;
            }
        }
    }

    /// The atoms of an axis, innermost first; none where it has too many channels.
    pub(super) fn atoms(&self, axis: usize) -> Vec<Atom> {
        let axis = &self.all[axis];
        let Some(mut first_node) = axis.first_node else {
            return Vec::new();
        };
        let mut atoms = Vec::new();
        for (unit, count) in factors(axis) {
            atoms.push(Atom {
                unit,
                count,
                first_node,
            });
            first_node += usize::try_from(count).unwrap_or_default();
        }
        atoms
    }

    /// Whether the forward touches an allocation.
    pub(super) fn has(&self, allocation: usize) -> bool {
        self.of_allocation.contains_key(&allocation)
    }

    /// The axes of an allocation.
    pub(super) fn of_allocation(&self, allocation: usize) -> &[usize] {
        self.of_allocation
            .get(&allocation)
            .map_or(&[], Vec::as_slice)
    }

    /// The channels that a refined piece runs along.
    pub(super) fn nodes_of(&self, piece: &Piece) -> Option<std::ops::Range<usize>> {
        let atoms = self.atoms(piece.axis);
        let atom = atoms.iter().find(|atom| atom.unit == piece.unit)?;
        let digit = (piece.start / piece.unit) % atom.count;
        if piece.count > atom.count - digit {
            return None;
        }
        let first = atom.first_node + usize::try_from(digit).ok()?;
        Some(first..first + usize::try_from(piece.count).ok()?)
    }

    /// The channels of axes that views see in ways that do not go together.
    pub(super) fn broken(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.all.len()).filter(|&axis| self.all[axis].is_broken)
    }

    /// The atoms of which a value sees one index alone.
    pub(super) fn picked(&self, trace: &Trace, value: usize) -> Vec<Atom> {
        let allocation = trace.values[value].allocation.index();
        let mut seen = Vec::new();
        for dimension in 0..self.rank(value) {
            match self.resolve(value, dimension, Part::All) {
                Some(pieces) => seen.extend(pieces.iter().map(|piece| (piece.axis, piece.unit))),
                None if *self.dimension(value, dimension) == Dimension::Repeated => {}
                None => return Vec::new(),
            }
        }
        let mut picked = Vec::new();
        for &axis in self.of_allocation(allocation) {
            let atoms = self.atoms(axis);
            let unseen = atoms
                .iter()
                .filter(|it| it.count > 1 && !seen.contains(&(axis, it.unit)));
            picked.extend(unseen);
        }
        picked
    }
}

fn factors(axis: &Axis) -> Vec<(u64, u64)> {
    let ends = axis.cuts[1..].iter().copied().chain([axis.size]);
    axis.cuts
        .iter()
        .zip(ends)
        .map(|(&unit, end)| (unit, end / unit))
        .collect()
}

/// The product of sizes, which saturates.
pub(super) fn product(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(1, u64::saturating_mul)
}

/// Where the pieces have `count` elements inside.
fn boundary(pieces: &[Piece], count: u64) -> Option<usize> {
    let mut product = 1_u64;
    for place in (0..=pieces.len()).rev() {
        if product == count {
            return Some(place);
        }
        product = product.checked_mul(pieces.get(place.checked_sub(1)?)?.count)?;
    }
    None
}

/// `count` indices from `start`.
fn range(pieces: &[Piece], start: u64, count: u64) -> Option<Vec<Piece>> {
    let Some((outer, inner)) = pieces.split_first() else {
        return (start == 0 && count == 1).then(Vec::new);
    };
    let inside = product(inner.iter().map(|piece| piece.count)).max(1);
    let moved = |first: u64| outer.start.checked_add(outer.unit.checked_mul(first)?);
    if start.is_multiple_of(inside) && count.is_multiple_of(inside) {
        let (first, count) = (start / inside, count / inside);
        if first.saturating_add(count) > outer.count {
            return None;
        }
        let piece = Piece {
            start: moved(first)?,
            count,
            ..*outer
        };
        let mut pieces = if count > 1 { vec![piece] } else { Vec::new() };
        pieces.extend(inner);
        return Some(pieces);
    }
    let is_within_one = start / inside == start.saturating_add(count).saturating_sub(1) / inside;
    if is_within_one {
        range(inner, start % inside, count)
    } else {
        None
    }
}

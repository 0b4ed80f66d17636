//! A step at sizes that were never recorded, learnt from recordings of the same ops at other sizes.
//!
//! Responsible for the law of every size and for the step that follows from it. Not responsible for the batch
//! dimension of a capture (`batch.rs`), where the laws are kept with the trace.
//!
//! # The law
//!
//! Every number of a step (bytes, sizes, floating-point operations) that differs between the recordings is a product
//! of powers of the sizes that differ (`batch * length * length`), or grows with one of them by a straight line
//! (`length + 1`), from three recordings on also such a line times a product (`batch * (length + 1)`). Where several of
//! these agree with all recordings, the one that foresees most counts: a step that is taken to be larger than it is
//! costs time, the other way round it costs the budget.

use std::collections::BTreeSet;

use super::{AllocationId, Op, Phase, Trace, ValueId};
use crate::bytes::Bytes;

/// Highest power of one size, and of all together: attention has the square of the length times the batch.
const MOST_POWER: u32 = 3;

/// Sizes that may differ: of more, no few recordings tell which number follows which.
const MOST_SIZES: usize = 6;

/// Recordings from which a line times a product can be told from others: two determine it, one more bears it out.
const FOR_LINES_OF_PRODUCTS: usize = 3;

/// Why a step cannot be foreseen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizesError {
    /// There are not two recordings, or they have different numbers of sizes.
    #[error("the steps were called with other tensors")]
    OtherInputs,
    /// A size is wanted to differ that was the same in all.
    #[error("size {0} was the same in all recorded steps")]
    Unseen(usize),
    /// Too many sizes differ.
    #[error("{0} sizes of the input differ at once, more than a few recorded steps tell apart")]
    TooMany(usize),
    /// The ops differ.
    #[error("the recorded steps ran other ops from op {0} on")]
    OtherOps(usize),
    /// No law explains a number.
    #[error("the size of allocation {0} follows no law of the sizes")]
    NoLaw(usize),
    /// The step would not fit any memory.
    #[error("the step is beyond any memory at these sizes")]
    TooLarge,
}

/// A size that differs between the recordings, or a product of such: its value in each, and at the wanted sizes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Product {
    seen: Vec<u128>,
    wanted: u128,
}

impl Product {
    fn times(&self, other: &Self) -> Self {
        let pairs = self.seen.iter().zip(&other.seen);
        Self {
            seen: pairs.map(|(a, b)| a.saturating_mul(*b)).collect(),
            wanted: self.wanted.saturating_mul(other.wanted),
        }
    }
}

/// The laws that a number may follow.
struct Laws {
    /// The sizes that differ, each once.
    sizes: Vec<Product>,
    /// Products of powers of them, but for 1.
    powers: Vec<Product>,
    /// What lines may be multiplied by.
    factors: Vec<Product>,
}

impl Laws {
    fn new(recorded: &[&[u64]], wanted: &[u64]) -> Result<Self, SizesError> {
        let Some((own, others)) = recorded.split_last() else {
            return Err(SizesError::OtherInputs);
        };
        if others.is_empty() || recorded.iter().any(|sizes| sizes.len() != wanted.len()) {
            return Err(SizesError::OtherInputs);
        }
        let mut sizes = BTreeSet::new();
        for (at, &wanted) in wanted.iter().enumerate() {
            let seen: Vec<u128> = recorded.iter().map(|sizes| sizes[at].into()).collect();
            if seen.iter().any(|&size| size != u128::from(own[at])) {
                let wanted = wanted.into();
                sizes.insert(Product { seen, wanted });
            } else if wanted != own[at] {
                return Err(SizesError::Unseen(at));
            }
        }
        if sizes.len() > MOST_SIZES {
            return Err(SizesError::TooMany(sizes.len()));
        }
        let sizes: Vec<Product> = sizes.into_iter().collect();
        let one = Product {
            seen: vec![1; recorded.len()],
            wanted: 1,
        };
        let mut factors = Vec::new();
        if recorded.len() >= FOR_LINES_OF_PRODUCTS {
            factors = Self::products(&sizes, &one, MOST_POWER - 1);
        }
        factors.push(one.clone());
        let powers = Self::products(&sizes, &one, MOST_POWER);
        Ok(Self {
            sizes,
            powers,
            factors,
        })
    }

    /// The number at the wanted sizes; `None` where no law explains what was seen.
    fn foresee(&self, seen: &[u64]) -> Option<u64> {
        let (&own, others) = seen.split_last()?;
        if others.iter().all(|&other| other == own) {
            return Some(own);
        }
        let powers = self.powers.iter();
        let powers = powers.filter_map(|power| proportional(seen, power));
        let lines = self.factors.iter().flat_map(|factor| {
            let sizes = self.sizes.iter();
            sizes.filter_map(|size| line(seen, factor, size))
        });
        powers.chain(lines).max()
    }

    /// The number at the wanted sizes, or an upper bound where no law explains what was seen.
    fn at_most(&self, seen: &[u64]) -> u64 {
        self.foresee(seen).unwrap_or_else(|| {
            let most = seen.iter().copied().max().unwrap_or_default();
            let grown = self.sizes.iter().map(|size| {
                let from = size.seen.iter().copied().max().unwrap_or(1).max(1);
                let times = size.wanted.max(from).saturating_pow(2) / from.saturating_pow(2);
                let grown = u128::from(most).saturating_mul(times.max(1));
                u64::try_from(grown).unwrap_or(u64::MAX)
            });
            grown.max().unwrap_or(most)
        })
    }

    /// The scratch of an op that makes so many bytes, by its scratch and what it made in each recording: what
    /// libraries take follows no law of the sizes where it comes in blocks, but grows no faster than the result.
    fn scratch(&self, seen: &[(u64, u64)], made: u64) -> u64 {
        let scratch: Vec<u64> = seen.iter().map(|&(scratch, _)| scratch).collect();
        self.foresee(&scratch).unwrap_or_else(|| {
            let grown = seen.iter().map(|&(scratch, before)| {
                let grown = u128::from(scratch) * u128::from(made.max(before));
                u64::try_from(grown.div_ceil(before.max(1).into())).unwrap_or(u64::MAX)
            });
            grown.max().unwrap_or_default()
        })
    }

    /// All products of powers of sizes, but for 1.
    fn products(sizes: &[Product], so_far: &Product, most: u32) -> Vec<Product> {
        let Some((size, rest)) = sizes.split_first() else {
            return Vec::new();
        };
        let mut found = Vec::new();
        let mut product = so_far.clone();
        for power in 0..=most {
            if power > 0 {
                product = product.times(size);
                found.push(product.clone());
            }
            found.extend(Self::products(rest, &product, most - power));
        }
        found
    }
}

/// What a number that is in proportion to a product is at the wanted sizes; `None` where it is not.
fn proportional(seen: &[u64], to: &Product) -> Option<u64> {
    let (&own, &unit) = (seen.last()?, to.seen.last()?);
    for (&number, &product) in seen.iter().zip(&to.seen) {
        let left = u128::from(number).checked_mul(unit)?;
        if left != u128::from(own).checked_mul(product)? {
            return None;
        }
    }
    let grown = u128::from(own).checked_mul(to.wanted)?;
    Some(u64::try_from(grown.div_ceil(unit.max(1))).unwrap_or(u64::MAX))
}

/// What a number that is a factor times a straight line of a size is at the wanted sizes; `None` where it is not.
fn line(seen: &[u64], factor: &Product, size: &Product) -> Option<u64> {
    let mut points = Vec::with_capacity(seen.len());
    for ((&number, &factor), &size) in seen.iter().zip(&factor.seen).zip(&size.seen) {
        if u128::from(number).checked_rem(factor)? != 0 {
            return None;
        }
        let height = i128::try_from(u128::from(number) / factor).ok()?;
        points.push((i128::try_from(size).ok()?, height));
    }
    let &(own, height) = points.last()?;
    let &(from, below) = points.iter().find(|&&(at, _)| at != own)?;
    let (run, rise) = (own - from, height - below);
    if rise % run != 0 {
        return None;
    }
    let slope = rise / run;
    let at = |size: i128| height.checked_add(slope.checked_mul(size.checked_sub(own)?)?);
    for &(size, height) in &points {
        if at(size)? != height {
            return None;
        }
    }
    let there = u128::try_from(at(i128::try_from(size.wanted).ok()?)?.max(0)).ok()?;
    let there = there.saturating_mul(factor.wanted);
    Some(u64::try_from(there).unwrap_or(u64::MAX))
}

impl Trace {
    /// The same step at other sizes of its input, which no recording has.
    ///
    /// Optimizer steps are as in this recording: parameters are of the same size whatever the input.
    ///
    /// # Arguments
    ///
    /// `others` are other recordings; `sizes` are those of the input in each of them and, last, in this.
    ///
    /// # Errors
    ///
    /// The recordings are not of one step at several sizes, or no law explains how it grows.
    pub fn at_sizes(
        &self,
        others: &[&Self],
        sizes: &[&[u64]],
        wanted: &[u64],
    ) -> Result<Self, SizesError> {
        if sizes.len() != others.len() + 1 {
            return Err(SizesError::OtherInputs);
        }
        let laws = Laws::new(sizes, wanted)?;
        let twins = others.iter().map(|other| self.twins(other));
        let twins = twins.collect::<Result<Vec<_>, _>>()?;
        let mut grown = self.alone();
        for (i, allocation) in grown.allocations.iter_mut().enumerate() {
            let pairs = others.iter().zip(&twins);
            let seen = pairs.map(|(other, twins)| {
                let twin = twins[i]?;
                Some(other.allocations[twin.index()].bytes.0)
            });
            if let Some(mut seen) = seen.collect::<Option<Vec<u64>>>() {
                seen.push(allocation.bytes.0);
                let bytes = laws.foresee(&seen);
                allocation.bytes = Bytes(bytes.ok_or(SizesError::NoLaw(i))?);
            }
        }
        for (i, op) in grown.ops[..self.computation()].iter_mut().enumerate() {
            let at_most = |own: u64, of: &dyn Fn(&Op) -> u64| {
                let seen = others.iter().map(|other| of(&other.ops[i]));
                laws.at_most(&seen.chain([own]).collect::<Vec<_>>())
            };
            op.flops = at_most(op.flops, &|op| op.flops);
            op.moved_bytes = Bytes(at_most(op.moved_bytes.0, &|op| op.moved_bytes.0));
        }
        for i in 0..self.computation() {
            let made = grown.made_by(i);
            let seen = others.iter().chain([&self]).map(|&one| {
                let scratch = one.ops[i].workspace_bytes.0;
                (scratch, one.made_by(i))
            });
            grown.ops[i].workspace_bytes = Bytes(laws.scratch(&seen.collect::<Vec<_>>(), made));
        }
        for values in self.value_twins(others) {
            let Some((own, before)) = values.split_last() else {
                continue;
            };
            let shape = &mut grown.values[own.index()].shape;
            for (dim, size) in shape.iter_mut().enumerate() {
                let pairs = before.iter().zip(others);
                let seen = pairs.map(|(value, other)| {
                    let shape = &other.values[value.index()].shape;
                    shape.get(dim).copied()
                });
                if let Some(mut seen) = seen.collect::<Option<Vec<u64>>>() {
                    seen.push(*size);
                    *size = laws.at_most(&seen);
                }
            }
        }
        if grown.is_addable() {
            Ok(grown)
        } else {
            Err(SizesError::TooLarge)
        }
    }

    /// Bytes of what an op returns.
    fn made_by(&self, op: usize) -> u64 {
        let outputs = self.ops[op].outputs.iter();
        let bytes = outputs.map(|&value| self.allocations[self.allocation_of(value).index()].bytes);
        bytes.sum::<Bytes>().0
    }

    /// Number of ops before the optimizer's.
    fn computation(&self) -> usize {
        let optimizer = |op: &Op| op.phase == Phase::Optimizer;
        let first = self.ops.iter().position(optimizer);
        first.unwrap_or(self.ops.len())
    }

    /// For each allocation that forward or backward touches, the one of another recording that plays its part.
    fn twins(&self, first: &Self) -> Result<Vec<Option<AllocationId>>, SizesError> {
        let count = self.computation();
        let other = first.computation();
        let pairs = self.ops[..count].iter().zip(&first.ops[..other]);
        let mut twins: Vec<Option<AllocationId>> = vec![None; self.allocations.len()];
        for (i, (own, before)) in pairs.enumerate() {
            let same = self.string(own.name) == first.string(before.name)
                && own.phase == before.phase
                && own.reads.len() == before.reads.len()
                && own.writes.len() == before.writes.len()
                && own.outputs.len() == before.outputs.len();
            if !same {
                return Err(SizesError::OtherOps(i));
            }
            for (value, before) in values_of(own).zip(values_of(before)) {
                let twin = first.allocation_of(before);
                let known = &mut twins[self.allocation_of(value).index()];
                if known.is_some_and(|known| known != twin) {
                    return Err(SizesError::OtherOps(i));
                }
                *known = Some(twin);
            }
        }
        if count == other {
            Ok(twins)
        } else {
            Err(SizesError::OtherOps(count.min(other)))
        }
    }

    /// The values that ops of all recordings have in one place: of the others in order, then its own.
    fn value_twins(&self, others: &[&Self]) -> BTreeSet<Vec<ValueId>> {
        let mut found = BTreeSet::new();
        for (i, own) in self.ops[..self.computation()].iter().enumerate() {
            let places = own.reads.len() + own.writes.len() + own.outputs.len();
            let columns: Vec<Vec<ValueId>> = others
                .iter()
                .map(|other| values_of(&other.ops[i]).collect())
                .chain([values_of(own).collect()])
                .collect();
            found.extend((0..places).map(|at| columns.iter().map(|column| column[at]).collect()));
        }
        found
    }
}

fn values_of(op: &Op) -> impl Iterator<Item = ValueId> + '_ {
    let values = op.reads.iter().chain(&op.writes).chain(&op.outputs);
    values.copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict;
    use crate::trace::sample;

    fn foreseen(first: u64, second: u64, sizes: [&[u64]; 3]) -> Option<u64> {
        let [a, b, wanted] = sizes;
        let laws = Laws::new(&[a, b], wanted).unwrap();
        laws.foresee(&[first, second])
    }

    #[test]
    fn a_number_is_a_product_of_powers_or_a_line() {
        let length: [&[u64]; 3] = [&[8, 10], &[8, 20], &[8, 70]];
        assert_eq!(foreseen(5, 5, length), Some(5));
        assert_eq!(foreseen(40, 80, length), Some(280));
        assert_eq!(foreseen(300, 1200, length), Some(14700), "a square");
        assert_eq!(
            foreseen(11, 21, length),
            Some(71),
            "one more than the length"
        );
        assert_eq!(foreseen(11, 1000, length), None);
        let both: [&[u64]; 3] = [&[2, 10], &[3, 25], &[5, 70]];
        assert_eq!(
            foreseen(200, 1875, both),
            Some(24500),
            "batch times the square of the length"
        );
        assert_eq!(foreseen(9, 24, both), Some(69));
    }

    #[test]
    fn of_several_laws_the_largest_counts() {
        // From 1 to 2 a size and its square both may have grown by what was seen, if another one did not.
        let sizes: [&[u64]; 3] = [&[1, 1], &[2, 4], &[6, 5]];
        assert_eq!(
            foreseen(7, 28, sizes),
            Some(7 * 36),
            "the square of the first, or the second"
        );
    }

    #[test]
    fn a_third_recording_tells_laws_apart_and_bears_out_others() {
        let sizes = |rest: &[&'static [u64]]| Laws::new(rest, &[1, 256]).unwrap();
        let (two, three): ([&[u64]; 2], [&[u64]; 3]) =
            ([&[3, 64], &[2, 128]], [&[3, 64], &[5, 100], &[2, 128]]);
        let tokens = |at: &&[u64]| 4 * at[0] * at[1];
        let seen: Vec<u64> = two.iter().map(tokens).collect();
        assert_eq!(
            sizes(&two).foresee(&seen),
            Some(1536),
            "a line of the length"
        );
        let seen: Vec<u64> = three.iter().map(tokens).collect();
        assert_eq!(sizes(&three).foresee(&seen), Some(1024));
        let seen: Vec<u64> = three.iter().map(|at| 8 * at[0] * (at[1] + 1)).collect();
        assert_eq!(sizes(&three).foresee(&seen), Some(8 * 257));
        assert_eq!(sizes(&three).foresee(&[1, 2, 4]), None);
    }

    #[test]
    fn scratch_without_a_law_grows_as_what_the_op_makes() {
        let laws = Laws::new(&[&[64], &[128]], &[1024]).unwrap();
        assert_eq!(laws.scratch(&[(640, 64), (1280, 128)], 1024), 10_240);
        assert_eq!(laws.scratch(&[(700, 64), (801, 128)], 1024), 11_200);
        assert_eq!(laws.scratch(&[(700, 64), (801, 128)], 0), 801);
    }

    #[test]
    fn sizes_must_have_been_seen_to_differ() {
        let unseen = Laws::new(&[&[8, 10], &[8, 20]], &[9, 10]).err();
        assert_eq!(unseen, Some(SizesError::Unseen(0)));
        let other = Laws::new(&[&[8], &[8, 20]], &[9]).err();
        assert_eq!(other, Some(SizesError::OtherInputs));
        let alone = Laws::new(&[&[8]], &[9]).err();
        assert_eq!(alone, Some(SizesError::OtherInputs));
    }

    #[test]
    fn a_step_is_foreseen_as_it_would_be_recorded() {
        let (first, second) = (sample::batched_chain(4), sample::batched_chain(6));
        for rows in [1, 5, 24] {
            let there = second
                .at_sizes(&[&first], &[&[4, 8], &[6, 8]], &[rows, 8])
                .unwrap();
            let recorded = sample::batched_chain(rows);
            assert_eq!(
                predict::unplanned_peak(&there),
                predict::unplanned_peak(&recorded)
            );
            assert_eq!(there.values, recorded.values);
            assert_eq!(there.check(), Ok(()));
        }
    }

    #[test]
    fn other_ops_are_no_other_size() {
        let (first, mut second) = (sample::batched_chain(4), sample::batched_chain(6));
        second.ops[2].phase = Phase::Backward;
        let sizes: [&[u64]; 2] = [&[4], &[6]];
        assert_eq!(
            second.at_sizes(&[&first], &sizes, &[8]).err(),
            Some(SizesError::OtherOps(2))
        );
        let mut shorter = first.clone();
        shorter.ops.remove(7);
        let found = first.at_sizes(&[&shorter], &sizes, &[8]).err();
        assert_eq!(found, Some(SizesError::OtherOps(7)));
    }
}

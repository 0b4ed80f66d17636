//! A step at sizes that nobody recorded, learnt from two recordings of the same ops at other sizes.
//!
//! Responsible for the law of every size and for the step that follows from it. Not responsible for the batch
//! dimension of a capture (`batch.rs`), where the laws are kept with the trace.
//!
//! # The law
//!
//! Every number of a step (bytes, sizes, floating-point operations) that differs between the recordings is a product
//! of powers of the sizes that differ (`batch * length * length`), or grows with one of them by a straight line
//! (`length + 1`). Where several of these agree with both recordings, the one that foresees most counts: a step that is
//! taken to be larger than it is costs time, the other way round it costs the budget.

use std::collections::BTreeSet;

use super::{AllocationId, Op, Phase, Trace, ValueId};
use crate::bytes::Bytes;

/// Highest power of one size, and of all together: attention has the square of the length times the batch.
const MOST_POWER: u32 = 3;

/// Sizes that may differ: of more, no two recordings tell which number follows which.
const MOST_SIZES: usize = 6;

/// Why a step cannot be foreseen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizesError {
    /// The recordings have different numbers of sizes.
    #[error("the steps were called with other tensors")]
    OtherInputs,
    /// A size is wanted to differ that was the same in both.
    #[error("size {0} was the same in both recorded steps")]
    Unseen(usize),
    /// Too many sizes differ.
    #[error("{0} sizes of the input differ at once, more than two recorded steps tell apart")]
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

/// One size that differs between the recordings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Size {
    first: u64,
    second: u64,
    wanted: u64,
}

/// The sizes that differ, each once.
struct Laws {
    sizes: Vec<Size>,
}

impl Laws {
    fn new(first: &[u64], second: &[u64], wanted: &[u64]) -> Result<Self, SizesError> {
        if first.len() != second.len() || second.len() != wanted.len() {
            return Err(SizesError::OtherInputs);
        }
        let mut sizes = BTreeSet::new();
        for (at, ((&first, &second), &wanted)) in first.iter().zip(second).zip(wanted).enumerate() {
            if first != second {
                sizes.insert(Size {
                    first,
                    second,
                    wanted,
                });
            } else if wanted != second {
                return Err(SizesError::Unseen(at));
            }
        }
        if sizes.len() > MOST_SIZES {
            return Err(SizesError::TooMany(sizes.len()));
        }
        let sizes = sizes.into_iter().collect();
        Ok(Self { sizes })
    }

    /// The number at the wanted sizes; `None` where no law explains both.
    fn foresee(&self, first: u64, second: u64) -> Option<u64> {
        if first == second {
            return Some(second);
        }
        let products = Self::products(&self.sizes, (1, 1, 1), MOST_POWER);
        let powers = products.into_iter().filter_map(|(a, b, w)| {
            let agrees = u128::from(first).checked_mul(b)? == u128::from(second).checked_mul(a)?;
            let grown = u128::from(second).checked_mul(w)?;
            agrees.then(|| u64::try_from(grown.div_ceil(b.max(1))).unwrap_or(u64::MAX))
        });
        let lines = self.sizes.iter().filter_map(|size| {
            let run = i128::from(size.second) - i128::from(size.first);
            let rise = i128::from(second) - i128::from(first);
            let further = i128::from(size.wanted) - i128::from(size.second);
            let at = i128::from(second) + rise / run * further;
            (rise % run == 0).then(|| u64::try_from(at.max(0)).unwrap_or(u64::MAX))
        });
        powers.chain(lines).max()
    }

    /// The number at the wanted sizes, or an upper bound where no law explains both.
    fn at_most(&self, first: u64, second: u64) -> u64 {
        self.foresee(first, second).unwrap_or_else(|| {
            let grown = self.sizes.iter().map(|size| {
                let most = first.max(second);
                let from = size.first.max(size.second).max(1);
                let times = u128::from(size.wanted.max(from)).pow(2) / u128::from(from).pow(2);
                u64::try_from(u128::from(most) * times.max(1)).unwrap_or(u64::MAX)
            });
            grown.max().unwrap_or(second)
        })
    }

    /// All products of powers of sizes, but for 1, each with its value in both recordings and at the wanted sizes.
    fn products(sizes: &[Size], so_far: (u128, u128, u128), most: u32) -> Vec<(u128, u128, u128)> {
        let Some((size, rest)) = sizes.split_first() else {
            return Vec::new();
        };
        let mut found = Vec::new();
        let mut product = so_far;
        for power in 0..=most {
            if power > 0 {
                product.0 = product.0.saturating_mul(size.first.into());
                product.1 = product.1.saturating_mul(size.second.into());
                product.2 = product.2.saturating_mul(size.wanted.into());
                found.push(product);
            }
            found.extend(Self::products(rest, product, most - power));
        }
        found
    }
}

impl Trace {
    /// The same step at other sizes of its input, which neither recording has.
    ///
    /// Optimizer steps are as in this recording: parameters are of the same size whatever the input.
    ///
    /// # Arguments
    ///
    /// `first` is an earlier recording; `sizes` are those of the input in `first`, in this, and wanted.
    ///
    /// # Errors
    ///
    /// The recordings are no two sizes of one step, or no law explains how it grows.
    pub fn at_sizes(&self, first: &Self, sizes: [&[u64]; 3]) -> Result<Self, SizesError> {
        let [earlier, own, wanted] = sizes;
        let laws = Laws::new(earlier, own, wanted)?;
        let twins = self.twins(first)?;
        let mut grown = self.alone();
        for (i, allocation) in grown.allocations.iter_mut().enumerate() {
            if let Some(twin) = twins[i] {
                let before = first.allocations[twin.index()].bytes.0;
                let bytes = laws.foresee(before, allocation.bytes.0);
                allocation.bytes = Bytes(bytes.ok_or(SizesError::NoLaw(i))?);
            }
        }
        for (op, before) in grown.ops[..self.computation()].iter_mut().zip(&first.ops) {
            op.flops = laws.at_most(before.flops, op.flops);
            op.moved_bytes = Bytes(laws.at_most(before.moved_bytes.0, op.moved_bytes.0));
            let scratch = laws.at_most(before.workspace_bytes.0, op.workspace_bytes.0);
            op.workspace_bytes = Bytes(scratch);
        }
        for (own, before) in self.value_twins(first) {
            let before = &first.values[before.index()].shape;
            let shape = &mut grown.values[own.index()].shape;
            for (size, &before) in shape.iter_mut().zip(before) {
                *size = laws.at_most(before, *size);
            }
        }
        if grown.is_addable() {
            Ok(grown)
        } else {
            Err(SizesError::TooLarge)
        }
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
            for (value, before) in value_pairs(own, before) {
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

    fn value_twins(&self, first: &Self) -> BTreeSet<(ValueId, ValueId)> {
        let pairs = self.ops[..self.computation()].iter().zip(&first.ops);
        pairs
            .flat_map(|(own, before)| value_pairs(own, before))
            .collect()
    }
}

fn value_pairs<'t>(own: &'t Op, before: &'t Op) -> impl Iterator<Item = (ValueId, ValueId)> + 't {
    let reads = own.reads.iter().zip(&before.reads);
    let writes = own.writes.iter().zip(&before.writes);
    let outputs = own.outputs.iter().zip(&before.outputs);
    reads
        .chain(writes)
        .chain(outputs)
        .map(|(&own, &before)| (own, before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict;
    use crate::trace::sample;

    fn foreseen(first: u64, second: u64, sizes: [&[u64]; 3]) -> Option<u64> {
        let [a, b, wanted] = sizes;
        Laws::new(a, b, wanted).unwrap().foresee(first, second)
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
    fn sizes_must_have_been_seen_to_differ() {
        let unseen = Laws::new(&[8, 10], &[8, 20], &[9, 10]).err();
        assert_eq!(unseen, Some(SizesError::Unseen(0)));
        let other = Laws::new(&[8], &[8, 20], &[9]).err();
        assert_eq!(other, Some(SizesError::OtherInputs));
    }

    #[test]
    fn a_step_is_foreseen_as_it_would_be_recorded() {
        let (first, second) = (sample::batched_chain(4), sample::batched_chain(6));
        for rows in [1, 5, 24] {
            let there = second
                .at_sizes(&first, [&[4, 8], &[6, 8], &[rows, 8]])
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
        let sizes: [&[u64]; 3] = [&[4], &[6], &[8]];
        assert_eq!(
            second.at_sizes(&first, sizes).err(),
            Some(SizesError::OtherOps(2))
        );
        let mut shorter = first.clone();
        shorter.ops.remove(7);
        let found = first.at_sizes(&shorter, sizes).err();
        assert_eq!(found, Some(SizesError::OtherOps(7)));
    }
}

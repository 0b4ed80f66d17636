//! How small one block of memory can be that holds all that a step allocates.
//!
//! Responsible for the arena of a planned step: what is left when nothing is lost to fragmentation, with
//! the bound below which no allocator can be. Not responsible for placing ([`crate::placement`]) nor for
//! what lives when ([`crate::step::lives`]).

use super::Arena;
use crate::bytes::Bytes;
use crate::placement::{Allocation, Problem, quick};
use crate::step::lives::lives;
use crate::step::{StepModel, Treatment, Variant};
use crate::trace::Trace;

/// Allocations of PyTorch start at multiples of this: `kMinBlockSize` in `c10/cuda/CUDACachingAllocator.h`.
const CUDA_ALIGNMENT: u64 = 512;
/// `gAlignment` in `c10/core/alignment.h`.
const CPU_ALIGNMENT: u64 = 64;

/// The arena of a step under a set of drops; what is there before the step lies outside. Absent where the
/// sizes cannot be summed.
pub(super) fn arena(trace: &Trace, variant: Variant, dropped: &[Treatment]) -> Option<Arena> {
    let model = StepModel::new(trace, variant);
    let alignment = if trace.meta.device_kind == "cuda" {
        CUDA_ALIGNMENT
    } else {
        CPU_ALIGNMENT
    };
    let allocations = lives(trace, &model, dropped)
        .into_iter()
        .filter(|life| !life.is_resident)
        .map(|life| Allocation {
            lower: i64::from(life.start),
            // One that outlives the step ends after everything else.
            upper: i64::from(life.end),
            size: life.bytes.0.saturating_add(alignment - 1) / alignment * alignment,
            alignment,
        });
    let problem = Problem::new(allocations.collect()).ok()?;
    let answer = quick(&problem).ok()?;
    Some(Arena {
        bytes: Bytes(answer.placement.height),
        lower_bound_bytes: Bytes(answer.lower_bound),
    })
}

#[cfg(test)]
mod tests {
    use proptest::strategy::{Strategy, ValueTree};
    use proptest::test_runner::TestRunner;

    use super::*;
    use crate::step::lives::highest;
    use crate::step::random;
    use crate::trace::sample;

    #[test]
    fn a_chain_needs_what_it_allocates_rounded_up() {
        // Batch 4, rows of 8 floats: activations of 128 bytes, a loss of 4, which takes 64. Most is alive at
        // `mean`, which sees two saved activations and the one made from them, and makes the loss.
        let trace = sample::chain();
        let dropped = vec![Treatment::Keep; trace.allocations.len()];
        let arena = arena(&trace, Variant::default(), &dropped).unwrap();
        assert_eq!(arena.lower_bound_bytes, Bytes(128 + 128 + 128 + 64));
        assert_eq!(arena.bytes, arena.lower_bound_bytes);
    }

    #[test]
    fn the_arena_is_no_smaller_than_what_is_alive_in_it() {
        let mut runner = TestRunner::deterministic();
        for _ in 0..60 {
            let (recipe, _, _) = random::recipes().new_tree(&mut runner).unwrap().current();
            let trace = random::build(&recipe);
            let dropped = vec![Treatment::Keep; trace.allocations.len()];
            let arena = arena(&trace, Variant::default(), &dropped).unwrap();
            let model = StepModel::new(&trace, Variant::default());
            let mut lives = lives(&trace, &model, &dropped);
            lives.retain(|life| !life.is_resident);
            assert!(highest(&lives) <= arena.lower_bound_bytes);
            assert!(arena.lower_bound_bytes <= arena.bytes);
            let sum: Bytes = lives
                .iter()
                .map(|life| life.bytes + Bytes(CPU_ALIGNMENT))
                .sum();
            assert!(arena.bytes <= sum);
        }
    }
}

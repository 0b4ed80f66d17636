//! The check that every placement passes before anyone sees it.
//!
//! Responsible for saying which rule a placement breaks. Plain: by birth, each
//! against all born before it dies, from the problem as given; shares nothing with what makes placements.

use super::{Placement, Problem};

/// A rule that a placement breaks; allocations by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPlacement {
    /// Not one offset for each allocation.
    #[error("{offsets} offsets for {allocations} allocations")]
    Count {
        /// Offsets given.
        offsets: usize,
        /// Allocations of the problem.
        allocations: usize,
    },
    /// An offset is no multiple of its alignment.
    #[error("allocation {index} is at {offset}, which is no multiple of its alignment {alignment}")]
    Misaligned {
        /// The allocation.
        index: usize,
        /// Its offset.
        offset: u64,
        /// Its alignment.
        alignment: u64,
    },
    /// Two allocations that are alive together share bytes.
    #[error("allocations {first} and {second} are alive together and share bytes")]
    Overlap {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
    },
    /// The height is not the end of the highest allocation.
    #[error("the height is given as {given}, and the highest allocation ends at {actual}")]
    Height {
        /// As the placement says.
        given: u64,
        /// As it is.
        actual: u64,
    },
}

/// Checks a placement.
///
/// # Errors
///
/// The first rule found broken.
pub fn validate(problem: &Problem, placement: &Placement) -> Result<(), InvalidPlacement> {
    let allocations = problem.allocations();
    let offsets = &placement.offsets;
    if offsets.len() != allocations.len() {
        return Err(InvalidPlacement::Count {
            offsets: offsets.len(),
            allocations: allocations.len(),
        });
    }
    // An end beyond 64 bits becomes the last number, which no height may be.
    let end = |index: usize| offsets[index].saturating_add(allocations[index].size);
    let mut highest = 0;
    let mut order: Vec<usize> = (0..allocations.len()).collect();
    order.sort_by_key(|&index| allocations[index].lower);
    for (position, &index) in order.iter().enumerate() {
        let a = &allocations[index];
        if !offsets[index].is_multiple_of(a.alignment) {
            return Err(InvalidPlacement::Misaligned {
                index,
                offset: offsets[index],
                alignment: a.alignment,
            });
        }
        if a.size == 0 {
            continue;
        }
        highest = highest.max(end(index));
        for &other in &order[position + 1..] {
            let b = &allocations[other];
            if b.lower >= a.upper {
                break;
            }
            let apart = end(index) <= offsets[other] || end(other) <= offsets[index];
            if !apart && b.size > 0 {
                return Err(InvalidPlacement::Overlap {
                    first: index.min(other),
                    second: index.max(other),
                });
            }
        }
    }
    if placement.height != highest || highest == u64::MAX {
        return Err(InvalidPlacement::Height {
            given: placement.height,
            actual: highest,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Allocation;

    fn check(offsets: &[u64], height: u64) -> Result<(), InvalidPlacement> {
        let allocation = |lower, upper, size, alignment| Allocation {
            lower,
            upper,
            size,
            alignment,
        };
        let allocations = vec![
            allocation(0, 2, 4, 1),
            allocation(1, 3, 2, 4),
            allocation(2, 4, 4, 1),
        ];
        let offsets = offsets.to_vec();
        validate(
            &Problem::new(allocations).unwrap(),
            &Placement { offsets, height },
        )
    }

    #[test]
    fn each_broken_rule_is_named() {
        assert_eq!(check(&[0, 4, 0], 6), Ok(()));
        assert!(matches!(
            check(&[0, 4], 6),
            Err(InvalidPlacement::Count { .. })
        ));
        assert!(matches!(
            check(&[0, 6, 0], 8),
            Err(InvalidPlacement::Misaligned { index: 1, .. })
        ));
        assert_eq!(
            check(&[0, 0, 2], 6),
            Err(InvalidPlacement::Overlap {
                first: 0,
                second: 1
            })
        );
        assert_eq!(
            check(&[0, 4, 0], 7),
            Err(InvalidPlacement::Height {
                given: 7,
                actual: 6
            })
        );
        assert_eq!(
            check(&[u64::MAX, 4, 0], 6),
            Err(InvalidPlacement::Height {
                given: 6,
                actual: u64::MAX
            })
        );
    }
}

//! Where to put allocations with known live ranges so that the arena is as small as possible.
//!
//! Responsible for static placement (dynamic storage allocation, strongly NP-hard): the types (this
//! file), the CSV form (`csv.rs`), one-pass orders (`greedy.rs`), the exact search (`canonical.rs`), its
//! portfolio on threads (`portfolio.rs`), search by order for what is too large for it
//! (`local_search.rs`), the driver (`solve.rs`) and the check that every placement passes
//! (`validate.rs`). Not responsible for where live ranges come from.
//!
//! # Words
//!
//! An *offset* is where an allocation starts in the arena; the *height* of a placement is the end of its
//! highest allocation; the *lower bound* is the largest sum of sizes alive at one moment, below which no
//! placement can be. Live ranges are half-open: two that only touch do not overlap.

mod canonical;
pub mod csv;
mod greedy;
mod local_search;
mod portfolio;
mod prepare;
mod sections;
#[cfg(test)]
mod small;
mod solve;
mod validate;

pub use solve::{Answer, Goal, Request, Status, StopReason, place, quick};
pub use validate::{InvalidPlacement, validate};

/// One request for memory: a size while a live range lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// Time of birth.
    pub lower: i64,
    /// Time of death, not included; above `lower`.
    pub upper: i64,
    /// Bytes.
    pub size: u64,
    /// The offset is a multiple of it; at least 1.
    pub alignment: u64,
}

/// Allocations that can be placed: live ranges are not empty, and no sum overflows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Problem {
    allocations: Vec<Allocation>,
}

/// Why allocations cannot be placed, by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProblem {
    /// A live range is empty or reversed.
    #[error("`lower` {lower} is not below `upper` {upper}")]
    EmptyRange {
        /// The allocation.
        index: usize,
        /// Its birth.
        lower: i64,
        /// Its death.
        upper: i64,
    },
    /// An alignment is 0.
    #[error("`alignment` is 0: it is at least 1")]
    ZeroAlignment {
        /// The allocation.
        index: usize,
    },
    /// The sizes and alignments up to this one do not fit 63 bits.
    #[error("the sizes and alignments up to here sum to 2^63 bytes or more")]
    Overflow {
        /// The allocation.
        index: usize,
    },
}

impl InvalidProblem {
    /// The allocation at fault.
    #[must_use]
    pub const fn index(&self) -> usize {
        match *self {
            Self::EmptyRange { index, .. }
            | Self::ZeroAlignment { index }
            | Self::Overflow { index } => index,
        }
    }
}

impl Problem {
    /// Checks allocations.
    ///
    /// # Errors
    ///
    /// An empty live range, an alignment of 0, or sizes and alignments that sum to 2^63 or more: no
    /// arithmetic after this can overflow.
    pub fn new(allocations: Vec<Allocation>) -> Result<Self, InvalidProblem> {
        let mut sum: u64 = 0;
        for (index, allocation) in allocations.iter().enumerate() {
            let &Allocation {
                lower,
                upper,
                size,
                alignment,
            } = allocation;
            if lower >= upper {
                return Err(InvalidProblem::EmptyRange {
                    index,
                    lower,
                    upper,
                });
            }
            if alignment == 0 {
                return Err(InvalidProblem::ZeroAlignment { index });
            }
            // An allocation moves the next offset by at most its size and one alignment.
            sum = sum
                .checked_add(size)
                .and_then(|sum| sum.checked_add(alignment))
                .filter(|&sum| sum < 1 << 63)
                .ok_or(InvalidProblem::Overflow { index })?;
        }
        Ok(Self { allocations })
    }

    /// The allocations, in the order given.
    #[must_use]
    pub fn allocations(&self) -> &[Allocation] {
        &self.allocations
    }
}

/// Where everything lies.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Placement {
    /// Offset of each allocation, in the problem's order.
    pub offsets: Vec<u64>,
    /// End of the highest.
    pub height: u64,
}

//! The check every plan passes before anyone sees it.
//!
//! Responsible for judging a set of drops by the slow twin of the evaluator, straight from the trace.
//! Slow, plain, and sharing nothing with the search.

use crate::bytes::Bytes;
use crate::step::{Treatment, Variant, naive};
use crate::trace::Trace;

/// The first way in which a plan is wrong. Reaching a user with one is a bug in memfit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPlan {
    /// The two evaluations disagree about the peak.
    #[error("the plan's peak was computed as {claimed} and as {checked}")]
    Peak {
        /// By the search.
        claimed: Bytes,
        /// By the twin.
        checked: Bytes,
    },
    /// A replay would read what was overwritten.
    #[error("replaying op {op} would read something overwritten since")]
    Stale {
        /// Index of the op.
        op: u32,
    },
    /// An allocation is treated as it may not be.
    #[error("allocation {allocation} may not be stored, or may not have the home it has")]
    Refused {
        /// Index of the allocation.
        allocation: u32,
    },
    /// The plan needs more memory than no plan.
    #[error("the plan's peak {planned} is above the unplanned {unplanned}")]
    Rises {
        /// With the plan.
        planned: Bytes,
        /// Without.
        unplanned: Bytes,
    },
}

pub(super) fn validate(
    trace: &Trace,
    variant: Variant,
    dropped: &[Treatment],
    claimed: Bytes,
) -> Result<(), InvalidPlan> {
    let checked = naive::evaluate(trace, variant, dropped);
    if let Some(op) = checked.stale {
        return Err(InvalidPlan::Stale { op: op.0 });
    }
    if let Some(allocation) = checked.refused {
        return Err(InvalidPlan::Refused {
            allocation: allocation.0,
        });
    }
    if checked.peak_bytes != claimed {
        return Err(InvalidPlan::Peak {
            claimed,
            checked: checked.peak_bytes,
        });
    }
    Ok(())
}

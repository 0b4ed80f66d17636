//! The choice of victims by trying every set, one candidate at a time.

use super::victims::Candidate;

/// The least loss of any set that frees `shortage` bytes.
pub(super) fn least_loss(candidates: &[Candidate], shortage: u64) -> Option<f64> {
    let Some((first, rest)) = candidates.split_first() else {
        return (shortage == 0).then_some(0.0);
    };
    let without = least_loss(rest, shortage);
    let with = least_loss(rest, shortage.saturating_sub(first.bytes));
    let with = with.map(|loss| loss + first.loss);
    match (without, with) {
        (Some(without), Some(with)) => Some(without.min(with)),
        (one, other) => one.or(other),
    }
}

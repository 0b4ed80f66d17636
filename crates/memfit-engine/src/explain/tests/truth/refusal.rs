//! What was true of a refusal: the numbers that the simulator has and no snapshot shows, and requests made again.

use std::collections::BTreeSet;

use super::super::super::Cause;
use super::program::{Place, Refusal};
use crate::snapshot::BlockState;

/// What can be taken away, other than tensors.
const REMOVABLE: [Cause; 4] = [
    Cause::Fragmentation,
    Cause::Cap,
    Cause::NonTorch,
    Cause::PrivatePools,
];

/// The exact bytes at a refusal.
struct Numbers {
    need: u64,
    segment: u64,
    free: u64,
    others: u64,
    /// What the limit leaves.
    allowed: u64,
    /// In no block, where the request could be served, and in private pools other than its own.
    inactive: u64,
    in_private: u64,
}

impl Numbers {
    fn of(refusal: &Refusal, place: &Place, pool: (u64, u64)) -> Self {
        let error = &refusal.error;
        let (mut inactive, mut in_private) = (0, 0);
        for segment in refusal.after.segments() {
            let free = segment.blocks.iter();
            let free = free.filter(|block| block.state == BlockState::Inactive);
            let bytes: u64 = free.map(|block| block.size).sum();
            if segment.pool == pool {
                inactive += bytes;
            } else if segment.pool != (0, 0) {
                in_private += bytes;
            }
        }
        Self {
            need: error.block_bytes,
            segment: error.segment_bytes,
            free: error.free_bytes,
            others: place.device.other_bytes - place.context_bytes,
            allowed: error
                .allowed_bytes
                .map_or(u64::MAX, |it| it.saturating_sub(error.reserved_bytes)),
            inactive,
            in_private,
        }
    }

    /// Whether the request is served once these causes are gone.
    fn is_served(&self, without: &[Cause]) -> bool {
        let is_gone = |cause| without.contains(&cause);
        let back = if is_gone(Cause::PrivatePools) {
            self.in_private
        } else {
            0
        };
        let others = if is_gone(Cause::NonTorch) {
            self.others
        } else {
            0
        };
        let allowed = if is_gone(Cause::Cap) {
            u64::MAX
        } else {
            self.allowed.saturating_add(back)
        };
        let room = allowed.min(self.free + back + others);
        if is_gone(Cause::Fragmentation) {
            self.inactive > 0 && self.inactive + room >= self.need
        } else {
            room >= self.segment
        }
    }
}

/// The causes of a refusal: those that have to go, alone or with others and none of them for nothing, for the
/// request to be served; where even all do not help, that too much is alive.
pub(super) fn causes(refusal: &Refusal, place: &Place, pool: (u64, u64)) -> BTreeSet<Cause> {
    let mut found = BTreeSet::new();
    let numbers = Numbers::of(refusal, place, pool);
    let mut serving: Vec<Vec<Cause>> = (1..1 << REMOVABLE.len())
        .map(|set: u32| {
            let numbered = (0..).zip(REMOVABLE);
            let chosen = numbered.filter(|(place, _)| set & (1 << place) != 0);
            chosen.map(|(_, cause)| cause).collect()
        })
        .filter(|set: &Vec<Cause>| numbers.is_served(set))
        .collect();
    serving.sort_by_key(Vec::len);
    let mut least: Vec<Vec<Cause>> = Vec::new();
    for set in serving {
        let has = |smaller: &Vec<Cause>| smaller.iter().all(|cause| set.contains(cause));
        if !least.iter().any(has) {
            found.extend(set.iter().copied());
            least.push(set);
        }
    }
    // The other stream is done before the request, not behind it.
    let mut again = refusal.before.clone();
    again.set_events_ready(true);
    if again.malloc(refusal.requested, refusal.stream).is_ok() {
        found.insert(Cause::Pending);
    }
    if found.is_empty() {
        found.insert(Cause::LiveSet);
    }
    found
}

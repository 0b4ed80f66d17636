//! Reserved bytes that no block uses at the peak or when a request was refused, and the blocks that keep them.
//!
//! Responsible for telling cache from fragmentation and for naming the survivors. Not responsible for what
//! other settings would have done: only a replay knows.
//!
//! `inactive = reserved - active`. A segment goes back to the driver only when it is wholly free, so
//!
//! - *releasable*: inactive bytes of segments without blocks, and whole pages of expandable segments. The
//!   allocator gives them back before it reports that memory is out; they are cache;
//! - *stuck*: the other inactive bytes. They serve requests that fit into a gap and nothing else;
//! - *private*: inactive bytes of private pools (`private.rs`), which are neither.
//!
//! A block that waits for another stream keeps nothing for long: the allocator waits for it before it gives back what
//! it can, so what is stuck only until then is not called stuck.
//!
//! Where requests were refused, one of them is judged, and its cause is the verdict: the first that failed for
//! fragmentation, or else the first. Where none was, the peak is judged, by the shares of these bytes.
//!
//! A segment is *pinned* when more than half of it is inactive although blocks are in it.

use super::history::History;
use super::life::Allocation;
use super::moment::{self, Filled};
use super::oom::{Cause, OutOfMemory};
use super::owners::{Category, Judge};
use super::private::{self, PrivatePool};
use crate::bytes::Bytes;
use crate::snapshot::{DeviceRecord, PoolIndex};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Pinned segments told; the others are counted.
pub(super) const MAX_PINNED: usize = 50;
/// Blocks told of a pinned segment; the others are counted.
const MAX_BLOCKS: usize = 8;

/// What the inactive bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "FragmentationVerdict")]
pub enum Verdict {
    /// Less than 5 % of what is reserved is inactive.
    Negligible,
    /// At least 5 % is inactive, but less than 10 % is stuck: the cache can give the rest back.
    Cached,
    /// At least 10 % of what is reserved is stuck in segments that blocks keep; where a request was refused,
    /// it was refused for fragmentation.
    Fragmented,
    /// At least 5 % is inactive, but a request was refused for another cause.
    NotTheCause,
    /// No history was recorded: the bytes are those when the snapshot was taken, and not judged.
    Unknown,
}

/// A block that keeps a segment.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct PinningBlock {
    /// Its bytes.
    pub bytes: Bytes,
    /// What for.
    pub category: Category,
    /// Who asked for it.
    pub stack: String,
}

/// A segment with inactive bytes that the blocks in it keep from going back.
///
/// At the peak and at a refusal, more than half of its bytes; at the end, any.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct PinnedSegment {
    /// Where it starts.
    pub address: u64,
    /// Its bytes.
    pub bytes: Bytes,
    /// Bytes in it that no block uses.
    pub inactive_bytes: Bytes,
    /// Blocks in it.
    pub block_count: u64,
    /// The largest of them.
    pub blocks: Vec<PinningBlock>,
}

/// The inactive bytes of the peak, or of the moment of a refusal.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Fragmentation {
    /// Index of the refused request at which it is judged; absent at the peak.
    pub refusal_event: Option<u64>,
    /// Reserved and in no block.
    pub inactive_bytes: Bytes,
    /// Those with the most inactive bytes first; at most 50.
    pub pinned_segments: Vec<PinnedSegment>,
    /// What they are.
    pub verdict: Verdict,
    /// Part of the inactive bytes that the allocator can give back to the driver.
    pub releasable_bytes: Bytes,
    /// Inactive bytes in pinned segments, those not told included.
    pub pinned_bytes: Bytes,
    /// Number of pinned segments, those not told included.
    pub pinned_segment_count: u64,
    /// Bytes of the blocks that pin them.
    pub pinning_bytes: Bytes,
    /// Inactive bytes of private pools, by pool: nothing else can use them, and they do not go back.
    pub private_pools: Vec<PrivatePool>,
    /// The verdict in a sentence.
    pub summary: String,
}

impl Fragmentation {
    /// The fragmentation at a refusal where there is one, and else at a state.
    pub(super) fn of(
        (device, history): (&DeviceRecord, &History),
        state: u32,
        refusals: &[OutOfMemory],
        judge: &Judge<'_>,
    ) -> Self {
        let is_of_this = |it: &&OutOfMemory| it.cause == Cause::Fragmentation;
        let refusal = refusals
            .iter()
            .find(is_of_this)
            .or_else(|| refusals.first());
        // The event of a refusal changes nothing: the state before it is that of the request.
        let place = refusal.and_then(|it| u32::try_from(it.event).ok());
        let state = place.unwrap_or(state);
        let event = place.and_then(|place| device.events.get(place as usize));
        let own = event.map_or(PoolIndex::DEFAULT, |it| it.pool);
        let filled = moment::at(device, history, state);
        let (mut reserved, mut inactive, mut releasable) = (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
        let mut stuck_in_the_end = Bytes::ZERO;
        let is_held = |block: &Allocation| block.is_allocated_at(state);
        let (foreign, shared): (Vec<&Filled<'_>>, Vec<&Filled<'_>>) =
            filled.iter().partition(|it| private::is_foreign(it, own));
        for it in &shared {
            reserved += Bytes(it.region.size);
            inactive += Bytes(it.inactive_bytes());
            if it.region.pool == PoolIndex::DEFAULT {
                releasable += Bytes(it.releasable_bytes(|_| true));
                stuck_in_the_end +=
                    Bytes(it.unheld_bytes(is_held)) - Bytes(it.releasable_bytes(is_held));
            }
        }
        let in_private: Bytes = foreign.iter().map(|it| Bytes(it.inactive_bytes())).sum();
        let reserved = reserved + foreign.iter().map(|it| Bytes(it.region.size)).sum();
        let mut pinned: Vec<&Filled<'_>> = shared.into_iter().filter(|it| is_pinned(it)).collect();
        pinned.sort_by_key(|it| (std::cmp::Reverse(it.inactive_bytes()), it.address));
        let mut found = Self {
            refusal_event: refusal.map(|it| it.event),
            inactive_bytes: inactive + in_private,
            verdict: match refusal {
                Some(it) => verdict_at(it, reserved, inactive),
                None => verdict(
                    reserved,
                    inactive,
                    (inactive - releasable).min(stuck_in_the_end),
                ),
            },
            releasable_bytes: releasable,
            pinned_bytes: pinned.iter().map(|it| Bytes(it.inactive_bytes())).sum(),
            pinned_segment_count: pinned.len() as u64,
            pinning_bytes: pinned.iter().map(|it| Bytes(it.active_bytes())).sum(),
            pinned_segments: pinned
                .iter()
                .take(MAX_PINNED)
                .map(|it| told(it, judge, |_| true))
                .collect(),
            private_pools: private::inactive(&filled, &judge.snapshot.pools, own, |_| true),
            summary: String::new(),
        };
        found.summary = found.sentence(reserved, refusal) + &private::clause(&found.private_pools);
        found
    }

    /// The same bytes without a verdict: no history says whether they ever were in the way.
    pub(super) fn unjudged(self) -> Self {
        Self {
            verdict: Verdict::Unknown,
            summary: "no history was recorded, so fragmentation is not judged".to_owned(),
            ..self
        }
    }

    fn sentence(&self, reserved: Bytes, refusal: Option<&OutOfMemory>) -> String {
        let shared = self.inactive_bytes - private::total(&self.private_pools);
        let stuck = shared - self.releasable_bytes;
        let place = if self.private_pools.is_empty() {
            "in no block"
        } else {
            "in no block outside private pools"
        };
        let refused = refusal.map(|it| {
            let need = it.requested_bytes;
            format!("why {need} were refused at event {}", it.event)
        });
        match (self.verdict, refused) {
            (Verdict::Fragmented, Some(refused)) => format!(
                "fragmentation is {refused}: {shared} of {reserved} reserved are {place}{}",
                self.pinning()
            ),
            (_, Some(refused)) => format!(
                "fragmentation is not {refused}: {shared} of {reserved} reserved are {place}"
            ),
            (Verdict::Cached, None) if self.releasable_bytes > Bytes::ZERO => format!(
                "{shared} of {reserved} reserved are {place}, but {} of them are cache that the \
                 allocator gives back when it must",
                self.releasable_bytes
            ),
            (Verdict::Fragmented, None) => format!(
                "fragmentation matters: {stuck} of {reserved} reserved are stuck between blocks{}",
                self.pinning()
            ),
            _ => format!(
                "fragmentation does not matter: {shared} of {reserved} reserved are {place}"
            ),
        }
    }

    /// A clause on the blocks that pin segments; empty where none does.
    fn pinning(&self) -> String {
        let segments = match self.pinned_segment_count {
            0 => return String::new(),
            1 => "1 segment".to_owned(),
            count => format!("{count} segments"),
        };
        format!(
            "; blocks of {} in all keep {} in {segments} from going back",
            self.pinning_bytes, self.pinned_bytes
        )
    }
}

fn is_pinned(filled: &Filled<'_>) -> bool {
    let stuck = filled
        .inactive_bytes()
        .saturating_sub(filled.releasable_bytes(|_| true));
    !filled.blocks.is_empty() && stuck > filled.region.size / 2
}

fn verdict_at(refusal: &OutOfMemory, reserved: Bytes, inactive: Bytes) -> Verdict {
    match (refusal.cause, verdict(reserved, inactive, inactive)) {
        (Cause::Fragmentation, _) => Verdict::Fragmented,
        (_, Verdict::Negligible) => Verdict::Negligible,
        _ => Verdict::NotTheCause,
    }
}

fn verdict(reserved: Bytes, inactive: Bytes, stuck: Bytes) -> Verdict {
    let share = |part: Bytes, percent: u64| {
        u128::from(part.0) * 100 >= u128::from(reserved.0) * u128::from(percent)
    };
    if reserved == Bytes::ZERO || !share(inactive, 5) {
        Verdict::Negligible
    } else if !share(stuck, 10) {
        Verdict::Cached
    } else {
        Verdict::Fragmented
    }
}

/// A segment with the largest of its blocks for which `counts` holds.
pub(super) fn told(
    filled: &Filled<'_>,
    judge: &Judge<'_>,
    counts: impl Fn(&Allocation) -> bool,
) -> PinnedSegment {
    let all = filled.blocks.iter().copied();
    let mut blocks: Vec<&Allocation> = all.filter(|block| counts(block)).collect();
    blocks.sort_by_key(|block| (std::cmp::Reverse(block.size), block.address));
    PinnedSegment {
        address: filled.address,
        bytes: Bytes(filled.region.size),
        inactive_bytes: Bytes(filled.unheld_bytes(counts)),
        block_count: blocks.len() as u64,
        blocks: blocks
            .into_iter()
            .take(MAX_BLOCKS)
            .map(|block| PinningBlock {
                bytes: Bytes(block.size),
                category: judge.category(block).0,
                stack: judge.stack_text(block),
            })
            .collect(),
    }
}

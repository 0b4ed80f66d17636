//! Why a request was refused.
//!
//! Responsible for dividing the device's memory at the moment of an `oom` event and for naming one
//! cause. Not responsible for what would have helped: only a replay knows.
//!
//! # The arithmetic
//!
//! Before an `oom` event is recorded the allocator has waited for other streams and given back every
//! segment that it could, so what it still holds and does not use is stuck. The device's memory divides into
//!
//! ```text
//! total = live_set + pending + fragmentation + private_pools + device_free + non_torch
//!         \____________________ reserved __________________/
//!
//! live_set       allocated: blocks that tensors hold
//! pending        blocks let go that wait for another stream, and those that waited until the refusal
//! fragmentation  the rest of what is reserved: in no block
//! private_pools  of that, what belongs to private pools other than the request's: it cannot have it
//! device_free    free on the device, recorded with the event
//! non_torch      the rest: other processes, CUDA contexts, libraries
//! ```
//!
//! `total` is not in a snapshot; without it `non_torch` is unknown. `need` is the request, rounded;
//! `segment` is what the allocator would have asked the driver for. The first line that holds is the cause:
//!
//! | cause | when | in words |
//! |---|---|---|
//! | pending | `pending > 0`, and without the waiting blocks there is a gap of at least `need`, or segments that then are empty and `device_free` make a `segment` | only the other stream was in the way |
//! | fragmentation | `fragmentation > 0` and `need <= fragmentation + device_free`, the latter only when the driver was out | the bytes were there, not in one piece |
//! | cap | `device_free >= segment` | the driver had room: a limit (`set_per_process_memory_fraction`) refused |
//! | `private_pools` | `private_pools > 0` and `need <= fragmentation + private_pools + device_free` | other pools keep the bytes |
//! | `live_set` | `total` is known, and `live_set + need > total` | the tensors alive and the request are too much, even for the whole device |
//! | `non_torch` | `total` is known, `non_torch > context`, `active + private_pools + need <= total - context` | the device would have been enough, but for others |
//! | `live_set_or_non_torch` | otherwise | the tensors alive and the request are too much for what others leave, which may be this process' context alone |
//!
//! `context` is what the process' own CUDA context may take: 1 GiB, on small devices an eighth of `total`.
//! A block that waited until the refusal is one whose `free_completed` stands between the last allocation
//! and the `oom` event, apart from its `free_requested`. PyTorch does not search its pools again after it has
//! waited, so such a request succeeds when it is asked again (pytorch#189504). `parts.cap` is `device_free` when the cap is the
//! cause, the bytes that it withheld, and else 0.

use super::history::History;
use super::moment::{self, Filled};
use super::peak::Totals;
use super::private;
use crate::bytes::Bytes;
use crate::snapshot::{Action, DeviceRecord, Event, PoolIndex, Pools, StackIndex};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;
/// Largest request of the small pool (`kSmallSize`).
const SMALL_REQUEST_BYTES: u64 = MIB;
/// Segments of the small pool (`kSmallBuffer`).
const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;
/// Segments for requests below [`LARGE_LINE_BYTES`] (`kLargeBuffer`).
const LARGE_SEGMENT_BYTES: u64 = 20 * MIB;
/// From here on a request gets a segment of its own (`kMinLargeAlloc`).
const LARGE_LINE_BYTES: u64 = 10 * MIB;
/// What a process' own CUDA context and libraries may take.
const MAX_CONTEXT_BYTES: Bytes = Bytes(1 << 30);

/// What a refusal comes down to.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The tensors alive and the request are too much, even for the whole device.
    LiveSet,
    /// The bytes were there, not in one piece.
    Fragmentation,
    /// A limit below the device's memory refused.
    Cap,
    /// Other processes, contexts or libraries hold what was missing.
    NonTorch,
    /// Blocks that wait for another stream hold what was missing.
    Pending,
    /// Unused bytes of private pools, as of CUDA graphs, are what was missing.
    PrivatePools,
    /// Too much is alive for what is left of the device, or others hold what was missing: which, is not known.
    LiveSetOrNonTorch,
}

/// How the device's memory divides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Parts {
    /// Held by tensors.
    pub live_set: Bytes,
    /// Reserved, in no block, private pools aside.
    pub fragmentation: Bytes,
    /// Free on the device but withheld by a limit.
    pub cap: Bytes,
    /// Outside PyTorch's allocator; absent while the device's memory is not known.
    pub non_torch: Option<Bytes>,
    /// Let go, but waiting for another stream, if only until the refusal.
    pub pending: Bytes,
    /// Reserved by private pools that the request could not use, in no block.
    pub private_pools: Bytes,
}

/// One refusal.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OutOfMemory {
    /// Index of the event.
    pub event: u64,
    /// What was asked for, rounded.
    pub requested_bytes: Bytes,
    /// What it comes down to.
    pub cause: Cause,
    /// How the device's memory divides.
    pub parts: Parts,
    /// Free on the device at that moment.
    pub device_free_bytes: Bytes,
    /// Largest gap between blocks at that moment.
    pub largest_gap_bytes: Bytes,
    /// Who asked.
    pub stack: String,
    /// The cause in a sentence.
    pub summary: String,
}

/// What is known at the moment of a refusal.
struct Refusal<'a> {
    filled: Vec<Filled<'a>>,
    totals: Totals,
    state: u32,
    need: Bytes,
    device_free: Bytes,
    non_torch: Option<Bytes>,
    device_memory: Option<Bytes>,
    pending: Bytes,
    /// Inactive bytes of private pools other than the request's.
    in_private: Bytes,
    /// The request's own pool, as far as its event names it.
    pool: PoolIndex,
    stream: u64,
    /// No event names a private pool, yet there are some.
    hides_pools: bool,
}

/// Explains the refusal of an event; `totals` are those of the state before it.
pub(super) fn explain(
    (device, pools): (&DeviceRecord, &Pools),
    history: &History,
    totals: Totals,
    (position, event): (u32, &Event),
    device_memory: Option<Bytes>,
    text: impl Fn(StackIndex) -> String,
) -> OutOfMemory {
    // The address column of an `oom` event holds the free bytes.
    let device_free = Bytes(event.address);
    let outside = device_memory.map(|total| total - device_free - totals.reserved_bytes);
    let filled = moment::at(device, history, position);
    let late = late_bytes(device, history, &filled, (position, event.pool));
    let waiting = totals.active_bytes - totals.allocated_bytes;
    let private_pools = private::inactive(&filled, pools, event.pool, |_| true);
    let in_private = private::total(&private_pools);
    let is_default = |pool| pool == PoolIndex::DEFAULT;
    let hides_pools = filled.iter().any(|it| !is_default(it.region.pool))
        && device.events.iter().all(|event| is_default(event.pool));
    let refusal = Refusal {
        filled,
        totals,
        state: position,
        need: Bytes(event.size),
        device_free,
        non_torch: outside,
        device_memory,
        pending: waiting + late,
        in_private,
        pool: event.pool,
        stream: event.stream,
        hides_pools,
    };
    let cause = refusal.cause();
    let parts = Parts {
        live_set: totals.allocated_bytes,
        fragmentation: totals.reserved_bytes - totals.active_bytes - late - in_private,
        cap: if cause == Cause::Cap {
            device_free
        } else {
            Bytes::ZERO
        },
        non_torch: outside,
        pending: refusal.pending,
        private_pools: in_private,
    };
    OutOfMemory {
        event: u64::from(position),
        requested_bytes: refusal.need,
        cause,
        parts,
        device_free_bytes: device_free,
        largest_gap_bytes: refusal.largest_gap(false),
        stack: text(event.stack),
        summary: sentence(cause, &parts, refusal.need, device_free)
            + &private::clause(&private_pools),
    }
}

impl Refusal<'_> {
    fn cause(&self) -> Cause {
        let segment = segment_bytes(self.need);
        let driver_had_room = self.device_free >= segment;
        let inactive = self.usable_inactive();
        let within_reach = if driver_had_room {
            inactive
        } else {
            inactive + self.device_free
        };
        if self.only_streams_in_the_way(segment) {
            return Cause::Pending;
        }
        if inactive > Bytes::ZERO && self.need <= within_reach && !self.has_another_pool() {
            return Cause::Fragmentation;
        }
        if driver_had_room {
            return Cause::Cap;
        }
        let with_private = inactive + self.in_private + self.device_free;
        if self.in_private > Bytes::ZERO && self.need <= with_private {
            return Cause::PrivatePools;
        }
        if let (Some(total), Some(outside)) = (self.device_memory, self.non_torch) {
            if self.totals.allocated_bytes + self.need > total {
                return Cause::LiveSet;
            }
            let context = MAX_CONTEXT_BYTES.min(Bytes(total.0 / 8));
            let kept = self.totals.active_bytes + self.in_private;
            let fits_alone = kept + self.need <= total - context;
            if fits_alone && outside > context {
                return Cause::NonTorch;
            }
        }
        Cause::LiveSetOrNonTorch
    }

    /// Whether the request is of a private pool, although its event, of an older version, names none: a gap for it was passed
    /// over.
    fn has_another_pool(&self) -> bool {
        let is_small = self.need <= Bytes(SMALL_REQUEST_BYTES);
        let gaps = self
            .usable()
            .filter(|it| it.region.stream == self.stream && it.region.is_small == is_small)
            .flat_map(|it| it.gaps(|_| true));
        self.hides_pools && gaps.map(|(start, end)| Bytes(end - start)).max() >= Some(self.need)
    }

    /// Segments that the request may be served from: those of its pool.
    fn usable(&self) -> impl Iterator<Item = &Filled<'_>> {
        self.filled.iter().filter(|it| it.region.pool == self.pool)
    }

    /// Bytes in no block of those.
    fn usable_inactive(&self) -> Bytes {
        self.usable().map(|it| Bytes(it.inactive_bytes())).sum()
    }

    /// Whether the request is served once every waiting block is free.
    fn only_streams_in_the_way(&self, segment: Bytes) -> bool {
        if self.pending == Bytes::ZERO {
            return false;
        }
        if self.largest_gap(true) >= self.need {
            return true;
        }
        let held = |block: &super::life::Allocation| block.is_allocated_at(self.state);
        // Private pools in use keep their segments.
        let emptied = self.filled.iter().filter(|it| {
            it.region.pool == PoolIndex::DEFAULT && !it.blocks.iter().any(|block| held(block))
        });
        let back: Bytes = emptied.map(|it| Bytes(it.region.size)).sum();
        back > Bytes::ZERO && back + self.device_free >= segment
    }

    /// The longest run of bytes that no block covers, or, `after_streams`, that no tensor holds.
    fn largest_gap(&self, after_streams: bool) -> Bytes {
        let gaps = self
            .usable()
            .flat_map(|it| it.gaps(|block| !after_streams || block.is_allocated_at(self.state)));
        gaps.map(|(start, end)| Bytes(end - start))
            .max()
            .unwrap_or_default()
    }
}

/// Bytes still reserved of blocks that waited for another stream until the refusal at a state, private pools
/// other than the request's aside.
fn late_bytes(
    device: &DeviceRecord,
    history: &History,
    filled: &[Filled<'_>],
    (state, pool): (u32, PoolIndex),
) -> Bytes {
    let mut late = Bytes::ZERO;
    for position in (0..state as usize).rev() {
        let Some(event) = device.events.get(position) else {
            break;
        };
        if event.action == Action::Alloc {
            break;
        }
        let index = history.of_event(position);
        let Some(index) = index.filter(|_| event.action == Action::FreeCompleted) else {
            continue;
        };
        let block = &history.allocations[index];
        let after = filled.partition_point(|it| it.address <= block.address);
        let holder = after.checked_sub(1).map(|index| &filled[index]);
        let is_reserved = holder.is_some_and(|it| {
            block.address - it.address < it.region.size && !private::is_foreign(it, pool)
        });
        if is_reserved && block.end - block.let_go > 1 {
            late += Bytes(block.size);
        }
    }
    late
}

/// What the allocator asks the driver for (`get_allocation_size`).
fn segment_bytes(need: Bytes) -> Bytes {
    Bytes(match need.0 {
        small if small <= SMALL_REQUEST_BYTES => SMALL_SEGMENT_BYTES,
        medium if medium < LARGE_LINE_BYTES => LARGE_SEGMENT_BYTES,
        large => large
            .checked_next_multiple_of(SMALL_SEGMENT_BYTES)
            .unwrap_or(large),
    })
}

fn sentence(cause: Cause, parts: &Parts, need: Bytes, device_free: Bytes) -> String {
    let live = parts.live_set;
    let lacking = || {
        let place = if parts.private_pools > Bytes::ZERO {
            " outside private pools"
        } else {
            ""
        };
        format!(
            "tensors hold {live}, and {need} more are not there: {device_free} are free on the device and \
             {} in no block{place}",
            parts.fragmentation
        )
    };
    match cause {
        Cause::LiveSet | Cause::PrivatePools => lacking(),
        Cause::LiveSetOrNonTorch => match parts.non_torch {
            None => lacking() + "; what others hold is not known without the device's memory",
            Some(outside) => format!(
                "{}; {outside} are held outside PyTorch, by this process' context or by others",
                lacking()
            ),
        },
        Cause::Fragmentation => format!(
            "{need} would have fitted into the {} reserved but unused and the {device_free} free on the \
             device, but not in one piece",
            parts.fragmentation
        ),
        Cause::Cap => format!(
            "{device_free} were free on the device, yet {need} were refused: a limit on this process, such \
             as `set_per_process_memory_fraction`, was reached"
        ),
        Cause::NonTorch => format!(
            "tensors hold {live} and would have left room for {need}, but {} of the device belong to \
             other processes or libraries",
            parts.non_torch.unwrap_or_default()
        ),
        Cause::Pending => format!(
            "{} were let go but waited for another stream; without them in the way, {need} would have fitted",
            parts.pending
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_as_large_as_the_allocator_makes_them() {
        for (need, segment) in [
            (512, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 512, 12 * MIB),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(segment_bytes(Bytes(need)), Bytes(segment));
        }
    }
}

//! The numbers of a message, each a range, and what they decide.
//!
//! Responsible for the arithmetic of [`super`]. Not responsible for which causes follow (`judge.rs`) nor for the words.

use super::amount::Amount;
use super::document::{Kind, OtherProcess};
use super::read::Message;
use crate::allocator::rounding::{
    LARGE_GRANULE_BYTES, LARGE_SEGMENT_BYTES, MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES,
};
use crate::bytes::Bytes;
/// What a process' own CUDA context may take, as [`crate::explain`] takes it; on small devices an eighth of them.
const MAX_CONTEXT_BYTES: u64 = 1 << 30;

/// The numbers of a message, each a range that holds the true one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Numbers {
    pub(super) kind: Kind,
    pub(super) request: Amount,
    /// The block that the request became: no more than `request`.
    pub(super) need: Amount,
    pub(super) total: Amount,
    pub(super) free: Amount,
    pub(super) alive: Amount,
    pub(super) private: Amount,
    pub(super) unallocated: Amount,
    pub(super) reserved: Amount,
    pub(super) limit: Option<Amount>,
    /// Held by other processes: at least by those that cannot be this one.
    pub(super) others: Amount,
    /// Held by this process outside PyTorch.
    pub(super) non_pytorch: Option<Amount>,
    /// Neither free nor PyTorch's.
    pub(super) outside: Amount,
    pub(super) reserve: Option<Amount>,
    pub(super) is_expandable: bool,
}

/// What is asked of the numbers: `None` where they do not tell.
pub(super) type Answer = Option<bool>;

impl Numbers {
    pub(super) fn of(message: &Message) -> Self {
        let known = |amount: Option<Amount>| amount.unwrap_or(Amount::UNKNOWN);
        let (allocated, reserved) = (known(message.allocated), known(message.reserved));
        // A message that ends early has not told whether there are private pools.
        let private = message
            .private_free
            .unwrap_or(if message.allocated.is_some() {
                Amount::ZERO
            } else {
                Amount::UNKNOWN
            });
        let request = known(message.requested);
        let (total, free) = (known(message.total), known(message.free));
        // Where the driver cannot tell, processes are said to hold more than the device has.
        let is_possible = |held: &Amount| held.at_least(total) != Some(true) || !total.is_known();
        let this_process = message.this_process.filter(is_possible);
        let total_outside = total.minus(free).minus(reserved);
        Self {
            kind: message.kind,
            request,
            need: need(request),
            total,
            free: free.least(total),
            alive: allocated.minus(private),
            private,
            unallocated: known(message.unallocated),
            reserved,
            limit: message.allowed,
            others: others(&message.other_processes, this_process, reserved, total),
            non_pytorch: this_process
                .filter(|_| message.reserved.is_some())
                .map(|held| held.minus(reserved)),
            outside: if total.is_known() {
                total_outside
            } else {
                Amount::UNKNOWN
            },
            reserve: message.expandable_reserve,
            is_expandable: message.is_expandable,
        }
    }

    /// Free memory that the limit lets this process take.
    pub(super) fn usable(&self) -> Amount {
        match self.limit {
            Some(limit) => self.free.least(limit.minus(self.taken())),
            None => self.free,
        }
    }

    /// What the limit counts: of the driver's own pool, PyTorch counts the tensors.
    pub(super) fn taken(&self) -> Amount {
        if self.kind == Kind::DriverPool {
            self.alive
        } else {
            self.reserved
        }
    }

    pub(super) fn limit_refused(&self) -> Answer {
        let limit = self.limit?;
        self.taken().plus(self.request).exceeds(limit)
    }

    /// Whether the driver had too little, whatever the limit.
    pub(super) fn device_was_out(&self) -> Answer {
        self.request.exceeds(self.free)
    }

    /// All that the process could use without anybody giving up anything.
    pub(super) fn reachable(&self) -> Amount {
        self.unallocated.plus(self.usable())
    }

    pub(super) fn too_much_is_alive(&self) -> Answer {
        let there = self.reachable().plus(self.private);
        or(
            self.need.exceeds(there),
            self.alive.plus(self.need).exceeds(self.total),
        )
    }

    /// Bytes that must go at least, so that the request has room.
    pub(super) fn excess(&self) -> Amount {
        let there = self.reachable().plus(self.private);
        let of_total = self.alive.plus(self.need).minus(self.total);
        let excess = self.need.minus(there);
        let low_bytes = excess.low_bytes.max(of_total.low_bytes);
        Amount {
            low_bytes,
            high_bytes: low_bytes.max(excess.high_bytes),
        }
    }

    /// Whether these bytes of the device, were they free, would have made the room that the device lacked. A limit is
    /// another cause beside it.
    pub(super) fn was_missing(&self, held: Amount) -> Answer {
        let room = self.unallocated.plus(self.free).plus(held);
        and(
            self.device_was_out(),
            and(held.exceeds(Amount::ZERO), room.at_least(self.request)),
        )
    }

    /// What the driver gives for the request: expandable segments, which not every message mentions, grow by whole pages.
    pub(super) fn mapped(&self) -> Amount {
        Amount {
            low_bytes: self.request.low_bytes,
            high_bytes: self.request.high_bytes + Bytes(LARGE_SEGMENT_BYTES),
        }
    }

    /// Whether the request is served once these bytes are free, and nothing else changes.
    pub(super) fn is_enough(&self, held: Amount) -> Answer {
        let is_allowed = match self.limit {
            Some(_) => self.limit_refused().map(|it| !it),
            None => Some(true),
        };
        and(is_allowed, self.device_serves(held))
    }

    /// The same where no limit is in the way. An expandable segment needs less where its end is free.
    pub(super) fn device_serves(&self, held: Amount) -> Answer {
        let room = self.free.plus(held);
        match room.at_least(self.mapped()) {
            Some(true) => Some(true),
            _ => self
                .need
                .exceeds(room.plus(self.unallocated))
                .filter(|&it| it)
                .map(|it| !it),
        }
    }

    /// What this process holds outside PyTorch beyond what its CUDA context may take.
    pub(super) fn beyond_context(&self) -> Option<Amount> {
        let context = Bytes(self.total.high_bytes.0 / 8).min(Bytes(MAX_CONTEXT_BYTES));
        Some(self.non_pytorch?.minus(Amount::exact(context)))
    }

    pub(super) fn fragmentation_is_possible(&self) -> Answer {
        if self.kind == Kind::DriverPool {
            return Some(false);
        }
        // A segment may be larger than its request.
        let holds = |reach: Amount| match reach.at_least(self.request) {
            Some(true) => Some(true),
            _ => reach.at_least(self.need).filter(|&it| !it),
        };
        // Where the driver had room and refused all the same, its room is of no use.
        let is_there = match self.was_short() {
            Some(true) => holds(self.reachable()),
            Some(false) => holds(self.unallocated),
            None => {
                let alone = holds(self.unallocated).filter(|&it| it);
                alone.or_else(|| holds(self.reachable()).filter(|&it| !it))
            }
        };
        and(self.unallocated.exceeds(Amount::ZERO), is_there)
    }

    /// Whether what could be taken was less than what the driver gives for the request.
    pub(super) fn was_short(&self) -> Answer {
        let page = if self.is_expandable {
            Amount::exact(Bytes(LARGE_SEGMENT_BYTES))
        } else {
            Amount::ZERO
        };
        self.request.plus(page).exceeds(self.usable())
    }

    pub(super) fn private_pools_hold_it(&self) -> Answer {
        let reach = self.reachable();
        and(
            self.need.exceeds(reach),
            and(
                self.private.exceeds(Amount::ZERO),
                reach.plus(self.private).at_least(self.request),
            ),
        )
    }

    pub(super) fn driver_had_room(&self) -> Answer {
        if self.reserve.is_some() {
            return Some(false);
        }
        self.usable().at_least(self.mapped())
    }
}

/// The block behind a segment, by the rounding of [`crate::allocator::rounding`]. A message does not tell whether
/// `large_segment_size_mb` is set; it is taken for the default.
fn need(request: Amount) -> Amount {
    let covers = |bytes| request.low_bytes <= Bytes(bytes) && request.high_bytes >= Bytes(bytes);
    let least = if request.high_bytes <= Bytes(SMALL_SEGMENT_BYTES) {
        Bytes(MIN_BLOCK_BYTES)
    } else if covers(LARGE_SEGMENT_BYTES) {
        Bytes(SMALL_BYTES)
    } else {
        request.low_bytes - Bytes(LARGE_GRANULE_BYTES)
    };
    Amount {
        low_bytes: least.min(request.low_bytes),
        high_bytes: request.high_bytes,
    }
}

/// What other processes hold. In a container the driver's numbers of processes are not its own, so a message that does not
/// tell what this process holds may name it among the others.
fn others(
    named: &[OtherProcess],
    this_process: Option<Amount>,
    reserved: Amount,
    total: Amount,
) -> Amount {
    let known = named.iter().filter_map(|it| it.bytes);
    let held: Vec<Amount> = known
        .filter(|it| it.at_least(total) != Some(true) || !total.is_known())
        .collect();
    let sum = held.iter().fold(Amount::ZERO, |sum, &it| sum.plus(it));
    if this_process.is_some() {
        return sum;
    }
    let may_be_this = held.iter().filter(|it| it.high_bytes >= reserved.low_bytes);
    let largest = may_be_this
        .map(|it| it.high_bytes)
        .max()
        .unwrap_or_default();
    Amount {
        low_bytes: sum.low_bytes - largest,
        high_bytes: sum.high_bytes,
    }
}

pub(super) fn and(a: Answer, b: Answer) -> Answer {
    match (a, b) {
        (Some(false), _) | (_, Some(false)) => Some(false),
        (Some(true), Some(true)) => Some(true),
        _ => None,
    }
}

pub(super) fn or(a: Answer, b: Answer) -> Answer {
    and(a.map(|it| !it), b.map(|it| !it)).map(|it| !it)
}

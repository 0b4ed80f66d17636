//! How much the blocks of the process may take, and how much they do.
//!
//! Responsible for the two numbers, for refusing whatever would bring one above the other, and for
//! knowing when kept blocks ([`crate::free_blocks`]) are in the way. Not responsible for what a block takes
//! ([`crate::footprint`]) nor for where requests come from ([`crate::hook`]).
//!
//! Invariants: bytes are reserved before they are taken and given back after they are gone, so what
//! blocks take is never above what is held, and that never above the tightest budget, at any
//! moment, whatever threads do. Everything is atomic: no lock, so a forked child finds them whole.
//!
//! Kept blocks are no tensors, yet they take memory. So together with what is held they never take
//! more than was held at the peak since the first budget, nor more than the tightest budget.

use std::sync::atomic::{AtomicU64, Ordering};

/// Without a budget.
const UNLIMITED: u64 = u64::MAX;

/// The tightest of the budgets that are on.
static LIMIT: AtomicU64 = AtomicU64::new(UNLIMITED);
/// Bytes of live blocks and of those on their way.
static HELD: AtomicU64 = AtomicU64::new(0);
/// The most that was held since the first budget.
static PEAK: AtomicU64 = AtomicU64::new(0);
/// Bytes of kept blocks and of those on their way out.
static KEPT: AtomicU64 = AtomicU64::new(0);

/// What stood in the way of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Over {
    pub(crate) held_bytes: u64,
    pub(crate) limit_bytes: u64,
}

/// Whether any budget is on.
pub(crate) fn is_on() -> bool {
    LIMIT.load(Ordering::Relaxed) != UNLIMITED
}

/// Reserves bytes, or refuses.
pub(crate) fn reserve(bytes: u64) -> Result<(), Over> {
    let mut held_bytes = HELD.load(Ordering::Relaxed);
    let after = loop {
        let limit_bytes = LIMIT.load(Ordering::Relaxed);
        let after = held_bytes.saturating_add(bytes);
        if after > limit_bytes {
            return Err(Over {
                held_bytes,
                limit_bytes,
            });
        }
        let swapped =
            HELD.compare_exchange_weak(held_bytes, after, Ordering::SeqCst, Ordering::Relaxed);
        match swapped {
            Ok(_) => break after,
            Err(now) => held_bytes = now,
        }
    };
    // A budget may have come between the look at the limit and the swap. It looks at what is held
    // after it is set, and this looks at the limit after bytes are held: one of the two sees.
    let limit_bytes = LIMIT.load(Ordering::SeqCst);
    if after > limit_bytes {
        give_back(bytes);
        return Err(Over {
            held_bytes,
            limit_bytes,
        });
    }
    if limit_bytes != UNLIMITED {
        PEAK.fetch_max(after, Ordering::Relaxed);
    }
    Ok(())
}

/// Bytes that were reserved are gone, or came to nothing.
pub(crate) fn give_back(bytes: u64) {
    HELD.fetch_sub(bytes, Ordering::Release);
}

/// Bytes of blocks from before counting began: they could not be refused.
pub(crate) fn seeded(bytes: u64) {
    HELD.fetch_add(bytes, Ordering::SeqCst);
}

/// Bytes of live blocks and of those on their way.
pub(crate) fn held_bytes() -> u64 {
    HELD.load(Ordering::SeqCst)
}

/// The tightest budget; `None` without one.
pub(crate) fn limit_bytes() -> Option<u64> {
    Some(LIMIT.load(Ordering::Relaxed)).filter(|&bytes| bytes != UNLIMITED)
}

/// Sets the tightest budget, tighter or wider, or says what is held where that is more already.
pub(crate) fn set(bytes: u64) -> Result<(), Over> {
    let before = LIMIT.swap(bytes, Ordering::SeqCst);
    let held_bytes = HELD.load(Ordering::SeqCst);
    if held_bytes > bytes {
        LIMIT.store(before, Ordering::SeqCst);
        return Err(Over {
            held_bytes,
            limit_bytes: bytes,
        });
    }
    if before == UNLIMITED {
        PEAK.store(held_bytes, Ordering::Relaxed);
    }
    Ok(())
}

/// Sets the tightest budget after another has ended; `None` for no budget at all.
pub(crate) fn widen(bytes: Option<u64>) {
    LIMIT.store(bytes.unwrap_or(UNLIMITED), Ordering::SeqCst);
}

/// A live block becomes a kept one: it takes as much as before.
pub(crate) fn keep(bytes: u64) {
    KEPT.fetch_add(bytes, Ordering::SeqCst);
    give_back(bytes);
}

/// A kept block is live again, or gone.
pub(crate) fn unkeep(bytes: u64) {
    KEPT.fetch_sub(bytes, Ordering::SeqCst);
}

/// Whether kept blocks take what live ones need.
pub(crate) fn is_crowded() -> bool {
    crowding_bytes() > 0
}

/// Bytes of kept blocks that live ones need.
pub(crate) fn crowding_bytes() -> u64 {
    let room = PEAK
        .load(Ordering::Relaxed)
        .min(LIMIT.load(Ordering::Relaxed));
    HELD.load(Ordering::SeqCst)
        .saturating_add(KEPT.load(Ordering::SeqCst))
        .saturating_sub(room)
}

/// In a forked child: counts what this one thread finds, without what others had on their way.
pub(crate) fn recount(held_bytes: u64, kept_bytes: u64) {
    HELD.store(held_bytes, Ordering::SeqCst);
    KEPT.store(kept_bytes, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// One test, as there is one budget in a process.
    #[test]
    fn threads_never_hold_more_than_the_budget() {
        const BUDGET: u64 = 1000;
        assert_eq!(limit_bytes(), None);
        reserve(300).unwrap();
        let over = set(299).unwrap_err();
        assert_eq!((over.held_bytes, over.limit_bytes), (300, 299));
        assert!(!is_on());
        set(BUDGET).unwrap();
        // What is really there: added after it was reserved, taken away before it is given back.
        let (real, worst) = (AtomicU64::new(300), AtomicU64::new(0));
        let refused = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let (real, worst, refused) = (&real, &worst, &refused);
                scope.spawn(move || {
                    // Each holds up to eight at once, so that even one alone is refused at times.
                    let mut held = [0_u64; 8];
                    for round in 0..20_000_usize {
                        let place = &mut held[round % 8];
                        real.fetch_sub(*place, Ordering::SeqCst);
                        give_back(std::mem::take(place));
                        let bytes = 1 + (thread * 31 + round as u64 * 17) % 400;
                        if reserve(bytes).is_err() {
                            refused.store(true, Ordering::Relaxed);
                            continue;
                        }
                        let now = real.fetch_add(bytes, Ordering::SeqCst) + bytes;
                        worst.fetch_max(now, Ordering::Relaxed);
                        *place = bytes;
                    }
                    let left = held.iter().sum();
                    real.fetch_sub(left, Ordering::SeqCst);
                    give_back(left);
                });
            }
        });
        assert_eq!((held_bytes(), real.into_inner()), (300, 300));
        assert!(worst.into_inner() <= BUDGET);
        assert!(refused.into_inner());
        // Exactly full is allowed, one more byte is not, and nothing wraps round.
        reserve(BUDGET - 300).unwrap();
        assert!(reserve(1).is_err());
        assert!(reserve(u64::MAX).is_err());
        // A block that is kept takes what it took; another one that is asked for crowds it.
        keep(200);
        assert!(!is_crowded());
        reserve(1).unwrap();
        assert_eq!(crowding_bytes(), 1);
        assert!(is_crowded());
        unkeep(200);
        assert!(!is_crowded());
        widen(None);
        reserve(u64::MAX / 2).unwrap();
        recount(0, 0);
        assert_eq!(held_bytes(), 0);
    }
}

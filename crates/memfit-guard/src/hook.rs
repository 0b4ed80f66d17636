//! The two functions that libc10 calls instead of the C library's, and the lock round the count.
//!
//! Responsible for passing calls on, for telling the ledger about them, and, while a budget is on, for
//! refusing requests and for keeping large blocks that were freed. Not responsible for how libc10
//! comes to call these functions ([`crate::patch`]).
//!
//! Invariants: the lock is never held while the C library allocates or frees for torch; nothing here
//! goes through libc10, so a hook never calls itself; a block leaves the ledger before it is freed,
//! so no other thread can be handed its address while the ledger still knows it; every block that
//! torch holds came from the C library's own function, so it may be freed past the hooks.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::budget::{self, Over};
use crate::footprint::{self, LARGE_BYTES};
use crate::kept::{Kept, KeptBlock};
use crate::ledger::{Ledger, Unwritten};
use crate::refusal::{Refusal, Refusals};

/// What one lock guards.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) ledger: Ledger,
    pub(crate) kept: Kept,
    pub(crate) refusals: Refusals,
    /// The budgets that are on, each with its number.
    pub(crate) budgets: Vec<(u64, u64)>,
    /// The number of the last budget.
    pub(crate) last_budget: u64,
}

static STATE: Mutex<State> = Mutex::new(State {
    ledger: Ledger::new(),
    kept: Kept::new(),
    refusals: Refusals::new(),
    budgets: Vec::new(),
    last_budget: 0,
});

/// What libc10 called before; zero for the C library's own.
pub(crate) static NEXT_MEMALIGN: AtomicUsize = AtomicUsize::new(0);
/// The same for `free`.
pub(crate) static NEXT_FREE: AtomicUsize = AtomicUsize::new(0);

type Memalign = unsafe extern "C" fn(*mut *mut c_void, usize, usize) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void);

/// The state, for as long as the guard lives. Nothing that allocates a tensor may run meanwhile.
pub(crate) fn state() -> MutexGuard<'static, State> {
    // Counting cannot leave a half-made state that matters more than having no count at all.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stands in for `posix_memalign` in libc10.
#[expect(unsafe_code, reason = "called from C and calls C")]
pub(crate) unsafe extern "C" fn memalign(
    out: *mut *mut c_void,
    alignment: usize,
    bytes: usize,
) -> c_int {
    let taking_bytes = footprint::of(bytes, alignment);
    if let Err(over) = budget::reserve(taking_bytes) {
        refused(bytes, taking_bytes, over, false);
        return libc::ENOMEM;
    }
    if budget::is_on() {
        if let Some(address) = reuse(bytes, alignment, taking_bytes) {
            // SAFETY: the caller gives room for a pointer.
            unsafe { *out = address as *mut c_void };
            return 0;
        }
        make_room();
    }
    // SAFETY: the caller's own arguments.
    let code = unsafe { next_memalign(out, alignment, bytes) };
    if code != 0 {
        budget::give_back(taking_bytes);
        system_refused(bytes, taking_bytes);
        return code;
    }
    // SAFETY: the caller gives room for a pointer, and on success it was written.
    let pointer = unsafe { *out };
    let written = state()
        .ledger
        .allocated(pointer as usize, bytes as u64, taking_bytes);
    match written {
        Ok(None) => {}
        Ok(Some(before)) => budget::give_back(before.taken_bytes),
        Err(Unwritten) => {
            budget::give_back(taking_bytes);
            if budget::is_on() {
                // Nobody would know when it goes.
                // SAFETY: just handed out, and nobody else has it.
                unsafe { next_free(pointer) };
                return libc::ENOMEM;
            }
        }
    }
    0
}

/// Stands in for `free` in libc10.
#[expect(unsafe_code, reason = "called from C and calls C")]
pub(crate) unsafe extern "C" fn free(pointer: *mut c_void) {
    let address = pointer as usize;
    let mut state = state();
    let Some(gone) = state.ledger.freed(address) else {
        drop(state);
        // SAFETY: the caller's own argument.
        return unsafe { next_free(pointer) };
    };
    let bytes = usize::try_from(gone.bytes).unwrap_or(usize::MAX);
    let taken_bytes = gone.taken_bytes;
    if bytes >= LARGE_BYTES && budget::is_on() && !budget::is_crowded() {
        let block = KeptBlock {
            address,
            bytes,
            taken_bytes,
        };
        if state.kept.keep(block) {
            budget::keep(taken_bytes);
            return;
        }
    }
    drop(state);
    // SAFETY: the caller's own argument.
    unsafe { next_free(pointer) };
    budget::give_back(taken_bytes);
}

/// A kept block that serves a request, live again.
fn reuse(bytes: usize, alignment: usize, taking_bytes: u64) -> Option<usize> {
    if bytes < LARGE_BYTES {
        return None;
    }
    let mut state = state();
    let block = state.kept.take(bytes, alignment, taking_bytes)?;
    let written = state
        .ledger
        .allocated(block.address, bytes as u64, taking_bytes);
    if written.is_err() {
        // It has just come from there, so there is room for it.
        let _is_kept = state.kept.keep(block);
        return None;
    }
    budget::unkeep(taking_bytes);
    Some(block.address)
}

/// Frees kept blocks as long as they take what live ones need.
pub(crate) fn make_room() {
    while budget::is_crowded() {
        if !free_oldest() {
            break;
        }
    }
}

/// Frees the kept block that nobody has asked for longest; whether there was one.
#[expect(unsafe_code, reason = "frees a block of the C library")]
pub(crate) fn free_oldest() -> bool {
    let Some(block) = state().kept.oldest() else {
        return false;
    };
    // SAFETY: torch gave it to be freed, and nothing else has it.
    unsafe { next_free(block.address as *mut c_void) };
    budget::unkeep(block.taken_bytes);
    true
}

/// Writes down what was live when the budget refused a request.
fn refused(bytes: usize, taking_bytes: u64, over: Over, is_by_system: bool) {
    let mut state = state();
    let blocks = state.ledger.live();
    state.ledger.refused(bytes as u64);
    state.refusals.add(Refusal {
        requested_bytes: bytes as u64,
        taking_bytes,
        held_bytes: over.held_bytes,
        budget_bytes: over.limit_bytes,
        is_by_system,
        blocks,
    });
}

/// The system had no memory, budget or not.
fn system_refused(bytes: usize, taking_bytes: u64) {
    let Some(limit_bytes) = budget::limit_bytes() else {
        return state().ledger.refused(bytes as u64);
    };
    let over = Over {
        held_bytes: budget::held_bytes(),
        limit_bytes,
    };
    refused(bytes, taking_bytes, over, true);
}

/// What libc10 called before.
///
/// # Safety
///
/// As for `posix_memalign`.
#[expect(unsafe_code, reason = "calls C")]
unsafe fn next_memalign(out: *mut *mut c_void, alignment: usize, bytes: usize) -> c_int {
    let next = NEXT_MEMALIGN.load(Ordering::Relaxed);
    if next == 0 {
        // SAFETY: the caller's own arguments, passed to the function it meant to call.
        return unsafe { libc::posix_memalign(out, alignment, bytes) };
    }
    // SAFETY: `next` is what the table held for `posix_memalign`, a function of this type.
    let next = unsafe { std::mem::transmute::<usize, Memalign>(next) };
    // SAFETY: as above.
    unsafe { next(out, alignment, bytes) }
}

/// What libc10 called before.
///
/// # Safety
///
/// As for `free`.
#[expect(unsafe_code, reason = "calls C")]
unsafe fn next_free(pointer: *mut c_void) {
    let next = NEXT_FREE.load(Ordering::Relaxed);
    if next == 0 {
        // SAFETY: the caller's own argument, passed to the function it meant to call.
        return unsafe { libc::free(pointer) };
    }
    // SAFETY: `next` is what the table held for `free`, a function of this type.
    let next = unsafe { std::mem::transmute::<usize, Free>(next) };
    // SAFETY: as above.
    unsafe { next(pointer) }
}

thread_local! {
    /// The lock, between the two halves of a fork.
    static HELD: RefCell<Option<MutexGuard<'static, State>>> = const { RefCell::new(None) };
}

/// Takes the lock, so that no other thread holds it at the moment the child is made.
extern "C" fn before_fork() {
    let guard = state();
    HELD.with(|held| held.borrow_mut().replace(guard));
}

/// Gives the lock back in the parent.
extern "C" fn after_fork() {
    HELD.with(|held| drop(held.borrow_mut().take()));
}

/// Gives the lock back in the child, whose other threads will never finish what they were at.
extern "C" fn after_fork_in_child() {
    HELD.with(|held| {
        if let Some(state) = held.borrow_mut().take() {
            budget::recount(state.ledger.taken_bytes(), state.kept.taken_bytes());
        }
    });
}

/// Makes sure that a forked child can count on, whatever other threads were doing.
#[expect(unsafe_code, reason = "registers handlers with the C library")]
pub(crate) fn survive_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let (before, parent, child) = (before_fork, after_fork, after_fork_in_child);
        // SAFETY: the handlers are plain functions of this module, which is never unloaded. Without
        // memory for the registration only forks in the middle of an allocation are at risk.
        let _out_of_memory =
            unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) };
    });
}

//! The two functions that libc10 calls instead of the C library's, and the lock round the count.
//!
//! Responsible for passing calls on, for telling the ledger about them, and, while a budget is on, for
//! refusing requests, for keeping large blocks that were freed, and for choosing which of them give their
//! pages to others. Not responsible for how libc10 comes to call these functions ([`crate::patch`]) nor
//! for moving pages ([`crate::remap`]).
//!
//! Invariants: the lock is never held while the C library allocates or frees for torch; nothing here
//! goes through libc10, so a hook never calls itself; a block leaves the ledger before it is freed,
//! so no other thread can be handed its address while the ledger still knows it; every block that
//! torch holds came from the C library's own function, so it may be freed past the hooks, but for those in files
//! ([`crate::overflow`]), which are only made where somebody asked for that.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::alarm::Alarm;
use crate::budget::{self, Over};
use crate::footprint::{self, LARGE_BYTES};
use crate::free_blocks::{Kept, KeptBlock};
use crate::ledger::{Ledger, Unwritten};
use crate::overflow::{self, Mapped, Overflow};
use crate::refusal::{Refusal, Refusals};
use crate::remap::{self, Lifted};
use crate::remap_seams::Seams;

/// What one lock guards.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) ledger: Ledger,
    pub(crate) alarm: Alarm,
    pub(crate) kept: Kept,
    pub(crate) seams: Seams,
    pub(crate) overflow: Overflow,
    pub(crate) refusals: Refusals,
    /// The budgets that are on, each with its number.
    pub(crate) budgets: Vec<(u64, u64)>,
    /// The number of the last budget.
    pub(crate) last_budget: u64,
}

impl State {
    /// Whether somebody is to be woken after an allocation.
    fn rings(&mut self) -> bool {
        let (live_bytes, event) = (self.ledger.current_bytes(), self.ledger.sequence());
        self.alarm.rings(live_bytes, event)
    }

    /// Forgets what is known of the mappings under a block that has come just now, or goes, from so
    /// many of its bytes on.
    fn forget_seams(&mut self, address: usize, taken_bytes: u64, from_bytes: u64) {
        let bytes = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        if bytes(taken_bytes) >= LARGE_BYTES {
            let start = address - address % footprint::page_bytes();
            let at = |count| start.saturating_add(bytes(count));
            self.seams.forget(at(from_bytes), at(taken_bytes));
        }
    }
}

static STATE: Mutex<State> = Mutex::new(State {
    ledger: Ledger::new(),
    alarm: Alarm::new(),
    kept: Kept::new(),
    seams: Seams::new(),
    overflow: Overflow::new(),
    refusals: Refusals::new(),
    budgets: Vec::new(),
    last_budget: 0,
});

/// What libc10 called before; zero for the C library's own.
pub(crate) static NEXT_MEMALIGN: AtomicUsize = AtomicUsize::new(0);
/// The same for `free`.
pub(crate) static NEXT_FREE: AtomicUsize = AtomicUsize::new(0);

/// Called when the alarm has rung, on the thread that allocates; zero for none.
pub(crate) static WAKE: AtomicUsize = AtomicUsize::new(0);

/// Least that is cut off a kept block at once.
const SMALLEST_CUT_BYTES: usize = 64 << 10;

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
    if overflow::may_take(bytes, alignment)
        && let Some(address) = in_file(bytes)
    {
        // SAFETY: the caller gives room for a pointer.
        unsafe { *out = address as *mut c_void };
        return 0;
    }
    let taking_bytes = footprint::of(bytes, alignment);
    if let Err(over) = budget::reserve(taking_bytes) {
        refused(bytes, taking_bytes, over, false);
        return libc::ENOMEM;
    }
    let mut lifted = None;
    if budget::is_on() {
        if let Some(address) = reuse(bytes, alignment, taking_bytes) {
            // SAFETY: the caller gives room for a pointer.
            unsafe { *out = address as *mut c_void };
            return 0;
        }
        if bytes >= LARGE_BYTES && budget::is_crowded() {
            lifted = Some(lift(taking_bytes));
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
    let mut state = state();
    state.forget_seams(pointer as usize, taking_bytes, 0);
    if let Some(lifted) = lifted {
        lifted.lay_under(pointer as usize, taking_bytes, &mut state.seams);
    }
    let written = state
        .ledger
        .allocated(pointer as usize, bytes as u64, taking_bytes);
    let rings = state.rings();
    drop(state);
    if rings {
        wake();
    }
    match written {
        Ok(None) => {}
        Ok(Some(before)) => budget::give_back(before.taken_bytes),
        Err(Unwritten) => {
            budget::give_back(taking_bytes);
            if budget::is_on() {
                // There would be no telling when it goes.
                // SAFETY: just handed out, and nothing else has it.
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
    if let Some(block) = state.overflow.take(address) {
        drop(state);
        return block.unmap();
    }
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
    state.forget_seams(address, taken_bytes, 0);
    drop(state);
    // SAFETY: the caller's own argument.
    unsafe { next_free(pointer) };
    budget::give_back(taken_bytes);
}

/// A block in a file for a request, where memory has no room for it.
fn in_file(bytes: usize) -> Option<usize> {
    let known = state();
    let live_bytes = known.ledger.current_bytes();
    let folder = known.overflow.folder_for(bytes as u64, live_bytes)?;
    drop(known);
    let block = Mapped::new(&folder, bytes)?;
    let address = block.address;
    let mut state = state();
    if state.ledger.filed(address, bytes as u64).is_err() {
        drop(state);
        block.unmap();
        return None;
    }
    state.overflow.add(&block, live_bytes);
    Some(address)
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
    let rings = state.rings();
    drop(state);
    if rings {
        wake();
    }
    budget::unkeep(taking_bytes);
    Some(block.address)
}

/// Calls what was set to look.
#[expect(
    unsafe_code,
    reason = "calls a function whose address was kept as a number"
)]
fn wake() {
    let wake = WAKE.load(Ordering::Relaxed);
    if wake != 0 {
        // SAFETY: only `on_alarm` writes there, and only functions of this type.
        let wake = unsafe { std::mem::transmute::<usize, fn()>(wake) };
        wake();
    }
}

/// Frees kept blocks, oldest first, as long as they take what live ones need.
pub(crate) fn make_room() {
    loop {
        let wanted_bytes = budget::crowding_bytes();
        if wanted_bytes == 0 || !free_from_oldest(wanted_bytes) {
            break;
        }
    }
}

/// Frees the kept block that was asked for longest ago; whether there was one.
pub(crate) fn free_oldest() -> bool {
    free_from_oldest(u64::MAX)
}

/// The same, or no more of it than so many bytes ask for.
fn free_from_oldest(wanted_bytes: u64) -> bool {
    let Some(block) = state().kept.oldest() else {
        return false;
    };
    // Small blocks crowd by little, and often.
    let wanted_bytes = usize::try_from(wanted_bytes).unwrap_or(usize::MAX);
    let wanted_bytes = wanted_bytes.checked_next_multiple_of(SMALLEST_CUT_BYTES);
    let rest_bytes = match wanted_bytes {
        Some(bytes) if is_large_without(block, bytes) && !is_watched() => cut(block, bytes),
        _ => {
            free_kept(block);
            0
        }
    };
    budget::unkeep(block.taken_bytes - rest_bytes);
    true
}

/// Whether a block is still large when so many bytes are cut off.
fn is_large_without(block: KeptBlock, bytes: usize) -> bool {
    block.taken_bytes.saturating_sub(bytes as u64) >= LARGE_BYTES as u64
}

/// Whether somebody else watches the C library's blocks, who shall see them as they are.
fn is_watched() -> bool {
    NEXT_FREE.load(Ordering::Relaxed) != 0
}

/// Cuts bytes off the end of a kept block, whole pages, and keeps the rest.
///
/// Returns what the rest takes; zero where it could not be kept and is gone.
fn cut(block: KeptBlock, bytes: usize) -> u64 {
    let rest = remap::shortened(block, bytes);
    let mut state = state();
    state.forget_seams(block.address, block.taken_bytes, rest.taken_bytes);
    if rest.taken_bytes < block.taken_bytes && state.kept.put_back(rest) {
        return rest.taken_bytes;
    }
    drop(state);
    free_kept(rest);
    0
}

#[expect(unsafe_code, reason = "frees a block of the C library")]
fn free_kept(block: KeptBlock) {
    state().forget_seams(block.address, block.taken_bytes, 0);
    // SAFETY: torch gave it to be freed, and nothing else has it.
    unsafe { next_free(block.address as *mut c_void) };
}

/// Takes pages of kept blocks that take what a new block of so many bytes needs.
fn lift(taking_bytes: u64) -> Lifted {
    let mut lifted = Lifted::for_block(taking_bytes);
    while lifted.has_room() && !is_watched() {
        let wanted_bytes = budget::crowding_bytes();
        let mut state = state();
        if !Lifted::is_worth(wanted_bytes) || !state.seams.has_room(Lifted::MOST_SEAMS) {
            break;
        }
        let Some(block) = state.kept.nearest(wanted_bytes) else {
            break;
        };
        drop(state);
        let rest_bytes = lift_from(block, wanted_bytes, &mut lifted);
        budget::unkeep(block.taken_bytes - rest_bytes);
    }
    lifted
}

/// Takes pages off the end of a kept block; what is left of it is kept, if it is still large.
///
/// Returns what the rest takes; zero where nothing is left.
fn lift_from(block: KeptBlock, wanted_bytes: u64, lifted: &mut Lifted) -> u64 {
    let Some((start, end)) = remap::mapping(block.address, block.taken_bytes) else {
        free_kept(block);
        return 0;
    };
    let wanted_bytes = usize::try_from(wanted_bytes).unwrap_or(usize::MAX);
    let wanted_bytes = wanted_bytes
        .min(end - start)
        .next_multiple_of(footprint::page_bytes());
    let is_partial = is_large_without(block, wanted_bytes);
    // The first page holds the C library's words about the block.
    let first = if is_partial {
        end - wanted_bytes
    } else {
        start + footprint::page_bytes()
    };
    let mut last = end;
    while last > first && lifted.has_room() {
        let seam = state().seams.before(last, first);
        last = lifted.lift(seam, last);
    }
    if is_partial {
        return cut(block, wanted_bytes);
    }
    free_kept(block);
    0
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
    let mut guard = state();
    guard.overflow.before_fork();
    HELD.with(|held| held.borrow_mut().replace(guard));
}

/// Gives the lock back in the parent.
extern "C" fn after_fork() {
    HELD.with(|held| drop(held.borrow_mut().take()));
}

/// Gives the lock back in the child, whose other threads will never finish what they were at.
extern "C" fn after_fork_in_child() {
    HELD.with(|held| {
        if let Some(mut state) = held.borrow_mut().take() {
            // The looks are the parent's, and its files.
            state.alarm.set(None);
            state.overflow.end();
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

//! The two functions that libc10 calls instead of the C library's, and the lock round the count.
//!
//! Responsible for passing every call on unchanged and telling the ledger about it. Not responsible
//! for how libc10 comes to call them ([`crate::patch`]).
//!
//! Invariants: the lock is never held while the C library allocates or frees for torch; nothing here
//! goes through libc10, so a hook never calls itself; a block leaves the ledger before it is freed,
//! so no other thread can be handed its address while the ledger still knows it.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::ledger::Ledger;

static LEDGER: Mutex<Ledger> = Mutex::new(Ledger::new());

/// What libc10 called before; zero for the C library's own.
pub(crate) static NEXT_MEMALIGN: AtomicUsize = AtomicUsize::new(0);
/// The same for `free`.
pub(crate) static NEXT_FREE: AtomicUsize = AtomicUsize::new(0);

type Memalign = unsafe extern "C" fn(*mut *mut c_void, usize, usize) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void);

/// The ledger, for as long as the guard lives. Nothing that allocates a tensor may run meanwhile.
pub(crate) fn ledger() -> MutexGuard<'static, Ledger> {
    // Counting cannot leave a half-made state that matters more than having no count at all.
    LEDGER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stands in for `posix_memalign` in libc10.
#[expect(unsafe_code, reason = "called from C and calls C")]
pub(crate) unsafe extern "C" fn memalign(
    out: *mut *mut c_void,
    alignment: usize,
    bytes: usize,
) -> c_int {
    let next = NEXT_MEMALIGN.load(Ordering::Relaxed);
    let code = if next == 0 {
        // SAFETY: the caller's own arguments, passed to the function it meant to call.
        unsafe { libc::posix_memalign(out, alignment, bytes) }
    } else {
        // SAFETY: `next` is what the table held for `posix_memalign`, a function of this type.
        let next = unsafe { std::mem::transmute::<usize, Memalign>(next) };
        // SAFETY: as above.
        unsafe { next(out, alignment, bytes) }
    };
    if code == 0 {
        // SAFETY: the caller gives room for a pointer, and on success it was written.
        let address = unsafe { *out } as usize;
        ledger().allocated(address, bytes as u64);
    } else {
        ledger().refused(bytes as u64);
    }
    code
}

/// Stands in for `free` in libc10.
#[expect(unsafe_code, reason = "called from C and calls C")]
pub(crate) unsafe extern "C" fn free(pointer: *mut c_void) {
    if !pointer.is_null() {
        ledger().freed(pointer as usize);
    }
    let next = NEXT_FREE.load(Ordering::Relaxed);
    if next == 0 {
        // SAFETY: the caller's own argument, passed to the function it meant to call.
        unsafe { libc::free(pointer) }
    } else {
        // SAFETY: `next` is what the table held for `free`, a function of this type.
        let next = unsafe { std::mem::transmute::<usize, Free>(next) };
        // SAFETY: as above.
        unsafe { next(pointer) }
    }
}

thread_local! {
    /// The lock, between the two halves of a fork.
    static HELD: RefCell<Option<MutexGuard<'static, Ledger>>> = const { RefCell::new(None) };
}

/// Takes the lock, so that no other thread holds it at the moment the child is made.
extern "C" fn before_fork() {
    let guard = ledger();
    HELD.with(|held| held.borrow_mut().replace(guard));
}

/// Gives the lock back, in the parent and in the child.
extern "C" fn after_fork() {
    HELD.with(|held| drop(held.borrow_mut().take()));
}

/// Makes sure that a forked child can count on, whatever other threads were doing.
#[expect(unsafe_code, reason = "registers handlers with the C library")]
pub(crate) fn survive_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handlers are plain functions of this module, which is never unloaded. Without
        // memory for the registration only forks in the middle of an allocation are at risk.
        let _out_of_memory =
            unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    });
}

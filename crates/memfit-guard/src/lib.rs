//! Counts what PyTorch allocates on the CPU, inside the running process, and holds it to a budget.
//!
//! PyTorch keeps no memory statistics for the CPU, and its profiler slows a program and keeps every
//! event. So this crate stands where torch asks the C library for tensor memory: it makes libc10 call
//! two functions of its own, which pass the call on and count. It is, with `memfit-memory`, the only crate of memfit
//! with unsafe code, but for the lines of the binding that lend memory and take it from an arena.
//!
//! Responsible for installing that and for the numbers. Not responsible for what a block holds, which
//! only Python can know ([`label`]), nor for words about it.
//!
//! Invariants: without a budget, and without files for what lacks room, every call of libc10 reaches the
//! function it was meant for, with its own arguments and result; with a budget, what blocks take, those kept
//! for the next requests included, never exceeds it, whatever threads do; the hooks stay for the life of the
//! process, since blocks they have counted may be freed at any time; all threads of the process count; a
//! forked child counts on from its parent's numbers, within its parent's budget.

mod alarm;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod budget;
mod category;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod footprint;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod free_blocks;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod hook;
mod ledger;
#[cfg(all(
    test,
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod mapped_block;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod overflow;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod patch;
mod refusal;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod remap;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod remap_seams;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod residence;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod settings;

pub use alarm::Bounds;
pub use category::{Category, CategoryBytes, NoCategory};
use ledger::WindowId;
pub use ledger::{Owned, Owner, Reading, Survivor};
pub use refusal::{LiveBlock, Refusal};

/// Why nothing can be counted.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// Not Linux on x86-64 or ARM64.
    #[error(
        "tensor memory on the CPU can be counted on Linux with x86-64 or ARM64 processors, not here"
    )]
    Platform,
    /// Torch is not imported, or has no libc10 of its own.
    #[error("the library `libc10.so` is not loaded: import torch first")]
    NotLoaded,
    /// libc10 gets its memory in another way.
    #[error("`libc10.so` does not call `{function}`: this build of torch allocates in another way")]
    NoSlot {
        /// The function it should call.
        function: &'static str,
    },
    /// The system does not allow to change the table of calls.
    #[error("cannot redirect the calls of `libc10.so`: {0}")]
    Protected(std::io::Error),
}

/// A budget cannot be set: blocks take more already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{held_bytes} bytes are taken, which is more than a budget of {budget_bytes} bytes")]
pub struct AboveBudget {
    /// Bytes that are taken.
    pub held_bytes: u64,
    /// The budget.
    pub budget_bytes: u64,
}

/// A budget that is on, until it is lifted or dropped.
#[derive(Debug)]
pub struct Budget(u64);

impl Drop for Budget {
    fn drop(&mut self) {
        lift_budget(self);
    }
}

/// A stretch of time with its own peak, open until it is closed or dropped.
#[derive(Debug)]
pub struct Window(WindowId);

impl Drop for Window {
    fn drop(&mut self) {
        // An open window costs a little at every allocation.
        let _unread = close_window(self);
    }
}

#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod counting {
    use std::sync::atomic::Ordering;
    use std::sync::{Mutex, PoisonError};

    use crate::alarm::Bounds;
    use crate::category::Category;
    use crate::hook::state;
    use crate::ledger::{Owner, Reading, Survivor};
    use crate::refusal::Refusal;
    use crate::{AboveBudget, Budget, InstallError, Window};
    use crate::{budget, footprint, hook, patch, residence, settings};

    /// What torch aligns tensors to on the CPU.
    const ALIGNMENT: usize = 64;

    static SLOTS: Mutex<Vec<patch::Slot>> = Mutex::new(Vec::new());

    /// Starts to count. Again, it only sees to it that the hooks are still in place.
    ///
    /// Blocks handed out before are not known; see [`seed`].
    ///
    /// # Errors
    ///
    /// [`InstallError`]; nothing is changed then.
    pub fn install() -> Result<(), InstallError> {
        let mut slots = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.is_empty() || !patch::is_intact(&slots) {
            hook::survive_forks();
            *slots = patch::patch(!slots.is_empty())?;
        }
        Ok(())
    }

    /// Makes blocks known that were handed out before: `(address, bytes)`.
    pub fn seed(blocks: &[(usize, u64)]) {
        let mut state = state();
        for &(address, bytes) in blocks {
            let taken_bytes =
                footprint::of(usize::try_from(bytes).unwrap_or(usize::MAX), ALIGNMENT);
            if state.ledger.seed(address, bytes, taken_bytes) {
                budget::seeded(taken_bytes);
            }
        }
    }

    /// Counts blocks from now on that torch's allocator has not handed out, such as written pages of mapped files:
    /// `(address, bytes)`. Known ones stay as they are. Budgets do not know of them.
    pub fn add(blocks: &[(usize, u64)]) {
        let mut state = state();
        for &(address, bytes) in blocks {
            if !state.ledger.knows(address) {
                // Where no memory is left to write it down, it is one of the uncounted.
                let _ = state.ledger.allocated(address, bytes, 0);
            }
        }
    }

    /// Counts such blocks no more.
    pub fn remove(addresses: &[usize]) {
        let mut state = state();
        for &address in addresses {
            state.ledger.freed(address);
        }
    }

    /// Says what the blocks at these addresses hold, and for whom; unknown addresses are passed over.
    pub fn label(addresses: &[usize], category: Category, owner: Owner) {
        let mut state = state();
        for &address in addresses {
            state.ledger.label(address, category, owner);
        }
    }

    /// Says the same of unnamed blocks that were live at the peak of an open window, came with an
    /// event from `since` on and are gone.
    pub fn label_gone(since: u64, category: Category, owner: Owner) {
        state().ledger.label_gone(since, category, owner);
    }

    /// Number of the last event: they count allocations and frees.
    #[must_use]
    pub fn last_event() -> u64 {
        state().ledger.sequence()
    }

    /// Live blocks that came with an event in `[from, until)`, with or without those of models and
    /// optimizers, the oldest first.
    #[must_use]
    pub fn survivors(from: u64, until: u64, with_models: bool) -> Vec<Survivor> {
        state().ledger.survivors(from, until, with_models)
    }

    /// Has large blocks in files of a folder from now on where more than `limit_bytes` would be live in
    /// memory, and no more than `most_bytes` of them; an empty folder ends that, and blocks that are there stay.
    ///
    /// Nothing that was there before goes to a file, and no forked child makes one.
    pub fn set_overflow(folder: &str, limit_bytes: u64, most_bytes: u64) {
        let mut state = state();
        match std::ffi::CString::new(folder) {
            Ok(folder) if !folder.is_empty() => {
                state.overflow.begin(folder, limit_bytes, most_bytes);
            }
            _ => state.overflow.end(),
        }
    }

    /// The most bytes of such blocks at once since that was last asked for, and the most that were live
    /// when one came, in memory and in files.
    #[must_use]
    pub fn overflow_peaks() -> (u64, u64) {
        state().overflow.peaks()
    }

    /// Says whom to wake when the alarm rings: called on the thread that allocates, which may hold any
    /// lock but those of this crate.
    pub fn on_alarm(wake: fn()) {
        hook::WAKE.store(wake as usize, Ordering::Relaxed);
    }

    /// Sets the alarm, or switches it off.
    pub fn set_alarm(bounds: Option<Bounds>) {
        state().alarm.set(bounds);
    }

    /// Sets the alarm that has rung again, to ring after a while.
    pub fn put_alarm_off() {
        state().alarm.put_off();
    }

    /// Number of the event that rang the alarm last; 0 where none has.
    #[must_use]
    pub fn alarm_event() -> u64 {
        state().alarm.rang_at_event()
    }

    /// Is the block at an address in the count?
    #[must_use]
    pub fn is_counted(address: usize) -> bool {
        state().ledger.knows(address)
    }

    /// Number of the event with which the block at an address came; `None` where it is not counted.
    #[must_use]
    pub fn born(address: usize) -> Option<u64> {
        state().ledger.born(address)
    }

    /// Sets the number that peaks reached from now on carry.
    pub fn set_mark(mark: u64) {
        state().ledger.set_mark(mark);
    }

    /// Bytes of all live blocks.
    #[must_use]
    pub fn current_bytes() -> u64 {
        state().ledger.current_bytes()
    }

    /// Size of the last request that the system refused; 0 when it refused none.
    #[must_use]
    pub fn refused_bytes() -> u64 {
        state().ledger.refused_bytes()
    }

    /// Blocks that are not in the count because no memory was left to write them down.
    #[must_use]
    pub fn uncounted_blocks() -> u64 {
        state().ledger.uncounted()
    }

    /// Begins a window whose peak starts at what is live now.
    #[must_use]
    pub fn open_window() -> Window {
        Window(state().ledger.open())
    }

    /// Peak bytes of a window so far and the number of the event that reached it.
    #[must_use]
    pub fn window_peak(window: &Window) -> Option<(u64, u64)> {
        state().ledger.peak(window.0)
    }

    /// Begins a window anew, with what is live now.
    pub fn restart_window(window: &Window) {
        state().ledger.restart(window.0);
    }

    /// What a window has seen so far; `None` when it is closed.
    #[must_use]
    pub fn read_window(window: &Window) -> Option<Reading> {
        state().ledger.read(window.0)
    }

    /// Ends a window and says what it has seen; other windows are not touched.
    #[must_use]
    pub fn close_window(window: &Window) -> Option<Reading> {
        state().ledger.close(window.0)
    }

    /// Holds everything that torch allocates to a budget, until [`lift_budget`]; the tightest counts.
    ///
    /// # Errors
    ///
    /// [`AboveBudget`]; no budget is set then.
    pub fn set_budget(budget_bytes: u64) -> Result<Budget, AboveBudget> {
        let mut state = state();
        let tightest = budget::limit_bytes().unwrap_or(u64::MAX).min(budget_bytes);
        budget::set(tightest).map_err(|over| AboveBudget {
            held_bytes: over.held_bytes,
            budget_bytes,
        })?;
        state.last_budget += 1;
        let id = state.last_budget;
        state.budgets.push((id, budget_bytes));
        drop(state);
        settings::pin();
        release_kept();
        Ok(Budget(id))
    }

    /// Sets a budget that is on to another number of bytes; one that is not is passed over.
    ///
    /// # Errors
    ///
    /// [`AboveBudget`]; it stays as it was then.
    pub fn change_budget(budget: &Budget, budget_bytes: u64) -> Result<(), AboveBudget> {
        let mut state = state();
        let others = state.budgets.iter().filter(|&&(id, _)| id != budget.0);
        let tightest = others.map(|&(_, bytes)| bytes).min();
        let tightest = tightest.map_or(budget_bytes, |bytes| bytes.min(budget_bytes));
        let Some(entry) = state.budgets.iter_mut().find(|(id, _)| *id == budget.0) else {
            return Ok(());
        };
        budget::set(tightest).map_err(|over| AboveBudget {
            held_bytes: over.held_bytes,
            budget_bytes,
        })?;
        entry.1 = budget_bytes;
        drop(state);
        hook::make_room();
        Ok(())
    }

    /// Ends a budget; those still on go on.
    pub fn lift_budget(budget: &Budget) {
        let mut state = state();
        let before = state.budgets.len();
        state.budgets.retain(|&(id, _)| id != budget.0);
        if state.budgets.len() == before {
            return;
        }
        budget::widen(state.budgets.iter().map(|&(_, bytes)| bytes).min());
        drop(state);
        settings::unpin();
        if !budget::is_on() {
            release_kept();
        }
    }

    /// Frees the blocks that are kept for the next requests.
    pub fn release_kept() {
        while hook::free_oldest() {}
    }

    /// What all live blocks take of the process's memory, those on their way included.
    #[must_use]
    pub fn taken_bytes() -> u64 {
        budget::held_bytes()
    }

    /// How much of all blocks, the kept ones included, is in memory: untouched pages are not.
    #[must_use]
    pub fn resident_bytes() -> u64 {
        let (live, kept) = {
            let state = state();
            (state.ledger.live(), state.kept.all())
        };
        // The system is asked without the lock; a block that is gone meanwhile counts as not there.
        let live = live.iter().map(|block| (block.address, block.bytes));
        let kept = kept.iter().map(|block| (block.address, block.bytes as u64));
        live.chain(kept)
            .map(|(address, bytes)| residence::of(address, usize::try_from(bytes).unwrap_or(0)))
            .sum()
    }

    /// How many requests were refused while a budget was on.
    #[must_use]
    pub fn refusals() -> u64 {
        state().refusals.count()
    }

    /// The last of them.
    #[must_use]
    pub fn last_refusal() -> Option<Refusal> {
        state().refusals.last()
    }

    /// Lets go of what is known of the last of them.
    pub fn forget_refusal() {
        state().refusals.forget();
    }
}

/// The same functions where nothing can be counted.
#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
mod counting {
    use crate::alarm::Bounds;
    use crate::category::Category;
    use crate::ledger::{Owner, Reading, Survivor};
    use crate::refusal::Refusal;
    use crate::{AboveBudget, Budget, InstallError, Window};

    /// Always fails.
    ///
    /// # Errors
    ///
    /// [`InstallError::Platform`].
    pub fn install() -> Result<(), InstallError> {
        Err(InstallError::Platform)
    }

    /// Does nothing.
    pub fn seed(_: &[(usize, u64)]) {}

    /// Does nothing.
    pub fn add(_: &[(usize, u64)]) {}

    /// Does nothing.
    pub fn remove(_: &[usize]) {}

    /// Does nothing.
    pub fn label(_: &[usize], _: Category, _: Owner) {}

    /// Does nothing.
    pub fn label_gone(_: u64, _: Category, _: Owner) {}

    /// Zero.
    #[must_use]
    pub fn last_event() -> u64 {
        0
    }

    /// None.
    #[must_use]
    pub fn survivors(_: u64, _: u64, _: bool) -> Vec<Survivor> {
        Vec::new()
    }

    /// Does nothing.
    pub fn set_overflow(_: &str, _: u64, _: u64) {}

    /// Zeros.
    #[must_use]
    pub fn overflow_peaks() -> (u64, u64) {
        (0, 0)
    }

    /// Does nothing.
    pub fn on_alarm(_: fn()) {}

    /// Does nothing.
    pub fn put_alarm_off() {}

    /// Does nothing.
    pub fn set_alarm(_: Option<Bounds>) {}

    /// Zero.
    #[must_use]
    pub fn alarm_event() -> u64 {
        0
    }

    /// Does nothing.
    pub fn restart_window(_: &Window) {}

    /// No.
    #[must_use]
    pub fn is_counted(_: usize) -> bool {
        false
    }

    /// Never.
    #[must_use]
    pub fn born(_: usize) -> Option<u64> {
        None
    }

    /// Does nothing.
    pub fn set_mark(_: u64) {}

    /// Zero.
    #[must_use]
    pub fn current_bytes() -> u64 {
        0
    }

    /// Zero.
    #[must_use]
    pub fn refused_bytes() -> u64 {
        0
    }

    /// Zero.
    #[must_use]
    pub fn uncounted_blocks() -> u64 {
        0
    }

    /// A window that is never open.
    #[must_use]
    pub fn open_window() -> Window {
        Window(crate::WindowId(0))
    }

    /// `None`.
    #[must_use]
    pub fn window_peak(_: &Window) -> Option<(u64, u64)> {
        None
    }

    /// `None`.
    #[must_use]
    pub fn read_window(_: &Window) -> Option<Reading> {
        None
    }

    /// `None`.
    #[must_use]
    pub fn close_window(_: &Window) -> Option<Reading> {
        None
    }

    /// Holds nothing to anything.
    ///
    /// # Errors
    ///
    /// Never.
    pub fn set_budget(_: u64) -> Result<Budget, AboveBudget> {
        Ok(Budget(0))
    }

    /// Changes nothing.
    ///
    /// # Errors
    ///
    /// Never.
    pub fn change_budget(_: &Budget, _: u64) -> Result<(), AboveBudget> {
        Ok(())
    }

    /// Does nothing.
    pub fn lift_budget(_: &Budget) {}

    /// Does nothing.
    pub fn release_kept() {}

    /// Zero.
    #[must_use]
    pub fn taken_bytes() -> u64 {
        0
    }

    /// Zero.
    #[must_use]
    pub fn resident_bytes() -> u64 {
        0
    }

    /// Zero.
    #[must_use]
    pub fn refusals() -> u64 {
        0
    }

    /// `None`.
    #[must_use]
    pub fn last_refusal() -> Option<Refusal> {
        None
    }

    /// Does nothing.
    pub fn forget_refusal() {}
}

pub use counting::{
    add, alarm_event, born, change_budget, close_window, current_bytes, forget_refusal, install,
    is_counted, label, label_gone, last_event, last_refusal, lift_budget, on_alarm, open_window,
    overflow_peaks, put_alarm_off, read_window, refusals, refused_bytes, release_kept, remove,
    resident_bytes, restart_window, seed, set_alarm, set_budget, set_mark, set_overflow, survivors,
    taken_bytes, uncounted_blocks, window_peak,
};

//! Counts what PyTorch allocates on the CPU, inside the running process.
//!
//! PyTorch keeps no memory statistics for the CPU, and its profiler slows a program and keeps every
//! event. So this crate stands where torch asks the C library for tensor memory: it makes libc10 call
//! two functions of its own, which pass the call on and count. It is the only crate of memfit with
//! unsafe code, but for the lines of the binding that lend memory to [`LentBytes`] and take it from an
//! [`Arena`]; these two have nothing to do with counting and are here for that reason.
//!
//! Responsible for installing that and for the numbers. Not responsible for what a block holds, which
//! only Python can know ([`label`]), nor for words about it.
//!
//! Invariants: every call of libc10 reaches the function it was meant for, with its own arguments and
//! result; the hooks stay for the life of the process, since blocks they have counted may be freed at
//! any time; all threads of the process count; a forked child counts on from its parent's numbers.

mod arena;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod hook;
mod ledger;
mod lent;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod patch;

pub use arena::Arena;
pub use ledger::{Category, CategoryBytes, Reading, WindowId};
pub use lent::{LentBytes, LentBytesMut};

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

#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod counting {
    use std::sync::{Mutex, PoisonError};

    use crate::hook::ledger;
    use crate::ledger::{Category, Reading, WindowId};
    use crate::{InstallError, hook, patch};

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
        let mut ledger = ledger();
        for &(address, bytes) in blocks {
            ledger.seed(address, bytes);
        }
    }

    /// Says what the blocks at these addresses hold; unknown addresses are passed over.
    pub fn label(addresses: &[usize], category: Category) {
        let mut ledger = ledger();
        for &address in addresses {
            ledger.label(address, category);
        }
    }

    /// Sets the number that peaks reached from now on carry.
    pub fn set_mark(mark: u64) {
        ledger().set_mark(mark);
    }

    /// Bytes of all live blocks.
    #[must_use]
    pub fn current_bytes() -> u64 {
        ledger().current_bytes()
    }

    /// Size of the last request that the system refused; 0 when it refused none.
    #[must_use]
    pub fn refused_bytes() -> u64 {
        ledger().refused_bytes()
    }

    /// Blocks that are not in the count because no memory was left to write them down.
    #[must_use]
    pub fn uncounted_blocks() -> u64 {
        ledger().uncounted()
    }

    /// Begins a window whose peak starts at what is live now.
    #[must_use]
    pub fn open_window() -> WindowId {
        ledger().open()
    }

    /// Peak bytes of a window so far and the number of the event that reached it.
    #[must_use]
    pub fn window_peak(window: WindowId) -> Option<(u64, u64)> {
        ledger().peak(window)
    }

    /// What a window has seen so far; `None` when it is closed.
    #[must_use]
    pub fn read_window(window: WindowId) -> Option<Reading> {
        ledger().read(window)
    }

    /// Ends a window and says what it has seen; other windows are not touched.
    #[must_use]
    pub fn close_window(window: WindowId) -> Option<Reading> {
        ledger().close(window)
    }
}

/// The same functions where nothing can be counted.
#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
mod counting {
    use crate::InstallError;
    use crate::ledger::{Category, Reading, WindowId};

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
    pub fn label(_: &[usize], _: Category) {}

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
    pub fn open_window() -> WindowId {
        WindowId(0)
    }

    /// `None`.
    #[must_use]
    pub fn window_peak(_: WindowId) -> Option<(u64, u64)> {
        None
    }

    /// `None`.
    #[must_use]
    pub fn read_window(_: WindowId) -> Option<Reading> {
        None
    }

    /// `None`.
    #[must_use]
    pub fn close_window(_: WindowId) -> Option<Reading> {
        None
    }
}

pub use counting::{
    close_window, current_bytes, install, label, open_window, read_window, refused_bytes, seed,
    set_mark, uncounted_blocks, window_peak,
};

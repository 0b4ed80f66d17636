//! How the C library gets memory while a budget is on.
//!
//! Responsible for making large blocks mappings of their own, which go back to the system when they
//! are freed, and for undoing that as far as it can be. Not responsible for counting.
//!
//! By default glibc moves its threshold for mappings up to 32 MiB as a program frees larger blocks,
//! and keeps what is freed below it. Setting the threshold ends that for the life of the process,
//! and glibc has no way to ask what it was. So afterwards it is set to where glibc's own adjusting
//! ends. A threshold that the user has set in the environment is left alone.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Budgets that are on.
static PINS: AtomicUsize = AtomicUsize::new(0);

/// The first budget begins.
pub(crate) fn pin() {
    if PINS.fetch_add(1, Ordering::AcqRel) == 0 {
        glibc::map_from(crate::footprint::LARGE_BYTES);
        glibc::trim();
    }
}

/// The last budget ends.
pub(crate) fn unpin() {
    if PINS.fetch_sub(1, Ordering::AcqRel) == 1 {
        glibc::map_from(glibc::LARGEST_THRESHOLD);
    }
}

#[cfg(target_env = "gnu")]
mod glibc {
    #![expect(unsafe_code, reason = "calls the C library")]

    use std::ffi::c_int;
    use std::sync::LazyLock;

    /// `DEFAULT_MMAP_THRESHOLD_MAX` in glibc's `malloc.c`.
    pub(super) const LARGEST_THRESHOLD: usize = 32 << 20;

    /// Whether the user has chosen a threshold.
    static IS_CHOSEN: LazyLock<bool> = LazyLock::new(|| {
        let tunables = std::env::var_os("GLIBC_TUNABLES").unwrap_or_default();
        std::env::var_os("MALLOC_MMAP_THRESHOLD_").is_some()
            || tunables.to_string_lossy().contains("malloc.mmap_threshold")
    });

    pub(super) fn map_from(bytes: usize) {
        if *IS_CHOSEN {
            return;
        }
        // glibc keeps the second at twice the first when it adjusts them by itself.
        for (setting, bytes) in [
            (libc::M_MMAP_THRESHOLD, bytes),
            (libc::M_TRIM_THRESHOLD, 2 * bytes),
        ] {
            // SAFETY: any value is allowed; one that is not taken leaves the setting as it was.
            let _is_taken =
                unsafe { libc::mallopt(setting, c_int::try_from(bytes).unwrap_or(c_int::MAX)) };
        }
    }

    /// Gives back what the heap has kept so far.
    pub(super) fn trim() {
        // SAFETY: frees nothing that is in use.
        let _gave_back = unsafe { libc::malloc_trim(0) };
    }
}

#[cfg(not(target_env = "gnu"))]
mod glibc {
    pub(super) const LARGEST_THRESHOLD: usize = 32 << 20;

    pub(super) fn map_from(_: usize) {}

    pub(super) fn trim() {}
}

//! This boot of the system: its name, and the time since it began.
//!
//! Responsible for a clock that goes on over a restart of the broker and is the same in all processes.

use std::fs;

/// A name for this boot: after another, no process of before lives.
pub(crate) fn name() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map(|id| id.trim().to_owned()).unwrap_or_default()
}

/// Milliseconds since boot, asleep or not.
pub(crate) fn milliseconds() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let rest = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds
        .saturating_mul(1000)
        .saturating_add(rest / 1_000_000)
}

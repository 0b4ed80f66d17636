//! How short the host is of memory: `/proc/meminfo` and the kernel's pressure stall information.

use std::fs;

use memfit_engine::bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Memory pressure of the host; what the system does not tell is `null`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Pressure {
    /// All memory.
    pub total_bytes: Option<u64>,
    /// What could be had without swapping.
    pub available_bytes: Option<u64>,
    /// Percent of the last ten seconds in which some task waited for memory.
    pub some_percent: Option<f64>,
    /// Percent of the last ten seconds in which all tasks did.
    pub full_percent: Option<f64>,
}

/// Reads it now; what the system does not tell is absent.
#[must_use]
pub fn read() -> Pressure {
    let stall = fs::read_to_string("/proc/pressure/memory").unwrap_or_default();
    Pressure {
        total_bytes: meminfo("MemTotal").map(|bytes| bytes.0),
        available_bytes: meminfo("MemAvailable").map(|bytes| bytes.0),
        some_percent: stalled(&stall, "some"),
        full_percent: stalled(&stall, "full"),
    }
}

/// A line of `/proc/meminfo`.
#[must_use]
pub fn meminfo(name: &str) -> Option<Bytes> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    kibibytes(&text, name)
}

/// What a process has in memory for itself alone; nothing of one that is gone or another's.
#[must_use]
pub fn private_bytes(pid: u32) -> Option<u64> {
    private_in(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// The same from its `/proc/PID/status`; a kernel thread has none.
#[must_use]
pub fn private_in(status: &str) -> Option<u64> {
    kibibytes(status, "RssAnon").map(|bytes| bytes.0)
}

fn kibibytes(text: &str, name: &str) -> Option<Bytes> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024).map(Bytes)
}

/// `avg10` of a line such as `some avg10=0.12 avg60=0.00 avg300=0.00 total=123`.
fn stalled(text: &str, kind: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
    let average = line
        .split_ascii_whitespace()
        .find_map(|field| field.strip_prefix("avg10="))?;
    average
        .parse()
        .ok()
        .filter(|percent: &f64| percent.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_writes_is_read_and_anything_else_is_not() {
        let text =
            "MemTotal:       24690000 kB\nMemAvailable:   17000000 kB\nHugePages_Total:   0\n";
        assert_eq!(kibibytes(text, "MemTotal"), Some(Bytes(24_690_000 * 1024)));
        assert_eq!(kibibytes(text, "HugePages_Total"), None);
        assert_eq!(kibibytes(text, "Mem"), None);
        let text = "some avg10=1.50 avg60=0.10 avg300=0.00 total=1\nfull avg10=0.25 avg60=0 avg300=0 total=1\n";
        assert_eq!(
            (stalled(text, "some"), stalled(text, "full")),
            (Some(1.5), Some(0.25))
        );
        assert_eq!(stalled("", "some"), None);
        assert_eq!(stalled("some avg10=inf", "some"), None);
    }
}

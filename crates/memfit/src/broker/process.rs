//! Which process a client is, and whether it still lives.
//!
//! Responsible for telling a process from a later one with the same number, and for its pidfd. Not
//! responsible for what follows from its death.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

/// A process, told apart from others with the same number by when it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// Its number; 0 when it lives in a namespace that we cannot see.
    pub(crate) pid: u32,
    /// When it started, in ticks since boot; 0 when unknown.
    pub(crate) started: u64,
}

impl Process {
    /// The process with this number now.
    pub(crate) fn now(pid: u32) -> Self {
        Self {
            pid,
            started: started(pid).unwrap_or(0),
        }
    }

    /// Whether it can be seen to live: not from outside of its pid namespace.
    pub(crate) const fn is_seen(self) -> bool {
        self.pid != 0
    }

    /// A descriptor that becomes readable when the process ends; nothing when it has ended or cannot be
    /// seen.
    pub(crate) fn open(self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The number may have been given to another process before it was opened, not after.
        (started(self.pid) == Some(self.started)).then_some(descriptor)
    }
}

/// Field 22 of `/proc/PID/stat`; the second may contain anything, but ends with the last parenthesis.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Lets this process open as many files as it may: two for each client.
pub(crate) fn allow_many_files() -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_itself_and_no_other_with_its_number() {
        let own = Process::now(std::process::id());
        assert!(own.started > 0 && own.open().is_some());
        let earlier = Process {
            started: own.started - 1,
            ..own
        };
        assert!(earlier.open().is_none());
        assert!(Process::now(0).open().is_none());
    }
}

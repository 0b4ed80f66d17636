//! The exit codes, which are part of the contract with scripts.
//!
//! Responsible for the numbers. Not responsible for which outcome a command has: the commands say
//! that, and [`crate::error::Failure`] says it for failures.

/// What the program tells its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It fits, or the work is done.
    Done,
    /// The answer is no: the step does not fit, `verify` found a difference or an overshoot, or `explain`
    /// found an OOM or a leak, or `doctor` that memfit does not work here.
    No,
    /// Wrong use, bad input, a failing workload, a file that cannot be read or written.
    Usage,
    /// A script that is held to its budget would have exceeded it, or did (`EX_IOERR`).
    OverBudget,
    /// The broker had no room for a script, which was not run: another time it may (`EX_TEMPFAIL`).
    NoRoom,
    /// A bug in memfit.
    Internal,
    /// Interrupted by the user (Ctrl-C).
    Interrupted,
    /// What a script that memfit ran exited with.
    Script(u8),
}

impl Exit {
    /// The process's exit status.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::No => 1,
            Self::Usage => 2,
            Self::OverBudget => 74,
            Self::NoRoom => 75,
            Self::Internal => 101,
            Self::Interrupted => 130,
            Self::Script(code) => code,
        }
    }
}

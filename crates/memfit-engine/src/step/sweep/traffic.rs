//! What of stored allocations is on its way, and the list of what moved.
//!
//! Responsible for the types and for keeping the two lines, out and ahead, in order. Not responsible for when something
//! goes or comes (`transfers.rs`).

use std::collections::VecDeque;

use crate::step::layout::model::StepModel;
use crate::trace::{AllocationId, OpIndex};

/// One thing that happened to a stored or shrunk allocation, at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Its write began.
    Out {
        /// Position.
        at: OpIndex,
        /// What is written.
        allocation: AllocationId,
    },
    /// Its write must have ended: the step waits for it here.
    Settled {
        /// Position.
        at: OpIndex,
        /// What was written.
        allocation: AllocationId,
    },
    /// It is fetched, and waited for at once.
    Fetch {
        /// Position.
        at: OpIndex,
        /// What is fetched.
        allocation: AllocationId,
    },
    /// Its fetch begins, before anything asks for it.
    Ahead {
        /// Position.
        at: OpIndex,
        /// What is fetched.
        allocation: AllocationId,
    },
    /// It was fetched ahead and is asked for: the step waits for its fetch here.
    Asked {
        /// Position.
        at: OpIndex,
        /// What was fetched.
        allocation: AllocationId,
    },
    /// A narrower form of it is made.
    Shrunk {
        /// Position.
        at: OpIndex,
        /// What is shrunk.
        allocation: AllocationId,
    },
    /// It is made from its narrower form.
    Expanded {
        /// Position.
        at: OpIndex,
        /// What was shrunk.
        allocation: AllocationId,
    },
}

/// What a sweep knows of stored allocations. Empty and idle where there are none.
#[derive(Debug, Default, Clone)]
pub(in crate::step) struct Traffic {
    pub(in crate::step) window: u64,
    lines: Lines,
    /// The section at hand looked at one of the two: what it does depends on it.
    pub(in crate::step) touched: Touched,
    /// The request asked for a stored allocation.
    pub(in crate::step) asked: bool,
    /// Slots that the request must fetch or wait for.
    pub(super) wanted: Vec<usize>,
    pub(in crate::step) transfers: Vec<Transfer>,
}

/// What is on its way at a moment.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(in crate::step) struct Lines {
    pub(in crate::step) out: Outgoing,
    pub(in crate::step) ahead: Ahead,
}

/// Allocations whose write has not settled, the oldest first.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(in crate::step) struct Outgoing {
    pub(super) queue: VecDeque<usize>,
    pub(in crate::step) bytes: u64,
}

/// What was fetched ahead and has not been asked for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(in crate::step) struct Ahead {
    pub(in crate::step) bytes: u64,
    /// Place in the order of fetches: what is before it is there, or nothing refers to it.
    pub(in crate::step) next: usize,
}

/// Which of the [`Lines`].
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(in crate::step) struct Touched {
    pub(in crate::step) out: bool,
    pub(in crate::step) ahead: bool,
}

impl Traffic {
    pub(in crate::step) fn begin(&mut self, model: &StepModel) {
        self.transfers.clear();
        self.wanted.clear();
        self.asked = false;
        self.window = model.variant.window_bytes.0;
        self.lines.out.queue.clear();
        self.lines.out.bytes = 0;
        self.lines.ahead = Ahead::default();
    }

    /// What is on its way, for comparing and repeating.
    pub(super) const fn lines(&self) -> &Lines {
        &self.lines
    }

    /// The same, to be set.
    pub(super) const fn lines_mut(&mut self) -> &mut Lines {
        &mut self.lines
    }

    pub(in crate::step) fn out(&mut self) -> &mut Outgoing {
        self.touched.out = true;
        &mut self.lines.out
    }

    pub(in crate::step) fn ahead(&mut self) -> &mut Ahead {
        self.touched.ahead = true;
        &mut self.lines.ahead
    }

    /// What was fetched ahead leaves the window.
    pub(super) fn leave_window(&mut self, bytes: u64) {
        let ahead = self.ahead();
        ahead.bytes = ahead.bytes.saturating_sub(bytes);
    }
}

pub(in crate::step) fn id(allocation: usize) -> AllocationId {
    AllocationId(u32::try_from(allocation).unwrap_or(u32::MAX))
}

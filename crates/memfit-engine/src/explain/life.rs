//! One allocation and its life in a trace, and what contradicts such lives.
//!
//! Responsible for the types. Not responsible for how lives are found (`history.rs`), nor for the sizes of blocks that
//! are gone (`sizes.rs`).

use crate::snapshot::{PoolIndex, Problem, StackIndex, TextIndex};

/// A state that never comes: the end of what is alive when the snapshot is taken.
pub const NEVER: u32 = u32::MAX;

/// Problems told one by one; the rest is counted.
const MAX_PROBLEMS: usize = 100;

/// One allocation and its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// Where it starts.
    pub address: u64,
    /// Bytes of its block.
    pub size: u64,
    /// Bytes asked for.
    pub requested_size: u64,
    /// First state in which it is alive; 0 when it was so before recording.
    pub start: u32,
    /// First state in which its tensor has let go; 0 when that was before recording, [`NEVER`] when it has
    /// not.
    pub let_go: u32,
    /// First state in which its block is free; [`NEVER`] when it is not.
    pub end: u32,
    /// Who asked for it.
    pub stack: StackIndex,
    /// What the profiler or the user called it.
    pub label: TextIndex,
    /// Private pool.
    pub pool: PoolIndex,
}

impl Allocation {
    /// Whether a tensor holds it at a state: it counts as allocated.
    #[must_use]
    pub const fn is_allocated_at(&self, state: u32) -> bool {
        self.start <= state && state < self.let_go
    }

    /// Whether its block is not free at a state: it counts as active.
    #[must_use]
    pub const fn is_active_at(&self, state: u32) -> bool {
        self.start <= state && state < self.end
    }
}

/// Contradictions, each with the event that shows it.
#[derive(Debug)]
pub(super) struct Problems {
    device: u32,
    pub(super) all: Vec<Problem>,
    untold: u64,
}

impl Problems {
    pub(super) const fn new(device: u32) -> Self {
        Self {
            device,
            all: Vec::new(),
            untold: 0,
        }
    }

    pub(super) fn add(&mut self, position: Option<usize>, what: impl FnOnce() -> String) {
        if self.all.len() < MAX_PROBLEMS {
            self.all.push(Problem {
                device: Some(self.device),
                event: position.map(|position| position as u64),
                what: what(),
            });
        } else {
            self.untold += 1;
        }
    }

    pub(super) fn told(mut self) -> Vec<Problem> {
        if self.untold > 0 {
            self.all.push(Problem {
                device: Some(self.device),
                event: None,
                what: format!("{} more events contradict the others", self.untold),
            });
        }
        self.all
    }
}

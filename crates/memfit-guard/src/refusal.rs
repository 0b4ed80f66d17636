//! What was live when a request was refused.
//!
//! Responsible for keeping the last refusal until somebody asks. Not responsible for words about it.

use serde::Serialize;

use crate::category::Category;

/// A block that was live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LiveBlock {
    /// Where it lies.
    pub address: usize,
    /// Bytes as asked for.
    pub bytes: u64,
    /// What it held, as far as that was known.
    pub category: Category,
}

/// A request that was refused while a budget was on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// Bytes as asked for.
    pub requested_bytes: u64,
    /// Bytes it would have taken.
    pub taking_bytes: u64,
    /// Bytes that were taken.
    pub held_bytes: u64,
    /// The tightest budget.
    pub budget_bytes: u64,
    /// Whether the budget would have let it through and the system did not.
    pub is_by_system: bool,
    /// What was live; empty where there was no memory to write it down.
    pub blocks: Vec<LiveBlock>,
}

/// The refusals of one process.
#[derive(Debug)]
pub(crate) struct Refusals {
    count: u64,
    last: Option<Refusal>,
}

impl Refusals {
    pub(crate) const fn new() -> Self {
        Self {
            count: 0,
            last: None,
        }
    }

    /// Keeps a refusal in place of the one before.
    pub(crate) fn add(&mut self, refusal: Refusal) {
        self.count += 1;
        self.last = Some(refusal);
    }

    pub(crate) const fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn last(&self) -> Option<Refusal> {
        self.last.clone()
    }

    /// Lets go of what was live.
    pub(crate) fn forget(&mut self) {
        self.last = None;
    }
}

//! All that is known of a technique beside what it does to memory.
//!
//! Responsible for the type that each room fills in, and for words that several of them use. Not responsible for which
//! techniques there are (`kinds.rs`, `mod.rs`).

use super::kinds::ActionKind;
use crate::plan::action::ActionSummary;
use crate::plan::choice::Chosen;
use crate::plan::context::Outcome;
use crate::plan::search::problem::Candidate;
use crate::plan::{Class, Plan, PlanRequest};
use crate::trace::Trace;

/// All that is known of a technique beside what it does to memory.
#[derive(Debug)]
pub struct Technique {
    /// Its kind of action.
    pub kind: ActionKind,
    /// Its name in JSON and on the command line.
    pub name: &'static str,
    /// Its name in reports.
    pub title: &'static str,
    /// What it does, in a line of help.
    pub help: &'static str,
    /// The class of its actions.
    pub promise: Class,
    /// What an action of it does, in words.
    pub effect: fn(&ActionSummary) -> String,
    /// The title with the count, for a plot's label; absent where a plan cannot choose how much of it.
    pub short: Option<fn(u64) -> String>,
    /// Where its action is among those of a plan.
    pub(in crate::plan) acts_on: ActsOn,
    /// Is it looked at only where no exact plan fits, or with leave for its class? Its refusals are said only then.
    pub(in crate::plan) only_where_needed: bool,
    /// Why it cannot be used, as a sentence without full stop; `None` where it can, or where it was not asked for.
    pub(in crate::plan) refusal: fn(&Trace, &PlanRequest) -> Option<String>,
    /// Does a candidate use it?
    pub(in crate::plan) is_used: fn(&Outcome, &Candidate) -> bool,
    /// Adds its action, and the notes that go with it, to the plan of a candidate that uses it.
    pub(in crate::plan) write: fn(&Chosen<'_>, &mut Plan),
}

/// What of a step a technique acts on, in the order that actions have in a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::plan) enum ActsOn {
    Optimizer,
    Parameters,
    Computation,
    Batch,
    Activations,
    Allocator,
}

/// `1 tensor`, `12 tensors`.
#[must_use]
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 {
        format!("1 {noun}")
    } else {
        format!("{count} {noun}s")
    }
}

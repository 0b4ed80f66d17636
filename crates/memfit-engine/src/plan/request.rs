//! What a user asks for.
//!
//! Responsible for the request as it comes in. Not responsible for what can be done about it (`technique/`).

use serde::{Deserialize, Serialize};

use super::promise::Class;
use super::search::transfers::Offer;
use super::technique::kinds::ActionKind;
use crate::bytes::Budget;

/// What a user asks for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PlanRequest {
    /// The budget.
    pub budget: Budget,
    /// The widest class the user allows beyond what is needed.
    pub allow: Class,
    /// Kinds of action that the user allows by name, whatever their class.
    pub allow_kinds: Vec<ActionKind>,
    /// The user drives forward, backward and optimizer: only actions that live in forward.
    pub own_loop: bool,
    /// The user drives backward: updates inside it take more than a step of ours would where parameters are offloaded
    /// too, so one of the two has to do.
    pub own_backward: bool,
    /// Kinds of action the user forbids.
    pub forbid: Vec<ActionKind>,
    /// Paths of modules that compute in their own types, with parameters as they are, whatever else is cast.
    pub keep: Vec<String>,
    /// A place for what is offloaded; nothing is without one.
    pub offload: Option<Offer>,
}

impl Default for PlanRequest {
    fn default() -> Self {
        Self {
            budget: Budget::Percent(100.0),
            allow: Class::Exact,
            allow_kinds: Vec::new(),
            own_loop: false,
            own_backward: false,
            forbid: Vec::new(),
            keep: Vec::new(),
            offload: None,
        }
    }
}

impl PlanRequest {
    /// Does the user want actions of a kind that changes numbers?
    #[must_use]
    pub fn asks_for(&self, kind: ActionKind) -> bool {
        self.allow >= kind.technique().promise || self.allow_kinds.contains(&kind)
    }
}

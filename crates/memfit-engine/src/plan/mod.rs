//! What to do so that a step fits, and the promise that comes with it.
//!
//! Responsible for the request and the plan (`request.rs`, `document.rs`, `action.rs`, `instructions.rs`, `promise.rs`),
//! for the techniques (`technique/`), for the choice among them (`choose.rs`, `combinations.rs`, `solve.rs`), the search
//! within one combination of them (`search/`), the lower bound (`bound/`), the front over all budgets (`front.rs`), the
//! conversation in which planning asks for what it needs (`session.rs`, `trace_requests.rs`) and the check every plan
//! passes before anyone sees it (`validate.rs`). Not responsible for what a plan does to memory ([`crate::step`]) or for
//! carrying it out (the Python package).

mod action;
mod actions;
mod arena;
mod bottleneck;
mod bound;
mod choice;
mod choose;
mod combinations;
mod context;
mod document;
mod executor;
mod front;
mod instructions;
mod outcomes;
mod promise;
mod request;
mod search;
mod session;
mod solve;
mod technique;
mod trace_requests;
mod validate;
mod ways;

pub use action::{Action, ActionSummary};
pub use choose::{plan, plan_within};
pub use context::PlanError;
pub use document::{
    Arena, Bottleneck, Estimate, NextClass, Plan, Refusal, SCHEMA_VERSION, StopReason, Verdict,
};
pub use front::{Front, FrontBound, FrontPoint, FrontRequest, FrontStop, front};
pub use instructions::{
    ActiveRegion, CallInPieces, Dropped, LossOfPieces, MicroBatch, Offload, OffloadOptimizer,
    OffloadParameters, OptimizerBits, Remat, Shrink, Tier,
};
pub use promise::Class;
pub use request::PlanRequest;
pub use search::limits::{Limit, TimeLimit};
pub use search::transfers::Offer;
pub use session::{Answer, AnswerError, Made, Need, PlanSession, Search};
pub use technique::micro_batch::mixed_items;
pub use technique::{ActionKind, Details, TECHNIQUES, Technique, counted};
pub use trace_requests::{Asked, Sizes};
pub use validate::InvalidPlan;
pub use ways::{ways, ways_without_leave};

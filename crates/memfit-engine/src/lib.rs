//! The pure engine of memfit: a trace in, a prediction or a plan out.
//!
//! Invariants: no I/O, no clock, no environment, no logging, no unsafe code; the same input gives the
//! same output; no input makes it panic.

pub mod allocator;
pub mod bytes;
pub mod cost;
pub mod explain;
pub mod file;
pub mod largest;
pub mod oom_message;
pub mod placement;
pub mod plan;
pub mod predict;
pub mod prune;
pub mod share;
pub mod snapshot;
pub mod step;
pub mod timeline;
pub mod trace;

//! The peak of a transformed trace, by sweeping its events.
//!
//! Responsible for one sweep (`evaluate.rs`) and for sweeping only what differs from the last (`incremental.rs`), with
//! who refers to what meanwhile (`state.rs`, `column.rs`) what is stored (`traffic.rs`,
//! `transfers.rs`) and what is shrunk (`narrow.rs`). Not
//! responsible for the events (`layout/`).

pub(super) mod change;
mod column;
pub(super) mod evaluate;
pub(super) mod incremental;
mod narrow;
mod state;
pub(super) mod traffic;
mod transfers;

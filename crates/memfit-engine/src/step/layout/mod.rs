//! A trace laid out for evaluation under a variant.
//!
//! Responsible for the model (`model.rs`), its events in order (`event.rs`, `events.rs`) and what may be done to an
//! allocation (`treatment.rs`, `storable.rs`). Not responsible for what follows from doing it (`sweep/`).

pub(super) mod event;
mod events;
pub(super) mod model;
mod storable;
pub(super) mod treatment;

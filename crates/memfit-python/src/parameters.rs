//! Parameters elsewhere: the engine's room, for the executor that moves them.
//!
//! Responsible for conversion, as the rest of the binding.

use memfit_engine::step::offload::room::{self, Move};
use pyo3::prelude::*;

/// Which parameters are in memory. Items are places in the list of sizes.
#[pyclass(module = "memfit._native")]
pub(crate) struct Room(room::Room);

#[pymethods]
impl Room {
    #[new]
    fn new(sizes: Vec<u64>, order: Vec<usize>, room_bytes: u64, ahead_bytes: u64) -> Self {
        Self(room::Room::new(sizes, order, room_bytes, ahead_bytes))
    }

    fn admit(&mut self, item: usize) {
        self.0.admit(item);
    }

    fn trim(&mut self) -> Vec<(&'static str, usize)> {
        self.0.trim().into_iter().map(Move::told).collect()
    }

    fn need(&mut self, items: Vec<usize>) -> Vec<(&'static str, usize)> {
        self.0.need(&items).into_iter().map(Move::told).collect()
    }
}

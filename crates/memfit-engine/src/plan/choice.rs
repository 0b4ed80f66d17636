//! A candidate that became the plan, with what techniques write their actions from.
//!
//! Responsible for what a technique may look at. Not responsible for writing (`actions.rs`, `technique/`).

use super::context::{Outcome, Planner};
use super::search::problem::Candidate;
use super::technique::addresses::Directions;
use crate::bytes::Bytes;
use crate::predict;
use crate::trace::Way;

/// A candidate that became the plan, for the techniques to write their actions from.
pub(super) struct Chosen<'a> {
    pub(super) planner: &'a Planner<'a>,
    pub(super) outcome: &'a Outcome,
    pub(super) candidate: &'a Candidate,
    /// What the executor needs for activations.
    pub(super) directions: Directions,
}

impl Chosen<'_> {
    /// The peak of the step in a way without anything else done; without a capture of that way, the plain step's.
    pub(super) fn peak_in(&self, way: &Way) -> Bytes {
        let ways = self.planner.ways.iter().map(|it| it.alternative);
        let mut same = ways.filter(|it| it.way == *way);
        let plain = self.planner.unplanned_peak;
        same.next()
            .map_or(plain, |it| predict::unplanned_peak(&it.trace))
    }
}

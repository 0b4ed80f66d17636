//! What the slow twin keeps while it walks through a step.
//!
//! Responsible for the types alone. Not responsible for what happens to them (`naive.rs`, and one file for each matter
//! beside this one).

use std::collections::BTreeMap;

use crate::bytes::Bytes;
use crate::step::{Transfer, Treatment, Variant};
use crate::trace::{AllocationId, OpIndex, Trace};

/// A made version of a dropped allocation.
#[derive(Debug)]
pub(super) struct Version {
    pub(super) allocation: usize,
    pub(super) number: u32,
    pub(super) record: usize,
    pub(super) materialised: bool,
    /// Its storage went on to the next version.
    pub(super) stolen: bool,
}

/// A recorded op.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) op: usize,
    pub(super) reads_versions: Vec<usize>,
    /// Stored and shrunk allocations that it reads.
    pub(super) reads_stored: Vec<usize>,
    pub(super) pins: Vec<usize>,
    /// The versions it makes.
    pub(super) made: std::ops::Range<usize>,
    pub(super) consumed: bool,
}

/// What the twin found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NaiveEvaluation {
    /// The peak.
    pub peak_bytes: Bytes,
    /// Forward ops replayed, in order.
    pub replayed: Vec<OpIndex>,
    /// A replay read something overwritten since, or a stored allocation was needed too early.
    pub stale: Option<OpIndex>,
    /// An allocation that may not be stored, or may not have the home it has.
    pub refused: Option<AllocationId>,
    /// What moved, in order.
    pub transfers: Vec<Transfer>,
}

/// What there is of the stored and the shrunk allocations; per allocation.
#[derive(Debug, Default)]
pub(super) struct Stored {
    /// Those that are stored or shrunk.
    pub(super) returning: Vec<usize>,
    /// Its narrower form was made.
    pub(super) shrunk: Vec<bool>,
    /// In the order of their writes; those up to `settled` are no longer on their way out.
    pub(super) sent: Vec<usize>,
    pub(super) settled: usize,
    pub(super) fetched: Vec<bool>,
    /// It came ahead, and nothing asked for it yet.
    pub(super) unasked: Vec<bool>,
    /// By first own unpack.
    pub(super) order: Vec<usize>,
}

/// Something that a request runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Errand {
    Fetch(usize),
    Replay(usize),
}

/// What is reachable at a moment.
pub(super) struct Reach {
    pub(super) versions: Vec<bool>,
    pub(super) records: Vec<bool>,
    /// Stored and shrunk allocations to which something refers.
    pub(super) stored: Vec<bool>,
}

pub(super) struct Twin<'t> {
    pub(super) trace: &'t Trace,
    pub(super) variant: Variant,
    pub(super) treatments: &'t [Treatment],
    pub(super) forward_end: usize,
    pub(super) versions: Vec<Version>,
    pub(super) records: Vec<Record>,
    /// Saved tensors of each allocation, and versions of each dropped allocation.
    pub(super) saved_of: Vec<Vec<usize>>,
    pub(super) versions_of: Vec<Vec<usize>>,
    /// The ranges in which the natural ranges of each allocation really hold, under the variant.
    pub(super) ranges: Vec<Vec<(usize, usize)>>,
    /// Per stretch of [`STRETCH`] positions: allocations that something but a pin or a replay may hold there.
    pub(super) near: Vec<Vec<usize>>,
    /// Those of them that are not kept.
    pub(super) treated: Vec<Vec<usize>>,
    /// The last op outside the optimizer that writes to each allocation.
    pub(super) last_writes: Vec<Option<usize>>,
    pub(super) stored: Stored,
    /// Forward ops that make the versions of each allocation.
    pub(super) makers: Vec<Vec<usize>>,
    /// Versions and stored allocations that are there only until a record of this request ran.
    pub(super) passing_versions: Vec<usize>,
    pub(super) passing_stored: Vec<usize>,
    pub(super) constant: u64,
    pub(super) updates: Updates,
    /// Bytes of what of the state is in 8 bits.
    pub(super) narrow_state: BTreeMap<usize, u64>,
    pub(super) result: NaiveEvaluation,
}

/// Positions in a stretch; few in tests, whose steps are short.
pub(super) const STRETCH: usize = if cfg!(test) { 4 } else { 256 };

/// Where the state of an update is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Away,
    /// Fetched, its update has yet to run.
    Ahead,
    Outgoing,
}

/// What there is of the updates.
#[derive(Debug, Default)]
pub(super) struct Updates {
    /// All of them in order, with the position of each.
    pub(super) in_order: Vec<(usize, usize)>,
    /// Of each in order, where its state is.
    pub(super) places: Vec<(Place, u64)>,
    /// Those in order that have run.
    pub(super) ran: usize,
    /// Optimizer state in memory that the trace holds no allocation for.
    pub(super) state_bytes: u64,
}

//! A snapshot's trace as a picture that fits into a page: levels of detail, computed once.
//!
//! Responsible for the lives of allocations and segments (`subject.rs`, `lives.rs`, `segments.rs`), for the totals over
//! time at a bounded number of columns (`columns.rs`), for choosing the lives worth listing (`select.rs`)
//! and for packing all of it into a given number of bytes (`pack.rs`, `head.rs`, `texts.rs`, `coding.rs`). Not responsible for
//! drawing, nor for what the picture means.
//!
//! Time is counted in *moments*: moment `m` is the state after the first `m` events, so that a trace of `n`
//! events has the moments `0..=n`. A life is the half-open range of moments at which something is there.
//!
//! Invariants: the highest column of any level is the exact peak; the bands of a column add up to its
//! total; what is left out is counted; the packed bytes never exceed what was allowed.

mod coding;
mod columns;
#[cfg(test)]
mod forward;
mod head;
mod lives;
#[cfg(test)]
mod naive;
mod pack;
#[cfg(test)]
mod sample;
mod segments;
mod select;
mod subject;
mod texts;

pub use coding::deflated;
pub use lives::Life;
pub use pack::{Packed, PackedDevice, pack};
pub use segments::SegmentLife;
pub use subject::{Subject, subjects};

/// Number of events applied so far.
pub type Moment = u32;

use crate::snapshot::DeviceRecord;

/// How many moments a device's trace has.
fn moments(device: &DeviceRecord) -> Moment {
    Moment::try_from(device.events.len()).map_or(Moment::MAX, |events| events.saturating_add(1))
}

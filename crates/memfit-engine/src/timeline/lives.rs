//! When each allocation was there.
//!
//! Responsible for putting what happens to lives in order. Not responsible for where lives come from
//! (`subject.rs`) nor for segments.
//!
//! Invariants: `birth <= released <= end`, and `birth < end`; changes are in the order of their moments, and
//! replaying them from the lives with birth 0 gives exactly the lives.

use super::Moment;
use crate::snapshot::StackIndex;

/// One allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// Where it was.
    pub address: u64,
    /// Bytes of its block. Known exactly when it is there at the end; otherwise the request, rounded.
    pub size: u64,
    /// First moment at which it is there; 0 when it was there before the recording.
    pub birth: Moment,
    /// First moment at which no tensor holds it.
    pub released: Moment,
    /// First moment at which its block is free.
    pub end: Moment,
    /// Who asked for it.
    pub stack: StackIndex,
    /// To whom it is counted.
    pub owner: u32,
}

/// What happens to a life at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// It begins.
    Born,
    /// Its tensor lets go.
    Released,
    /// Its block is free.
    Ended,
}

/// All lives of a device, and what happens to them in order.
#[derive(Debug)]
pub(super) struct Lives<'a> {
    pub(super) all: &'a [Life],
    pub(super) changes: Vec<(Moment, u32, Change)>,
    /// One more than the number of events.
    pub(super) moments: Moment,
}

impl<'a> Lives<'a> {
    /// Puts what happens to lives in order: by moment, then by their positions.
    ///
    /// `moments` is one more than the number of events.
    pub(super) fn new(lives: &'a [Life], moments: Moment) -> Self {
        let changes_of = |life: &Life| {
            [
                (life.birth, Change::Born),
                (life.released, Change::Released),
                (life.end, Change::Ended),
            ]
            .into_iter()
            .filter(|change| change.0 > 0 && change.0 < moments)
        };
        // Counting first, so that millions of changes need no sort.
        let mut starts = vec![0_u32; moments as usize + 1];
        for (moment, _) in lives.iter().flat_map(changes_of) {
            starts[moment as usize + 1] += 1;
        }
        let mut before = 0;
        for start in &mut starts {
            before += *start;
            *start = before;
        }
        let mut changes = vec![(0, 0, Change::Born); before as usize];
        for (index, life) in (0..).zip(lives) {
            for (moment, change) in changes_of(life) {
                let place = &mut starts[moment as usize];
                changes[*place as usize] = (moment, index, change);
                *place += 1;
            }
        }
        Self {
            all: lives,
            changes,
            moments,
        }
    }
}

//! What a sweep reports while it goes along.
//!
//! Responsible for the types: a moment, an op that runs again, a change of what is alive. Not responsible for when any
//! of them happens (`evaluate.rs`, `state.rs`).

use crate::trace::OpIndex;

/// When something happens: at a position, and within it at a replayed op, if at one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// The op that runs, or the op before which the replay runs.
    pub position: OpIndex,
    /// The forward op being replayed there, or the one that made what is fetched there.
    pub replay: Option<OpIndex>,
}

/// A forward op that runs again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replay {
    /// The op before which it does.
    pub at: OpIndex,
    /// The forward op.
    pub op: OpIndex,
}

/// One change of what is alive, as a sweep goes along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::step) enum Change {
    /// A kept allocation got its first holder.
    Held { at: (usize, u8), allocation: usize },
    /// It lost its last.
    LetGo { at: (usize, u8), allocation: usize },
    /// A replay made a version that something waits for.
    Made {
        at: (usize, u8),
        slot: usize,
        bytes: u64,
    },
    /// A replay wrote in place: the storage of slot `from` is now that of the next.
    Passed { at: (usize, u8), from: usize },
    /// A version that a replay made went.
    Gone {
        at: (usize, u8),
        slot: usize,
        bytes: u64,
    },
    /// A narrower form of a version came, or went.
    Narrow {
        at: (usize, u8),
        slot: usize,
        bytes: u64,
        comes: bool,
    },
    /// A replay's outputs that nothing waits for, and its workspace.
    Scratch { at: (usize, u8), bytes: u64 },
}

impl Change {
    /// Position, and rank of the event within it.
    pub(in crate::step) const fn at(&self) -> (usize, u8) {
        match *self {
            Self::Held { at, .. }
            | Self::LetGo { at, .. }
            | Self::Made { at, .. }
            | Self::Passed { at, .. }
            | Self::Gone { at, .. }
            | Self::Narrow { at, .. }
            | Self::Scratch { at, .. } => at,
        }
    }
}

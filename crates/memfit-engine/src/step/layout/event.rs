//! One event of a step, and its order among those of its position.
//!
//! Responsible for the type. Not responsible for which events a step has (`events.rs`), nor for what they do
//! (`sweep/`).

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::step) enum Event {
    /// Autograd packs saved tensor `.0`.
    Pack(usize),
    /// Forward is over, and what it saved is packed: every write of offloaded bytes settles.
    ForwardEnd,
    /// Natural range ends: allocation, and for a range that backward opened the slot it holds.
    End {
        allocation: usize,
        slot: Option<usize>,
    },
    /// The node of saved tensor `.0` lets go.
    Release(usize),
    /// Updates one by one, of which the highest reaches `height` above what may be dropped.
    Update { height: u64 },
    /// Backward asks for saved tensor `.0`.
    Unpack(usize),
    /// Natural range starts.
    Start {
        allocation: usize,
        slot: Option<usize>,
    },
    /// Ops from here to before `until` run with no other event; `highest` is the one of most ground.
    Run { until: usize, highest: usize },
}

impl Event {
    /// Does a sweep look at the height when it applies this?
    pub(in crate::step) const fn looks(self) -> bool {
        matches!(
            self,
            Self::Pack(_) | Self::Update { .. } | Self::Unpack(_) | Self::Run { .. }
        )
    }

    /// Order within one position. Packs come first, so that a value handed from a variable to autograd
    /// is never without a holder; ends and releases before unpacks, as autograd frees a node's tensors
    /// before the next node asks for its own; updates between the two, as `AccumulateGrad` nodes run
    /// before any other that is ready.
    pub(in crate::step) const fn rank(self) -> u8 {
        match self {
            Self::Pack(_) | Self::ForwardEnd => 0,
            Self::End { .. } => 1,
            Self::Release(_) => 2,
            Self::Update { .. } => 3,
            Self::Unpack(_) => 4,
            Self::Start { .. } => 5,
            Self::Run { .. } => 6,
        }
    }
}

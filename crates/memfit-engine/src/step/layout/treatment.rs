//! What a plan does with one allocation.
//!
//! Responsible for the type that every evaluation takes, one for each allocation of a trace, and for the reasons
//! against a store. Which treatments an allocation may get is for the model to say ([`crate::step::StepModel`]).

use crate::trace::OpIndex;

/// What happens to an allocation between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Treatment {
    /// It stays as long as something holds it.
    #[default]
    Keep,
    /// It goes, and is computed again.
    Drop {
        /// Requests for what ops from here on made let it pass; [`Treatment::NO_HOME`] for none.
        home: OpIndex,
    },
    /// It is offloaded, and fetched.
    Store {
        /// As for a drop.
        home: OpIndex,
    },
    /// It stays in a narrower form, and is expanded.
    Shrink {
        /// Which form.
        to: Narrow,
        /// As for a drop.
        home: OpIndex,
    },
}

/// A narrower form of 32-bit numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Narrow {
    /// `bfloat16`: the range of the 32-bit type, 8 bits of precision.
    Half,
    /// Whole numbers of 8 bits, in blocks with a scale of their own.
    EightBit,
}

impl Narrow {
    /// Numbers that share a scale. The kernel has the same (`memfit-memory/src/narrow.rs`).
    pub const BLOCK: u64 = 256;

    /// Bytes that so many bytes of 32-bit numbers take in this form.
    #[must_use]
    pub const fn bytes(self, full: u64) -> u64 {
        let count = full / 4;
        match self {
            Self::Half => count * 2,
            Self::EightBit => count + 4 * count.div_ceil(Self::BLOCK),
        }
    }
}

impl Treatment {
    /// A home behind every op of forward: there is none.
    pub const NO_HOME: OpIndex = OpIndex(u32::MAX);
    /// Computed again at most once.
    pub const DROP: Self = Self::Drop {
        home: Self::NO_HOME,
    };
    /// Fetched at most once.
    pub const STORE: Self = Self::Store {
        home: Self::NO_HOME,
    };

    /// Held in a narrower form, and expanded at most once.
    #[must_use]
    pub const fn shrunk(to: Narrow) -> Self {
        let home = Self::NO_HOME;
        Self::Shrink { to, home }
    }

    /// Does it stay?
    #[must_use]
    pub const fn is_keep(self) -> bool {
        matches!(self, Self::Keep)
    }

    /// Is it computed again?
    #[must_use]
    pub const fn is_drop(self) -> bool {
        matches!(self, Self::Drop { .. })
    }

    /// Is it offloaded?
    #[must_use]
    pub const fn is_store(self) -> bool {
        matches!(self, Self::Store { .. })
    }

    /// Is it held in a narrower form?
    #[must_use]
    pub const fn is_shrink(self) -> bool {
        matches!(self, Self::Shrink { .. })
    }

    /// Does it come back without an op that runs again?
    #[must_use]
    pub const fn is_fetched(self) -> bool {
        self.is_store() || self.is_shrink()
    }

    /// Its home; [`Treatment::NO_HOME`] when it has none or stays.
    #[must_use]
    pub const fn home(self) -> OpIndex {
        match self {
            Self::Keep => Self::NO_HOME,
            Self::Drop { home } | Self::Store { home } | Self::Shrink { home, .. } => home,
        }
    }

    /// The same with a home; what is kept stays kept.
    #[must_use]
    pub const fn with_home(self, home: OpIndex) -> Self {
        match self {
            Self::Keep => Self::Keep,
            Self::Drop { .. } => Self::Drop { home },
            Self::Store { .. } => Self::Store { home },
            Self::Shrink { to, .. } => Self::Shrink { to, home },
        }
    }

    /// Dropped, or kept: what a set of drops says.
    #[must_use]
    pub const fn dropped(drop: bool) -> Self {
        if drop { Self::DROP } else { Self::Keep }
    }

    /// Kept becomes dropped; anything else becomes kept.
    #[must_use]
    pub const fn flipped(self) -> Self {
        Self::dropped(self.is_keep())
    }

    /// Does a request for what op `asker` made let it pass?
    pub(in crate::step) const fn passes(self, asker: usize) -> bool {
        self.home().index() <= asker
    }
}

/// Why an allocation cannot be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unstorable {
    /// It holds no bytes.
    Empty,
    /// It was not created in forward.
    NotForward,
    /// Autograd does not save it, or not in forward only.
    NotSaved,
    /// It is alive to the end of the step.
    Output,
    /// It is written to after autograd saved it.
    Overwritten,
}

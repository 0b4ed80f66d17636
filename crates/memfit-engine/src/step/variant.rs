//! The choices that change the events of a step themselves.
//!
//! Responsible for the types. Not responsible for what follows from them: `offload/` says which parameters and which
//! state are offloaded, `eight_bit_state.rs` which state is in 8 bits, `layout/` what the events are then.

use crate::bytes::Bytes;

/// The global choices that change the events themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Variant {
    /// The optimizer runs per parameter inside backward and frees each gradient.
    pub fuse_optimizer: bool,
    /// The optimizer runs per parameter after backward.
    pub one_by_one: bool,
    /// Gradients of earlier micro-batches are alive throughout.
    pub accumulate: bool,
    /// Most bytes of stored allocations on their way out, and most fetched ahead. With none, every write
    /// settles before the pack returns, and nothing is fetched ahead.
    pub window_bytes: Bytes,
    /// The optimizer runs per parameter, and state is in memory only around its update.
    pub offload_optimizer: Option<StateAway>,
    /// The optimizer runs per parameter, and state is in 8 bits, also while it does. Of offloaded state, a slice
    /// is in memory then.
    pub eight_bit_state: Option<EightBitState>,
    /// The optimizer runs per parameter, and parameters are offloaded but for a room in memory.
    pub offload_parameters: Option<ParametersAway>,
}

impl Variant {
    /// Does the optimizer run per parameter, its own phase being empty?
    pub(super) const fn updates_one_by_one(self) -> bool {
        self.one_by_one
            || self.fuse_optimizer
            || self.offload_optimizer.is_some()
            || self.eight_bit_state.is_some()
            || self.offload_parameters.is_some()
    }
}

/// State that is offloaded between updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateAway {
    /// Most bytes fetched ahead of their update, and most on their way out.
    pub window_bytes: Bytes,
    /// Smallest allocation that goes away.
    pub least_bytes: Bytes,
}

/// State in 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EightBitState {
    /// Smallest parameter whose state is.
    pub least_bytes: Bytes,
    /// The lower halves of parameters in `bfloat16` are kept with it.
    pub lower_halves: bool,
}

/// Parameters that are offloaded but for a room in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParametersAway {
    /// Most bytes of them in memory, or on their way, at a time.
    pub room_bytes: Bytes,
    /// Most of those that are on their way, or came ahead and are not used yet.
    pub ahead_bytes: Bytes,
    /// Smallest parameter that goes away.
    pub least_bytes: Bytes,
}

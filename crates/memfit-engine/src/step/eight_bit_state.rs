//! Optimizer state in 8 bits: which of it is, and what it takes.
//!
//! Part of laying a step out (`layout/` sums the bytes). Not responsible for the order of updates (`offload/updates.rs`),
//! nor for whether an optimizer has such a form at all (`plan/technique/optimizer_bits.rs`).

use super::layout::treatment::Narrow;
use super::variant::EightBitState;
use crate::bytes::Bytes;
use crate::trace::{AllocationId, Category, Trace};

impl EightBitState {
    /// Of each update, the moments in 8 bits: those of parameters that are large enough, with a 32-bit number for each of
    /// the parameter's. The update of a parameter that has any makes no temporaries.
    #[must_use]
    pub fn moments(self, trace: &Trace) -> Vec<Vec<AllocationId>> {
        let mut is_float32: Vec<bool> = trace
            .allocations
            .iter()
            .map(|it| it.bytes.0.is_multiple_of(4))
            .collect();
        for value in &trace.values {
            is_float32[value.allocation.index()] &= trace.string(value.dtype) == "float32";
        }
        let of_update = |update: &crate::trace::ParameterUpdate| {
            let parameter = &trace.allocations[update.parameter.index()];
            let is_large = parameter.bytes >= self.least_bytes.max(Bytes(1));
            let states = update.state.iter().copied();
            let moments = states.filter(|id| {
                let state = &trace.allocations[id.index()];
                is_large
                    && is_float32[update.parameter.index()]
                    && state.category == Category::OptimizerState
                    && state.bytes == parameter.bytes
                    && is_float32[id.index()]
            });
            moments.collect()
        };
        trace.updates.iter().map(of_update).collect()
    }

    /// Bytes of a moment that takes so many in 32 bits.
    #[must_use]
    pub const fn bytes(full: Bytes) -> Bytes {
        Bytes(Narrow::EightBit.bytes(full.0))
    }
}

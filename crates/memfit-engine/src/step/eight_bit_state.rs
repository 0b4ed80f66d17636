//! Optimizer state in 8 bits: which of it is, what it takes, and what of it is offloaded.
//!
//! Part of laying a step out (`layout/` sums the bytes). Not responsible for the order of updates (`offload/updates.rs`),
//! nor for whether an optimizer has such a form at all (`plan/technique/optimizer_bits.rs`).

use super::layout::treatment::Narrow;
use super::variant::{EightBitState, Variant};
use crate::bytes::Bytes;
use crate::trace::{AllocationId, Category, ParameterUpdate, Trace};

/// A moment in 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NarrowMoment {
    /// As the trace has it.
    pub state: AllocationId,
    /// How many it has.
    pub numbers: u64,
    /// What it takes, the first of a parameter's with the lower halves of that, where they are kept.
    pub bytes: Bytes,
    /// Those of its bytes that are lower halves.
    pub lower_bytes: Bytes,
}

impl NarrowMoment {
    /// What its first slice takes; no other takes more.
    #[must_use]
    pub fn slice_bytes(self) -> Bytes {
        let slice = self.numbers.min(EightBitState::SLICE_NUMBERS);
        let lower = self.lower_bytes.0 / self.numbers.max(1) * slice;
        Bytes(Narrow::EightBit.bytes(slice * WIDE) + lower)
    }

    /// In how many slices it is fetched and written.
    #[must_use]
    pub const fn slices(self) -> u64 {
        self.numbers.div_ceil(EightBitState::SLICE_NUMBERS)
    }
}

impl Variant {
    /// Of each update, the moments in 8 bits that are offloaded: they are fetched and written slice by slice.
    #[must_use]
    pub fn offloaded_moments(self, trace: &Trace) -> Vec<Vec<NarrowMoment>> {
        let Some((away, narrow)) = self.offload_optimizer.zip(self.eight_bit_state) else {
            return vec![Vec::new(); trace.updates.len()];
        };
        let mut moments = narrow.moments(trace);
        for of_update in &mut moments {
            of_update.retain(|moment| away.takes(trace, moment.state));
        }
        moments
    }
}

impl EightBitState {
    /// Numbers of a slice: what torch's ops work on at once, and what is fetched at once of offloaded moments.
    pub const SLICE_NUMBERS: u64 = 1 << 20;

    /// Of each update, the moments in 8 bits: those of parameters that are large enough, with a number for each of the
    /// parameter's, of the same type. That has 32 bits, or 16 where parameters were narrowed for the recording.
    #[must_use]
    pub fn moments(self, trace: &Trace) -> Vec<Vec<NarrowMoment>> {
        let width = widths(trace);
        let of_update = |update: &ParameterUpdate| {
            let parameter = &trace.allocations[update.parameter.index()];
            let Some(wide) = width[update.parameter.index()] else {
                return Vec::new();
            };
            let numbers = parameter.bytes.0 / wide;
            if numbers < self.least_numbers().max(1) {
                return Vec::new();
            }
            let states = update.state.iter().copied().filter(|id| {
                let state = &trace.allocations[id.index()];
                state.category == Category::OptimizerState
                    && state.bytes == parameter.bytes
                    && width[id.index()] == Some(wide)
            });
            let bytes = Bytes(Narrow::EightBit.bytes(numbers * WIDE));
            let has_halves = self.lower_halves && wide < WIDE;
            let lower = Bytes(if has_halves { numbers * wide } else { 0 });
            let moments = states.enumerate().map(|(place, state)| NarrowMoment {
                state,
                numbers,
                bytes: if place == 0 { bytes + lower } else { bytes },
                lower_bytes: if place == 0 { lower } else { Bytes::ZERO },
            });
            moments.collect()
        };
        trace.updates.iter().map(of_update).collect()
    }

    /// What the update of a parameter takes whose moments are in 8 bits: nothing by the kernel, which a CPU has. Torch's
    /// ops take room for a slice of its numbers, as `moments_by_ops.py` says.
    #[must_use]
    pub fn temporary_bytes(trace: &Trace, moments: &[NarrowMoment]) -> Bytes {
        let numbers = moments.first().map_or(0, |moment| moment.numbers);
        if trace.meta.device_kind == "cpu" {
            return Bytes::ZERO;
        }
        Bytes(numbers.min(Self::SLICE_NUMBERS) * ROOM_BYTES)
    }

    /// Numbers of the smallest parameter whose state is in 8 bits.
    const fn least_numbers(self) -> u64 {
        self.least_bytes.0.div_ceil(WIDE)
    }
}

/// What torch's ops take for each number of a slice.
const ROOM_BYTES: u64 = 18;

/// Bytes of a number of 32 bits.
const WIDE: u64 = 4;

/// Bytes of each allocation's numbers, where all of them are of a type that moments may have.
fn widths(trace: &Trace) -> Vec<Option<u64>> {
    let mut dtypes: Vec<Option<&str>> = vec![None; trace.allocations.len()];
    for value in &trace.values {
        let dtype = trace.string(value.dtype);
        let known = dtypes[value.allocation.index()].get_or_insert(dtype);
        if *known != dtype {
            *known = "";
        }
    }
    let sizes = trace.allocations.iter().zip(dtypes);
    let width = sizes.map(|(allocation, dtype)| {
        let width = match dtype {
            None | Some("float32") => WIDE,
            Some("bfloat16") if trace.meta.half_parameters => WIDE / 2,
            Some(_) => return None,
        };
        allocation.bytes.0.is_multiple_of(width).then_some(width)
    });
    width.collect()
}

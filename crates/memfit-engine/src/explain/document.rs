//! The explanation as a struct: what `memfit explain --format json` prints.
//!
//! Responsible for the shape, which is a contract: fields are added, never renamed, and `schema_version` rises
//! when one changes its meaning. Integers are bytes unless the name says otherwise (`count`, `event`,
//! `address`). Not responsible for how the values come about.

use super::end::End;
use super::fragmentation::Fragmentation;
use super::growth::Growth;
use super::oom::OutOfMemory;
use super::owners::Owner;
use super::steps::StepSource;
use crate::bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Version of the shapes in this file.
pub const SCHEMA_VERSION: u32 = 1;

/// What happened to the memory of every device in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Explanation {
    /// Version of this shape.
    pub schema_version: u32,
    /// The snapshot, as the caller named it.
    pub source: String,
    /// The earlier snapshot it is compared with.
    pub before: Option<String>,
    /// Number of recorded events.
    pub events: u64,
    /// By index.
    pub devices: Vec<DeviceExplanation>,
    /// What in the file contradicts itself; the rest was analysed.
    pub problems: Vec<Contradiction>,
}

/// Something in the file that contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Contradiction {
    /// The device, when it is about one.
    pub device: Option<u32>,
    /// Index of the event in the device's trace, when it is about one.
    pub event: Option<u64>,
    /// What is wrong, in one sentence.
    pub what: String,
}

/// What happened to one device's memory.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct DeviceExplanation {
    /// Index of the device.
    pub index: u32,
    /// Whether a history was recorded: two events or more. Without one, `peak`, `owners` and `fragmentation`
    /// are of the moment when the snapshot was taken, and nothing is judged but refusals.
    pub has_history: bool,
    /// When it held most.
    pub peak: Peak,
    /// Active bytes before the first event.
    pub live_before_recording_bytes: Bytes,
    /// Who owned the allocated bytes at the peak; they sum to it. The largest first.
    pub owners: Vec<Owner>,
    /// The inactive bytes at the peak, or at a refusal.
    pub fragmentation: Fragmentation,
    /// Refused requests, in order.
    pub oom: Vec<OutOfMemory>,
    /// Stacks that hold more after every step, the fastest first; with an earlier snapshot, stacks that
    /// hold more than there.
    pub growth: Vec<Growth>,
    /// What other allocator settings would have done, the best first.
    pub counterfactuals: Vec<Counterfactual>,
    /// What they come down to, in a sentence; why there are none, if there are none.
    pub counterfactual_summary: Option<String>,
    /// Peak of reserved bytes when replayed under the recorded settings: what to compare with.
    pub replayed_reserved_bytes: Option<Bytes>,
    /// What the growth comes down to, in a sentence; that it was not looked for, where no steps were found.
    pub growth_summary: Option<String>,
    /// How the steps were found, and how many there are; absent when none were.
    pub steps: Option<StepsFound>,
    /// When the snapshot was taken.
    pub last: Held,
    /// What becomes of that.
    pub end: End,
    /// Block sizes from before recording that nothing in the file tells may make the byte counts larger by
    /// up to this.
    pub uncertain_bytes: Bytes,
}

/// The peaks of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Peak {
    /// Most bytes held by tensors.
    pub allocated_bytes: Bytes,
    /// Most bytes in blocks that are not free.
    pub active_bytes: Bytes,
    /// Most bytes taken from the driver.
    pub reserved_bytes: Bytes,
    /// Index of the event after which `allocated_bytes` were first held; absent when it was before the
    /// first event.
    pub event: Option<u64>,
    /// The same for `active_bytes`.
    pub active_event: Option<u64>,
    /// The same for `reserved_bytes`.
    pub reserved_event: Option<u64>,
    /// Microseconds from the first event to `event`; absent without times.
    pub after_us: Option<u64>,
}

/// Bytes of a device at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Held {
    /// Held by tensors.
    pub allocated_bytes: Bytes,
    /// In blocks that are not free.
    pub active_bytes: Bytes,
    /// Taken from the driver.
    pub reserved_bytes: Bytes,
}

/// The steps of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct StepsFound {
    /// Boundaries between steps.
    pub boundary_count: u64,
    /// How they were found.
    pub source: StepSource,
}

/// What other allocator settings would have done with the same requests.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Counterfactual {
    /// As in `PYTORCH_CUDA_ALLOC_CONF`.
    pub settings: String,
    /// Peak of reserved bytes.
    pub peak_reserved_bytes: Bytes,
    /// Whether no recorded refusal would have happened; absent when there was none, or when a replay under the
    /// recorded settings is not refused either.
    pub oom_avoided: Option<bool>,
}

//! What an OOM message decides, as a struct: what `memfit explain --format json` prints for a text.
//!
//! Responsible for the shape, which is a contract: fields are added, never renamed, and `schema_version` rises
//! when one changes its meaning. Not responsible for how the values come about.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::amount::Amount;

/// Version of the shapes in this file.
pub const SCHEMA_VERSION: u32 = 1;

/// The OOM messages of a text.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OomMessages {
    /// Version of this shape.
    pub schema_version: u32,
    /// What this document is about: always `oom_messages`.
    pub kind: String,
    /// The text, as the caller named it.
    pub source: String,
    /// Messages in it, the same ones counted each time.
    pub message_count: u64,
    /// Messages after the first 100 different ones, which are not explained.
    pub further_count: u64,
    /// Each different message, in the order of the text.
    pub messages: Vec<OomMessage>,
}

/// One message and what it decides.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OomMessage {
    /// How often the text has it.
    pub count: u64,
    /// Who wrote it.
    pub kind: Kind,
    /// Index of the device, as the process numbers them.
    pub device: Option<u32>,
    /// What the driver was asked for: the request, rounded up to a segment.
    pub requested: Option<Amount>,
    /// The device's memory.
    pub total: Option<Amount>,
    /// Free on the device when the message was written.
    pub free: Option<Amount>,
    /// In blocks that tensors hold.
    pub allocated: Option<Amount>,
    /// Reserved by PyTorch in no block, outside private pools.
    pub unallocated: Option<Amount>,
    /// Reserved by PyTorch in no block, in private pools: only their own graphs can use it.
    pub private_unallocated: Option<Amount>,
    /// Taken from the driver by PyTorch.
    pub reserved: Option<Amount>,
    /// The limit of this process.
    pub allowed: Option<Amount>,
    /// All that this process holds on the device.
    pub this_process: Option<Amount>,
    /// Of `this_process`, what PyTorch did not take: the CUDA context, libraries.
    pub non_pytorch: Option<Amount>,
    /// Other processes that the message names; without `this_process`, one of them may be this process.
    pub other_processes: Vec<OtherProcess>,
    /// Whether the message says that expandable segments were on.
    pub is_expandable: bool,
    /// What an expandable segment could reach, where the message says so.
    pub expandable_reserve: Option<Amount>,
    /// Whether the message ends before its last number.
    pub is_cut: bool,
    /// What the numbers show.
    pub causes: Vec<ShownCause>,
    /// What they leave open.
    pub undecided: Vec<Undecided>,
    /// What it comes down to, in a sentence.
    pub summary: String,
    /// What would tell the rest.
    pub next: Vec<NextStep>,
}

/// Who wrote a message.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "OomMessageKind")]
pub enum Kind {
    /// PyTorch's caching allocator.
    Allocator,
    /// The same, before it asked the driver (`throw_on_cudamalloc_oom`).
    Rejected,
    /// PyTorch with `backend:cudaMallocAsync`.
    DriverPool,
    /// The driver or a library, outside PyTorch's allocator: no numbers.
    Driver,
    /// PyTorch's allocator of the host's memory.
    Host,
}

/// Another process on the device.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
pub struct OtherProcess {
    /// Its number, as the driver knows it.
    pub pid: u64,
    /// What it holds; `None` where the driver does not tell.
    pub bytes: Option<Amount>,
}

/// A reason for a refusal.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum OomCause {
    /// A limit of this process refused.
    Limit,
    /// A request larger than an expandable segment can become.
    ExpandableReserve,
    /// The tensors alive and the request are more than the process could have, however it is arranged.
    TooMuchAlive,
    /// Other processes hold what was missing.
    OtherProcesses,
    /// This process holds it outside PyTorch.
    NonPytorch,
    /// Private pools hold it, unused.
    PrivatePools,
    /// The bytes were there, but perhaps not in one piece.
    FragmentationPossible,
    /// The device had room and no limit was reached.
    DriverHadRoom,
}

/// A cause that the numbers show.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ShownCause {
    /// Which.
    pub cause: OomCause,
    /// The bytes it is about: those held, or, of `too_much_alive`, those that must go; of `limit`, the limit.
    pub bytes: Option<Amount>,
    /// Whether the request is served once this alone changes; `None` where the numbers do not tell.
    pub is_enough: Option<bool>,
    /// The cause in a sentence.
    pub summary: String,
}

/// What the numbers do not tell.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Undecided {
    /// The cause that is left open.
    pub cause: OomCause,
    /// Why, in a sentence.
    pub summary: String,
}

/// A command and what it tells.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct NextStep {
    /// What to run.
    pub command: String,
    /// What it tells.
    pub tells: String,
}

//! A pool: which of many models are in memory, decided by one pure state machine.
//!
//! Responsible for admission, order, the choice of what to park, and the sums. Not responsible for moving
//! bytes, threads or clocks: the caller does the jobs that [`Machine::begin`] hands out, says how they
//! ended, and brings the time with every event.
//!
//! `plain_types.rs` the words for callers without these types, `machine.rs` one event in and its answers out, `victims.rs` what to park, `copies.rs` where its copy goes,
//! `cached.rs` what a device's allocator keeps of calls, `habits.rs` when a model will be used next and what
//! moving it takes; tests: `naive.rs` all subsets, `histories.rs` random histories against a judge that counts
//! anew.
//!
//! # What is counted
//!
//! A model counts in full from the moment its wake begins until its parking has ended, and each use
//! counts its activations from the moment they are granted until it ends. The sum never exceeds the
//! budget: bytes are set aside first and taken after. A use may ask for more ([`Machine::grow`]), as a
//! holder does (below).
//!
//! The budget may come down and grow again up to what it was at first ([`Machine::aim`]): what is unused is
//! parked by the caller's wish ([`Machine::shed`]), and what is in use comes down when it ends. What can never fit
//! is judged by the first budget; a request that only lacks budget waits for it to grow ([`Machine::short`]).
//!
//! # A pool of a device
//!
//! What calls took of a device is not free when they end: PyTorch's allocator keeps it for later. It counts
//! until somebody needs the bytes and a [`Job::Release`] has given them back, which comes before any parking;
//! the next call of the same model has it again. Parked models have copies in the host's memory, which have
//! a share of their own: a model that is not expected back soon goes on to the disk ([`Job::Spill`]).
//!
//! # The order of service
//!
//! Requests are served in the order in which they came, but a *hit* (its model is awake and its activations fit)
//! may overtake those that wait for room, each of them at most [`OVERTAKINGS`] times. The first request that
//! waits for room is the only one for which anything is parked.
//!
//! A client that holds a use and asks for another is a *holder*. At most one holder waits, and it is first;
//! another is refused at once, as is one whose need together with what it holds is above the budget.
//!
//! # Why nothing deadlocks and no request starves
//!
//! Assume that a use whose client does not wait ends. The first request waits for uses of others, or for
//! jobs. If it is a holder, no other client both waits and holds, so all other uses end; if it is not,
//! there is no waiting holder at all, and the same is true. Once overtaken so many times, no other request passes
//! it: then all others' uses end, what is not pinned is parked, and its need fits, as was checked when it
//! asked. What cannot be parked although it is unused is *stuck*; where only such models are in the way
//! the request is refused. So every request is granted or refused, and the next becomes first. With a budget that
//! came down this holds as soon as it has grown again.
//!
//! # What is parked
//!
//! Of the idle models the set that frees enough at the least loss: what it will take to have a model back
//! (and to write what has changed since it was parked before), by the requests until it is expected to be
//! used. Writing a model for the first time is not counted: it comes once for every model that is ever
//! parked, and counted it would keep for ever those that happened to be in memory from the beginning.

mod cached;
mod copies;
mod habits;
#[cfg(test)]
mod histories;
#[cfg(test)]
mod histories_of_devices;
mod machine;
#[cfg(test)]
mod naive;
mod plain_types;
mod victims;

pub use machine::Machine;
pub use plain_types::{NoJob, ToldJob, ToldRefusal};

use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;

/// Hits that may overtake a request that waits for room.
pub const OVERTAKINGS: u32 = 16;

/// A model of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(pub usize);

/// A request, and the use that it becomes. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A line of work that waits for one thing at a time: a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Client(pub u64);

/// Microseconds of a clock that never goes back.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Micros(pub u64);

/// Something for the caller to do, begun by being handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Job {
    /// Have the model back, then say [`Machine::woken`].
    Wake(ModelId),
    /// Give its memory back, with no more than so many bytes of its copy in the host's memory and the rest on
    /// the disk, then say [`Machine::parked`].
    Park(ModelId, Bytes),
    /// Move its copy from the host's memory to the disk, then say [`Machine::spilled`].
    Spill(ModelId),
    /// Have the device's allocator give back what no call uses, then say [`Machine::released`].
    Release,
}

/// A model that was added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// The model.
    pub model: ModelId,
    /// Whether it stays in memory; if not, it is parked before anything else.
    pub is_awake: bool,
    /// What its copy may have of the host's memory then.
    pub in_host: Bytes,
}

/// How a job went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Done {
    /// Whether it did what it was to do; if not, the model is as before.
    pub is_done: bool,
    /// Bytes that were moved.
    pub moved: Bytes,
    /// What its copy has of the host's memory, where it was parked.
    pub in_host: Bytes,
    /// What it took.
    pub took: Micros,
    /// When it ended.
    pub now: Micros,
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The model is awake and stays so, and there is room for the activations.
    Granted(Ticket),
    /// It is not.
    Refused(Ticket, Refusal),
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It can never fit.
    TooLarge {
        /// Bytes of the model and its activations.
        wanted: Bytes,
        /// Bytes that pinned models and the client itself leave of the budget.
        available: Bytes,
    },
    /// Its client holds a use, and another such client waits already.
    Contended,
    /// Its model could not be woken.
    NotWoken,
    /// What is in the way is unused, and cannot be parked.
    Stuck,
}

/// What a pool did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Statistics {
    /// Uses granted.
    pub uses: u64,
    /// Uses whose model was awake when they were asked for.
    pub hits: u64,
    /// Uses that were not granted at once.
    pub waits: u64,
    /// Models woken.
    pub wakes: u64,
    /// Models parked.
    pub parks: u64,
    /// Bytes moved by waking.
    pub bytes_woken: Bytes,
    /// Bytes written by parking, and by moving copies on.
    pub bytes_written: Bytes,
    /// What uses waited, together.
    #[serde(rename = "waited_micros")]
    pub waited: Micros,
    /// Most bytes counted at a time.
    #[serde(rename = "peak_bytes")]
    pub peak: Bytes,
    /// Copies moved from the host's memory to the disk.
    pub spills: u64,
    /// Most bytes of copies in the host's memory at a time.
    #[serde(rename = "host_peak_bytes")]
    pub host_peak: Bytes,
    /// Times that a device's allocator gave back what it kept.
    pub releases: u64,
}

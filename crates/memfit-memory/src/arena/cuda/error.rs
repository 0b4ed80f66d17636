//! Why the driver did not do what it was asked.
//!
//! Responsible for one variant per cause, with the call, the bytes and the next step in it.

use memfit_engine::bytes::Bytes;

/// Why memory of a device was not had, moved or given back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VmmError {
    /// There is no driver.
    #[error(
        "the CUDA driver `{library}` cannot be opened: {reason}\nhint: is there a GPU on this machine?"
    )]
    NoDriver {
        /// The library's name or path.
        library: String,
        /// What the system says.
        reason: String,
    },
    /// A driver from before CUDA 11.
    #[error(
        "the CUDA driver `{library}` has no `{function}`\nhint: update it; CUDA 11 or later is needed"
    )]
    OldDriver {
        /// The library's name or path.
        library: String,
        /// What it lacks.
        function: String,
    },
    /// A device that cannot map memory at addresses.
    #[error(
        "device {device} does not have virtual memory management, so its memory cannot be parked in place"
    )]
    Unsupported {
        /// Its number.
        device: u32,
    },
    /// The device has no room.
    #[error("device {device} has no room for {}: {} free", Bytes(*.wanted), free_text(*.free))]
    NoRoom {
        /// Its number.
        device: u32,
        /// What was asked for.
        wanted: u64,
        /// What it had then, where it tells.
        free: Option<u64>,
    },
    /// The driver refused a call.
    #[error("the CUDA driver refused `{call}` with {name} ({code})")]
    Refused {
        /// The call.
        call: &'static str,
        /// The driver's word for it.
        name: String,
        /// The driver's number.
        code: i32,
    },
    /// No memory can be that long.
    #[error("{wanted} bytes are no length of device memory")]
    Length {
        /// What was asked for.
        wanted: u64,
    },
    /// A range that is not there, or not now.
    #[error("bytes {start} to {end} are not in device memory that is open")]
    Range {
        /// From the start of the memory.
        start: u64,
        /// Its end.
        end: u64,
    },
    /// The host has no memory for a copy.
    #[error("the host has no memory for {}: {reason}", Bytes(*.wanted))]
    NoHostMemory {
        /// What was asked for.
        wanted: u64,
        /// What the system says.
        reason: String,
    },
}

fn free_text(free: Option<u64>) -> String {
    free.map_or_else(
        || "an unknown amount is".to_owned(),
        |bytes| format!("{} is", Bytes(bytes)),
    )
}

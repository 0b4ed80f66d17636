//! What a model's parking did so far, in numbers.

use serde::Serialize;

/// What a model's parking did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CudaStatistics {
    /// Bytes kept in the host's memory.
    pub bytes_to_host: u64,
    /// Bytes written to the file.
    pub bytes_written: u64,
    /// Bytes that were not written because the file had them.
    pub bytes_unchanged: u64,
    /// Bytes read from the file.
    pub bytes_read: u64,
    /// Times that it was parked.
    pub parks: u64,
    /// Times that it was woken.
    pub wakes: u64,
    /// What parking took.
    pub park_seconds: f64,
    /// What waking took.
    pub wake_seconds: f64,
}

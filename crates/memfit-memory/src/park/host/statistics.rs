//! What a model's parking did so far, in numbers.

use serde::Serialize;

/// What a model's parking did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Statistics {
    /// Bytes written to the file.
    pub bytes_written: u64,
    /// Bytes that were not written because the file had them.
    pub bytes_unchanged: u64,
    /// Bytes that were not written because the weights file had them.
    pub bytes_in_source: u64,
    /// Bytes read and compared: none of those that were in memory all the time.
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

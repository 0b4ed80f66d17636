//! The document of `memfit ps`.

use std::path::Path;

use serde::Serialize;

use crate::lease::status::Status;

/// Version of the shape.
const SCHEMA_VERSION: u32 = 1;

/// What `memfit ps --format json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct PsDocument {
    schema_version: u32,
    /// Where the broker is, or would be.
    pub(crate) socket: String,
    /// Absent when no broker runs there.
    pub(crate) broker: Option<Status>,
}

impl PsDocument {
    pub(crate) fn new(socket: &Path, broker: Option<Status>) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            socket: socket.display().to_string(),
            broker,
        }
    }
}

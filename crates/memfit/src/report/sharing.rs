//! The documents of `memfit ps` and `memfit devices`.

use std::path::Path;

use memfit_engine::bytes::Bytes;
use serde::Serialize;

use crate::device::Room;
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

/// What `memfit devices --format json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct DevicesDocument {
    schema_version: u32,
    /// The step, where one was named.
    pub(crate) target: Option<String>,
    pub(crate) devices: Vec<DeviceRoom>,
    /// Where the step fits: the GPU with the most room, else the host.
    pub(crate) best: Option<String>,
}

/// A device, and whether a step fits there.
#[derive(Debug, Serialize)]
pub(crate) struct DeviceRoom {
    #[serde(flatten)]
    pub(crate) room: Room,
    /// What the step takes there in a process of its own; absent where that is not known.
    pub(crate) needed_bytes: Option<Bytes>,
    pub(crate) fits: Option<bool>,
}

impl DeviceRoom {
    pub(crate) fn new(room: Room, needed_bytes: Option<Bytes>) -> Self {
        let fits = needed_bytes.map(|needed| needed.0 <= room.room_bytes);
        Self {
            room,
            needed_bytes,
            fits,
        }
    }
}

impl DevicesDocument {
    pub(crate) fn new(target: Option<String>, devices: Vec<DeviceRoom>) -> Self {
        let fitting = devices.iter().filter(|device| device.fits == Some(true));
        // Of equals the first.
        let best = fitting.rev().max_by_key(|device| {
            let is_gpu = device.room.device != "host";
            (is_gpu, device.room.room_bytes)
        });
        Self {
            schema_version: SCHEMA_VERSION,
            target,
            best: best.map(|device| device.room.device.clone()),
            devices,
        }
    }
}

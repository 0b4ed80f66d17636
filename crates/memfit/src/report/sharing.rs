//! The documents of `memfit ps` and `memfit devices`, and the sentence on what is short.

use std::path::Path;

use memfit_engine::bytes::Bytes;
use serde::Serialize;

use crate::device::Room;
use crate::lease::status::{DeviceStatus, Status};
use crate::report::words;

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

/// Says that the broker could grant what is not there, if that is so.
pub(crate) fn shortfall(device: &DeviceStatus) -> Option<String> {
    let short = Bytes(device.shortfall()?);
    let is_too_large = device
        .total_bytes
        .is_some_and(|total| device.capacity_bytes > total);
    let reason = if is_too_large {
        "it may grant more than there is"
    } else {
        "memory without a lease is in use"
    };
    let name = words::inert(&device.name, 20);
    Some(format!(
        "{name}: {short} more could be granted than is free: {reason}"
    ))
}

/// Says that the broker grants less than it may, for others use the rest, if that is so.
pub(crate) fn occupied(device: &DeviceStatus) -> Option<String> {
    let bytes = device.occupied_bytes.filter(|bytes| *bytes > 0)?;
    let ungranted = device.capacity_bytes.saturating_sub(device.granted_bytes);
    let name = words::inert(&device.name, 20);
    let bytes = Bytes(bytes.min(ungranted));
    Some(format!(
        "{name}: {bytes} are not granted while others than lease holders use them"
    ))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_what_could_be_granted_is_told_with_the_reason() {
        let used = |capacity: u64, granted: u64, used: u64| DeviceStatus {
            name: "cuda:0".to_owned(),
            capacity_bytes: capacity << 30,
            granted_bytes: granted << 30,
            free_bytes: (capacity - granted) << 30,
            occupied_bytes: None,
            total_bytes: Some(80 << 30),
            used_bytes: Some(used << 30),
        };
        assert_eq!(shortfall(&used(70, 40, 50)), None);
        assert_eq!(
            shortfall(&used(70, 40, 53)).unwrap(),
            "cuda:0: 3.00 GiB more could be granted than is free: memory without a lease is in use"
        );
        assert_eq!(
            shortfall(&used(90, 40, 40)).unwrap(),
            "cuda:0: 10.00 GiB more could be granted than is free: it may grant more than there is"
        );
    }

    #[test]
    fn what_is_not_granted_for_others_is_told() {
        let device = |occupied_bytes| DeviceStatus {
            name: "host".to_owned(),
            capacity_bytes: 16 << 30,
            granted_bytes: 4 << 30,
            occupied_bytes,
            ..DeviceStatus::default()
        };
        assert_eq!(occupied(&device(None)), None);
        assert_eq!(occupied(&device(Some(0))), None);
        assert_eq!(
            occupied(&device(Some(3 << 30))).unwrap(),
            "host: 3.00 GiB are not granted while others than lease holders use them"
        );
        assert!(
            occupied(&device(Some(u64::MAX)))
                .unwrap()
                .contains("12.00 GiB are")
        );
    }
}

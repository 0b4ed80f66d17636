//! The memories of this machine: the host's, and those of the GPUs as the driver's library (NVML) tells.
//!
//! Responsible for asking, and for how much room each has: what is free there now, and no more than
//! a broker could still grant. NVML is opened at run time: where there is none there are no GPUs, and
//! that is no error. Not responsible for granting (`broker/`).

use std::path::Path;

use memfit_engine::bytes::Bytes;
use memfit_memory::pressure;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use serde::{Deserialize, Serialize};

use crate::lease::status::Status;
use crate::lease::{Client, LeaseError, SocketError};

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gpu {
    /// `cuda:0`; numbered as NVML does, by the bus, which is `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    pub device: String,
    /// What its maker calls it.
    pub name: String,
    /// All of its memory.
    pub total_bytes: u64,
    /// What is in use, by any process: all that is not free.
    pub used_bytes: u64,
    /// The processes that NVML sees on it.
    pub processes: Vec<GpuProcess>,
}

/// The memory of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total_bytes: u64,
    /// What is not free, what the driver keeps for itself included.
    pub used_bytes: u64,
}

/// A process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its number, in the driver's namespace.
    pub pid: u32,
    /// What it holds there; absent where the driver does not tell.
    pub used_bytes: Option<u64>,
}

/// NVML, opened once.
#[derive(Debug)]
pub struct Driver {
    nvml: Nvml,
}

impl Driver {
    /// Opens it.
    ///
    /// # Errors
    ///
    /// Why it cannot be used: usually that there is no GPU.
    pub fn open() -> Result<Self, String> {
        let nvml = Nvml::init().map_err(|error| format!("NVML cannot be used ({error})"))?;
        Ok(Self { nvml })
    }

    /// The GPUs as they are now; one that does not answer is left out.
    #[must_use]
    pub fn gpus(&self) -> Vec<Gpu> {
        let count = self.nvml.device_count().unwrap_or(0);
        (0..count).filter_map(|index| self.gpu(index)).collect()
    }

    /// The GPU with this number; nothing where it does not answer.
    #[must_use]
    pub fn gpu(&self, index: u32) -> Option<Gpu> {
        let device = self.nvml.device_by_index(index).ok()?;
        let memory = memory(&device)?;
        let compute = device.running_compute_processes().unwrap_or_default();
        let graphics = device.running_graphics_processes().unwrap_or_default();
        let mut processes: Vec<GpuProcess> = Vec::new();
        for process in compute.iter().chain(&graphics) {
            if processes.iter().all(|known| known.pid != process.pid) {
                let used_bytes = match process.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => Some(bytes),
                    UsedGpuMemory::Unavailable => None,
                };
                let pid = process.pid;
                processes.push(GpuProcess { pid, used_bytes });
            }
        }
        Some(Gpu {
            device: format!("cuda:{index}"),
            name: device.name().unwrap_or_default(),
            total_bytes: memory.total_bytes,
            used_bytes: memory.used_bytes,
            processes,
        })
    }
}

fn memory(device: &nvml_wrapper::Device<'_>) -> Option<Memory> {
    let memory = device.memory_info().ok()?;
    // What NVML calls used is without the driver's reserve, which no other process can have either.
    Some(Memory {
        total_bytes: memory.total,
        used_bytes: memory.total.saturating_sub(memory.free),
    })
}

/// The GPUs that are there.
///
/// # Errors
///
/// Why none can be seen.
pub fn gpus() -> Result<Vec<Gpu>, String> {
    Ok(Driver::open()?.gpus())
}

/// The GPUs that are there, as device, total and used bytes; none where they cannot be seen.
#[must_use]
pub fn gpu_memory() -> Vec<(String, u64, u64)> {
    let gpus = gpus().unwrap_or_default().into_iter();
    gpus.map(|gpu| (gpu.device, gpu.total_bytes, gpu.used_bytes))
        .collect()
}

/// What one memory has left.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// `host` or `cuda:0`.
    pub device: String,
    /// What its maker calls it; empty for the host.
    pub name: String,
    /// All of it; absent where it is unknown.
    pub total_bytes: Option<u64>,
    /// What is free now; absent where it is unknown.
    pub free_bytes: Option<u64>,
    /// What the broker has granted; absent where none runs, or where it grants nothing of this one.
    pub granted_bytes: Option<u64>,
    /// What the broker could still grant; likewise.
    pub grantable_bytes: Option<u64>,
    /// What a process that starts now can have: the smaller of the two.
    pub room_bytes: u64,
}

/// The memories of this machine with what the broker at `socket` still has of each.
///
/// # Errors
///
/// There is a broker, and it does not answer or may not be trusted.
pub fn rooms(socket: &Path) -> Result<Vec<Room>, LeaseError> {
    let status = Client::connect(socket, "memfit devices").and_then(|client| client.status());
    let status = match status {
        Ok(status) => Some(status),
        Err(LeaseError::Socket(SocketError::NoBroker(_) | SocketError::Away(_))) => None,
        Err(error) => return Err(error),
    };
    Ok(rooms_beside(status.as_ref()))
}

/// The memories of this machine with what a broker of this status still has of each.
pub(crate) fn rooms_beside(status: Option<&Status>) -> Vec<Room> {
    let mut found = vec![host()];
    found.extend(gpus().unwrap_or_default().into_iter().map(|gpu| Room {
        device: gpu.device,
        name: gpu.name,
        total_bytes: Some(gpu.total_bytes),
        free_bytes: Some(gpu.total_bytes.saturating_sub(gpu.used_bytes)),
        ..Room::default()
    }));
    with_broker(found, status)
}

fn host() -> Room {
    let of = |name| pressure::meminfo(name).map(|bytes: Bytes| bytes.0);
    Room {
        device: "host".to_owned(),
        total_bytes: of("MemTotal"),
        free_bytes: of("MemAvailable"),
        ..Room::default()
    }
}

/// Adds what the broker says, and what follows for the room; devices that only the broker knows come last.
fn with_broker(mut found: Vec<Room>, status: Option<&Status>) -> Vec<Room> {
    for granted in status.iter().flat_map(|status| &status.devices) {
        let known = found.iter().position(|room| room.device == granted.name);
        let place = known.unwrap_or_else(|| {
            found.push(Room {
                device: granted.name.clone(),
                ..Room::default()
            });
            found.len() - 1
        });
        found[place].granted_bytes = Some(granted.granted_bytes);
        found[place].grantable_bytes = Some(granted.free_bytes);
    }
    for room in &mut found {
        let limits = room.free_bytes.into_iter().chain(room.grantable_bytes);
        room.room_bytes = limits.min().unwrap_or(0);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::status::DeviceStatus;

    #[test]
    fn room_is_what_is_free_and_can_still_be_granted() {
        let free = |device: &str, free| Room {
            device: device.to_owned(),
            free_bytes: Some(free),
            ..Room::default()
        };
        let device = |name: &str, free_bytes| DeviceStatus {
            name: name.to_owned(),
            free_bytes,
            granted_bytes: 5,
            ..DeviceStatus::default()
        };
        let status = Status {
            devices: vec![
                device("host", 70),
                device("cuda:0", 200),
                device("cuda:9", 40),
            ],
            ..Status::default()
        };
        let found = vec![free("host", 100), free("cuda:0", 100), free("cuda:1", 100)];
        let rooms = with_broker(found.clone(), Some(&status));
        let room: Vec<(&str, u64)> = rooms
            .iter()
            .map(|room| (room.device.as_str(), room.room_bytes))
            .collect();
        let expected = [
            ("host", 70),
            ("cuda:0", 100),
            ("cuda:1", 100),
            ("cuda:9", 40),
        ];
        assert_eq!(room, expected);
        assert_eq!(rooms[2].granted_bytes, None);
        assert!(
            with_broker(found, None)
                .iter()
                .all(|room| room.room_bytes == 100)
        );
    }
}

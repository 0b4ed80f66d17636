//! The GPUs of this machine, as the driver's library (NVML) tells of them.
//!
//! Responsible for asking. The library is opened at run time: where there is none there are no GPUs, and
//! that is no error of the caller's. Not responsible for what is granted of them (`broker/`).

use memfit_engine::bytes::Bytes;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// `cuda:0`; numbered as NVML does, by the bus, which is `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    pub device: String,
    /// What its maker calls it.
    pub name: String,
    /// All of its memory.
    pub total_bytes: u64,
    /// What is in use, by whom ever and for whatever.
    pub used_bytes: u64,
    /// The processes that NVML sees on it.
    pub processes: Vec<GpuProcess>,
}

/// A process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its number, in the driver's namespace.
    pub pid: u32,
    /// What it holds there; absent where the driver does not tell.
    pub used_bytes: Option<u64>,
}

/// The GPUs that are there.
///
/// # Errors
///
/// Why none can be seen.
pub fn gpus() -> Result<Vec<Gpu>, String> {
    let nvml = Nvml::init().map_err(|error| format!("NVML cannot be used ({error})"))?;
    let count = nvml.device_count().map_err(|error| error.to_string())?;
    let found = (0..count).filter_map(|index| {
        let device = nvml.device_by_index(index).ok()?;
        let memory = device.memory_info().ok()?;
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
            total_bytes: memory.total,
            used_bytes: memory.used,
            processes,
        })
    });
    Ok(found.collect())
}

impl Gpu {
    /// What a broker may grant of it.
    pub(crate) fn capacity(&self) -> (String, Bytes) {
        (self.device.clone(), Bytes(self.total_bytes))
    }
}

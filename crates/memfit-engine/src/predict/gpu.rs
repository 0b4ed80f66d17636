//! Which GPUs an unplanned step fits on: each of the table, and the one asked about.
//!
//! Responsible for what a process finds on a card ([`Device::room_bytes`](crate::cost::devices::Device::room_bytes)
//! says it) held against what a step takes there. Not responsible for GPUs that are present: the program asks those
//! how much is free.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;
use crate::cost::devices::{self, CONTEXT_BYTES, Device};
use crate::predict::error::PredictError;

/// Does the step fit on a device?
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct DeviceFit {
    /// The device.
    pub device: String,
    /// Its memory.
    pub memory_bytes: Bytes,
    /// Peak plus the CUDA context is within what a process finds there.
    pub fits: bool,
}

/// Does the step fit on the GPU that was asked about?
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct GpuFit {
    /// Its name in the table.
    pub gpu: String,
    /// Its memory, as the datasheet says.
    pub memory_bytes: Bytes,
    /// What PyTorch finds of it: the total capacity of its OOM messages.
    pub capacity_bytes: Bytes,
    /// What the CUDA context and kernels are counted with.
    pub context_bytes: Bytes,
    /// What is left for the step.
    pub room_bytes: Bytes,
    /// Whether the peak of allocated bytes is within the room.
    pub allocated_fits: bool,
    /// Whether the peak of reserved bytes is, which decides.
    pub fits: bool,
}

impl GpuFit {
    pub(super) fn new(device: &Device, allocated_bytes: Bytes, reserved_bytes: Bytes) -> Self {
        let room_bytes = device.room_bytes();
        Self {
            gpu: device.name.to_owned(),
            memory_bytes: device.memory_bytes,
            capacity_bytes: device.capacity_bytes,
            context_bytes: CONTEXT_BYTES,
            room_bytes,
            allocated_fits: allocated_bytes <= room_bytes,
            fits: reserved_bytes <= room_bytes,
        }
    }
}

/// The GPU of a name, for a step that runs on one.
pub(super) fn asked(name: &str, device_kind: &str) -> Result<&'static Device, PredictError> {
    let device = devices::find(name)?;
    if device_kind != "cuda" {
        return Err(PredictError::NotOnGpu {
            gpu: device.name,
            device_kind: device_kind.to_owned(),
        });
    }
    Ok(device)
}

/// All GPUs of the table; `needed_bytes` is what the step takes on a device.
pub(super) fn device_fits(needed_bytes: Bytes) -> Vec<DeviceFit> {
    let fit = |device: &Device| DeviceFit {
        device: device.name.to_owned(),
        memory_bytes: device.memory_bytes,
        fits: needed_bytes <= device.room_bytes(),
    };
    devices::TABLE.iter().map(fit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Budget;
    use crate::predict::{PredictRequest, predict};
    use crate::trace::sample;

    fn request(gpu: &str) -> PredictRequest {
        PredictRequest {
            gpu: Some(gpu.to_owned()),
            ..PredictRequest::default()
        }
    }

    #[test]
    fn what_decides_is_what_the_allocator_holds() {
        let device = devices::find("rtx4090").unwrap();
        let room = device.room_bytes();
        let just = GpuFit::new(device, room - Bytes(1), room);
        assert!(just.fits && just.allocated_fits);
        let pieces = GpuFit::new(device, room, room + Bytes(1));
        assert!(!pieces.fits && pieces.allocated_fits);
        assert_eq!(room + just.context_bytes, just.capacity_bytes);
        assert!(just.capacity_bytes < just.memory_bytes);
    }

    #[test]
    fn a_step_on_cuda_is_held_against_the_gpu() {
        let mut trace = sample::batched_chain(4)
            .with_second(&sample::batched_chain(2))
            .unwrap();
        trace.meta.device_kind = "cuda".into();
        let found = predict(&trace, &request("4090")).unwrap();
        let gpu = found.gpu.unwrap();
        assert_eq!((gpu.gpu.as_str(), gpu.fits), ("RTX 4090", true));
        let budget = PredictRequest {
            budget: Some(Budget::Absolute(gpu.room_bytes)),
            ..PredictRequest::default()
        };
        let by_budget = predict(&trace, &budget).unwrap();
        assert_eq!(found.largest_batch, by_budget.largest_batch);
        assert_eq!(by_budget.gpu, None);
    }

    #[test]
    fn what_cannot_be_answered_is_refused() {
        let refused = predict(&sample::chain(), &request("4090")).unwrap_err();
        assert!(refused.to_string().contains("runs on `cpu`"), "{refused}");
        let unknown = predict(&sample::chain(), &request("mi300x")).unwrap_err();
        assert!(unknown.to_string().contains("mi300x"), "{unknown}");
        let both = PredictRequest {
            budget: Some(Budget::Absolute(Bytes(1))),
            ..request("4090")
        };
        let refused = predict(&sample::chain(), &both).unwrap_err();
        assert_eq!(refused, PredictError::TwoBudgets);
    }
}

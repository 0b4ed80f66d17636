//! Why there is no prediction.

use crate::cost::devices::UnknownGpu;
use crate::trace::BatchError;

/// Why there is no prediction.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PredictError {
    /// The trace cannot be scaled to the batch asked for.
    #[error("cannot predict another batch size: {0}")]
    Batch(#[from] BatchError),
    /// The table has no such GPU.
    #[error(transparent)]
    Gpu(#[from] UnknownGpu),
    /// The step was recorded for another kind of device.
    #[error(
        "`{gpu}` is a GPU and the step runs on `{device_kind}`: record it for `cuda`, which needs no GPU"
    )]
    NotOnGpu {
        /// The GPU.
        gpu: &'static str,
        /// The trace's device kind.
        device_kind: String,
    },
    /// A GPU says what the step may take, and so does a budget.
    #[error("a GPU is a budget of its own: give a GPU or a budget, not both")]
    TwoBudgets,
}

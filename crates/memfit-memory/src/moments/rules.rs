//! The rules of the optimizers whose state has 8 bits, in numbers.

use serde::Deserialize;

/// One update by Adam, as torch has it: what depends on the number of the step alone is computed already.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Adam {
    /// 1, or -1 to go uphill.
    pub direction: f32,
    /// Added to the gradient for each unit of the parameter.
    pub penalty: f32,
    /// What the parameter is multiplied by before (`AdamW`).
    pub decay: f32,
    /// Part of the gradient that the first moment takes on; the rest of it stays.
    pub first_added: f32,
    /// Part of the second moment that stays.
    pub second_stays: f32,
    /// Part of the gradient's square that it takes on.
    pub second_added: f32,
    /// The learning rate over the correction of the first moment.
    pub step: f32,
    /// One over the root of the correction of the second.
    pub root_correction: f32,
    /// Added to the root.
    pub epsilon: f32,
}

/// One update by gradient descent with momentum.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Momentum {
    /// 1, or -1 to go uphill.
    pub direction: f32,
    /// Added to the gradient for each unit of the parameter.
    pub penalty: f32,
    /// Part of the momentum that stays.
    pub stays: f32,
    /// Part of the gradient that is added to it.
    pub added: f32,
    /// Part of the momentum that is added to the gradient once more; `None` where the momentum is the step.
    pub nesterov: Option<f32>,
    /// The learning rate.
    pub step: f32,
}

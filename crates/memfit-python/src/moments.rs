//! Updates of an optimizer whose state is in 8 bits, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding: addresses and lengths become memory lent for one call.

use std::num::NonZeroUsize;

use memfit_memory::arena::host::{LentBytes, LentBytesMut};
use memfit_memory::forms::Form;
use memfit_memory::moments::{self, Adam, Moment, Momentum};
use pyo3::prelude::*;

use crate::UsageError;

/// Address and bytes of a tensor.
type Memory = (usize, usize);

/// What an update by Adam is made of.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct AdamRule {
    direction: f32,
    penalty: f32,
    decay: f32,
    first_added: f32,
    second_stays: f32,
    second_added: f32,
    step: f32,
    root_correction: f32,
    epsilon: f32,
    seed: Option<u32>,
}

/// What an update by gradient descent with momentum is made of.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct MomentumRule {
    direction: f32,
    penalty: f32,
    stays: f32,
    added: f32,
    nesterov: Option<f32>,
    step: f32,
    seed: Option<u32>,
}

/// Updates the parameter at an address by Adam; `lower` are the lower halves of one in `bfloat16`, where they are kept.
#[pyfunction]
#[pyo3(signature = (rule, parameter, gradient, first, second, threads, lower=None))]
#[expect(clippy::too_many_arguments, reason = "as many tensors")]
pub(crate) fn update_by_adam(
    py: Python<'_>,
    rule: AdamRule,
    parameter: Memory,
    gradient: Memory,
    first: Memory,
    second: Memory,
    threads: usize,
    lower: Option<Memory>,
) -> PyResult<()> {
    let form = rule.seed.map_or(Form::Wide, Form::Half);
    let rule = Adam {
        direction: rule.direction,
        penalty: rule.penalty,
        decay: rule.decay,
        first_added: rule.first_added,
        second_stays: rule.second_stays,
        second_added: rule.second_added,
        step: rule.step,
        root_correction: rule.root_correction,
        epsilon: rule.epsilon,
    };
    let gradient = read(gradient)?;
    let (mut parameter, mut first, mut second) =
        (written(parameter)?, written(first)?, written(second)?);
    let (gradient, parameter) = (gradient.as_ref(), parameter.as_mut());
    let (first, second) = (first.as_mut(), second.as_mut());
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    let mut lower = lower.map(written).transpose()?;
    let done = py.detach(|| match &mut lower {
        None => moments::adam(rule, form, parameter, gradient, first, second, threads),
        Some(lower) => {
            let halves = [parameter, lower.as_mut()];
            moments::adam_of_halves(rule, halves, gradient, [first, second], threads)
        }
    });
    done.map_err(|error| UsageError::new_err(error.to_string()))
}

/// Updates the parameter at an address by gradient descent with momentum; as [`update_by_adam`].
#[pyfunction]
#[pyo3(signature = (rule, parameter, gradient, held, threads, lower=None))]
pub(crate) fn update_by_momentum(
    py: Python<'_>,
    rule: MomentumRule,
    parameter: Memory,
    gradient: Memory,
    held: Memory,
    threads: usize,
    lower: Option<Memory>,
) -> PyResult<()> {
    let form = rule.seed.map_or(Form::Wide, Form::Half);
    let rule = Momentum {
        direction: rule.direction,
        penalty: rule.penalty,
        stays: rule.stays,
        added: rule.added,
        nesterov: rule.nesterov,
        step: rule.step,
    };
    let gradient = read(gradient)?;
    let (mut parameter, mut held) = (written(parameter)?, written(held)?);
    let (gradient, parameter, held) = (gradient.as_ref(), parameter.as_mut(), held.as_mut());
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    let mut lower = lower.map(written).transpose()?;
    let done = py.detach(|| match &mut lower {
        None => moments::momentum(rule, form, parameter, gradient, held, threads),
        Some(lower) => {
            let halves = [parameter, lower.as_mut()];
            moments::momentum_of_halves(rule, halves, gradient, held, threads)
        }
    });
    done.map_err(|error| UsageError::new_err(error.to_string()))
}

/// Writes the moment at an address in 8 bits to another.
#[pyfunction]
pub(crate) fn shrink_moment(
    py: Python<'_>,
    is_second: bool,
    wide: Memory,
    held: Memory,
) -> PyResult<()> {
    let (wide, mut held) = (read(wide)?, written(held)?);
    let (wide, held) = (wide.as_ref(), held.as_mut());
    let done = py.detach(|| moments::shrink(moment(is_second), wide, held));
    done.map_err(|error| UsageError::new_err(error.to_string()))
}

/// Writes the moment of 8 bits at an address in 32 to another.
#[pyfunction]
pub(crate) fn expand_moment(
    py: Python<'_>,
    is_second: bool,
    held: Memory,
    wide: Memory,
) -> PyResult<()> {
    let (held, mut wide) = (read(held)?, written(wide)?);
    let (held, wide) = (held.as_ref(), wide.as_mut());
    let done = py.detach(|| moments::expand(moment(is_second), held, wide));
    done.map_err(|error| UsageError::new_err(error.to_string()))
}

const fn moment(is_second: bool) -> Moment {
    if is_second {
        Moment::Second
    } else {
        Moment::First
    }
}

fn read((address, bytes): Memory) -> PyResult<LentBytes> {
    #[expect(unsafe_code, reason = "an address is the caller's word")]
    // SAFETY: the executor passes the memory of a tensor that it holds during this call and does not change.
    let lent = unsafe { LentBytes::new(address, bytes) };
    lent.ok_or_else(missing)
}

fn written((address, bytes): Memory) -> PyResult<LentBytesMut> {
    #[expect(unsafe_code, reason = "an address is the caller's word")]
    // SAFETY: the executor passes the memory of a tensor that it holds during this call: a parameter while its optimizer
    // updates it, or moments, which are its own. No two of them share memory.
    let lent = unsafe { LentBytesMut::new(address, bytes) };
    lent.ok_or_else(missing)
}

fn missing() -> PyErr {
    UsageError::new_err("there is no memory at that address")
}

//! Numbers in fewer bits, for tensors of Python.
//!
//! Responsible for conversion, as the rest of the binding: an address and a length become memory lent for one call.

use std::num::NonZeroUsize;

use memfit_memory::arena::host::{LentBytes, LentBytesMut};
use memfit_memory::narrow;
use pyo3::prelude::*;

use crate::UsageError;

/// Writes the 32-bit numbers at an address in 8 bits to another.
#[pyfunction]
pub(crate) fn shrink_numbers(
    py: Python<'_>,
    wide: (usize, usize),
    narrow: (usize, usize),
    threads: usize,
) -> PyResult<()> {
    let (source, mut target) = lent(wide, narrow)?;
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    let (source, target) = (source.as_ref(), target.as_mut());
    let done = py.detach(|| narrow::shrink(source, target, threads));
    done.map_err(|error| UsageError::new_err(error.to_string()))
}

/// Writes the numbers of 8 bits at an address in 32 to another.
#[pyfunction]
pub(crate) fn expand_numbers(
    py: Python<'_>,
    narrow: (usize, usize),
    wide: (usize, usize),
    threads: usize,
) -> PyResult<()> {
    let (source, mut target) = lent(narrow, wide)?;
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    let (source, target) = (source.as_ref(), target.as_mut());
    let done = py.detach(|| narrow::expand(source, target, threads));
    done.map_err(|error| UsageError::new_err(error.to_string()))
}

/// Address and length of each as memory.
fn lent(from: (usize, usize), to: (usize, usize)) -> PyResult<(LentBytes, LentBytesMut)> {
    #[expect(unsafe_code, reason = "an address is the caller's word")]
    // SAFETY: the executor passes the memory of two tensors that it holds during this call; the second is its own, and
    // what is written to the first meanwhile it refuses afterwards, as autograd would.
    let (source, target) = unsafe {
        (
            LentBytes::new(from.0, from.1),
            LentBytesMut::new(to.0, to.1),
        )
    };
    let missing = || UsageError::new_err("there is no memory at that address");
    Ok((source.ok_or_else(missing)?, target.ok_or_else(missing)?))
}

//! A pending Ctrl-C ends a wait.
//!
//! Responsible for asking now and then whether there is one. Not responsible for what waits.

use std::time::{Duration, Instant};

use memfit_memory::store::Interrupted;
use pyo3::prelude::*;

use crate::errors::{Failure, Result};

/// Between two questions whether a signal is pending: each waits for the interpreter.
const PATIENCE: Duration = Duration::from_millis(50);

/// Runs `work`, which has no interpreter; that is asked now and then for a pending signal.
pub(crate) fn waiting<T, E: Into<Failure>>(
    work: impl FnOnce(Interrupted<'_>) -> std::result::Result<T, E>,
) -> Result<T> {
    let (mut signal, mut asked) = (None, Instant::now());
    let result = work(&mut || {
        if asked.elapsed() >= PATIENCE {
            signal = Python::attach(|py| py.check_signals().err());
            asked = Instant::now();
        }
        signal.is_some()
    });
    result.map_err(|error| signal.map_or_else(|| error.into(), Failure::from))
}

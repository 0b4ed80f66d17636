//! What `memfit-guard` counts, for Python.
//!
//! Responsible for conversion, as the rest of the binding.

use memfit_guard::{Category, Reading, WindowId};
use pyo3::prelude::*;

use crate::UsageError;
use crate::value::Value;

/// Starts to count what torch allocates on the CPU; again, it checks that the hooks are in place.
///
/// Returns why that cannot be, or nothing.
#[pyfunction]
pub(crate) fn count_allocations() -> Option<String> {
    memfit_guard::install().err().map(|error| error.to_string())
}

/// Makes blocks known that were handed out before: `(address, bytes)`.
#[pyfunction]
pub(crate) fn seed_blocks(blocks: Vec<(usize, u64)>) {
    memfit_guard::seed(&blocks);
}

/// Says what the blocks at these addresses hold, and for whom; unknown addresses are passed over.
#[pyfunction]
#[pyo3(signature = (addresses, category, owner=0))]
pub(crate) fn label_blocks(addresses: Vec<usize>, category: &str, owner: u32) -> PyResult<()> {
    memfit_guard::label(&addresses, of_name(category)?, owner);
    Ok(())
}

/// Says the same of unnamed blocks that came with an event from `since` on and are gone.
#[pyfunction]
#[pyo3(signature = (since, category, owner=0))]
pub(crate) fn label_gone_blocks(since: u64, category: &str, owner: u32) -> PyResult<()> {
    memfit_guard::label_gone(since, of_name(category)?, owner);
    Ok(())
}

fn of_name(category: &str) -> PyResult<Category> {
    Category::of_name(category)
        .ok_or_else(|| UsageError::new_err(format!("there is no category `{category}`")))
}

/// Number of the last event: they count allocations and frees.
#[pyfunction]
pub(crate) fn last_event() -> u64 {
    memfit_guard::last_event()
}

/// Live blocks that came with an event in `[since, until)`, with or without those of models and optimizers,
/// the oldest first: `(address, bytes, event)`.
#[pyfunction]
#[pyo3(signature = (since, until, *, with_models))]
pub(crate) fn survivors(since: u64, until: u64, with_models: bool) -> Vec<(usize, u64, u64)> {
    let blocks = memfit_guard::survivors(since, until, with_models).into_iter();
    blocks
        .map(|block| (block.address, block.bytes, block.born))
        .collect()
}

/// Whether the block at an address is in the count.
#[pyfunction]
pub(crate) fn is_counted(address: usize) -> bool {
    memfit_guard::is_counted(address)
}

/// Number of the event with which the block at an address came; 0 where it is not counted.
#[pyfunction]
pub(crate) fn block_event(address: usize) -> u64 {
    memfit_guard::born(address).unwrap_or(0)
}

/// Sets the number that peaks reached from now on carry.
#[pyfunction]
pub(crate) fn mark_allocations(mark: u64) {
    memfit_guard::set_mark(mark);
}

/// Bytes of all live blocks.
#[pyfunction]
pub(crate) fn counted_bytes() -> u64 {
    memfit_guard::current_bytes()
}

/// Size of the last request that the system refused; 0 when it refused none.
#[pyfunction]
pub(crate) fn refused_bytes() -> u64 {
    memfit_guard::refused_bytes()
}

/// Blocks missing from the count because no memory was left to write them down.
#[pyfunction]
pub(crate) fn uncounted_blocks() -> u64 {
    memfit_guard::uncounted_blocks()
}

/// A stretch of time with its own peak. It is open from the start until it is closed or dropped.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct AllocationWindow {
    window: WindowId,
}

#[pymethods]
impl AllocationWindow {
    #[new]
    fn new() -> Self {
        Self {
            window: memfit_guard::open_window(),
        }
    }

    /// Peak bytes so far and the number of the event that reached it; `(0, 0)` when it is closed.
    fn peak(&self) -> (u64, u64) {
        memfit_guard::window_peak(self.window).unwrap_or_default()
    }

    /// Begins it anew, with what is live now.
    fn restart(&self) {
        memfit_guard::restart_window(self.window);
    }

    /// What it has seen so far; nothing when it is closed.
    fn read(&self) -> Option<Value<Reading>> {
        memfit_guard::read_window(self.window).map(Value)
    }

    /// Ends it and says what it has seen; nothing when it was closed before.
    fn close(&self) -> Option<Value<Reading>> {
        memfit_guard::close_window(self.window).map(Value)
    }
}

impl Drop for AllocationWindow {
    fn drop(&mut self) {
        // An open window costs a little at every allocation.
        let _unread = memfit_guard::close_window(self.window);
    }
}

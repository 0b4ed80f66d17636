//! The budget that `memfit-guard` holds torch to on the CPU, for Python.
//!
//! Responsible for conversion, as the rest of the binding.

use std::sync::Mutex;

use memfit_engine::bytes::Bytes;
use memfit_guard::{AboveBudget, BudgetId};
use pyo3::prelude::*;

use crate::BudgetError;

/// Python's error for a budget below what is taken, with bytes as people read them.
fn above(error: AboveBudget) -> PyErr {
    let (held, budget) = (Bytes(error.held_bytes), Bytes(error.budget_bytes));
    BudgetError::new_err(format!(
        "tensors already take {held}, more than the budget of {budget}"
    ))
}

/// A budget, on from the start until it is lifted or dropped.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct AllocationBudget {
    budget: Mutex<Option<BudgetId>>,
}

#[pymethods]
impl AllocationBudget {
    #[new]
    fn new(budget_bytes: u64) -> PyResult<Self> {
        let budget = memfit_guard::set_budget(budget_bytes).map_err(above)?;
        Ok(Self {
            budget: Mutex::new(Some(budget)),
        })
    }

    /// Sets another number of bytes; once it is lifted, it does nothing.
    fn change(&self, budget_bytes: u64) -> PyResult<()> {
        let budget = self.budget.lock().ok().and_then(|held| *held);
        budget.map_or(Ok(()), |budget| {
            memfit_guard::change_budget(budget, budget_bytes).map_err(above)
        })
    }

    /// Ends it; again, it does nothing.
    fn lift(&self) {
        let budget = self.budget.lock().ok().and_then(|mut held| held.take());
        if let Some(budget) = budget {
            memfit_guard::lift_budget(budget);
        }
    }
}

impl Drop for AllocationBudget {
    fn drop(&mut self) {
        self.lift();
    }
}

/// What all counted blocks take of the process's memory, in whole pages where they are large.
#[pyfunction]
pub(crate) fn taken_bytes() -> u64 {
    memfit_guard::taken_bytes()
}

/// How much of all counted blocks is in memory, those that are kept included.
#[pyfunction]
pub(crate) fn resident_bytes(py: Python<'_>) -> u64 {
    py.detach(memfit_guard::resident_bytes)
}

/// How many requests were refused while a budget was on.
#[pyfunction]
pub(crate) fn refusals() -> u64 {
    memfit_guard::refusals()
}

/// The last refusal: bytes requested, bytes taken, the budget, whether it was the system's, and the
/// live blocks as `(address, bytes, category)`.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "a tuple of Python's")]
pub(crate) fn last_refusal() -> Option<(u64, u64, u64, bool, Vec<(usize, u64, &'static str)>)> {
    let refusal = memfit_guard::last_refusal()?;
    let blocks = refusal.blocks.iter();
    let blocks = blocks.map(|block| (block.address, block.bytes, block.category.name()));
    Some((
        refusal.requested_bytes,
        refusal.held_bytes,
        refusal.budget_bytes,
        refusal.is_by_system,
        blocks.collect(),
    ))
}

/// Lets go of what is known of the last refusal.
#[pyfunction]
pub(crate) fn forget_refusal() {
    memfit_guard::forget_refusal();
}

/// Frees the blocks that are kept for the next requests while a budget is on.
#[pyfunction]
pub(crate) fn release_kept() {
    memfit_guard::release_kept();
}

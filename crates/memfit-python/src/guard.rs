//! What `memfit-guard` counts and holds to a budget.
//!
//! Responsible for conversion, as the rest of the binding. These calls come with every op, and keep the interpreter.

use memfit_guard::{Bounds, BudgetId, Category, Reading, Refusal, Survivor, WindowId};
use pyo3::prelude::*;

use crate::functions::{functions, methods};

functions! {
    quick fn count_allocations() -> Option<String> =
        memfit_guard::install().err().map(|error| error.to_string());
    quick fn seed_blocks(blocks: Vec<(usize, u64)>) -> () = memfit_guard::seed(&blocks);
    quick fn add_blocks(blocks: Vec<(usize, u64)>) -> () = memfit_guard::add(&blocks);
    quick fn remove_blocks(addresses: Vec<usize>) -> () = memfit_guard::remove(&addresses);

    #[pyo3(signature = (addresses, category, owner=0))]
    quick fn label_blocks(addresses: Vec<usize>, category: &str, owner: u32) -> () =
        memfit_guard::label(&addresses, Category::of_name(category)?, owner);

    #[pyo3(signature = (since, category, owner=0))]
    quick fn label_gone_blocks(since: u64, category: &str, owner: u32) -> () =
        memfit_guard::label_gone(since, Category::of_name(category)?, owner);
    quick fn last_event() -> u64 = memfit_guard::last_event();
    quick fn is_counted(address: usize) -> bool = memfit_guard::is_counted(address);
    quick fn block_event(address: usize) -> u64 = memfit_guard::born(address).unwrap_or(0);
    quick fn mark_allocations(mark: u64) -> () = memfit_guard::set_mark(mark);
    quick fn counted_bytes() -> u64 = memfit_guard::current_bytes();
    quick fn refused_bytes() -> u64 = memfit_guard::refused_bytes();
    quick fn uncounted_blocks() -> u64 = memfit_guard::uncounted_blocks();
    quick fn taken_bytes() -> u64 = memfit_guard::taken_bytes();
    fn resident_bytes() -> u64 = memfit_guard::resident_bytes();
    quick fn refusals() -> u64 = memfit_guard::refusals();
    quick fn last_refusal() -> Option<Refusal> = memfit_guard::last_refusal();
    quick fn forget_refusal() -> () = memfit_guard::forget_refusal();
    quick fn release_kept() -> () = memfit_guard::release_kept();
    quick fn set_alarm(
        above_bytes: u64, later_above_bytes: u64, later_seconds: f64, later_from_event: u64
    ) -> () = memfit_guard::set_alarm(Some(Bounds::from_now(
        above_bytes, later_above_bytes, later_seconds, later_from_event
    )));
    quick fn switch_alarm_off() -> () = memfit_guard::set_alarm(None);
    quick fn alarm_event() -> u64 = memfit_guard::alarm_event();
}

/// Live blocks that came with an event in `[since, until)`, with or without those of models and optimizers, the oldest
/// first: `(address, bytes, event)`. They may be many, and no value, which would take a quarter longer.
#[pyfunction]
#[pyo3(signature = (since, until, *, with_models))]
pub(crate) fn survivors(since: u64, until: u64, with_models: bool) -> Vec<(usize, u64, u64)> {
    let found = memfit_guard::survivors(since, until, with_models);
    found.iter().map(Survivor::told).collect()
}

/// A budget, on from the start until it is lifted or dropped.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct AllocationBudget(BudgetId);

methods! { impl AllocationBudget {
    #[new]
    make fn new(budget_bytes: u64) = Self(memfit_guard::set_budget(budget_bytes)?);
    quick fn change(self, budget_bytes: u64) -> () = memfit_guard::change_budget(self.0, budget_bytes)?;
    quick fn lift(self) -> () = memfit_guard::lift_budget(self.0);
}}

impl Drop for AllocationBudget {
    fn drop(&mut self) {
        memfit_guard::lift_budget(self.0);
    }
}

/// A stretch of time with its own peak. It is open from the start until it is closed or dropped.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct AllocationWindow(WindowId);

methods! { impl AllocationWindow {
    #[new]
    make fn new() = Self(memfit_guard::open_window());
    quick fn peak(self) -> (u64, u64) = memfit_guard::window_peak(self.0).unwrap_or_default();
    quick fn restart(self) -> () = memfit_guard::restart_window(self.0);
    quick fn read(self) -> Option<Reading> = memfit_guard::read_window(self.0);
    quick fn close(self) -> Option<Reading> = memfit_guard::close_window(self.0);
}}

impl Drop for AllocationWindow {
    fn drop(&mut self) {
        // An open window costs a little at every allocation.
        let _unread = memfit_guard::close_window(self.0);
    }
}

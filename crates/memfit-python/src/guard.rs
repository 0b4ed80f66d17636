//! What `memfit-guard` counts and holds to a budget.
//!
//! Responsible for conversion, as the rest of the binding. These calls come with every op, and keep the interpreter.

use memfit_guard::{Bounds, BudgetId, Category, Reading, Refusal, Survivor, WindowId};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::functions::functions;
use crate::value::Value;

functions! {
    /// Starts to count what torch allocates on the CPU; again, it checks that the hooks are in place. Returns why that
    /// cannot be, or nothing.
    quick fn count_allocations() -> Option<String> =
        memfit_guard::install().err().map(|error| error.to_string());

    /// Makes blocks known that were handed out before: `(address, bytes)`.
    quick fn seed_blocks(blocks: Vec<(usize, u64)>) -> () = memfit_guard::seed(&blocks);

    /// Counts blocks from now on that are not torch's allocator's: `(address, bytes)`.
    quick fn add_blocks(blocks: Vec<(usize, u64)>) -> () = memfit_guard::add(&blocks);

    /// Counts them no more.
    quick fn remove_blocks(addresses: Vec<usize>) -> () = memfit_guard::remove(&addresses);

    /// Says what the blocks at these addresses hold, and for whom; unknown addresses are passed over.
    #[pyo3(signature = (addresses, category, owner=0))]
    quick fn label_blocks(addresses: Vec<usize>, category: &str, owner: u32) -> () =
        memfit_guard::label(&addresses, Category::of_name(category)?, owner);

    /// Says the same of unnamed blocks that came with an event from `since` on and are gone.
    #[pyo3(signature = (since, category, owner=0))]
    quick fn label_gone_blocks(since: u64, category: &str, owner: u32) -> () =
        memfit_guard::label_gone(since, Category::of_name(category)?, owner);

    /// Number of the last event: they count allocations and frees.
    quick fn last_event() -> u64 = memfit_guard::last_event();

    /// Whether the block at an address is in the count.
    quick fn is_counted(address: usize) -> bool = memfit_guard::is_counted(address);

    /// Number of the event with which the block at an address came; 0 where it is not counted.
    quick fn block_event(address: usize) -> u64 = memfit_guard::born(address).unwrap_or(0);

    /// Sets the number that peaks reached from now on carry.
    quick fn mark_allocations(mark: u64) -> () = memfit_guard::set_mark(mark);

    /// Bytes of all live blocks.
    quick fn counted_bytes() -> u64 = memfit_guard::current_bytes();

    /// Size of the last request that the system refused; 0 when it refused none.
    quick fn refused_bytes() -> u64 = memfit_guard::refused_bytes();

    /// Blocks missing from the count because no memory was left to write them down.
    quick fn uncounted_blocks() -> u64 = memfit_guard::uncounted_blocks();

    /// What all counted blocks take of the process's memory, in whole pages where they are large.
    quick fn taken_bytes() -> u64 = memfit_guard::taken_bytes();

    /// How much of all counted blocks is in memory, those that are kept included.
    fn resident_bytes() -> u64 = memfit_guard::resident_bytes();

    /// How many requests were refused while a budget was on.
    quick fn refusals() -> u64 = memfit_guard::refusals();

    /// The last refusal, with the blocks that were live.
    quick fn last_refusal() -> Option<Refusal> = memfit_guard::last_refusal();

    /// Lets go of what is known of the last refusal.
    quick fn forget_refusal() -> () = memfit_guard::forget_refusal();

    /// Frees the blocks that are kept for the next requests while a budget is on.
    quick fn release_kept() -> () = memfit_guard::release_kept();

    /// Sets the alarm that `on_alarm` speaks of: `later` is in seconds from now.
    quick fn set_alarm(
        above_bytes: u64, later_above_bytes: u64, later_seconds: f64, later_from_event: u64
    ) -> () = memfit_guard::set_alarm(Some(Bounds::from_now(
        above_bytes, later_above_bytes, later_seconds, later_from_event
    )));

    /// Switches the alarm off.
    quick fn switch_alarm_off() -> () = memfit_guard::set_alarm(None);

    /// Number of the event that rang the alarm last; 0 where none has.
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

#[pymethods]
impl AllocationBudget {
    #[new]
    fn new(budget_bytes: u64) -> Result<Self> {
        Ok(Self(memfit_guard::set_budget(budget_bytes)?))
    }

    /// Sets another number of bytes; once it is lifted, it does nothing.
    fn change(&self, budget_bytes: u64) -> Result<()> {
        Ok(memfit_guard::change_budget(self.0, budget_bytes)?)
    }

    /// Ends it; again, it does nothing.
    fn lift(&self) {
        memfit_guard::lift_budget(self.0);
    }
}

impl Drop for AllocationBudget {
    fn drop(&mut self) {
        self.lift();
    }
}

/// A stretch of time with its own peak. It is open from the start until it is closed or dropped.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct AllocationWindow(WindowId);

#[pymethods]
impl AllocationWindow {
    #[new]
    fn new() -> Self {
        Self(memfit_guard::open_window())
    }

    /// Peak bytes so far and the number of the event that reached it; `(0, 0)` when it is closed.
    fn peak(&self) -> (u64, u64) {
        memfit_guard::window_peak(self.0).unwrap_or_default()
    }

    /// Begins it anew, with what is live now.
    fn restart(&self) {
        memfit_guard::restart_window(self.0);
    }

    /// What it has seen so far; nothing when it is closed.
    fn read(&self) -> Value<Option<Reading>> {
        Value(memfit_guard::read_window(self.0))
    }

    /// Ends it and says what it has seen; nothing when it was closed before.
    fn close(&self) -> Value<Option<Reading>> {
        Value(memfit_guard::close_window(self.0))
    }
}

impl Drop for AllocationWindow {
    fn drop(&mut self) {
        // An open window costs a little at every allocation.
        let _unread = memfit_guard::close_window(self.0);
    }
}

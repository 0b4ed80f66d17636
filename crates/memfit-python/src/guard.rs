//! What `memfit-guard` counts and holds to a budget, and Python called when what is live has risen.
//!
//! Responsible for conversion, as the rest of the binding, and for calling Python at the next moment at which that is
//! safe: the alarm rings in the middle of an allocation, on any thread, with or without the interpreter's lock. So Python
//! is only asked to call back, which it does on the main thread between two of its instructions, as it does with signals.
//! Not responsible for when the alarm rings, nor for what is done then. Calls that come with every op keep the interpreter.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use memfit_guard::{Bounds, Budget, Category, Reading, Refusal, Survivor, Window};
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
    quick fn refusals() -> u64 = memfit_guard::refusals();
    quick fn last_refusal() -> Option<Refusal> = memfit_guard::last_refusal();
    quick fn forget_refusal() -> () = memfit_guard::forget_refusal();
    quick fn release_kept() -> () = memfit_guard::release_kept();
    quick fn set_overflow(folder: &str, limit_bytes: u64, most_bytes: u64) -> () =
        memfit_guard::set_overflow(folder, limit_bytes, most_bytes);
    quick fn overflow_peaks() -> (u64, u64) = memfit_guard::overflow_peaks();
    quick fn set_alarm(
        above_bytes: u64, later_above_bytes: u64, later_seconds: f64, later_from_event: u64
    ) -> () = memfit_guard::set_alarm(Some(Bounds::from_now(
        above_bytes, later_above_bytes, later_seconds, later_from_event
    )));
    quick fn switch_alarm_off() -> () = memfit_guard::set_alarm(None);
    quick fn alarm_event() -> u64 = memfit_guard::alarm_event();
    quick fn on_alarm(look: Py<PyAny>, obstacle: Py<PyAny>) -> () = have_looked(look, obstacle);
    free fn resident_bytes() -> u64 = memfit_guard::resident_bytes();
    // They may be many, and values would take a quarter longer.
    #[pyo3(signature = (since, until, *, with_models))]
    object fn survivors(since: u64, until: u64, with_models: bool) -> Vec<(usize, u64, u64)> =
        memfit_guard::survivors(since, until, with_models).iter().map(Survivor::told).collect();
}

/// A budget, on from the start until it is lifted or dropped.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct AllocationBudget(Budget);

methods! { impl AllocationBudget {
    #[new]
    object fn new(budget_bytes: u64) -> Self = Self(memfit_guard::set_budget(budget_bytes)?);
    quick fn change(&self, budget_bytes: u64) -> () = memfit_guard::change_budget(&self.0, budget_bytes)?;
    quick fn lift(&self) -> () = memfit_guard::lift_budget(&self.0);
}}

/// A stretch of time with its own peak. It is open from the start until it is closed or dropped.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct AllocationWindow(Window);

methods! { impl AllocationWindow {
    #[new]
    object fn new() -> Self = Self(memfit_guard::open_window());
    quick fn peak(&self) -> (u64, u64) = memfit_guard::window_peak(&self.0).unwrap_or_default();
    quick fn restart(&self) -> () = memfit_guard::restart_window(&self.0);
    quick fn read(&self) -> Option<Reading> = memfit_guard::read_window(&self.0);
    quick fn close(&self) -> Option<Reading> = memfit_guard::close_window(&self.0);
}}

/// Whom to call, and who says whether this is no moment for it.
type Look = Arc<(Py<PyAny>, Py<PyAny>)>;
static LOOK: Mutex<Option<Look>> = Mutex::new(None);
/// Whether Python has been asked and has not called yet.
static IS_ASKED: AtomicBool = AtomicBool::new(false);

/// Says whom to call when the alarm rings: `look()`, unless `obstacle()` returns something.
///
/// `obstacle` must be a function of C: where a compiler watches Python's frames, none may begin.
fn have_looked(look: Py<PyAny>, obstacle: Py<PyAny>) {
    *LOOK.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new((look, obstacle)));
    memfit_guard::on_alarm(ask);
}

/// The alarm rings.
#[expect(unsafe_code, reason = "asks Python to call back")]
fn ask() {
    if !IS_ASKED.swap(true, Ordering::Relaxed) {
        // SAFETY: it may be called on any thread, with and without the interpreter's lock, and the
        // function that it is given is never unloaded.
        let refused = unsafe { pyo3::ffi::Py_AddPendingCall(Some(called), ptr::null_mut()) };
        if refused != 0 {
            IS_ASKED.store(false, Ordering::Relaxed);
            memfit_guard::put_alarm_off();
        }
    }
}

/// Called by Python, which holds its lock. What is raised is raised where the program is.
extern "C" fn called(_: *mut c_void) -> c_int {
    IS_ASKED.store(false, Ordering::Relaxed);
    Python::attach(|py| {
        look(py)
            .map_err(|error| error.restore(py))
            .map_or(-1, |()| 0)
    })
}

fn look(py: Python<'_>) -> PyResult<()> {
    let known = LOOK.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let Some((look, obstacle)) = known.as_deref() else {
        return Ok(());
    };
    if obstacle.call0(py)?.is_none(py) {
        look.call0(py)?;
    } else {
        memfit_guard::put_alarm_off();
    }
    Ok(())
}

//! Python, called when what is live has risen, at the next moment at which that is safe.
//!
//! The alarm of `memfit-guard` rings in the middle of an allocation, on any thread, with or without the
//! interpreter's lock. So Python is only asked to call back, which it does on the main thread between
//! two of its instructions, as it does with signals.
//!
//! Responsible for that call. Not responsible for when the alarm rings, nor for what is done then.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

/// Whom to call, and who says whether this is no moment for it.
static LOOK: Mutex<Option<(Py<PyAny>, Py<PyAny>)>> = Mutex::new(None);
/// Whether Python has been asked and has not called yet.
static IS_ASKED: AtomicBool = AtomicBool::new(false);

/// Says whom to call when the alarm rings: `look()`, unless `obstacle()` returns something.
///
/// `obstacle` must be a function of C: where a compiler watches Python's frames, none may begin.
#[pyfunction]
pub(crate) fn on_alarm(look: Py<PyAny>, obstacle: Py<PyAny>) {
    *LOOK.lock().unwrap_or_else(PoisonError::into_inner) = Some((look, obstacle));
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
    Python::attach(|py| match look(py) {
        Ok(()) => 0,
        Err(error) => {
            error.restore(py);
            -1
        }
    })
}

fn look(py: Python<'_>) -> PyResult<()> {
    let known = LOOK.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((look, obstacle)) = known
        .as_ref()
        .map(|(look, obstacle)| (look.clone_ref(py), obstacle.clone_ref(py)))
    else {
        return Ok(());
    };
    drop(known);
    if obstacle.call0(py)?.is_none(py) {
        look.call0(py)?;
    } else {
        memfit_guard::put_alarm_off();
    }
    Ok(())
}

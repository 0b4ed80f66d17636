//! Which exception an error of the crates below becomes.
//!
//! Responsible for that table and for the hints that an exception carries as fields. Not responsible for the words.

use memfit::lease::LeaseError as LeaseFailure;
use memfit_engine::bytes::Bytes;
use memfit_guard::AboveBudget;
use memfit_memory::park::host::ParkError as ParkFailure;
use pyo3::import_exception;
use pyo3::prelude::*;

import_exception!(memfit.errors, LeaseError);
import_exception!(memfit.errors, ParkError);

/// An error on its way to Python.
pub(crate) struct Failure(PyErr);

/// What a call gives, or what Python raises.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        failure.0
    }
}

/// `Exception: errors;` for errors whose words are all that Python needs.
macro_rules! raise {
    ($($exception:ident: $($error:ty),+;)+) => {$(import_exception!(memfit.errors, $exception); $(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self($exception::new_err(error.to_string()))
            }
        }
    )+)+};
}

raise! {
    BudgetError: memfit_engine::bytes::BudgetError;
    CaptureError: memfit_engine::trace::CaptureError;
    OffloadError: memfit_memory::store::StoreError;
    SnapshotError: memfit_engine::snapshot::SnapshotError;
    TraceFileError: memfit_engine::file::FileError;
    UsageError: String, memfit_guard::NoCategory, memfit_memory::arena::host::NoMemory,
        memfit_memory::moments::LengthError,
        memfit_memory::narrow::LengthError, serde_json::Error, memfit_engine::cost::CostError,
        memfit_engine::cost::devices::UnknownGpu, memfit_engine::plan::AnswerError,
        memfit_engine::plan::PlanError, memfit_engine::predict::PredictError,
        memfit_engine::share::pool::NoJob,
        memfit_engine::step::NoAllocation, memfit_engine::trace::SizesError;
}

impl From<AboveBudget> for Failure {
    fn from(error: AboveBudget) -> Self {
        let (held, budget) = (Bytes(error.held_bytes), Bytes(error.budget_bytes));
        let message = format!("tensors already take {held}, more than the budget of {budget}");
        Self(BudgetError::new_err(message))
    }
}

impl From<ParkFailure> for Failure {
    fn from(error: ParkFailure) -> Self {
        Self(ParkError::new_err((error.to_string(), error.reason())))
    }
}

impl From<LeaseFailure> for Failure {
    fn from(error: LeaseFailure) -> Self {
        let ((device, asked, largest), reason) = (error.shortage(), error.reason());
        let fields = (error.to_string(), reason, device, asked, largest);
        Self(LeaseError::new_err(fields))
    }
}

//! What serde can say, as Python has it: dictionaries, lists, texts and numbers.
//!
//! Responsible for the conversion in both directions, of arguments and of results. Not responsible for what crosses.

use memfit_engine::bytes::Budget;
use pyo3::prelude::*;
use pythonize::{depythonize, pythonize};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::errors::{BudgetError, Result, UsageError};

/// A value on its way between the languages.
pub(crate) struct Value<T>(pub(crate) T);

/// A value as Python has it, or what Python raises.
pub(crate) type Answer<T> = Result<Value<T>>;

impl<'a, 'py, T: DeserializeOwned> FromPyObject<'a, 'py> for Value<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let value = depythonize(&object);
        value.map(Self).map_err(|error| {
            let message = format!("the {} is not valid: {error}", noun::<T>());
            unreadable_budget(&object).unwrap_or_else(|| UsageError::new_err(message))
        })
    }
}

/// The error of a request whose budget cannot be read.
fn unreadable_budget(request: &Bound<'_, PyAny>) -> Option<PyErr> {
    let written: String = request.get_item("budget").ok()?.extract().ok()?;
    let error = Budget::parse(&written).err()?;
    Some(BudgetError::new_err(error.to_string()))
}

/// What a type is called in a sentence: `PlanRequest` is a plan request.
fn noun<T>() -> String {
    let path = std::any::type_name::<T>().trim_end_matches('>');
    let name = path.rsplit("::").next().unwrap_or(path).chars();
    let words = name.flat_map(|letter| {
        let space = letter.is_uppercase().then_some(' ');
        space.into_iter().chain(letter.to_lowercase())
    });
    words.collect::<String>().trim_start().to_owned()
}

impl<'py, T: Serialize> IntoPyObject<'py> for Value<T> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(pythonize(py, &self.0)?)
    }
}

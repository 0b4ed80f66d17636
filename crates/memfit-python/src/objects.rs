//! Python's objects by their classes: there are hundreds of thousands, and a line of Python for each takes long.
//!
//! Responsible for telling them apart. Not responsible for finding them.

use std::collections::hash_map::{Entry, HashMap};

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

/// Those of the objects that are of some families, in their order; each class is asked once.
#[pyfunction]
pub(crate) fn instances<'py>(
    objects: &Bound<'py, PyList>,
    families: &Bound<'py, PyTuple>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let mut asked = HashMap::new();
    let mut is_of = |object: &Bound<'py, PyAny>| match asked.entry(object.get_type_ptr()) {
        Entry::Occupied(known) => Ok(*known.get()),
        Entry::Vacant(new) => object
            .get_type()
            .is_subclass(families)
            .map(|is| *new.insert(is)),
    };
    let chosen = objects
        .iter()
        .map(|object| Ok(is_of(&object)?.then_some(object)));
    chosen.filter_map(Result::transpose).collect()
}

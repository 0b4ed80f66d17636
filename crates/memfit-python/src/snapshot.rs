//! A CUDA memory snapshot.
//!
//! Responsible for conversion, as the rest of the binding.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use memfit_engine::bytes::Bytes;
use memfit_engine::explain::{self, Explanation};
use memfit_engine::snapshot::{self, ReadOptions};
use pyo3::prelude::*;

use crate::functions::methods;

/// A CUDA memory snapshot, as columns.
#[pyclass(frozen, from_py_object, module = "memfit._native")]
#[derive(Clone)]
pub(crate) struct Snapshot(Arc<snapshot::Snapshot>);

methods! { impl Snapshot {
    #[staticmethod]
    make fn decode(data: &[u8]) = snapshot::read_bytes(data)?.into();
    #[staticmethod]
    make fn read(path: PathBuf) = {
        let file = File::open(path).map_err(PyErr::from)?;
        snapshot::read(file, ReadOptions::default())?.into()
    };
    fn json(self) -> String = serde_json::to_string(&*self.0)?;
    #[pyo3(signature = (source, before=None, steps=None, device_memory_bytes=None))]
    fn explain(
        self, source: &str, before: Option<(String, Snapshot)>, steps: Option<u64>, device_memory_bytes: Option<u64>
    ) -> Explanation = {
        let before = before.as_ref().map(|(name, before)| (name.as_str(), &*before.0));
        let device_memory = device_memory_bytes.map(Bytes);
        explain::explain(&self.0, &explain::Request { source, before, steps, device_memory })
    };
    fn replay(self, source: String, settings: &str, device_memory_bytes: Option<u64>) -> memfit::Answer =
        memfit::replay(&self.0, source, settings, device_memory_bytes.map(Bytes))?;
}}

impl From<snapshot::Snapshot> for Snapshot {
    fn from(snapshot: snapshot::Snapshot) -> Self {
        Self(Arc::new(snapshot))
    }
}

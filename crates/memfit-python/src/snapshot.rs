//! A CUDA memory snapshot.
//!
//! Responsible for conversion, as the rest of the binding.

use std::fs::File;
use std::path::PathBuf;

use memfit_engine::bytes::Bytes;
use memfit_engine::explain::{self, Explanation};
use memfit_engine::snapshot::{self, ReadOptions};
use pyo3::prelude::*;

use crate::errors::{Answer, Result};
use crate::value::Value;

/// A CUDA memory snapshot, as columns.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct Snapshot(snapshot::Snapshot);

#[pymethods]
impl Snapshot {
    /// Reads a snapshot from the bytes of its pickle, gzip'ed or not.
    #[staticmethod]
    fn decode(py: Python<'_>, data: &[u8]) -> Result<Self> {
        Ok(Self(py.detach(|| snapshot::read_bytes(data))?))
    }

    /// Reads a snapshot from a file, without holding the file.
    #[staticmethod]
    fn read(py: Python<'_>, path: PathBuf) -> Result<Self> {
        py.detach(|| {
            let file = File::open(path).map_err(PyErr::from)?;
            Ok(Self(snapshot::read(file, ReadOptions::default())?))
        })
    }

    /// The snapshot as JSON, column by column.
    fn json(&self, py: Python<'_>) -> Result<String> {
        Ok(py.detach(|| serde_json::to_string(&self.0))?)
    }

    /// Explains the snapshot; `before` is an earlier one with its name.
    #[pyo3(signature = (source, before=None, steps=None, device_memory_bytes=None))]
    fn explain(
        &self,
        py: Python<'_>,
        source: &str,
        before: Option<(String, PyRef<'_, Snapshot>)>,
        steps: Option<u64>,
        device_memory_bytes: Option<u64>,
    ) -> Value<Explanation> {
        let request = explain::Request {
            source,
            before: before
                .as_ref()
                .map(|(name, before)| (name.as_str(), &before.0)),
            steps,
            device_memory: device_memory_bytes.map(Bytes),
        };
        Value(py.detach(|| explain::explain(&self.0, &request)))
    }

    /// Runs the requests again under other allocator settings: the document and the text.
    fn replay(
        &self,
        py: Python<'_>,
        source: String,
        settings: &str,
        device_memory_bytes: Option<u64>,
    ) -> Answer<memfit::Answer> {
        let memory = device_memory_bytes.map(Bytes);
        Ok(Value(py.detach(|| {
            memfit::replay(&self.0, source, settings, memory)
        })?))
    }
}

//! What was recorded: a step, with what of its model can be pruned, and the memory of a CUDA device.
//!
//! Responsible for conversion, as the rest of the binding.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use memfit_engine::bytes::Bytes;
use memfit_engine::explain::{self, Explanation};
use memfit_engine::snapshot::{self, ReadOptions};
use memfit_engine::trace::{Refusals, Way};
use memfit_engine::{file, plan, prune, trace};
use pyo3::prelude::*;

use crate::functions::methods;
use crate::value::Value;

/// A step in another way: which, its trace as JSON, and the trace at another batch size if there is one.
type Captured = (Value<Way>, Vec<u8>, Option<Vec<u8>>);

/// One recorded step, checked.
#[pyclass(frozen, from_py_object, module = "memfit._native")]
#[derive(Clone)]
pub(crate) struct Trace(pub(crate) Arc<trace::Trace>);

methods! { impl Trace {
    #[pyo3(signature = (json, second=None, batch=0))]
    #[staticmethod]
    object fn from_json(json: &[u8], second: Option<&[u8]>, batch: u64) -> Self =
        Self(trace::Trace::from_json(json, second, batch)?.into());
    #[staticmethod]
    object fn decode(data: &[u8]) -> Self = Self(file::decode(data)?.into());
    object fn encode(&self) -> Vec<u8> = file::encode(&self.0);
    object fn at_sizes(&self, others: Vec<Trace>, sizes: Vec<Vec<u64>>, wanted: Vec<u64>) -> Self = {
        let others: Vec<&trace::Trace> = others.iter().map(|other| &*other.0).collect();
        let sizes: Vec<&[u64]> = sizes.iter().map(Vec::as_slice).collect();
        Self(self.0.at_sizes(&others, &sizes, &wanted)?.into())
    };
    object fn with_alternatives(&self, steps: Vec<Captured>, refusals: Value<Refusals>) -> Self = {
        let steps = steps.into_iter().map(|(way, first, second)| (way.0, first, second));
        Self(self.0.with_captures(steps.collect(), refusals.0)?.into())
    };
    object fn with_piece(&self, way: Value<Way>, piece: &[u8]) -> Self =
        Self(self.0.with_captured_piece(&way.0, piece)?.into());
    free fn json(&self) -> String = serde_json::to_string(&*self.0)?;
    free fn mixed_items(&self) -> Option<String> = plan::mixed_items(&self.0);
    free fn op_names(&self, way: Value<Way>) -> Option<Vec<&str>> =
        self.0.in_way(&way.0).map(trace::Trace::op_names);
    free fn ways(&self) -> Vec<Way> = plan::ways_without_leave(&self.0);
    free fn text(&self) -> String = memfit::of_trace(&self.0);
    quick fn knows_other_sizes(&self) -> bool = self.0.couplings.is_some();
}}

/// What of a step's model can be pruned.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct Separation {
    trace: Arc<trace::Trace>,
    found: prune::Separation,
}

methods! { impl Separation {
    #[staticmethod]
    object fn of(trace: &Trace, request: Value<prune::Request>) -> Self =
        Self { trace: Arc::clone(&trace.0), found: prune::separate(&trace.0, &request.0) };
    free fn groups(&self) -> &[prune::Group] = self.found.groups.as_slice();
    free fn stays(&self) -> &[prune::Stay] = self.found.stays.as_slice();
    free fn deviation(&self, removed: Vec<Vec<usize>>, again: &Trace) -> Option<usize> =
        self.found.deviation(&self.trace, &removed, &again.0);
}}

/// A CUDA memory snapshot, as columns.
#[pyclass(frozen, from_py_object, module = "memfit._native")]
#[derive(Clone)]
pub(crate) struct Snapshot(Arc<snapshot::Snapshot>);

methods! { impl Snapshot {
    #[staticmethod]
    object fn decode(data: &[u8]) -> Self = Self(snapshot::read_bytes(data)?.into());
    #[staticmethod]
    object fn read(path: PathBuf) -> Self = {
        let file = File::open(path).map_err(PyErr::from)?;
        Self(snapshot::read(file, ReadOptions::default())?.into())
    };
    free fn json(&self) -> String = serde_json::to_string(&*self.0)?;
    #[pyo3(signature = (source, before=None, steps=None, device_memory_bytes=None))]
    free fn explain(
        &self, source: &str, before: Option<(String, Snapshot)>, steps: Option<u64>, device_memory_bytes: Option<u64>
    ) -> Explanation = {
        let before = before.as_ref().map(|(name, before)| (name.as_str(), &*before.0));
        let device_memory = device_memory_bytes.map(Bytes);
        explain::explain(&self.0, &explain::Request { source, before, steps, device_memory })
    };
    free fn replay(&self, source: String, settings: &str, device_memory_bytes: Option<u64>) -> memfit::Answer =
        memfit::replay(&self.0, source, settings, device_memory_bytes.map(Bytes))?;
}}

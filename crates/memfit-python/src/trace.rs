//! A recorded step, and what of its model can be pruned.
//!
//! Responsible for conversion, as the rest of the binding.

use std::ops::Deref;
use std::sync::Arc;

use memfit_engine::trace::{Refusals, Way};
use memfit_engine::{file, plan, prune, trace};
use pyo3::prelude::*;

use crate::functions::methods;
use crate::value::{ByteString, Value};

/// A step in another way: which, its trace as JSON, and the trace at another batch size if there is one.
type Captured = (Value<Way>, Vec<u8>, Option<Vec<u8>>);

/// One recorded step, checked.
#[pyclass(frozen, from_py_object, module = "memfit._native")]
#[derive(Clone)]
pub(crate) struct Trace(pub(crate) Arc<trace::Trace>);

impl Deref for Trace {
    type Target = trace::Trace;

    fn deref(&self) -> &trace::Trace {
        &self.0
    }
}

impl From<trace::Trace> for Trace {
    fn from(trace: trace::Trace) -> Self {
        Self(Arc::new(trace))
    }
}

methods! { impl Trace {
    #[pyo3(signature = (json, second=None, batch=0))]
    #[staticmethod]
    make fn from_json(json: &[u8], second: Option<&[u8]>, batch: u64) =
        trace::Trace::from_json(json, second, batch)?.into();
    #[staticmethod]
    make fn decode(data: &[u8]) = file::decode(data)?.into();
    fn encode(self) -> ByteString = ByteString(file::encode(self));
    fn json(self) -> String = serde_json::to_string(&*self.0)?;
    fn at_sizes(self, others: Vec<Trace>, sizes: Vec<Vec<u64>>, wanted: Vec<u64>) -> Self = {
        let others: Vec<&trace::Trace> = others.iter().map(|other| &**other).collect();
        let sizes: Vec<&[u64]> = sizes.iter().map(Vec::as_slice).collect();
        self.0.at_sizes(&others, &sizes, &wanted)?.into()
    };
    fn mixed_items(self) -> Option<String> = plan::mixed_items(self);
    fn op_names(self, way: Value<Way>) -> Option<Vec<String>> = self.0.in_way(&way).map(|step| {
        step.ops.iter().map(|op| step.string(op.name).to_owned()).collect()
    });
    quick fn knows_other_sizes(self) -> bool = self.0.couplings.is_some();
    fn ways(self) -> Vec<Way> = plan::ways_without_leave(self);
    fn with_alternatives(self, steps: Vec<Captured>, refusals: Value<Refusals>) -> Self = {
        let steps = steps.into_iter().map(|(way, first, second)| (way.0, first, second));
        self.0.with_captures(steps.collect(), refusals.0)?.into()
    };
    fn with_piece(self, way: Value<Way>, piece: &[u8]) -> Self = self.0.with_captured_piece(&way, piece)?.into();
    fn text(self) -> String = memfit::of_trace(self);
}}

/// What of a step's model can be pruned.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct Separation {
    trace: Arc<trace::Trace>,
    found: prune::Separation,
}

methods! { impl Separation {
    #[staticmethod]
    make fn of(trace: &Trace, request: Value<prune::Request>) =
        Self { trace: Arc::clone(&trace.0), found: prune::separate(trace, &request) };
    fn groups(self) -> &[prune::Group] = self.found.groups.as_slice();
    fn stays(self) -> &[prune::Stay] = self.found.stays.as_slice();
    fn deviation(self, removed: Vec<Vec<usize>>, again: &Trace) -> Option<usize> =
        self.found.deviation(&self.trace, &removed, again);
}}

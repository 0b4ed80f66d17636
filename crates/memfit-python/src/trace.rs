//! A recorded step, and what of its model can be pruned.
//!
//! Responsible for conversion, as the rest of the binding.

use std::ops::Deref;
use std::sync::Arc;

use memfit_engine::trace::{Refusals, Way};
use memfit_engine::{file, plan, prune, trace};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::value::Value;

/// A step in another way: which, its trace as JSON, and the trace at another batch size if there is one.
type Captured = (Value<Way>, Vec<u8>, Option<Vec<u8>>);

/// One recorded step, checked.
#[pyclass(frozen, module = "memfit._native")]
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

#[pymethods]
impl Trace {
    /// Makes a trace from its JSON; `second` is the same step at another batch size, `batch` the batch size wanted if it
    /// is neither.
    #[staticmethod]
    #[pyo3(signature = (json, second=None, batch=0))]
    fn from_json(py: Python<'_>, json: &[u8], second: Option<&[u8]>, batch: u64) -> Result<Self> {
        Ok(py
            .detach(|| trace::Trace::from_json(json, second, batch))?
            .into())
    }

    /// Reads an encoded trace.
    #[staticmethod]
    fn decode(py: Python<'_>, data: &[u8]) -> Result<Self> {
        Ok(py.detach(|| file::decode(data))?.into())
    }

    /// The trace as the bytes of a `.memfit` file.
    fn encode(&self, py: Python<'_>) -> Vec<u8> {
        py.detach(|| file::encode(&self.0))
    }

    /// The trace as JSON.
    fn json(&self, py: Python<'_>) -> Result<String> {
        Ok(py.detach(|| serde_json::to_string(&*self.0))?)
    }

    /// The step at other sizes of its input, learnt from other recordings: `sizes` are those of each of them and, last,
    /// of this.
    fn at_sizes(
        &self,
        py: Python<'_>,
        others: Vec<PyRef<'_, Self>>,
        sizes: Vec<Vec<u64>>,
        wanted: Vec<u64>,
    ) -> Result<Self> {
        let others: Vec<&trace::Trace> = others.iter().map(|other| &*other.0).collect();
        let sizes: Vec<&[u64]> = sizes.iter().map(Vec::as_slice).collect();
        Ok(py
            .detach(|| self.0.at_sizes(&others, &sizes, &wanted))?
            .into())
    }

    /// Why a forward does not treat the items of its batch apart; nothing where it does.
    fn mixed_items(&self, py: Python<'_>) -> Option<String> {
        py.detach(|| plan::mixed_items(&self.0))
    }

    /// The ways that are worth a capture where all is allowed that needs no leave: in slices.
    fn ways(&self, py: Python<'_>) -> Value<Vec<Way>> {
        Value(py.detach(|| plan::ways_without_leave(&self.0)))
    }

    /// The trace with the step in other ways, and why there are no more.
    fn with_alternatives(
        &self,
        py: Python<'_>,
        steps: Vec<Captured>,
        refusals: Value<Refusals>,
    ) -> Result<Self> {
        let steps = steps
            .into_iter()
            .map(|(way, first, second)| (way.0, first, second));
        let steps = steps.collect();
        Ok(py
            .detach(|| self.0.with_captures(steps, refusals.0))?
            .into())
    }

    /// The trace with what ops take on a piece of the batch, in the way that was asked for; as it is where the step runs
    /// other ops there.
    fn with_piece(&self, py: Python<'_>, way: Value<Way>, piece: &[u8]) -> Result<Self> {
        Ok(py
            .detach(|| self.0.with_captured_piece(&way.0, piece))?
            .into())
    }

    /// The trace as `memfit show` prints it.
    fn text(&self, py: Python<'_>) -> String {
        py.detach(|| memfit::of_trace(&self.0))
    }
}

/// What of a step's model can be pruned.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct Separation {
    trace: Arc<trace::Trace>,
    found: prune::Separation,
}

#[pymethods]
impl Separation {
    /// Finds the groups of channels in a step.
    #[staticmethod]
    fn of(py: Python<'_>, trace: &Trace, request: Value<prune::Request>) -> Self {
        let trace = Arc::clone(&trace.0);
        let found = py.detach(|| prune::separate(&trace, &request.0));
        Self { trace, found }
    }

    /// The groups.
    fn groups(&self) -> Value<&[prune::Group]> {
        Value(&self.found.groups)
    }

    /// What stays, and why.
    fn stays(&self) -> Value<&[prune::Stay]> {
        Value(&self.found.stays)
    }

    /// The first op of the forward that is not as meant in the step of the pruned model; `removed` has for each group
    /// the channels that are gone.
    fn deviation(&self, py: Python<'_>, removed: Vec<Vec<usize>>, again: &Trace) -> Option<usize> {
        py.detach(|| self.found.deviation(&self.trace, &removed, &again.0))
    }
}

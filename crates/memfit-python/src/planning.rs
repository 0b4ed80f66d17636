//! The conversation in which planning asks for what it needs.
//!
//! Responsible for conversion, as the rest of the binding. The interpreter is released while a search runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memfit_engine::bytes::Budget;
use memfit_engine::cost::CostSource;
use memfit_engine::plan::{self, Front, Need, Offer, PlanRequest};
use pyo3::prelude::*;

use crate::errors::{Answer, Result};
use crate::trace::Trace;
use crate::value::Value;

/// A conversation about the plan of one step; it asks, and whoever holds it answers.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct PlanSession(Mutex<plan::PlanSession>);

#[pymethods]
impl PlanSession {
    /// Begins one for a request and a place for what is offloaded; `front`: for many budgets; `tells_leave`: a plan that
    /// does not fit says what leave to change numbers would bring.
    #[new]
    #[pyo3(signature = (request, place=None, *, front=false, tells_leave=false))]
    fn new(
        request: Value<PlanRequest>,
        place: Option<String>,
        front: bool,
        tells_leave: bool,
    ) -> Self {
        let begin = if front {
            plan::PlanSession::for_front
        } else {
            plan::PlanSession::new
        };
        let session = begin(request.0, place);
        Self(Mutex::new(if tells_leave {
            session.telling_leave()
        } else {
            session
        }))
    }

    /// What is needed now.
    fn next(&self) -> Value<Need> {
        Value(self.lock().next())
    }

    /// Brings the trace.
    fn trace(&self, py: Python<'_>, trace: &Trace) -> Result<()> {
        self.answer(py, plan::Answer::Trace(Arc::clone(&trace.0)))
    }

    /// Brings the costs.
    fn costs(&self, py: Python<'_>, costs: Value<CostSource>) -> Result<()> {
        self.answer(py, plan::Answer::Costs(costs.0))
    }

    /// Brings the offer of the place.
    fn offer(&self, py: Python<'_>, offer: Value<Offer>) -> Result<()> {
        self.answer(py, plan::Answer::Offer(offer.0))
    }

    /// Brings the trace with the step in other ways; none where it cannot be captured again.
    fn ways(&self, py: Python<'_>, trace: Option<&Trace>) -> Result<()> {
        let ways = trace.map(|trace| plan::Answer::Ways(Arc::clone(&trace.0)));
        self.answer(py, ways.unwrap_or(plan::Answer::NoWays))
    }

    /// Searches for the plan that is needed and brings it, in about so many seconds if they are given.
    #[pyo3(signature = (time_limit=None))]
    fn search(&self, py: Python<'_>, time_limit: Option<f64>) -> Result<()> {
        let search = self.lock().search()?;
        let plan = py.detach(|| memfit::within(time_limit, |limit| search.plan(limit)))?;
        self.answer(py, plan::Answer::Plan(Box::new(plan)))
    }

    /// Searches for plans for many budgets, on all cores, and for one that is asked for.
    #[pyo3(signature = (budget=None))]
    fn front(&self, py: Python<'_>, budget: Option<&str>) -> Answer<Front> {
        let budget = budget.map(Budget::parse).transpose()?;
        let search = self.lock().search()?;
        Ok(Value(py.detach(|| search.front(budget, memfit::cores()))?))
    }
}

impl PlanSession {
    fn lock(&self) -> MutexGuard<'_, plan::PlanSession> {
        // The engine does not panic, and no call leaves it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, py: Python<'_>, answer: plan::Answer) -> Result<()> {
        Ok(py.detach(|| self.lock().answer(answer))?)
    }
}

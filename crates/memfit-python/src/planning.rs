//! The conversation in which planning asks for what it needs.
//!
//! Responsible for conversion, as the rest of the binding, and for the clock and the threads of a search, which the
//! engine has not. The interpreter is released while a search runs.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use memfit_engine::bytes::Budget;
use memfit_engine::cost::CostSource;
use memfit_engine::plan::{
    self, Answer, Front, Limit, Need, Offer, PlanRequest, Search, TimeLimit,
};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::_native::Trace;
use crate::value::Value;
use crate::{no_budget, usage};

/// A conversation about the plan of one step; it asks, and whoever holds it answers.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct PlanSession {
    session: Mutex<plan::PlanSession>,
}

#[pymethods]
impl PlanSession {
    /// Begins one for a request and a place for what is offloaded; `front`: for many budgets.
    #[new]
    #[pyo3(signature = (request, place=None, *, front=false))]
    fn new(request: Value<PlanRequest>, place: Option<String>, front: bool) -> Self {
        let begin = if front {
            plan::PlanSession::for_front
        } else {
            plan::PlanSession::new
        };
        Self {
            session: Mutex::new(begin(request.0, place)),
        }
    }

    /// What is needed now: its name, and what there is to know about it.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        match self.lock().next() {
            Need::Trace => ("trace",).into_pyobject(py),
            Need::Costs { device_kind } => ("costs", device_kind).into_pyobject(py),
            Need::Offer {
                device_kind,
                place,
                profile,
            } => {
                let profile = profile.map(|profile| Value(*profile));
                ("offer", device_kind, place, profile).into_pyobject(py)
            }
            Need::Ways(ways) => ("ways", Value(ways)).into_pyobject(py),
            Need::Plan(_) => ("plan",).into_pyobject(py),
            Need::Nothing(made) => ("nothing", Value(made.plan)).into_pyobject(py),
        }
    }

    /// Brings the trace.
    fn trace(&self, py: Python<'_>, trace: &Trace) -> PyResult<()> {
        self.answer(py, Answer::Trace(Arc::clone(&trace.0)))
    }

    /// Brings the costs.
    fn costs(&self, py: Python<'_>, costs: Value<CostSource>) -> PyResult<()> {
        self.answer(py, Answer::Costs(costs.0))
    }

    /// Brings the offer of the place.
    fn offer(&self, py: Python<'_>, offer: Value<Offer>) -> PyResult<()> {
        self.answer(py, Answer::Offer(offer.0))
    }

    /// Brings the trace with the step in other ways; none where it cannot be captured again.
    fn ways(&self, py: Python<'_>, trace: Option<&Trace>) -> PyResult<()> {
        let answer = trace.map_or(Answer::NoWays, |trace| Answer::Ways(Arc::clone(&trace.0)));
        self.answer(py, answer)
    }

    /// Searches for the plan that is needed and brings it, in about so many seconds if they are given.
    #[pyo3(signature = (time_limit=None))]
    fn search(&self, py: Python<'_>, time_limit: Option<f64>) -> PyResult<()> {
        let search = self.needed_search()?;
        let plan = py.detach(|| within(time_limit, |limit| search.plan(limit)));
        let plan = plan.map_err(usage)?;
        self.answer(py, Answer::Plan(Box::new(plan)))
    }

    /// Searches for plans for many budgets, on all cores, and for one that is asked for.
    #[pyo3(signature = (budget=None))]
    fn front(&self, py: Python<'_>, budget: Option<&str>) -> PyResult<Value<Front>> {
        let budget = budget.map(Budget::parse).transpose();
        let budget = budget.map_err(no_budget)?;
        let search = self.needed_search()?;
        py.detach(|| {
            let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
            search.front(budget, threads).map(Value).map_err(usage)
        })
    }
}

impl PlanSession {
    fn lock(&self) -> MutexGuard<'_, plan::PlanSession> {
        // The engine does not panic, and no call leaves it half changed.
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, py: Python<'_>, answer: Answer) -> PyResult<()> {
        py.detach(|| self.lock().answer(answer)).map_err(usage)
    }

    fn needed_search(&self) -> PyResult<Search> {
        match self.lock().next() {
            Need::Plan(search) => Ok(search),
            need => Err(usage(format!(
                "planning needs {}, and no search",
                need.name()
            ))),
        }
    }
}

/// Runs `work` with a time limit that began now.
pub(crate) fn within<T>(seconds: Option<f64>, work: impl FnOnce(Limit<'_>) -> T) -> T {
    let began = Instant::now();
    let elapsed = || began.elapsed().as_secs_f64();
    work(seconds.map_or(Limit::None, |seconds| {
        Limit::Time(TimeLimit {
            seconds,
            elapsed: &elapsed,
        })
    }))
}

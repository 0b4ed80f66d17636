//! The conversation in which planning asks for what it needs.
//!
//! Responsible for conversion, as the rest of the binding. The interpreter is released while a search runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memfit_engine::bytes::Budget;
use memfit_engine::cost::CostSource;
use memfit_engine::plan::{self, Front, Need, Offer, PlanRequest};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::functions::methods;
use crate::trace::Trace;
use crate::value::Value;

/// A conversation about the plan of one step; it asks, and whoever holds it answers.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct PlanSession(Mutex<plan::PlanSession>);

methods! { impl PlanSession {
    #[pyo3(signature = (request, place=None, *, front=false, tells_leave=false))]
    #[new]
    make fn new(request: Value<PlanRequest>, place: Option<String>, front: bool, tells_leave: bool) = {
        let begin = if front { plan::PlanSession::for_front } else { plan::PlanSession::new };
        let session = begin(request.0, place);
        Self(Mutex::new(if tells_leave { session.telling_leave() } else { session }))
    };
    quick fn next(self) -> Need = self.lock().next();
    fn trace(self, trace: &Trace) -> () = self.answer(plan::Answer::Trace(Arc::clone(&trace.0)))?;
    fn costs(self, costs: Value<CostSource>) -> () = self.answer(plan::Answer::Costs(costs.0))?;
    fn offer(self, offer: Value<Offer>) -> () = self.answer(plan::Answer::Offer(offer.0))?;
    fn ways(self, trace: Option<&Trace>) -> () = {
        let ways = trace.map(|trace| plan::Answer::Ways(Arc::clone(&trace.0)));
        self.answer(ways.unwrap_or(plan::Answer::NoWays))?;
    };
    #[pyo3(signature = (time_limit=None))]
    fn search(self, time_limit: Option<f64>) -> () = {
        let search = self.lock().search()?;
        let plan = memfit::within(time_limit, |limit| search.plan(limit))?;
        self.answer(plan::Answer::Plan(Box::new(plan)))?;
    };
    #[pyo3(signature = (budget=None))]
    fn front(self, budget: Option<&str>) -> Front = {
        let budget = budget.map(Budget::parse).transpose()?;
        let search = self.lock().search()?;
        search.front(budget, memfit::cores())?
    };
}}

impl PlanSession {
    fn lock(&self) -> MutexGuard<'_, plan::PlanSession> {
        // The engine does not panic, and no call leaves it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, answer: plan::Answer) -> Result<()> {
        Ok(self.lock().answer(answer)?)
    }
}

//! The engine's machines, for threads of Python: who plans one step, which models are in memory, which parameters are.
//!
//! Responsible for conversion, as the rest of the binding, and for one caller at a time. The interpreter is released
//! while a search runs; the other calls are short and keep it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memfit_engine::bytes::{Budget, Bytes};
use memfit_engine::cost::CostSource;
use memfit_engine::plan::{self, Front, Need, Offer, PlanRequest};
use memfit_engine::share::pool::{
    Added, Answer, Client, Done, Job, Machine, Micros, ModelId, Refusal, Statistics, Ticket,
    ToldJob, ToldRefusal,
};
use memfit_engine::step::offload::room::{self, Move};
use pyo3::prelude::*;

use crate::functions::methods;
use crate::recordings::Trace;
use crate::value::Value;

/// A machine, for one caller.
fn locked<M>(machine: &Mutex<M>) -> MutexGuard<'_, M> {
    // The engine does not panic, and no call leaves it half changed.
    machine.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A conversation about the plan of one step; it asks, and its caller answers.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct PlanSession(Mutex<plan::PlanSession>);

methods! { impl PlanSession {
    #[pyo3(signature = (request, place=None, *, front=false, tells_leave=false))]
    #[new]
    object fn new(request: Value<PlanRequest>, place: Option<String>, front: bool, tells_leave: bool) -> Self = {
        let begin = if front { plan::PlanSession::for_front } else { plan::PlanSession::new };
        let session = begin(request.0, place);
        Self(Mutex::new(if tells_leave { session.telling_leave() } else { session }))
    };
    quick fn next(&self) -> Need = locked(&self.0).next();
    free fn trace(&self, trace: &Trace) -> () = locked(&self.0).answer(plan::Answer::Trace(Arc::clone(&trace.0)))?;
    free fn costs(&self, costs: Value<CostSource>) -> () = locked(&self.0).answer(plan::Answer::Costs(costs.0))?;
    free fn offer(&self, offer: Value<Offer>) -> () = locked(&self.0).answer(plan::Answer::Offer(offer.0))?;
    free fn ways(&self, trace: Option<&Trace>) -> () = {
        let ways = trace.map(|trace| plan::Answer::Ways(Arc::clone(&trace.0)));
        locked(&self.0).answer(ways.unwrap_or(plan::Answer::NoWays))?;
    };
    #[pyo3(signature = (time_limit=None))]
    free fn search(&self, time_limit: Option<f64>) -> () = {
        let search = locked(&self.0).search()?;
        let plan = memfit::within(time_limit, |limit| search.plan(limit))?;
        locked(&self.0).answer(plan::Answer::Plan(Box::new(plan)))?;
    };
    #[pyo3(signature = (budget=None))]
    free fn front(&self, budget: Option<&str>) -> Front = {
        let budget = budget.map(Budget::parse).transpose()?;
        let search = locked(&self.0).search()?;
        search.front(budget, memfit::cores())?
    };
}}

/// Which models are in memory, and who waits.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct PoolMachine(Mutex<Machine>);

methods! { impl PoolMachine {
    #[pyo3(signature = (budget, host=None))]
    #[new]
    object fn new(budget: u64, host: Option<u64>) -> Self =
        Self(Mutex::new(Machine::of(Bytes(budget), host.map(Bytes))));
    quick fn add(
        &self, size: u64, activations: u64, is_pinned: bool, now: u64
    ) -> (Option<(usize, bool, u64)>, Option<ToldRefusal>) = {
        let added = locked(&self.0).add(Bytes(size), Bytes(activations), is_pinned, true, Micros(now));
        (added.ok().map(Added::told), added.err().map(Refusal::told))
    };
    quick fn copied(&self, model: usize, in_host: u64) -> () = locked(&self.0).copied(ModelId(model), Bytes(in_host));
    quick fn remove(&self, model: usize) -> bool = locked(&self.0).remove(ModelId(model));
    quick fn ask(&self, model: usize, activations: u64, client: u64, now: u64) -> u64 =
        locked(&self.0).ask(ModelId(model), Bytes(activations), Client(client), Micros(now)).0;
    quick fn grow(&self, running: u64, by: u64, now: u64) -> u64 =
        locked(&self.0).grow(Ticket(running), Bytes(by), Micros(now)).0;
    quick fn cancel(&self, ticket: u64) -> () = locked(&self.0).cancel(Ticket(ticket));
    quick fn end(&self, ticket: u64, unsaved: u64, now: u64) -> () =
        locked(&self.0).end(Ticket(ticket), Bytes(unsaved), Micros(now));
    quick fn begin(&self, now: u64) -> Option<ToldJob> = locked(&self.0).begin(Micros(now)).map(Job::told);
    quick fn shed(&self, target: u64, now: u64) -> Option<ToldJob> =
        locked(&self.0).shed(Bytes(target), Micros(now)).map(Job::told);
    quick fn aim(&self, target: u64, now: u64) -> () = locked(&self.0).aim(Bytes(target), Micros(now));
    quick fn budget(&self) -> Bytes = locked(&self.0).budget();
    quick fn short(&self) -> Option<Bytes> = locked(&self.0).short();
    quick fn ended(&self, kind: &str, model: usize, done: Value<Done>) -> () =
        locked(&self.0).ended(Job::of(kind, ModelId(model))?, done.0);
    quick fn answers(&self) -> Vec<(u64, Option<ToldRefusal>)> =
        locked(&self.0).answers().into_iter().map(Answer::told).collect();
    quick fn counted(&self) -> Bytes = locked(&self.0).counted();
    quick fn in_host(&self) -> Bytes = locked(&self.0).in_host();
    quick fn statistics(&self) -> Statistics = locked(&self.0).statistics();
}}

/// Which parameters are in memory. Items are places in the list of sizes.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct Room(Mutex<room::Room>);

methods! { impl Room {
    #[new]
    object fn new(sizes: Vec<u64>, order: Vec<usize>, room_bytes: u64, ahead_bytes: u64) -> Self =
        Self(Mutex::new(room::Room::new(sizes, order, room_bytes, ahead_bytes)));
    quick fn admit(&self, item: usize) -> () = locked(&self.0).admit(item);
    quick fn trim(&self) -> Vec<(&'static str, usize)> = locked(&self.0).trim().into_iter().map(Move::told).collect();
    quick fn need(&self, items: Vec<usize>) -> Vec<(&'static str, usize)> =
        locked(&self.0).need(&items).into_iter().map(Move::told).collect();
}}

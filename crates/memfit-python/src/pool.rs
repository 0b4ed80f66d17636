//! The pool's decisions, for threads of Python.
//!
//! Responsible for conversion, as the rest of the binding. Every call is short and keeps the interpreter.

use std::sync::{Mutex, MutexGuard, PoisonError};

use memfit_engine::bytes::Bytes;
use memfit_engine::share::pool::{
    Added, Answer, Client, Done, Job, Machine, Micros, ModelId, Refusal, Statistics, Ticket,
    ToldJob, ToldRefusal,
};
use pyo3::prelude::*;

use crate::errors::Result;
use crate::value::Value;

/// Which models are in memory, and who waits.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct PoolMachine(Mutex<Machine>);

#[pymethods]
impl PoolMachine {
    /// A pool without models: of the host's memory, or of a device's with so much of the host's for copies.
    #[new]
    #[pyo3(signature = (budget, host=None))]
    fn new(budget: u64, host: Option<u64>) -> Self {
        Self(Mutex::new(Machine::of(Bytes(budget), host.map(Bytes))))
    }

    /// Adds a model that is in memory: its number, whether it may stay there and what its copy may have of the
    /// host's memory if not; or why it can never fit.
    fn add(
        &self,
        size: u64,
        activations: u64,
        is_pinned: bool,
        now: u64,
    ) -> (Option<(usize, bool, u64)>, Option<ToldRefusal>) {
        let (size, activations) = (Bytes(size), Bytes(activations));
        let added = self
            .lock()
            .add(size, activations, is_pinned, true, Micros(now));
        (added.ok().map(Added::told), added.err().map(Refusal::told))
    }

    /// The copy of a model that was parked when it was added has so much of the host's memory.
    fn copied(&self, model: usize, in_host: u64) {
        self.lock().copied(ModelId(model), Bytes(in_host));
    }

    /// Takes a model out; false while it is used, moved or waited for.
    fn remove(&self, model: usize) -> bool {
        self.lock().remove(ModelId(model))
    }

    /// Asks for a use; returns its ticket.
    fn ask(&self, model: usize, activations: u64, client: u64, now: u64) -> u64 {
        let (activations, client) = (Bytes(activations), Client(client));
        self.lock()
            .ask(ModelId(model), activations, client, Micros(now))
            .0
    }

    /// Asks for more activations of a use that runs; returns the ticket of its answer.
    fn grow(&self, running: u64, by: u64, now: u64) -> u64 {
        self.lock().grow(Ticket(running), Bytes(by), Micros(now)).0
    }

    /// Gives up a request that has no answer.
    fn cancel(&self, ticket: u64) {
        self.lock().cancel(Ticket(ticket));
    }

    /// A use has ended; parking its model would write `unsaved` bytes.
    fn end(&self, ticket: u64, unsaved: u64, now: u64) {
        self.lock().end(Ticket(ticket), Bytes(unsaved), Micros(now));
    }

    /// The next job, begun: what is to be done, the number of the model it is to be done with, and what its copy may
    /// have of the host's memory where it is parked.
    fn begin(&self, now: u64) -> Option<ToldJob> {
        self.lock().begin(Micros(now)).map(Job::told)
    }

    /// The next job, begun, so that no more than `target` counts.
    fn shed(&self, target: u64, now: u64) -> Option<ToldJob> {
        self.lock().shed(Bytes(target), Micros(now)).map(Job::told)
    }

    /// Changes the budget; it comes down as bytes are given up.
    fn aim(&self, target: u64, now: u64) {
        self.lock().aim(Bytes(target), Micros(now));
    }

    /// What may count now.
    fn budget(&self) -> u64 {
        self.lock().budget().0
    }

    /// The budget that the first request lacks, whatever is parked; none where it lacks none.
    fn short(&self) -> Option<u64> {
        self.lock().short().map(|budget| budget.0)
    }

    /// A job has ended, and how.
    fn ended(&self, kind: &str, model: usize, done: Value<Done>) -> Result<()> {
        self.lock().ended(Job::of(kind, ModelId(model))?, *done);
        Ok(())
    }

    /// Tickets that have been answered since the last time; each with a reason if it was refused.
    fn answers(&self) -> Vec<(u64, Option<ToldRefusal>)> {
        self.lock()
            .answers()
            .into_iter()
            .map(Answer::told)
            .collect()
    }

    /// Bytes that count now.
    fn counted(&self) -> u64 {
        self.lock().counted().0
    }

    /// Bytes of the host's memory that copies have now.
    fn in_host(&self) -> u64 {
        self.lock().in_host().0
    }

    /// What it did so far.
    fn statistics(&self) -> Value<Statistics> {
        Value(self.lock().statistics())
    }
}

impl PoolMachine {
    fn lock(&self) -> MutexGuard<'_, Machine> {
        // The engine does not panic, and no call leaves it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

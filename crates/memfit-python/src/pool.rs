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

use crate::functions::methods;
use crate::value::Value;

/// Which models are in memory, and who waits.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct PoolMachine(Mutex<Machine>);

methods! { impl PoolMachine {
    #[pyo3(signature = (budget, host=None))]
    #[new]
    make fn new(budget: u64, host: Option<u64>) = Self(Mutex::new(Machine::of(Bytes(budget), host.map(Bytes))));
    quick fn add(
        self, size: u64, activations: u64, is_pinned: bool, now: u64
    ) -> (Option<(usize, bool, u64)>, Option<ToldRefusal>) = {
        let added = self.lock().add(Bytes(size), Bytes(activations), is_pinned, true, Micros(now));
        (added.ok().map(Added::told), added.err().map(Refusal::told))
    };
    quick fn copied(self, model: usize, in_host: u64) -> () = self.lock().copied(ModelId(model), Bytes(in_host));
    quick fn remove(self, model: usize) -> bool = self.lock().remove(ModelId(model));
    quick fn ask(self, model: usize, activations: u64, client: u64, now: u64) -> u64 =
        self.lock().ask(ModelId(model), Bytes(activations), Client(client), Micros(now)).0;
    quick fn grow(self, running: u64, by: u64, now: u64) -> u64 =
        self.lock().grow(Ticket(running), Bytes(by), Micros(now)).0;
    quick fn cancel(self, ticket: u64) -> () = self.lock().cancel(Ticket(ticket));
    quick fn end(self, ticket: u64, unsaved: u64, now: u64) -> () =
        self.lock().end(Ticket(ticket), Bytes(unsaved), Micros(now));
    quick fn begin(self, now: u64) -> Option<ToldJob> = self.lock().begin(Micros(now)).map(Job::told);
    quick fn shed(self, target: u64, now: u64) -> Option<ToldJob> =
        self.lock().shed(Bytes(target), Micros(now)).map(Job::told);
    quick fn aim(self, target: u64, now: u64) -> () = self.lock().aim(Bytes(target), Micros(now));
    quick fn budget(self) -> Bytes = self.lock().budget();
    quick fn short(self) -> Option<Bytes> = self.lock().short();
    quick fn ended(self, kind: &str, model: usize, done: Value<Done>) -> () =
        self.lock().ended(Job::of(kind, ModelId(model))?, *done);
    quick fn answers(self) -> Vec<(u64, Option<ToldRefusal>)> =
        self.lock().answers().into_iter().map(Answer::told).collect();
    quick fn counted(self) -> Bytes = self.lock().counted();
    quick fn in_host(self) -> Bytes = self.lock().in_host();
    quick fn statistics(self) -> Statistics = self.lock().statistics();
}}

impl PoolMachine {
    fn lock(&self) -> MutexGuard<'_, Machine> {
        // The engine does not panic, and no call leaves it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

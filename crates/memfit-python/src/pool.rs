//! The pool's decisions, for threads of Python.
//!
//! Responsible for conversion, as the rest of the binding. Every call is short and keeps the interpreter.

use std::sync::{Mutex, MutexGuard, PoisonError};

use memfit_engine::bytes::Bytes;
use memfit_engine::share::pool::{
    Answer, Client, Done, Job, Machine, Micros, ModelId, Refusal, Statistics, Ticket,
};
use pyo3::prelude::*;

use crate::value::Value;

/// Which models are in memory, and who waits.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct PoolMachine {
    machine: Mutex<Machine>,
}

/// Why a request was refused, the bytes it wanted and those it could have, where it is that.
type Refused = (&'static str, u64, u64);

/// What is to be done, the number of the model it is to be done with, and what its copy may have of the host's
/// memory where it is parked.
type Due = (&'static str, usize, u64);

const WAKE: &str = "wake";
const PARK: &str = "park";
const SPILL: &str = "spill";
const RELEASE: &str = "release";

#[pymethods]
impl PoolMachine {
    /// A pool without models: of the host's memory, or of a device's with so much of the host's for copies.
    #[new]
    #[pyo3(signature = (budget, host=None))]
    fn new(budget: u64, host: Option<u64>) -> Self {
        let budget = Bytes(budget);
        let machine = match host {
            Some(host) => Machine::on_device(budget, Bytes(host)),
            None => Machine::new(budget),
        };
        Self {
            machine: Mutex::new(machine),
        }
    }

    /// Adds a model that is in memory: its number, whether it may stay there and what its copy may have of the
    /// host's memory if not; or why it can never fit.
    fn add(
        &self,
        size: u64,
        activations: u64,
        is_pinned: bool,
        now: u64,
    ) -> (Option<(usize, bool, u64)>, Option<Refused>) {
        let activations = Bytes(activations);
        let added = self
            .lock()
            .add(Bytes(size), activations, is_pinned, true, Micros(now));
        match added {
            Ok(added) => {
                let added = (added.model.0, added.is_awake, added.in_host.0);
                (Some(added), None)
            }
            Err(refusal) => (None, Some(refused(refusal))),
        }
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
        let (model, activations) = (ModelId(model), Bytes(activations));
        let ticket = self
            .lock()
            .ask(model, activations, Client(client), Micros(now));
        ticket.0
    }

    /// Asks for more activations of a use that runs; returns the ticket of its answer.
    fn grow(&self, running: u64, by: u64, now: u64) -> u64 {
        let grown = self.lock().grow(Ticket(running), Bytes(by), Micros(now));
        grown.0
    }

    /// Gives up a request that has no answer.
    fn cancel(&self, ticket: u64) {
        self.lock().cancel(Ticket(ticket));
    }

    /// A use has ended; parking its model would write `unsaved` bytes.
    fn end(&self, ticket: u64, unsaved: u64, now: u64) {
        self.lock().end(Ticket(ticket), Bytes(unsaved), Micros(now));
    }

    /// The next job, begun.
    fn begin(&self, now: u64) -> Option<Due> {
        self.lock().begin(Micros(now)).map(due)
    }

    /// The next job, begun, so that no more than `target` counts.
    fn shed(&self, target: u64, now: u64) -> Option<Due> {
        self.lock().shed(Bytes(target), Micros(now)).map(due)
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

    /// A job has ended, after so many microseconds.
    #[pyo3(signature = (kind, model, *, is_done, moved, in_host, took, now))]
    #[expect(clippy::too_many_arguments, reason = "named in Python")]
    fn ended(
        &self,
        kind: &str,
        model: usize,
        is_done: bool,
        moved: u64,
        in_host: u64,
        took: u64,
        now: u64,
    ) {
        let model = ModelId(model);
        let done = Done {
            is_done,
            moved: Bytes(moved),
            in_host: Bytes(in_host),
            took: Micros(took),
            now: Micros(now),
        };
        match kind {
            WAKE => self.lock().woken(model, done),
            PARK => self.lock().parked(model, done),
            SPILL => self.lock().spilled(model, done),
            _ => self.lock().released(done.now),
        }
    }

    /// Tickets that have been answered since the last time; each with a reason if it was refused.
    fn answers(&self) -> Vec<(u64, Option<Refused>)> {
        let answers = self.lock().answers().into_iter();
        answers
            .map(|answer| match answer {
                Answer::Granted(ticket) => (ticket.0, None),
                Answer::Refused(ticket, refusal) => (ticket.0, Some(refused(refusal))),
            })
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
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const fn due(job: Job) -> Due {
    match job {
        Job::Wake(model) => (WAKE, model.0, 0),
        Job::Park(model, in_host) => (PARK, model.0, in_host.0),
        Job::Spill(model) => (SPILL, model.0, 0),
        Job::Release => (RELEASE, 0, 0),
    }
}

fn refused(refusal: Refusal) -> Refused {
    match refusal {
        Refusal::TooLarge { wanted, available } => ("too_large", wanted.0, available.0),
        Refusal::Contended => ("contended", 0, 0),
        Refusal::NotWoken => ("not_woken", 0, 0),
        Refusal::Stuck => ("stuck", 0, 0),
    }
}

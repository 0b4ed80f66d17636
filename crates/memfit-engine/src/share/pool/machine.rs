//! The state machine of a pool: an event in, answers and jobs out.
//!
//! Invariants: [`Machine::counted`] never exceeds the budget, nor [`Machine::in_host`] the host's share; a
//! granted use's model is awake until the use ends; nothing is summed up along the way, so no sum can drift.

mod device;

use std::collections::VecDeque;

use super::cached::Cached;
use super::copies::{self, Place};
use super::habits::{Arrivals, Rate, Tick};
use super::victims::{Candidate, choose};
use super::{
    Added, Answer, Client, Done, Job, Micros, ModelId, OVERTAKINGS, Refusal, Statistics, Ticket,
};
use crate::bytes::Bytes;

/// Bytes by microsecond before anything is measured: a disk whose file is still in memory, and one.
const WAKE_GUESS: f64 = 1000.0;
const WRITE_GUESS: f64 = 500.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Parked,
    Waking,
    Awake,
    Parking,
    /// Parked, and its copy is on its way to the disk.
    Spilling,
}

/// What a model's copy has of the host's memory.
#[derive(Debug, Clone, Copy, Default)]
struct HostCopy {
    /// From before it is made until it is gone.
    bytes: Bytes,
    /// It could not be moved to the disk.
    is_stuck: bool,
}

#[derive(Debug)]
struct Model {
    bytes: Bytes,
    /// Of a use that says nothing else.
    activations: Bytes,
    is_pinned: bool,
    state: State,
    uses: usize,
    /// What parking it would write; `None` if it was never parked.
    unsaved: Option<Bytes>,
    /// It could not be parked, and nothing has happened to it since.
    is_stuck: bool,
    copy: HostCopy,
    is_gone: bool,
    arrivals: Arrivals,
}

#[derive(Debug)]
struct Request {
    ticket: Ticket,
    client: Client,
    model: ModelId,
    activations: Bytes,
    /// The use that it asks more activations for.
    grows: Option<Ticket>,
    asked: Micros,
    overtaken: u32,
    /// Its room is set aside, and its model is being woken for it.
    has_room: bool,
    was_awake: bool,
    has_waited: bool,
}

#[derive(Debug)]
struct Use {
    ticket: Ticket,
    client: Client,
    model: ModelId,
    activations: Bytes,
}

/// What only a pool on a device has.
#[derive(Debug)]
pub(super) struct OnDevice {
    /// The host's share for copies.
    host: Bytes,
    pub(super) kept: Cached,
}

/// The pool's decisions.
#[derive(Debug)]
pub struct Machine {
    /// The largest that the budget may become: what can never fit is judged by it.
    whole: Bytes,
    /// What may count now.
    budget: Bytes,
    /// What the budget comes down to as bytes are given up.
    target: Bytes,
    device: Option<OnDevice>,
    models: Vec<Model>,
    queue: VecDeque<Request>,
    uses: Vec<Use>,
    answers: Vec<Answer>,
    next_ticket: u64,
    now: Micros,
    tick: Tick,
    waking: Rate,
    writing: Rate,
    statistics: Statistics,
}

impl Machine {
    /// A pool without models, of the host.
    #[must_use]
    pub fn new(budget: Bytes) -> Self {
        Self {
            whole: budget,
            budget,
            target: budget,
            device: None,
            models: Vec::new(),
            queue: VecDeque::new(),
            uses: Vec::new(),
            answers: Vec::new(),
            next_ticket: 0,
            now: Micros(0),
            tick: Tick(0),
            waking: Rate::guess(WAKE_GUESS),
            writing: Rate::guess(WRITE_GUESS),
            statistics: Statistics::default(),
        }
    }

    /// Adds a model, and says whether it is awake. One that is in memory stays there (`is_awake`) if it fits
    /// beside what is counted; else the caller parks it before it goes on, with what the host has room for,
    /// and may say [`Machine::copied`]: no copy moves on for a model that was never asked for.
    ///
    /// # Errors
    ///
    /// [`Refusal::TooLarge`]: with `activations` it does not fit beside the pinned models, or, pinned,
    /// leaves no room for one that is there.
    pub fn add(
        &mut self,
        bytes: Bytes,
        activations: Bytes,
        is_pinned: bool,
        is_awake: bool,
        now: Micros,
    ) -> Result<Added, Refusal> {
        let available = self.whole - self.pinned_beside(None);
        let others = self
            .models
            .iter()
            .filter(|one| is_pinned && !one.is_pinned && !one.is_gone);
        let largest = others.map(|one| one.bytes + one.activations).max();
        // A pinned one stays beside each of the others.
        let wanted = bytes + activations.max(largest.unwrap_or_default());
        if wanted > available {
            return Err(Refusal::TooLarge { wanted, available });
        }
        self.pass(now);
        let is_there = is_awake;
        let is_awake = is_there && bytes <= self.free();
        let in_host = if is_there && !is_awake {
            bytes.min(self.room().free)
        } else {
            Bytes::ZERO
        };
        self.models.push(Model {
            bytes,
            activations,
            is_pinned,
            state: if is_awake {
                State::Awake
            } else {
                State::Parked
            },
            uses: 0,
            unsaved: (!is_awake).then_some(Bytes::ZERO),
            is_stuck: false,
            copy: HostCopy {
                bytes: in_host,
                is_stuck: false,
            },
            is_gone: false,
            arrivals: Arrivals::new(self.tick),
        });
        self.note_peaks();
        Ok(Added {
            model: ModelId(self.models.len() - 1),
            is_awake,
            in_host,
        })
    }

    /// Takes a model out; it is not counted any more. `false` while it is used, moved or waited for.
    pub fn remove(&mut self, model: ModelId) -> bool {
        let is_wanted = self.is_wanted(model);
        let Some(found) = self.models.get_mut(model.0) else {
            return false;
        };
        let is_still = matches!(found.state, State::Parked | State::Awake);
        if is_wanted || found.uses > 0 || !is_still {
            return false;
        }
        found.is_gone = true;
        found.state = State::Parked;
        found.copy = HostCopy::default();
        found.is_pinned = false;
        self.serve();
        true
    }

    /// Asks for a use. The answer is among [`Self::answers`] at once or later.
    pub fn ask(
        &mut self,
        model: ModelId,
        activations: Bytes,
        client: Client,
        now: Micros,
    ) -> Ticket {
        self.pass(now);
        let ticket = self.ticket();
        let Some(asked) = self.models.get_mut(model.0).filter(|model| !model.is_gone) else {
            let refusal = Refusal::NotWoken;
            self.answers.push(Answer::Refused(ticket, refusal));
            return ticket;
        };
        self.tick.0 += 1;
        asked.arrivals.arrived(self.tick);
        let was_awake = asked.state == State::Awake;
        self.enqueue(Request {
            ticket,
            client,
            model,
            activations,
            grows: None,
            asked: self.now,
            overtaken: 0,
            has_room: false,
            was_awake,
            has_waited: false,
        });
        ticket
    }

    /// Asks for more activations of a use that runs, which it then has until it ends. The answer is among
    /// [`Self::answers`] at once or later, under a ticket of its own; its client waits as any that holds a use.
    pub fn grow(&mut self, running: Ticket, by: Bytes, now: Micros) -> Ticket {
        self.pass(now);
        let ticket = self.ticket();
        let Some(found) = self.uses.iter().find(|one| one.ticket == running) else {
            let refusal = Refusal::NotWoken;
            self.answers.push(Answer::Refused(ticket, refusal));
            return ticket;
        };
        self.enqueue(Request {
            ticket,
            client: found.client,
            model: found.model,
            activations: by,
            grows: Some(running),
            asked: self.now,
            overtaken: 0,
            has_room: false,
            was_awake: true,
            has_waited: false,
        });
        ticket
    }

    fn ticket(&mut self) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        ticket
    }

    /// Grants or refuses a request at once, or lets it wait.
    fn enqueue(&mut self, request: Request) {
        let (ticket, client, model) = (request.ticket, request.client, request.model);
        let wanted = self.models[model.0].bytes + request.activations;
        let available = self.whole - self.pinned_beside(Some(model)) - self.held_by(client, model);
        let holds = |client| self.uses.iter().any(|one: &Use| one.client == client);
        let is_hit = request.was_awake && self.more(model, request.activations) <= self.free();
        if wanted > available {
            let refusal = Refusal::TooLarge { wanted, available };
            self.answers.push(Answer::Refused(ticket, refusal));
        } else if !holds(client) {
            self.queue.push_back(request);
        } else if is_hit {
            self.grant(&request);
        } else if self.queue.iter().any(|other| holds(other.client)) {
            self.answers
                .push(Answer::Refused(ticket, Refusal::Contended));
        } else {
            self.queue.push_front(request);
        }
        self.serve();
        for request in &mut self.queue {
            request.has_waited |= request.ticket == ticket;
        }
    }

    /// Gives a request up that has not been answered; room set aside for it is free again.
    pub fn cancel(&mut self, ticket: Ticket) {
        self.queue.retain(|request| request.ticket != ticket);
        self.serve();
    }

    /// A use has ended; `unsaved` is what parking its model would write now.
    pub fn end(&mut self, ticket: Ticket, unsaved: Bytes, now: Micros) {
        self.pass(now);
        let Some(place) = self.uses.iter().position(|one| one.ticket == ticket) else {
            return;
        };
        let ended = self.uses.swap_remove(place);
        let model = &mut self.models[ended.model.0];
        model.uses -= 1;
        model.unsaved = model.unsaved.map(|_| unsaved);
        model.is_stuck = false;
        self.serve();
    }

    /// The next thing to do for the first request that waits for room; `None` when it can only wait.
    pub fn begin(&mut self, now: Micros) -> Option<Job> {
        self.pass(now);
        let place = self.queue.iter().position(|request| !request.has_room)?;
        let request = &self.queue[place];
        let (id, activations) = (request.model, request.activations);
        let state = self.models[id.0].state;
        if matches!(state, State::Parking | State::Spilling) {
            return None;
        }
        let (needed, free) = (self.needs(request), self.free());
        if needed <= free {
            if state != State::Parked {
                return None;
            }
            self.models[id.0].state = State::Waking;
            self.queue[place].has_room = true;
            self.note_peaks();
            return Some(Job::Wake(id));
        }
        let shortage = needed - free - self.coming();
        let gain = self.gain(Some((id, activations)));
        if shortage > Bytes::ZERO && gain > Bytes::ZERO && self.begin_release() {
            return Some(Job::Release);
        }
        let idle = self.idle(Some(id));
        let victim = self.victim(&idle, shortage - gain)?;
        self.park(victim, true)
    }

    /// The next model to park so that no more than `target` counts, of those that no client uses or waits
    /// for; `None` when that is so or nothing more can be done for it.
    ///
    /// Nothing is held back: requests are served as ever, and may wake what was parked.
    pub fn shed(&mut self, target: Bytes, now: Micros) -> Option<Job> {
        self.pass(now);
        let surplus = self.counted() - self.coming() - target;
        let gain = self.gain(None);
        if surplus > Bytes::ZERO && gain > Bytes::ZERO && self.begin_release() {
            return Some(Job::Release);
        }
        let surplus = surplus - gain;
        let mut idle = self.idle(None);
        idle.retain(|&id| !self.is_wanted(id));
        let could: Bytes = idle.iter().map(|id| self.models[id.0].bytes).sum();
        let victim = self.victim(&idle, surplus.min(could))?;
        self.park(victim, false)
    }

    /// Changes the budget, to no more than what it was at first. It grows at once; it comes down as far as
    /// nothing counts, and further whenever something is given up.
    pub fn aim(&mut self, target: Bytes, now: Micros) {
        self.pass(now);
        self.target = target.min(self.whole);
        self.budget = self.target.max(self.counted());
        self.serve();
    }

    /// What may count now.
    #[must_use]
    pub const fn budget(&self) -> Bytes {
        self.budget
    }

    /// The budget with which the first request that waits for room could be served, where it cannot be with
    /// this one, whatever is parked.
    #[must_use]
    pub fn short(&self) -> Option<Bytes> {
        let request = self.queue.iter().find(|request| !request.has_room)?;
        let needed = self.needs(request) - self.could_free(request);
        (needed > self.free()).then(|| self.budget + (needed - self.free()))
    }

    /// A wake has ended.
    pub fn woken(&mut self, id: ModelId, done: Done) {
        let Some(model) = self.models.get_mut(id.0) else {
            return;
        };
        if model.state != State::Waking {
            return;
        }
        self.now = self.now.max(done.now);
        if done.is_done {
            model.state = State::Awake;
            model.copy = HostCopy::default();
            self.waking.observe(done.moved, done.took);
            self.statistics.wakes += 1;
            self.statistics.bytes_woken += done.moved;
        } else {
            model.state = State::Parked;
            let failed = |request: &Request| request.has_room && request.model == id;
            let refused = self.queue.iter().filter(|request| failed(request));
            let refused = refused.map(|one| Answer::Refused(one.ticket, Refusal::NotWoken));
            self.answers.extend(refused);
            self.queue.retain(|request| !failed(request));
        }
        self.serve();
    }

    /// A parking has ended.
    pub fn parked(&mut self, id: ModelId, done: Done) {
        let Some(model) = self.models.get_mut(id.0) else {
            return;
        };
        if model.state != State::Parking {
            return;
        }
        self.now = self.now.max(done.now);
        if done.is_done {
            model.state = State::Parked;
            model.unsaved = Some(Bytes::ZERO);
            model.copy.bytes = model.copy.bytes.min(done.in_host);
            self.writing.observe(done.moved, done.took);
            self.statistics.parks += 1;
            self.statistics.bytes_written += done.moved;
        } else {
            model.state = State::Awake;
            model.is_stuck = true;
            model.copy = HostCopy::default();
        }
        self.serve();
    }

    /// The answers since the last time.
    pub fn answers(&mut self) -> Vec<Answer> {
        std::mem::take(&mut self.answers)
    }

    /// Bytes that count now.
    #[must_use]
    pub fn counted(&self) -> Bytes {
        let is_there = |model: &&Model| !matches!(model.state, State::Parked | State::Spilling);
        let models = self.models.iter().filter(is_there);
        let models: Bytes = models.map(|model| model.bytes).sum();
        let calls: Bytes = self.calls().map(|(_, activations)| activations).sum();
        let device = self.device.as_ref();
        let kept = device.map(|device| device.kept.idle(&self.running()));
        models + calls + kept.unwrap_or_default()
    }

    /// What it did so far.
    #[must_use]
    pub const fn statistics(&self) -> Statistics {
        self.statistics
    }

    fn pass(&mut self, now: Micros) {
        self.now = self.now.max(now);
    }

    fn free(&self) -> Bytes {
        self.budget - self.counted()
    }

    fn note_peaks(&mut self) {
        self.statistics.peak = self.statistics.peak.max(self.counted());
        self.statistics.host_peak = self.statistics.host_peak.max(self.in_host());
    }

    /// Model and activations of every call that runs, or has its room set aside.
    fn calls(&self) -> impl Iterator<Item = (ModelId, Bytes)> {
        let uses = self.uses.iter().map(|one| (one.model, one.activations));
        let set_aside = self.queue.iter().filter(|request| request.has_room);
        uses.chain(set_aside.map(|request| (request.model, request.activations)))
    }

    /// Bytes of pinned models, but for one.
    fn pinned_beside(&self, model: Option<ModelId>) -> Bytes {
        let models = self.models.iter().enumerate();
        let pinned = models.filter(|&(id, one)| one.is_pinned && Some(ModelId(id)) != model);
        pinned.map(|(_, one)| one.bytes).sum()
    }

    /// Bytes that a client's uses keep, beside those of pinned models and of one.
    fn held_by(&self, client: Client, beside: ModelId) -> Bytes {
        let own = || self.uses.iter().filter(|one| one.client == client);
        let mut models: Vec<ModelId> = own().map(|one| one.model).collect();
        models.sort_unstable();
        models.dedup();
        models.retain(|&id| id != beside && !self.models[id.0].is_pinned);
        let models: Bytes = models.iter().map(|id| self.models[id.0].bytes).sum();
        models + own().map(|one| one.activations).sum()
    }

    /// Grants what can be granted, and refuses the first request if nothing will ever make room for it.
    fn serve(&mut self) {
        // What was given up goes before anybody else has it.
        self.budget = self.budget.min(self.target.max(self.counted()));
        let mut place = 0;
        let mut is_closed = false;
        while let Some(request) = self.queue.get(place) {
            let is_awake = self.models[request.model.0].state == State::Awake;
            let more = self.more(request.model, request.activations);
            let fits = request.has_room || (!is_closed && more <= self.free());
            if is_awake && fits {
                let request = self.queue.remove(place);
                if request.as_ref().is_some_and(|request| !request.has_room) {
                    for passed in self.queue.iter_mut().take(place) {
                        passed.overtaken += 1;
                    }
                }
                if let Some(request) = request {
                    self.grant(&request);
                }
                (place, is_closed) = (0, false);
                continue;
            }
            is_closed |= !request.has_room && request.overtaken >= OVERTAKINGS;
            place += 1;
        }
        self.refuse_stuck();
    }

    fn grant(&mut self, request: &Request) {
        self.statistics.waited.0 += self.now.0.saturating_sub(request.asked.0);
        self.answers.push(Answer::Granted(request.ticket));
        if let Some(running) = request.grows {
            let mut uses = self.uses.iter_mut();
            if let Some(grown) = uses.find(|one| one.ticket == running) {
                grown.activations += request.activations;
            }
        } else {
            self.models[request.model.0].uses += 1;
            self.statistics.uses += 1;
            self.statistics.hits += u64::from(request.was_awake);
            self.statistics.waits += u64::from(request.has_waited);
            self.uses.push(Use {
                ticket: request.ticket,
                client: request.client,
                model: request.model,
                activations: request.activations,
            });
        }
        let calls = self.uses.iter().filter(|one| one.model == request.model);
        let together = calls.map(|one| one.activations).sum();
        if let Some(device) = &mut self.device {
            device.kept.took(request.model, together);
        }
        self.note_peaks();
    }

    /// Refuses the first request where only models that cannot be parked are in its way.
    fn refuse_stuck(&mut self) {
        while let Some(first) = self.queue.front() {
            let is_still = |model: &Model| matches!(model.state, State::Awake | State::Parked);
            let others = self.uses.iter().any(|one| one.client != first.client);
            if first.has_room || others || !self.models.iter().all(is_still) {
                return;
            }
            let could = self.could_free(first) + (self.whole - self.budget);
            if self.needs(first) <= self.free() + could {
                return;
            }
            let refused = Answer::Refused(first.ticket, Refusal::Stuck);
            self.answers.push(refused);
            self.queue.pop_front();
        }
    }

    /// What would count more with a request granted.
    fn needs(&self, request: &Request) -> Bytes {
        let model = &self.models[request.model.0];
        let own = if matches!(model.state, State::Parked | State::Spilling) {
            model.bytes
        } else {
            Bytes::ZERO
        };
        own + self.more(request.model, request.activations)
    }

    /// What parking all unused models would free for a request, and giving back what its calls took.
    fn could_free(&self, request: &Request) -> Bytes {
        let idle = self.idle(Some(request.model));
        let models: Bytes = idle.iter().map(|id| self.models[id.0].bytes).sum();
        models + self.gain(Some((request.model, request.activations)))
    }

    /// Bytes that are on their way out.
    fn coming(&self) -> Bytes {
        let models = self.models.iter();
        let parking = models.filter(|model| model.state == State::Parking);
        parking.map(|model| model.bytes).sum()
    }

    /// The first of the models to park for so many bytes; `None` if none are needed, or they have too few.
    fn victim(&self, idle: &[ModelId], shortage: Bytes) -> Option<ModelId> {
        if shortage == Bytes::ZERO {
            return None;
        }
        let candidates: Vec<_> = idle.iter().map(|&model| self.candidate(model)).collect();
        let first = *choose(&candidates, shortage.0)?.first()?;
        idle.get(first).copied()
    }

    /// Parks a model, or what has to be done before; `None` where that is being done and waited for.
    fn park(&mut self, id: ModelId, may_wait: bool) -> Option<Job> {
        let bytes = self.models[id.0].bytes;
        let room = self.room();
        let in_host = match copies::place(bytes, self.until(id), room, &self.copies()) {
            Place::Here(in_host) => in_host,
            Place::Soon if may_wait => return None,
            Place::Soon => room.free,
            Place::After(copy) => {
                self.models[copy.0].state = State::Spilling;
                return Some(Job::Spill(copy));
            }
        };
        let model = &mut self.models[id.0];
        model.state = State::Parking;
        model.copy.bytes = in_host;
        self.note_peaks();
        Some(Job::Park(id, in_host))
    }

    fn is_wanted(&self, id: ModelId) -> bool {
        self.queue.iter().any(|request| request.model == id)
    }

    /// Requests until a model is expected to be used.
    fn until(&self, id: ModelId) -> f64 {
        if self.is_wanted(id) {
            1.0
        } else {
            self.models[id.0].arrivals.until_next(self.tick)
        }
    }

    /// Models that could be parked for another.
    fn idle(&self, beside: Option<ModelId>) -> Vec<ModelId> {
        let models = self.models.iter().enumerate();
        let idle = models.filter(|&(id, model)| {
            model.state == State::Awake
                && model.uses == 0
                && !model.is_pinned
                && !model.is_stuck
                && Some(ModelId(id)) != beside
        });
        idle.map(|(id, _)| ModelId(id)).collect()
    }

    fn candidate(&self, id: ModelId) -> Candidate {
        let model = &self.models[id.0];
        let written = model.unsaved.unwrap_or_default();
        let moving = self.waking.micros(model.bytes) + self.writing.micros(written);
        Candidate {
            bytes: model.bytes.0,
            loss: moving / self.until(id),
        }
    }
}

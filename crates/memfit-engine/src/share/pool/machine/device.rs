//! What only a pool of a device has: an allocator that keeps what calls took, and copies of parked models.
//!
//! Responsible for counting both and for the events that end a release or a copy's way to the disk. Not
//! responsible for how much is cached (`cached.rs`), for where a copy goes (`copies.rs`), nor for the order of
//! service (`machine.rs`). A pool of the host keeps nothing and has no copies.

use super::super::cached::{Cached, Running};
use super::super::copies::{Copy, Room};
use super::super::{Done, Micros, ModelId};
use super::{Machine, OnDevice, State};
use crate::bytes::Bytes;

impl Machine {
    /// A pool without models, of a device: its allocator keeps what calls took until a
    /// [`Job::Release`](crate::share::pool::Job::Release), and parked models have copies in the host's memory, of no
    /// more than `host` bytes together.
    #[must_use]
    pub fn on_device(budget: Bytes, host: Bytes) -> Self {
        let kept = Cached::default();
        Self {
            device: Some(OnDevice { host, kept }),
            ..Self::new(budget)
        }
    }

    /// The copy of a parked model has no more than so much of the host's memory.
    pub fn copied(&mut self, model: ModelId, in_host: Bytes) {
        if let Some(found) = self.models.get_mut(model.0)
            && found.state == State::Parked
        {
            found.copy.bytes = found.copy.bytes.min(in_host);
        }
    }

    /// The way of a copy to the disk has ended.
    pub fn spilled(&mut self, id: ModelId, done: Done) {
        let Some(model) = self.models.get_mut(id.0) else {
            return;
        };
        if model.state != State::Spilling {
            return;
        }
        self.now = self.now.max(done.now);
        model.state = State::Parked;
        if done.is_done {
            model.copy.bytes = Bytes::ZERO;
            self.statistics.spills += 1;
            self.statistics.bytes_written += done.moved;
        } else {
            model.copy.is_stuck = true;
        }
        self.serve();
    }

    /// The allocator has given back what no call uses.
    pub fn released(&mut self, now: Micros) {
        self.pass(now);
        if let Some(device) = &mut self.device
            && device.kept.is_releasing()
        {
            device.kept.released();
            self.statistics.releases += 1;
        }
        self.serve();
    }

    /// Bytes of the host's memory that copies of parked models have.
    #[must_use]
    pub fn in_host(&self) -> Bytes {
        self.models.iter().map(|model| model.copy.bytes).sum()
    }

    /// What calls of each model take together.
    pub(super) fn running(&self) -> Running {
        let mut running = Running::new();
        for (model, activations) in self.calls() {
            *running.entry(model).or_default() += activations;
        }
        running
    }

    /// What would count more with a call of a model that is awake.
    pub(super) fn more(&self, model: ModelId, activations: Bytes) -> Bytes {
        self.device.as_ref().map_or(activations, |device| {
            device.kept.more(&self.running(), model, activations)
        })
    }

    /// What a release frees for a call, or the one that has begun will.
    pub(super) fn gain(&self, call: Option<(ModelId, Bytes)>) -> Bytes {
        self.device.as_ref().map_or(Bytes::ZERO, |device| {
            let mut running = self.running();
            if let Some((model, activations)) = call {
                *running.entry(model).or_default() += activations;
            }
            device.kept.gain(&running)
        })
    }

    /// Begins a release, unless one runs.
    pub(super) fn begin_release(&mut self) -> bool {
        let Some(device) = &mut self.device else {
            return false;
        };
        if device.kept.is_releasing() {
            return false;
        }
        // Not what is only set aside: where that is given up, nothing was ever taken.
        let mut running = Running::new();
        for one in &self.uses {
            *running.entry(one.model).or_default() += one.activations;
        }
        device.kept.begin_release(running);
        true
    }

    /// The host's share for copies.
    pub(super) fn room(&self) -> Room {
        let whole = self
            .device
            .as_ref()
            .map_or(Bytes::ZERO, |device| device.host);
        let models = self.models.iter();
        let leaving = models.filter(|one| matches!(one.state, State::Spilling | State::Waking));
        Room {
            whole,
            free: whole - self.in_host(),
            coming: leaving.map(|model| model.copy.bytes).sum(),
        }
    }

    /// Copies that could move on to the disk: those of models that no request waits for.
    pub(super) fn copies(&self) -> Vec<Copy> {
        let models = self.models.iter().enumerate();
        let could = models.filter(|&(id, model)| {
            model.state == State::Parked
                && model.copy.bytes > Bytes::ZERO
                && !model.copy.is_stuck
                && !self.is_wanted(ModelId(id))
        });
        could
            .map(|(id, _)| Copy {
                model: ModelId(id),
                until: self.until(ModelId(id)),
            })
            .collect()
    }
}

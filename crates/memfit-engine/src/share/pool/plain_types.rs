//! The pool's words for callers that have none of its types: texts and numbers.
//!
//! Responsible for the names, which callers compare with. Not responsible for what they mean (`mod.rs`).

use super::{Added, Answer, Done, Job, Machine, ModelId, Refusal};
use crate::bytes::Bytes;

/// A [`Job`]: its name, the number of the model, and what the copy of one that is parked may have of the host's memory.
pub type ToldJob = (&'static str, usize, u64);

/// A [`Refusal`]: the reason, the bytes wanted and those that could be had, where it is that.
pub type ToldRefusal = (&'static str, u64, u64);

/// No job has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no job `{0}` in a pool")]
pub struct NoJob(String);

impl Job {
    /// The job in words.
    #[must_use]
    pub const fn told(self) -> ToldJob {
        match self {
            Self::Wake(model) => ("wake", model.0, 0),
            Self::Park(model, in_host) => ("park", model.0, in_host.0),
            Self::Spill(model) => ("spill", model.0, 0),
            Self::Release => ("release", 0, 0),
        }
    }

    /// The job of a name; what a copy may have of the host's memory is not said.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn of(name: &str, model: ModelId) -> Result<Self, NoJob> {
        match name {
            "wake" => Ok(Self::Wake(model)),
            "park" => Ok(Self::Park(model, Bytes::ZERO)),
            "spill" => Ok(Self::Spill(model)),
            "release" => Ok(Self::Release),
            _ => Err(NoJob(name.to_owned())),
        }
    }
}

impl Refusal {
    /// The reason in words.
    #[must_use]
    pub const fn told(self) -> ToldRefusal {
        match self {
            Self::TooLarge { wanted, available } => ("too_large", wanted.0, available.0),
            Self::Contended => ("contended", 0, 0),
            Self::NotWoken => ("not_woken", 0, 0),
            Self::Stuck => ("stuck", 0, 0),
        }
    }
}

impl Added {
    /// The number of the model, whether it stays in memory, and what its copy may have of the host's if not.
    #[must_use]
    pub const fn told(self) -> (usize, bool, u64) {
        (self.model.0, self.is_awake, self.in_host.0)
    }
}

impl Answer {
    /// The ticket, and the reason if it was refused.
    #[must_use]
    pub fn told(self) -> (u64, Option<ToldRefusal>) {
        match self {
            Self::Granted(ticket) => (ticket.0, None),
            Self::Refused(ticket, refusal) => (ticket.0, Some(refusal.told())),
        }
    }
}

impl Machine {
    /// A pool without models: of the host's memory, or of a device's with so much of the host's for copies.
    #[must_use]
    pub fn of(budget: Bytes, host: Option<Bytes>) -> Self {
        match host {
            Some(host) => Self::on_device(budget, host),
            None => Self::new(budget),
        }
    }

    /// A job has ended, whichever it was.
    pub fn ended(&mut self, job: Job, done: Done) {
        match job {
            Job::Wake(model) => self.woken(model, done),
            Job::Park(model, _) => self.parked(model, done),
            Job::Spill(model) => self.spilled(model, done),
            Job::Release => self.released(done.now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Client, Micros, Ticket};
    use super::*;

    #[test]
    fn a_job_is_known_again_by_its_name() {
        let model = ModelId(7);
        for job in [
            Job::Wake(model),
            Job::Park(model, Bytes::ZERO),
            Job::Spill(model),
        ] {
            let (name, number, in_host) = job.told();
            assert_eq!((number, in_host), (7, 0));
            assert_eq!(Job::of(name, model), Ok(job));
        }
        assert_eq!(Job::Park(model, Bytes(3)).told(), ("park", 7, 3));
        assert_eq!(Job::of(Job::Release.told().0, model), Ok(Job::Release));
        let error = Job::of("sleep", model).unwrap_err();
        assert_eq!(error.to_string(), "there is no job `sleep` in a pool");
    }

    #[test]
    fn a_pool_of_the_host_parks_for_a_wake_and_answers() {
        let (budget, now) = (Bytes(10), Micros(0));
        let mut machine = Machine::of(budget, None);
        let mut add = || {
            machine
                .add(Bytes(8), Bytes(1), false, true, now)
                .unwrap()
                .told()
        };
        assert_eq!(add(), (0, true, 0));
        assert_eq!(add(), (1, false, 0));
        machine.ask(ModelId(1), Bytes(1), Client(0), now);
        let done = Done {
            is_done: true,
            moved: Bytes(8),
            in_host: Bytes::ZERO,
            took: Micros(1),
            now,
        };
        for expected in ["park", "wake"] {
            let job = machine.begin(now).unwrap();
            assert_eq!(job.told().0, expected);
            machine.ended(job, done);
        }
        let answers = machine.answers().into_iter().map(Answer::told);
        assert_eq!(answers.collect::<Vec<_>>(), [(0, None)]);
        let refusal = machine
            .add(Bytes(11), Bytes(1), false, true, now)
            .unwrap_err();
        assert_eq!(refusal.told(), ("too_large", 12, 10));
        let refused = Answer::Refused(Ticket(3), Refusal::Stuck);
        assert_eq!(refused.told(), (3, Some(("stuck", 0, 0))));
    }

    #[test]
    fn a_pool_of_a_device_spills_and_releases_by_the_same_door() {
        let now = Micros(0);
        let mut machine = Machine::of(Bytes(20), Some(Bytes(8)));
        machine.add(Bytes(8), Bytes(8), false, true, now).unwrap();
        machine.add(Bytes(8), Bytes(8), false, false, now).unwrap();
        let used = machine.ask(ModelId(0), Bytes(8), Client(0), now);
        machine.end(used, Bytes::ZERO, now);
        machine.ask(ModelId(1), Bytes(8), Client(0), now);
        let job = machine.begin(now).unwrap();
        assert_eq!(job, Job::Release);
        let done = Done {
            is_done: true,
            moved: Bytes::ZERO,
            in_host: Bytes::ZERO,
            took: Micros(0),
            now,
        };
        machine.ended(job, done);
        assert_eq!(machine.statistics().releases, 1);
    }
}

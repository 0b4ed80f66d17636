//! What planning asks, answered.
//!
//! Responsible for the answers that a plan or a front needs: costs, the offer of a place, the step in other ways, and
//! the searches themselves, with progress, interruption and the time that counts as planning. Not responsible for what is
//! asked, nor in which order: that is the engine's [`PlanSession`].

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use memfit_engine::bytes::Budget;
use memfit_engine::cost::{CostSource, DeviceProfile};
use memfit_engine::plan::{
    Answer, Front, Limit, Need, Offer, Plan, PlanSession, Search, TimeLimit,
};

use crate::error::Failure;
use crate::interrupt::interruptible;
use crate::request::{PlanChoice, Target};
use crate::session::{Planned, Recorded, Session};

impl Session<'_> {
    /// Plans the step; `recorded` gets the step in other ways where the plan needs that.
    pub(crate) fn plan(
        &mut self,
        target: &Target,
        recorded: &mut Recorded,
        choice: &PlanChoice,
    ) -> Result<Planned, Failure> {
        let mut planning = PlanSession::new(choice.request.clone(), choice.offload.clone());
        if choice.time_limit.is_none() {
            planning = planning.telling_leave();
        }
        let mut answers = Answers::new(self, target, recorded, choice);
        loop {
            match planning.next() {
                Need::Nothing(made) => {
                    return Ok(Planned {
                        plan: made.plan,
                        request: made.request,
                        plan_seconds: answers.plan_seconds,
                    });
                }
                need => planning.answer(answers.answer(need)?)?,
            }
        }
    }

    /// Plans the step for many budgets, and for one that is asked for; also says how long that took.
    pub(crate) fn front(
        &mut self,
        target: &Target,
        recorded: &mut Recorded,
        choice: &PlanChoice,
        budget: Option<Budget>,
    ) -> Result<(Front, f64), Failure> {
        let mut planning = PlanSession::for_front(choice.request.clone(), choice.offload.clone());
        let mut answers = Answers::new(self, target, recorded, choice);
        loop {
            match planning.next() {
                Need::Plan(search) => {
                    let front = answers.front(search, budget)?;
                    return Ok((front, answers.plan_seconds));
                }
                need => planning.answer(answers.answer(need)?)?,
            }
        }
    }
}

/// Who answers.
struct Answers<'s, 'h> {
    session: &'s mut Session<'h>,
    target: &'s Target,
    recorded: &'s mut Recorded,
    choice: &'s PlanChoice,
    /// The searches and the measurement of this machine, as far as they are done.
    plan_seconds: f64,
}

impl<'s, 'h> Answers<'s, 'h> {
    const fn new(
        session: &'s mut Session<'h>,
        target: &'s Target,
        recorded: &'s mut Recorded,
        choice: &'s PlanChoice,
    ) -> Self {
        Self {
            session,
            target,
            recorded,
            choice,
            plan_seconds: 0.0,
        }
    }

    fn answer(&mut self, need: Need) -> Result<Answer, Failure> {
        match need {
            Need::Trace => Ok(Answer::Trace(Arc::clone(&self.recorded.trace))),
            Need::Costs { device_kind } => Ok(Answer::Costs(self.costs(&device_kind)?)),
            Need::Offer {
                device_kind,
                place,
                profile,
            } => {
                let offer = self.offer(&device_kind, &place, profile.as_deref())?;
                Ok(Answer::Offer(offer))
            }
            Need::Ways(asked) => {
                let Target::Live(live) = self.target else {
                    return Ok(Answer::NoWays);
                };
                self.session.in_ways(live, self.recorded, &asked)?;
                Ok(Answer::Ways(Arc::clone(&self.recorded.trace)))
            }
            Need::Plan(search) => Ok(Answer::Plan(Box::new(self.plan(search)?))),
            Need::Nothing(_) => Err(Failure::Internal("planning has ended".to_owned())),
        }
    }

    fn costs(&mut self, device_kind: &str) -> Result<CostSource, Failure> {
        if self.choice.profile {
            return self.profiled();
        }
        if let Some(gpu) = self.choice.gpu {
            if device_kind != "cuda" {
                return Err(Failure::usage(format!(
                    "`--gpu` names a GPU and the step runs on `{device_kind}`"
                ))
                .hint("capture it for a GPU, which need not be here: `--device cuda`"));
            }
            let profile = gpu.profile();
            return Ok(CostSource::Roofline { profile });
        }
        let file = self.choice.costs.as_deref();
        let (profile, seconds) = self.session.slow("measuring this machine", |host| {
            Ok(host.device_profile(device_kind, file)?)
        })?;
        self.plan_seconds += seconds;
        let profile = serde_json::from_value(profile)
            .map_err(|error| Failure::bad_answer("device_profile", error))?;
        Ok(CostSource::Roofline { profile })
    }

    /// The times of one real step. It is a run of the model, not part of planning.
    fn profiled(&mut self) -> Result<CostSource, Failure> {
        let Target::Live(live) = self.target else {
            return Err(
                Failure::usage("`--profile` runs the model, and a saved trace has none")
                    .hint("give the function that builds the workload: FILE.py:FUNCTION"),
            );
        };
        let file = &self.recorded.file;
        let (costs, _) = self.session.slow("profiling one step", |host| {
            Ok(host.op_seconds(&live.name, &live.settings, file)?)
        })?;
        serde_json::from_value(costs).map_err(|error| Failure::bad_answer("op_seconds", error))
    }

    fn offer(
        &mut self,
        device_kind: &str,
        place: &str,
        profile: Option<&DeviceProfile>,
    ) -> Result<Offer, Failure> {
        let what = format!("measuring how fast `{place}` is");
        let (offer, _) = self
            .session
            .slow(&what, |host| Ok(host.offer(device_kind, place, profile)?))?;
        serde_json::from_value(offer).map_err(|error| Failure::bad_answer("offer", error))
    }

    fn plan(&mut self, search: Search) -> Result<Plan, Failure> {
        let time_limit = self.choice.time_limit;
        let (plan, seconds) = self.session.slow("planning", |host| {
            interruptible(host, move || within(time_limit, |limit| search.plan(limit)))
        })?;
        self.plan_seconds += seconds;
        Ok(plan?)
    }

    fn front(&mut self, search: Search, budget: Option<Budget>) -> Result<Front, Failure> {
        let (front, seconds) = self.session.slow("planning for many budgets", |host| {
            interruptible(host, move || search.front(budget, cores()))
        })?;
        self.plan_seconds += seconds;
        Ok(front?)
    }
}

/// Runs a search with a time limit, if there is one, that begins now: the engine has no clock.
pub fn within<T>(seconds: Option<f64>, search: impl FnOnce(Limit<'_>) -> T) -> T {
    let began = Instant::now();
    let elapsed = || began.elapsed().as_secs_f64();
    search(seconds.map_or(Limit::None, |seconds| {
        Limit::Time(TimeLimit {
            seconds,
            elapsed: &elapsed,
        })
    }))
}

/// Threads for what runs on all cores.
#[must_use]
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

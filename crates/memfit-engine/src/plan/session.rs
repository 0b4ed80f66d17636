//! One conversation that ends in a plan.
//!
//! Responsible for what planning needs to know, in which order, and for when a step is worth a capture in other ways. Not
//! responsible for finding any of it out (the caller does), nor for the search (`choose.rs`).
//!
//! The machine is pure: no clock, no I/O, no callbacks. [`PlanSession::next`] says what it needs, the same until
//! [`PlanSession::answer`] brings it:
//!
//! ```text
//! Trace -> Costs -> [Offer] -> [Ways] -> Plan -> [Ways -> Plan] -> [Piece -> Plan] -> [Ways -> Plan] -> Nothing
//! ```
//!
//! An offer is needed where a place is named; other ways of running the step (slices, autocast, narrow parameters, no
//! graph) are needed before the first search where what is allowed has them, and after it where the plan made without
//! them does not fit; weights in fewer bits alone after it, unless they are named. Where a plan cuts the batch into pieces smaller than any recorded, the step is asked for once more on
//! such a piece: what ops take there follows no law. Where nothing fits and only leave to change numbers would help, the
//! step is asked for as it would run with that leave, so that the plan can say what it would bring.

use std::sync::Arc;

use serde::Serialize;

use super::choose::beyond;
use super::technique::{autocast, micro_batch};
use super::trace_requests::{Asked, asked};
use super::ways::ways_by;
use super::{
    Class, Front, FrontRequest, Limit, Offer, Plan, PlanError, PlanRequest, Verdict, bottleneck,
    front, plan_within, ways,
};
use crate::bytes::Budget;
use crate::cost::{CostSource, DeviceProfile};
use crate::trace::{Trace, Way};

/// What planning needs next.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "need", content = "of", rename_all = "snake_case")]
pub enum Need {
    /// The recorded step.
    Trace,
    /// Where its op times come from.
    Costs {
        /// The kind of device that the step is for.
        device_kind: String,
    },
    /// How fast the place is that was named for what is offloaded.
    Offer {
        /// The kind of device that the step is for.
        device_kind: String,
        /// The place.
        place: String,
        /// What the device can do, where op times come from that.
        profile: Option<Box<DeviceProfile>>,
    },
    /// The trace with the step in other ways, those that it can be captured in.
    Ways(Vec<Asked>),
    /// The plan that this search finds.
    Plan(#[serde(skip)] Search),
    /// Nothing: this is the plan.
    Nothing(Box<Made>),
}

impl Need {
    /// What it is called in messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Trace => "a trace",
            Self::Costs { .. } => "costs",
            Self::Offer { .. } => "an offer",
            Self::Ways(_) => "other ways",
            Self::Plan(_) => "a plan",
            Self::Nothing(_) => "nothing",
        }
    }
}

/// What a [`Need`] asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// The recorded step.
    Trace(Arc<Trace>),
    /// Where its op times come from.
    Costs(CostSource),
    /// The place for what is offloaded.
    Offer(Offer),
    /// The trace with the step in other ways.
    Ways(Arc<Trace>),
    /// The step cannot be captured again; it is not asked for any more.
    NoWays,
    /// What the search found.
    Plan(Box<Plan>),
}

impl Answer {
    const fn name(&self) -> &'static str {
        match self {
            Self::Trace(_) => "a trace",
            Self::Costs(_) => "costs",
            Self::Offer(_) => "an offer",
            Self::Ways(_) | Self::NoWays => "other ways",
            Self::Plan(_) => "a plan",
        }
    }
}

/// Why an answer was not taken; the conversation is where it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// It answers another question.
    #[error("planning needs {needed}, and was given {given}")]
    NotAsked {
        /// What is needed.
        needed: &'static str,
        /// What was given.
        given: &'static str,
    },
    /// A search was begun that it does not ask for.
    #[error("planning needs {needed}, and no search")]
    NoSearch {
        /// What is needed.
        needed: &'static str,
    },
    /// The trace or the plan is of another step.
    #[error("planning was given {given} of another step")]
    AnotherStep {
        /// What was given.
        given: &'static str,
    },
    /// The trace does not say whether the step runs in other ways.
    #[error("planning needs other ways, and was given a trace without")]
    NoOtherWays,
}

/// A plan, and what it was made for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Made {
    /// The plan.
    pub plan: Plan,
    /// What was asked for, with the place for what is offloaded.
    pub request: PlanRequest,
}

/// A search, with all that it needs: it may run on another thread.
#[derive(Debug, Clone, PartialEq)]
pub struct Search {
    trace: Arc<Trace>,
    costs: Arc<CostSource>,
    request: PlanRequest,
    /// The plan that does not fit, where what is looked for is what leave to change numbers would bring.
    made: Option<Box<Plan>>,
}

impl Search {
    /// Plans the step, or completes a plan that does not fit by what leave to change numbers would bring.
    ///
    /// # Errors
    ///
    /// As [`plan_within`].
    pub fn plan(&self, limit: Limit<'_>) -> Result<Plan, PlanError> {
        let (trace, costs, request) = (&self.trace, &self.costs, &self.request);
        match &self.made {
            Some(made) => beyond(trace, costs, request, limit, made),
            None => plan_within(trace, costs, request, limit),
        }
    }

    /// Plans the step for many budgets, on so many threads; for `budget` in addition to those that the front needs.
    ///
    /// # Errors
    ///
    /// As [`front`].
    pub fn front(&self, budget: Option<Budget>, threads: usize) -> Result<Front, PlanError> {
        let request = FrontRequest {
            budget,
            own_loop: self.request.own_loop,
            forbid: self.request.forbid.clone(),
            keep: self.request.keep.clone(),
            offload: self.request.offload.clone(),
            threads,
        };
        front(&self.trace, &self.costs, &request)
    }
}

/// What is known once it was told.
#[derive(Debug, Clone)]
struct Known {
    trace: Arc<Trace>,
    costs: Arc<CostSource>,
}

/// How far the conversation is, named by what it lacks.
#[derive(Debug, Clone)]
enum Lacks {
    Trace,
    Costs(Arc<Trace>),
    Offer(Known, String),
    /// With the plan that was made without them, if one was.
    Ways(Known, Vec<Way>, Option<Box<Plan>>),
    Plan(Known),
    /// What leave to change numbers would open, for a plan that does not fit.
    Beyond(Known, Vec<Way>, Box<Plan>),
    /// What it brings.
    Told(Known, Box<Plan>),
    Nothing(Box<Plan>),
}

/// A conversation about the plan of one step; see the head of this file.
#[derive(Debug, Clone)]
pub struct PlanSession {
    request: PlanRequest,
    /// Where to offload to, until the offer is there.
    place: Option<String>,
    may_capture: bool,
    tells_leave: bool,
    /// The ways that were asked for: none is twice.
    asked: Vec<Way>,
    /// How often pieces were asked for.
    pieces: u32,
    lacks: Lacks,
}

/// How often pieces are asked for, at most: once some are known, another number of them may be better.
const MOST_PIECES: u32 = 3;

impl PlanSession {
    /// Begins a conversation.
    ///
    /// `place` is where things may be offloaded to, by the name that the offer is asked for; without one the
    /// request's own offer stands, if it has one.
    #[must_use]
    pub const fn new(request: PlanRequest, place: Option<String>) -> Self {
        Self {
            request,
            place,
            may_capture: true,
            tells_leave: false,
            asked: Vec::new(),
            pieces: 0,
            lacks: Lacks::Trace,
        }
    }

    /// Where nothing fits, the plan also says what leave to change numbers would bring: for those who have the time.
    #[must_use]
    pub const fn telling_leave(mut self) -> Self {
        self.tells_leave = true;
        self
    }

    /// Begins a conversation about plans for many budgets: it ends with [`Search::front`] of the search that it asks
    /// for. The request's budget and class do not matter.
    #[must_use]
    pub fn for_front(mut request: PlanRequest, place: Option<String>) -> Self {
        request.allow = Class::Equivalent;
        Self::new(request, place)
    }

    /// What is needed now.
    #[must_use]
    pub fn next(&self) -> Need {
        match &self.lacks {
            Lacks::Trace => Need::Trace,
            Lacks::Costs(trace) => Need::Costs {
                device_kind: trace.meta.device_kind.clone(),
            },
            Lacks::Offer(known, place) => Need::Offer {
                device_kind: known.trace.meta.device_kind.clone(),
                place: place.clone(),
                profile: match &*known.costs {
                    CostSource::Roofline { profile } => Some(Box::new(profile.clone())),
                    CostSource::Profile { .. } => None,
                },
            },
            Lacks::Ways(known, ways, _) | Lacks::Beyond(known, ways, _) => {
                Need::Ways(asked(&known.trace, &self.request, ways))
            }
            Lacks::Plan(known) => Need::Plan(self.search_in(known, None)),
            Lacks::Told(known, made) => Need::Plan(self.search_in(known, Some(made.clone()))),
            Lacks::Nothing(plan) => Need::Nothing(Box::new(Made {
                plan: (**plan).clone(),
                request: self.request.clone(),
            })),
        }
    }

    fn search_in(&self, known: &Known, made: Option<Box<Plan>>) -> Search {
        Search {
            trace: Arc::clone(&known.trace),
            costs: Arc::clone(&known.costs),
            request: self.request.clone(),
            made,
        }
    }

    /// The search that is needed now.
    ///
    /// # Errors
    ///
    /// None is.
    pub fn search(&self) -> Result<Search, AnswerError> {
        match self.next() {
            Need::Plan(search) => Ok(search),
            need => Err(AnswerError::NoSearch {
                needed: need.name(),
            }),
        }
    }

    /// Takes what was needed.
    ///
    /// # Errors
    ///
    /// It is not what was asked for, or not of the step that the conversation is about.
    pub fn answer(&mut self, answer: Answer) -> Result<(), AnswerError> {
        let given = answer.name();
        self.lacks = match (self.lacks.clone(), answer) {
            (Lacks::Trace, Answer::Trace(trace)) => Lacks::Costs(trace),
            (Lacks::Costs(trace), Answer::Costs(costs)) => {
                let costs = Arc::new(costs);
                let known = Known { trace, costs };
                match self.place.take() {
                    Some(place) => Lacks::Offer(known, place),
                    None => self.before_search(known),
                }
            }
            (Lacks::Offer(known, _), Answer::Offer(offer)) => {
                self.request.offload = Some(offer);
                self.before_search(known)
            }
            (Lacks::Ways(known, asked, made), Answer::Ways(trace)) => {
                is_of(&known, &trace, &asked, given)?;
                self.asked.extend(asked);
                match made {
                    // Nothing came of it, and the same search finds the same plan.
                    Some(made) if trace == known.trace => self.after_search(known, made),
                    _ => Lacks::Plan(Known { trace, ..known }),
                }
            }
            (Lacks::Beyond(known, asked, made), Answer::Ways(trace)) => {
                is_of(&known, &trace, &asked, given)?;
                Lacks::Told(Known { trace, ..known }, made)
            }
            (Lacks::Beyond(_, _, made), Answer::NoWays) => Lacks::Nothing(made),
            (Lacks::Told(known, _), Answer::Plan(plan)) => {
                if plan.trace_digest != bottleneck::digest(&known.trace) {
                    return Err(AnswerError::AnotherStep { given });
                }
                Lacks::Nothing(plan)
            }
            (Lacks::Ways(known, _, made), Answer::NoWays) => {
                self.may_capture = false;
                made.map_or(Lacks::Plan(known), Lacks::Nothing)
            }
            (Lacks::Plan(known), Answer::Plan(plan)) => {
                if plan.trace_digest != bottleneck::digest(&known.trace) {
                    return Err(AnswerError::AnotherStep { given });
                }
                self.after_search(known, plan)
            }
            _ => {
                let needed = self.next().name();
                return Err(AnswerError::NotAsked { needed, given });
            }
        };
        Ok(())
    }

    fn before_search(&self, known: Known) -> Lacks {
        let ways = self.wanted_ways(&known, None);
        if ways.is_empty() {
            Lacks::Plan(known)
        } else {
            Lacks::Ways(known, ways, None)
        }
    }

    fn after_search(&mut self, known: Known, plan: Box<Plan>) -> Lacks {
        let mut ways = self.wanted_ways(&known, Some(&plan));
        if ways.is_empty() {
            ways = self.wanted_pieces(&known, &plan);
            self.pieces += u32::from(!ways.is_empty());
        }
        if ways.is_empty() {
            self.before_end(known, plan)
        } else {
            Lacks::Ways(known, ways, Some(plan))
        }
    }

    fn before_end(&self, known: Known, plan: Box<Plan>) -> Lacks {
        let is_open = plan.verdict == Verdict::DoesNotFit && plan.next_class.is_none();
        let may_help = self.request.allow < Class::Approximate && self.may_capture;
        let ways = if self.tells_leave && is_open && may_help {
            ways::beyond(&known.trace, &self.request)
        } else {
            Vec::new()
        };
        if ways.is_empty() {
            Lacks::Nothing(plan)
        } else {
            Lacks::Beyond(known, ways, plan)
        }
    }

    /// The step on pieces of the batch that are smaller than it was ever recorded on: those of the plan, and where that
    /// does not fit, the smallest in each way that may be cut.
    fn wanted_pieces(&self, known: &Known, plan: &Plan) -> Vec<Way> {
        let trace = &known.trace;
        let chosen = plan.pieces().map(|pieces| (plan.way(), pieces));
        let others = trace.alternatives().iter().map(|it| it.way.clone());
        let all = std::iter::once(Way::default()).chain(others);
        let smallest = all.filter_map(|way| {
            let step = trace.in_way(&way)?;
            let may_cut = micro_batch::may_cut(step, &self.request);
            let most = micro_batch::piece_counts(step).last()?;
            may_cut.then_some((way, most))
        });
        let does_not_fit = plan.verdict == Verdict::DoesNotFit;
        let smallest = smallest.filter(|_| does_not_fit);
        let mut wanted = Vec::new();
        for (way, pieces) in chosen.into_iter().chain(smallest) {
            let Some(step) = trace.in_way(&way) else {
                continue;
            };
            let items = micro_batch::piece_items(step, pieces.max(1));
            let is_known = step.pieces.iter().any(|piece| piece.items == items);
            let is_small = items < step.meta.batch.min(step.meta.second_batch);
            let piece = Way {
                items: Some(items),
                ..way
            };
            let is_asked = self.asked.contains(&piece) || wanted.contains(&piece);
            if is_small && !is_known && !is_asked {
                wanted.push(piece);
            }
        }
        let may_ask = self.may_capture && self.pieces < MOST_PIECES;
        wanted.retain(|_| may_ask);
        wanted
    }

    fn wanted_ways(&self, known: &Known, made: Option<&Plan>) -> Vec<Way> {
        if !self.may_capture {
            return Vec::new();
        }
        let casts_slow_down = known.costs.slows_down(autocast::BFLOAT16);
        let mut ways = ways_by(&known.trace, &self.request, made, casts_slow_down);
        ways.retain(|way| !self.asked.contains(way));
        ways
    }
}

/// Is a trace of the step that is known, with the ways that were asked for?
fn is_of(
    known: &Known,
    trace: &Trace,
    asked: &[Way],
    given: &'static str,
) -> Result<(), AnswerError> {
    if bottleneck::digest(trace) != bottleneck::digest(&known.trace) {
        return Err(AnswerError::AnotherStep { given });
    }
    if trace.alternatives.is_none() && asked.iter().all(|way| way.items.is_none()) {
        return Err(AnswerError::NoOtherWays);
    }
    Ok(())
}

#[cfg(test)]
mod tests;

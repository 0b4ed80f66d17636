//! One conversation that ends in a plan.
//!
//! Responsible for what planning needs to know, in which order, and for when a step is worth a capture in other ways. Not
//! responsible for finding any of it out (the caller does), nor for the search (`choose.rs`).
//!
//! The machine is pure: no clock, no I/O, no callbacks. [`PlanSession::next`] says what it needs, the same until
//! [`PlanSession::answer`] brings it:
//!
//! ```text
//! Trace -> Costs -> [Offer] -> [Ways] -> Plan -> [Ways -> Plan] -> [Piece -> Plan] -> Nothing
//! ```
//!
//! An offer is needed where a place is named; other ways of running the step (slices, autocast, narrow parameters, no
//! graph) are needed before the first search where what is allowed has them, and after it where the plan made without
//! them does not fit. Where a plan cuts the batch into pieces smaller than any recorded, the step is asked for once more on
//! such a piece: what ops take there follows no law.

use std::sync::Arc;

use serde::Serialize;

use super::technique::micro_batch;
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
    Ways(Vec<Way>),
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
}

impl Search {
    /// Plans the step.
    ///
    /// # Errors
    ///
    /// As [`plan_within`].
    pub fn plan(&self, limit: Limit<'_>) -> Result<Plan, PlanError> {
        plan_within(&self.trace, &self.costs, &self.request, limit)
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
    Nothing(Box<Plan>),
}

/// A conversation about the plan of one step; see the head of this file.
#[derive(Debug, Clone)]
pub struct PlanSession {
    request: PlanRequest,
    /// Where to offload to, until the offer is there.
    place: Option<String>,
    may_capture: bool,
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
            pieces: 0,
            lacks: Lacks::Trace,
        }
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
            Lacks::Ways(_, ways, _) => Need::Ways(ways.clone()),
            Lacks::Plan(known) => Need::Plan(Search {
                trace: Arc::clone(&known.trace),
                costs: Arc::clone(&known.costs),
                request: self.request.clone(),
            }),
            Lacks::Nothing(plan) => Need::Nothing(Box::new(Made {
                plan: (**plan).clone(),
                request: self.request.clone(),
            })),
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
            (Lacks::Ways(known, asked, _), Answer::Ways(trace)) => {
                if bottleneck::digest(&trace) != bottleneck::digest(&known.trace) {
                    return Err(AnswerError::AnotherStep { given });
                }
                if trace.alternatives.is_none() && asked.iter().all(|way| way.items.is_none()) {
                    return Err(AnswerError::NoOtherWays);
                }
                Lacks::Plan(Known { trace, ..known })
            }
            (Lacks::Ways(known, _, made), Answer::NoWays) => {
                self.may_capture = false;
                made.map_or(Lacks::Plan(known), Lacks::Nothing)
            }
            (Lacks::Plan(known), Answer::Plan(plan)) => {
                if plan.trace_digest != bottleneck::digest(&known.trace) {
                    return Err(AnswerError::AnotherStep { given });
                }
                let mut ways = self.wanted_ways(&known, Some(&plan));
                if ways.is_empty() {
                    ways = self.wanted_pieces(&known, &plan);
                    self.pieces += u32::from(!ways.is_empty());
                }
                if ways.is_empty() {
                    Lacks::Nothing(plan)
                } else {
                    Lacks::Ways(known, ways, Some(plan))
                }
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
            if is_small && !is_known && !wanted.contains(&piece) {
                wanted.push(piece);
            }
        }
        let may_ask = self.may_capture && self.pieces < MOST_PIECES;
        wanted.retain(|_| may_ask);
        wanted
    }

    fn wanted_ways(&self, known: &Known, made: Option<&Plan>) -> Vec<Way> {
        if self.may_capture {
            ways(&known.trace, &self.request, made)
        } else {
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Bytes;
    use crate::plan::{ActionKind, Tier, Verdict, plan};
    use crate::trace::{Alternative, Alternatives, sample};

    /// A step whose loss is worth slices.
    fn step() -> Arc<Trace> {
        Arc::new(sample::loss_over_classes(512, None))
    }

    /// The same with what came of a capture in slices: all that it makes in an eighth of the bytes.
    fn in_slices(whole: &Trace) -> Arc<Trace> {
        let widest = request(Budget::Percent(50.0), Class::Equivalent);
        let way = ways(whole, &widest, None).swap_remove(0);
        let mut trace = whole.clone();
        for allocation in &mut trace.allocations {
            if allocation.producer.is_some() {
                allocation.bytes = Bytes(allocation.bytes.0 / 8);
            }
        }
        Arc::new(Trace {
            alternatives: Some(Alternatives {
                steps: vec![Alternative { way, trace }],
                ..Alternatives::default()
            }),
            ..whole.clone()
        })
    }

    #[test]
    fn a_piece_that_was_never_recorded_is_asked_for_and_known_from_then_on() {
        let mut trace = sample::inference(64);
        for op in &mut trace.ops {
            op.workspace_bytes = Bytes(1 << 20);
        }
        let asked = request(Budget::Percent(1.0), Class::Equivalent);
        let made = plan(&trace, &costs(&trace), &asked).unwrap();
        let known = Known {
            trace: Arc::new(trace.clone()),
            costs: Arc::new(costs(&trace)),
        };
        let session = PlanSession::new(asked.clone(), None);
        let wanted = session.wanted_pieces(&known, &made);
        let piece = Way {
            items: Some(2),
            ..Way::default()
        };
        assert_eq!(wanted, std::slice::from_ref(&piece), "what is smallest");
        // On two items there is no scratch.
        let mut recorded = trace.at_batch(2).unwrap();
        for op in &mut recorded.ops {
            op.workspace_bytes = Bytes::ZERO;
        }
        let whole = trace.with_piece(&piece, &recorded).unwrap();
        assert_eq!(whole.check(), Ok(()));
        let better = plan(&whole, &costs(&whole), &asked).unwrap();
        assert_eq!(
            made.minimum_peak_bytes - better.minimum_peak_bytes,
            Bytes(1 << 20)
        );
        let known = Known {
            trace: Arc::new(whole.clone()),
            ..known
        };
        assert!(session.wanted_pieces(&known, &better).is_empty());
        // Other ops, another way, too few numbers.
        recorded.ops.pop();
        assert!(trace.with_piece(&piece, &recorded).is_err());
        let elsewhere = Way {
            no_graph: true,
            ..piece
        };
        assert!(trace.with_piece(&elsewhere, &trace).is_err());
        let mut torn = whole;
        torn.pieces[0].workspace_bytes.pop();
        assert!(torn.check().is_err());
    }

    fn costs(trace: &Trace) -> CostSource {
        CostSource::profile(vec![1.0; trace.ops.len()])
    }

    fn roofline() -> (CostSource, DeviceProfile) {
        let profile = DeviceProfile {
            name: "a test machine".to_owned(),
            bytes_per_second: 1e10,
            op_overhead_seconds: 1e-6,
            ..DeviceProfile::default()
        };
        let source = CostSource::Roofline {
            profile: profile.clone(),
        };
        (source, profile)
    }

    fn offer() -> Offer {
        Offer {
            tier: Tier::Disk,
            folder: "/scratch".to_owned(),
            write_bytes_per_second: 1e9,
            read_bytes_per_second: 2e9,
        }
    }

    fn request(budget: Budget, allow: Class) -> PlanRequest {
        PlanRequest {
            budget,
            allow,
            ..PlanRequest::default()
        }
    }

    /// Answers a conversation as its user would, and writes down what it asked for.
    fn scripted(
        mut session: PlanSession,
        trace: &Arc<Trace>,
        costs: &CostSource,
        may_slice: bool,
    ) -> (Vec<&'static str>, Made) {
        let mut asked = Vec::new();
        loop {
            let need = session.next();
            assert_eq!(
                session.next(),
                need,
                "it needs the same until it is answered"
            );
            asked.push(need.name());
            let answer = match need {
                Need::Trace => Answer::Trace(Arc::clone(trace)),
                Need::Costs { device_kind } => {
                    assert_eq!(device_kind, "cpu");
                    Answer::Costs(costs.clone())
                }
                Need::Offer { place, .. } => {
                    assert_eq!(place, "/scratch");
                    Answer::Offer(offer())
                }
                Need::Ways(_) if may_slice => Answer::Ways(in_slices(trace)),
                Need::Ways(_) => Answer::NoWays,
                Need::Plan(search) => Answer::Plan(Box::new(search.plan(Limit::None).unwrap())),
                Need::Nothing(made) => return (asked, *made),
            };
            session.answer(answer).unwrap();
        }
    }

    const STRAIGHT: [&str; 4] = ["a trace", "costs", "a plan", "nothing"];

    #[test]
    fn without_a_place_or_slices_it_needs_a_trace_costs_and_one_search() {
        let trace = Arc::new(sample::chain());
        let request = request(Budget::Percent(80.0), Class::Exact);
        let session = PlanSession::new(request.clone(), None);
        let (asked, made) = scripted(session, &trace, &costs(&trace), true);
        assert_eq!(asked, STRAIGHT);
        assert_eq!(made.plan, plan(&trace, &costs(&trace), &request).unwrap());
        assert_eq!(made.request, request);
    }

    #[test]
    fn a_named_place_is_asked_for_with_the_profile_that_plans_use() {
        let trace = Arc::new(sample::chain());
        let mut request = request(Budget::Percent(80.0), Class::Exact);
        let place = Some("/scratch".to_owned());
        let session = PlanSession::new(request.clone(), place.clone());
        let (asked, made) = scripted(session.clone(), &trace, &roofline().0, true);
        assert_eq!(asked, ["a trace", "costs", "an offer", "a plan", "nothing"]);
        request.offload = Some(offer());
        assert_eq!(made.plan, plan(&trace, &roofline().0, &request).unwrap());
        assert_eq!(made.request, request);

        for (costs, known) in [
            (roofline().0, Some(Box::new(roofline().1))),
            (costs(&trace), None),
        ] {
            let mut session = session.clone();
            session.answer(Answer::Trace(Arc::clone(&trace))).unwrap();
            session.answer(Answer::Costs(costs)).unwrap();
            let Need::Offer { profile, .. } = session.next() else {
                panic!("{:?}", session.next())
            };
            assert_eq!(profile, known);
        }
    }

    #[test]
    fn slices_are_needed_first_where_their_class_is_allowed() {
        let trace = step();
        let request = request(Budget::Percent(50.0), Class::Equivalent);
        let session = PlanSession::new(request.clone(), None);
        let (asked, made) = scripted(session, &trace, &costs(&trace), true);
        assert_eq!(
            asked,
            ["a trace", "costs", "other ways", "a plan", "nothing"]
        );
        let sliced = in_slices(&trace);
        assert_eq!(made.plan, plan(&sliced, &costs(&trace), &request).unwrap());
        assert_eq!(made.plan.actions[0].kind(), ActionKind::Chunk);
    }

    #[test]
    fn slices_are_needed_later_where_the_plan_without_does_not_fit() {
        let trace = step();
        let within = |budget| PlanSession::new(request(budget, Class::Exact), None);
        let (asked, _) = scripted(within(Budget::Percent(110.0)), &trace, &costs(&trace), true);
        assert_eq!(asked, STRAIGHT);

        let tight = Budget::Percent(50.0);
        let (asked, made) = scripted(within(tight), &trace, &costs(&trace), true);
        let twice = [
            "a trace",
            "costs",
            "a plan",
            "other ways",
            "a plan",
            "nothing",
        ];
        assert_eq!(asked, twice);
        assert_eq!(made.plan.verdict, Verdict::Fits);
        let sliced = in_slices(&trace);
        let alone = plan(&sliced, &costs(&trace), &request(tight, Class::Exact)).unwrap();
        assert_eq!(made.plan, alone);
    }

    #[test]
    fn refused_slices_are_not_asked_for_again() {
        let trace = step();
        for (allow, expected) in [
            (
                Class::Equivalent,
                ["a trace", "costs", "other ways", "a plan", "nothing"],
            ),
            (
                Class::Exact,
                ["a trace", "costs", "a plan", "other ways", "nothing"],
            ),
        ] {
            let request = request(Budget::Percent(50.0), allow);
            let session = PlanSession::new(request.clone(), None);
            let (asked, made) = scripted(session, &trace, &costs(&trace), false);
            assert_eq!(asked, expected);
            assert_eq!(made.plan, plan(&trace, &costs(&trace), &request).unwrap());
            assert_eq!(made.plan.verdict, Verdict::DoesNotFit);
        }
    }

    #[test]
    fn a_front_needs_slices_and_ends_with_its_search() {
        let trace = step();
        let exact = request(Budget::Percent(100.0), Class::Exact);
        let mut session = PlanSession::for_front(exact, None);
        session.answer(Answer::Trace(Arc::clone(&trace))).unwrap();
        session.answer(Answer::Costs(costs(&trace))).unwrap();
        assert!(matches!(session.next(), Need::Ways(_)));
        let sliced = in_slices(&trace);
        session.answer(Answer::Ways(Arc::clone(&sliced))).unwrap();
        let Need::Plan(search) = session.next() else {
            panic!("{:?}", session.next())
        };
        let request = FrontRequest {
            budget: Some(Budget::Percent(50.0)),
            ..FrontRequest::default()
        };
        let alone = front(&sliced, &costs(&trace), &request).unwrap();
        assert_eq!(search.front(request.budget, 1).unwrap(), alone);
    }

    #[test]
    fn an_answer_to_another_question_changes_nothing() {
        let trace = step();
        let whole = plan(&trace, &costs(&trace), &PlanRequest::default()).unwrap();
        let answers = [
            Answer::Trace(Arc::clone(&trace)),
            Answer::Costs(costs(&trace)),
            Answer::Offer(offer()),
            Answer::Ways(in_slices(&trace)),
            Answer::Plan(Box::new(whole)),
        ];
        let request = request(Budget::Percent(50.0), Class::Equivalent);
        let mut session = PlanSession::new(request, Some("/scratch".to_owned()));
        for asked in 0..=answers.len() {
            for (number, answer) in answers.iter().enumerate() {
                if number != asked {
                    let before = session.next();
                    let (needed, given) = (before.name(), answer.name());
                    let refused = session.answer(answer.clone()).unwrap_err();
                    assert_eq!(refused, AnswerError::NotAsked { needed, given });
                    assert_eq!(session.next(), before);
                }
            }
            if let Some(answer) = answers.get(asked) {
                session.answer(answer.clone()).unwrap();
            }
        }
        assert!(matches!(session.next(), Need::Nothing(_)));
        let refused = session.answer(Answer::NoWays).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "planning needs nothing, and was given other ways"
        );
    }

    #[test]
    fn slices_and_plans_of_another_step_are_refused() {
        let (trace, other) = (step(), sample::loss_over_classes(1024, None));
        let request = request(Budget::Percent(50.0), Class::Equivalent);
        let mut session = PlanSession::new(request.clone(), None);
        session.answer(Answer::Trace(Arc::clone(&trace))).unwrap();
        session.answer(Answer::Costs(costs(&trace))).unwrap();
        let refused = session.answer(Answer::Ways(in_slices(&other)));
        let given = "other ways";
        assert_eq!(refused, Err(AnswerError::AnotherStep { given }));
        let refused = session.answer(Answer::Ways(Arc::clone(&trace)));
        assert_eq!(refused, Err(AnswerError::NoOtherWays));
        session.answer(Answer::NoWays).unwrap();
        let theirs = plan(&other, &costs(&other), &request).unwrap();
        let refused = session.answer(Answer::Plan(Box::new(theirs)));
        let given = "a plan";
        assert_eq!(refused, Err(AnswerError::AnotherStep { given }));
        assert!(matches!(session.next(), Need::Plan(_)));
    }
}

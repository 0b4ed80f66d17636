//! Conversations of planning, answered by hand.

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

#[test]
fn a_piece_that_came_to_nothing_is_not_asked_for_again_nor_the_plan_made_again() {
    let mut trace = sample::inference(64);
    for op in &mut trace.ops {
        op.workspace_bytes = Bytes(1 << 20);
    }
    let trace = Arc::new(trace);
    let request = request(Budget::Percent(1.0), Class::Exact);
    let mut session = PlanSession::new(request, None);
    let mut asked = Vec::new();
    loop {
        let need = session.next();
        asked.push(need.name());
        let answer = match need {
            Need::Trace => Answer::Trace(Arc::clone(&trace)),
            Need::Costs { .. } => Answer::Costs(costs(&trace)),
            Need::Plan(search) => Answer::Plan(Box::new(search.plan(Limit::None).unwrap())),
            Need::Ways(ways) => {
                assert!(ways.iter().all(|it| it.way.items.is_some()), "{ways:?}");
                Answer::Ways(Arc::clone(&trace))
            }
            Need::Nothing(made) => {
                assert_eq!(made.plan.verdict, Verdict::DoesNotFit);
                break;
            }
            Need::Offer { .. } => panic!("no place was named"),
        };
        session.answer(answer).unwrap();
    }
    assert_eq!(
        asked,
        ["a trace", "costs", "a plan", "other ways", "nothing"]
    );
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

/// A step in all the ways that were asked for: what it makes takes a part of the bytes in each.
fn in_all(whole: &Trace, asked: &[Way], part: u64) -> Arc<Trace> {
    let mut narrow = whole.alone();
    for allocation in &mut narrow.allocations {
        if allocation.producer.is_some() {
            allocation.bytes = Bytes(allocation.bytes.0 / part);
        }
    }
    let steps = asked.iter().map(|way| Alternative {
        way: way.clone(),
        trace: narrow.clone(),
    });
    let alternatives = Alternatives {
        steps: whole.alternatives().iter().cloned().chain(steps).collect(),
        ..Alternatives::default()
    };
    Arc::new(whole.with_alternatives(alternatives).unwrap())
}

/// A step whose products are computed in `float32`.
fn products() -> Trace {
    let mut trace = sample::chain();
    for op in &mut trace.ops {
        op.flops = 1 << 20;
    }
    trace
}

/// Answers to the end; what was asked for in other ways, and the plan.
fn told(mut session: PlanSession, trace: &Trace, part: u64) -> (Vec<Vec<Way>>, Plan) {
    let mut known = Arc::new(trace.clone());
    let mut asked = Vec::new();
    loop {
        let answer = match session.next() {
            Need::Trace => Answer::Trace(Arc::clone(&known)),
            Need::Costs { .. } => Answer::Costs(costs(trace)),
            Need::Offer { .. } => Answer::Offer(offer()),
            Need::Ways(asked_now) => {
                let ways: Vec<_> = asked_now.into_iter().map(|it| it.way).collect();
                known = in_all(&known, &ways, part);
                asked.push(ways);
                Answer::Ways(Arc::clone(&known))
            }
            Need::Plan(search) => Answer::Plan(Box::new(search.plan(Limit::None).unwrap())),
            Need::Nothing(made) => return (asked, made.plan),
        };
        session.answer(answer).unwrap();
    }
}

#[test]
fn where_nothing_fits_the_plan_says_what_leave_to_change_numbers_would_bring() {
    let trace = products();
    let mut exact = request(Budget::Percent(1.0), Class::Exact);
    exact.forbid = vec![ActionKind::MicroBatch];
    let lowest = plan(&trace, &costs(&trace), &exact).unwrap();
    exact.budget = Budget::Absolute(lowest.minimum_budget_bytes() - Bytes(1));
    let session = || PlanSession::new(exact.clone(), None);

    let (asked, plain) = told(session(), &trace, 2);
    assert!(asked.is_empty(), "no ways were to be asked for: {asked:?}");
    assert_eq!(
        (plain.verdict, plain.next_class.as_ref()),
        (Verdict::DoesNotFit, None)
    );

    let (asked, made) = told(session().telling_leave(), &trace, 2);
    let [ways] = asked.as_slice() else {
        panic!("{asked:?}")
    };
    assert!(
        ways.iter()
            .all(|it| it.autocast.as_ref().is_some_and(|cast| !cast.cache))
    );
    let next = made.next_class.clone().expect("half of the bytes fit");
    assert_eq!(next.promise, Class::Approximate);
    assert!(next.kinds.contains(&ActionKind::Autocast), "{next:?}");
    // It is what a plan with leave comes to, and the plan itself is as before.
    let wide = PlanRequest {
        allow: Class::Approximate,
        ..exact.clone()
    };
    let with = plan(&in_all(&trace, ways, 2), &costs(&trace), &wide).unwrap();
    assert_eq!(with.verdict, Verdict::Fits);
    assert_eq!(with.planned.predicted_peak_bytes, next.predicted_peak_bytes);
    assert_eq!(
        Plan {
            next_class: None,
            ..made
        },
        plain
    );
}

#[test]
fn where_leave_to_change_numbers_is_not_enough_a_note_says_how_far_it_comes() {
    let trace = products();
    let mut exact = request(Budget::Percent(1.0), Class::Exact);
    exact.forbid = vec![ActionKind::MicroBatch];
    let (_, made) = told(PlanSession::new(exact, None).telling_leave(), &trace, 2);
    assert_eq!(made.next_class, None);
    let said = "with `--allow approximate` the smallest peak found is ";
    let note = made.notes.iter().find_map(|it| it.strip_prefix(said));
    assert!(note.is_some(), "{:?}", made.notes);
}

#[test]
fn with_leave_weights_in_fewer_bits_are_asked_for_where_nothing_else_fits_and_by_name() {
    // A weight that products alone read, and its optimizer's state.
    let trace = crate::plan::technique::half_parameters::tests::product();
    let narrows = |ways: &[Way]| ways.iter().any(|it| it.half_parameters.is_some());
    let asked_for = |budget, named: &[ActionKind]| {
        let mut request = request(budget, Class::Approximate);
        request.forbid = vec![ActionKind::Chunk, ActionKind::MicroBatch];
        request.allow_kinds = named.to_vec();
        let (asked, made) = told(PlanSession::new(request, None).telling_leave(), &trace, 2);
        let narrows: Vec<_> = asked.iter().map(|ways| narrows(ways)).collect();
        (narrows, made)
    };
    let (narrow, made) = asked_for(Budget::Percent(90.0), &[]);
    assert_eq!((narrow, made.verdict), (vec![false], Verdict::Fits));
    let is_refused = |it: &crate::plan::Refusal| it.kind == ActionKind::HalfParameters;
    assert!(!made.refusals.iter().any(is_refused), "{:?}", made.refusals);
    let (narrow, made) = asked_for(Budget::Percent(1.0), &[]);
    assert_eq!(
        (narrow, made.verdict),
        (vec![false, true], Verdict::DoesNotFit)
    );
    let (narrow, _) = asked_for(Budget::Percent(90.0), &[ActionKind::HalfParameters]);
    assert_eq!(narrow, [true]);
}

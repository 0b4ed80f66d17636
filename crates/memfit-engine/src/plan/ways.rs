//! Other ways of running the step, as captured: in slices, under autocast, with parameters in fewer bits, without a graph.
//!
//! Responsible for which ways are worth a capture, for op times of a step in another way, and for trying each with the
//! inner search, jointly with the other outer choices. Not responsible for what may run in which way (`technique/`)
//! nor for choosing among what comes out (`choose.rs`).

use super::context::{OtherWay, Outcome, Planner};
use super::outcomes::lowest_peak;
use super::search::limits::Share;
use super::technique::chunk::candidates::chunks;
use super::technique::{
    autocast, autocast_fp16, half_parameters, int8_dynamic, int8_weights, no_graph,
    undo_checkpoints,
};
use super::{ActionKind, Class, Plan, PlanRequest, Verdict};
use crate::cost::{CostError, CostSource, Costs};
use crate::predict;
use crate::trace::{Alternative, Alternatives, Autocast, Chunk, Refusals, Trace, Way};

/// The ways of running a step that a plan may get better by, each worth a capture; none where they are captured
/// already. `made` is the plan made without them, or absent before any. Weights in fewer bits are for where nothing else
/// fits, so before that they are worth a capture to those alone who name them; where products in 8 bits have no room in all
/// layers, those in some come after. Without the model's checkpoints the step
/// stays exact, so that way comes first, and alone where nothing else is allowed. Training in slices does all that it
/// does whole, so where the step may autocast, slices that do not wait for a plan that takes longer than the step as it is.
#[must_use]
pub fn ways(trace: &Trace, request: &PlanRequest, made: Option<&Plan>) -> Vec<Way> {
    ways_by(trace, request, made, false)
}

/// The same, where it is known how fast the device computes: autocast that slows a step down is for where nothing else
/// fits, and is captured before that for those alone who name it.
pub(in crate::plan) fn ways_by(
    trace: &Trace,
    request: &PlanRequest,
    made: Option<&Plan>,
    casts_slow_down: bool,
) -> Vec<Way> {
    let asked = request.allow >= Class::Equivalent
        || may_change_numbers(trace, request)
        || no_graph::may(trace, request);
    let may_undo =
        undo_checkpoints::may(trace, request) && !undo_checkpoints::fits_with(trace, request);
    if !asked && may_undo && made.is_none() && trace.alternatives.is_none() {
        return vec![undo_checkpoints::alone()];
    }
    let fits = made.is_some_and(|plan| plan.verdict == Verdict::Fits);
    let cannot_gain = made.is_some_and(|plan| fits && plan.predicted_step_ratio <= 1.0);
    if cannot_gain || made.is_none() && !asked {
        return Vec::new();
    }
    let is_last = |way: &Way| {
        let slow = way.autocast.as_ref().filter(|_| casts_slow_down);
        let kind = narrowing(way).or(slow.map(autocast::kind_of));
        kind.is_some_and(|kind| !request.allow_kinds.contains(&kind))
    };
    let mut ways = all(trace, request);
    let may_cast = trace.meta.training && ways.iter().any(|way| is_cast(way) && !is_last(way));
    let waits = |way: &Way| may_cast && way.chunk.is_some() && way.autocast.is_none();
    match (&trace.alternatives, made) {
        (None, None) => ways.retain(|way| !is_last(way) && !waits(way)),
        (None, Some(_)) => ways.retain(|_| !fits),
        (Some(known), Some(_)) if !fits && tried_without_checkpoints_alone(known) => {
            ways.retain(|way| known.steps.iter().all(|it| it.way != *way));
        }
        (Some(known), made) => {
            let is_new = |way: &Way| known.steps.iter().all(|it| it.way != *way);
            ways.retain(|way| {
                let is_wanted = waits(way) || is_last(way) && !fits;
                made.is_some() && is_wanted && is_new(way)
            });
            let mixed = made.and_then(|made| int8_dynamic::mixed(trace, request, made));
            ways.extend(mixed.filter(is_new));
        }
    }
    ways
}

/// Was the step without its checkpoints all that was asked for?
fn tried_without_checkpoints_alone(known: &Alternatives) -> bool {
    let others = Refusals {
        checkpoints: String::new(),
        ..known.refusals.clone()
    };
    let mut steps = known.steps.iter();
    others == Refusals::default() && steps.all(|it| it.way == undo_checkpoints::alone())
}

/// Every way that the request allows.
fn all(trace: &Trace, request: &PlanRequest) -> Vec<Way> {
    let is_without_graph = no_graph::may(trace, request);
    let sliced = slices(trace, request);
    let smallest = sliced.last().cloned();
    let undone = undo_checkpoints::may(trace, request).then(undo_checkpoints::alone);
    let undone_in_slices = undone.clone().zip(smallest.clone());
    let in_slices = sliced.into_iter().map(Way::in_slices);
    let mut ways: Vec<_> = is_without_graph
        .then(Way::default)
        .into_iter()
        .chain(undone)
        .chain(in_slices)
        .collect();
    ways.extend(undone_in_slices.map(|(undone, chunk)| Way {
        chunk: Some(chunk),
        ..undone
    }));
    ways.extend(autocast::ways(trace, request, smallest.as_ref()));
    ways.extend(half_parameters::ways(trace, request, smallest.as_ref()));
    ways.extend(int8_weights::ways(trace, request));
    for way in &mut ways {
        way.no_graph = is_without_graph;
    }
    ways
}

fn slices(trace: &Trace, request: &PlanRequest) -> Vec<Chunk> {
    match chunks(trace) {
        Ok(chunks) if !request.forbid.contains(&ActionKind::Chunk) => chunks,
        _ => Vec::new(),
    }
}

/// The request with leave for actions that change numbers.
pub(super) fn with_leave(request: &PlanRequest) -> PlanRequest {
    PlanRequest {
        allow: Class::Approximate,
        ..request.clone()
    }
}

/// The ways that only leave to change numbers would open, as far as telling what that brings needs them: of those under
/// autocast and of those with parameters in 16 bits the one that takes least, without a weight cache and in the smallest
/// slices. None where there is leave for them.
pub(super) fn beyond(trace: &Trace, request: &PlanRequest) -> Vec<Way> {
    let smallest = slices(trace, request).pop();
    let is_lowest = |way: &Way| {
        let cast = way.autocast.as_ref();
        way.chunk == smallest && cast.is_some_and(|it| !it.cache)
    };
    let captured = trace.alternatives();
    let mut ways = all(trace, &with_leave(request));
    ways.retain(|way| is_lowest(way) && captured.iter().all(|it| it.way != *way));
    ways
}

/// The ways that are worth a capture where all is allowed that needs no leave: in slices.
#[must_use]
pub fn ways_without_leave(trace: &Trace) -> Vec<Way> {
    let widest = PlanRequest {
        allow: Class::Equivalent,
        ..PlanRequest::default()
    };
    ways(trace, &widest, None)
}

/// Whether a way is under autocast, with weights as they are.
pub(super) fn is_cast(way: &Way) -> bool {
    way.autocast.is_some() && narrowing(way).is_none()
}

/// May the step run in a way that changes numbers?
pub(super) fn may_change_numbers(trace: &Trace, request: &PlanRequest) -> bool {
    autocast::may_any(trace, request)
        || half_parameters::may(trace, request)
        || int8_weights::may_any(trace, request)
}

/// The kind of action that holds the parameters of a way in fewer bits, if one does.
pub(super) fn narrowing(way: &Way) -> Option<ActionKind> {
    let half = way.half_parameters.as_ref();
    let eight = way.int8_weights.as_ref();
    half.map(|_| ActionKind::HalfParameters)
        .or(eight.map(int8_weights::kind_of))
}

/// May it run in this one?
fn may_be(way: &Way, trace: &Trace, request: &PlanRequest) -> bool {
    let may_slice = !request.forbid.contains(&ActionKind::Chunk);
    let may_stay_off = !way.no_graph || no_graph::may(trace, request);
    let may_undo = !way.undo_checkpoints || undo_checkpoints::may(trace, request);
    if way.chunk.is_some() && !may_slice || !may_stay_off || !may_undo {
        return false;
    }
    if way.half_parameters.is_some() {
        return half_parameters::may(trace, request);
    }
    if let Some(held) = &way.int8_weights {
        return int8_weights::may(int8_weights::kind_of(held), trace, request);
    }
    let may_cast = |it: &Autocast| autocast::may(autocast::kind_of(it), trace, request);
    way.autocast.as_ref().is_none_or(may_cast)
}

/// Every captured way that is allowed, with its op times. Those of a profiled step are known op by op: an op that both
/// steps have takes the same time, the others take theirs by their work.
pub(super) fn with_costs<'t>(
    trace: &'t Trace,
    source: &CostSource,
    costs: &Costs,
    request: &PlanRequest,
) -> Result<Vec<OtherWay<'t>>, CostError> {
    let captured = trace.alternatives().iter();
    let allowed = captured.filter(|it| may_be(&it.way, trace, request));
    let steps = allowed.map(|alternative| {
        let costs = match source {
            CostSource::Roofline { .. } => Costs::new(&alternative.trace, source)?,
            CostSource::Profile { .. } => costs.carried_over(trace, &alternative.trace),
        };
        let mut request = if alternative.way.half_parameters.is_some() {
            half_parameters::request_in_way(request)
        } else {
            request.clone()
        };
        if autocast::is_used(ActionKind::AutocastFp16, &alternative.way) {
            request.forbid.push(autocast_fp16::NOT_WITH);
        }
        Ok(OtherWay {
            alternative,
            promise: promise(trace, alternative),
            costs,
            request,
        })
    });
    steps.collect()
}

/// Every way that is wanted, solved: alone, and the last one that may be cut, with the least bytes, on pieces of the batch
/// too where `in_pieces` says so.
pub(super) fn outcomes(
    planner: &Planner<'_>,
    is_wanted: impl Fn(&OtherWay<'_>) -> bool,
    in_pieces: InPieces,
    mut share: Share<'_>,
    mut best_seconds: f64,
) -> Vec<Outcome> {
    let mut found = Vec::new();
    let ways = planner.ways.iter().enumerate();
    let ways: Vec<_> = ways.filter(|(_, step)| is_wanted(step)).collect();
    let is_plain_cut = planner.may_cut_batch();
    let may_cut = |own: &Planner<'_>| {
        if own.trace.meta.training {
            is_plain_cut && own.trace.couplings.is_some()
        } else {
            own.may_cut_batch()
        }
    };
    let last = ways
        .iter()
        .rposition(|(_, step)| in_pieces != InPieces::No && may_cut(&planner.in_way(step)));
    for (number, &(index, step)) in ways.iter().enumerate() {
        let own = planner.in_way(step);
        let is_cut = last == Some(number);
        let is_last = last.map_or(number + 1 == ways.len(), |_| is_cut);
        let part = share.part(number, ways.len()).for_one(is_last);
        let kinds = 1 + usize::from(is_cut);
        let mut outcomes = Vec::new();
        if in_pieces != InPieces::Only {
            let whole = part.part(0, kinds).for_one(!is_cut);
            outcomes = own.whole_batch(whole, best_seconds);
            best_seconds = outcomes
                .iter()
                .filter_map(Outcome::best_seconds)
                .fold(best_seconds, f64::min);
        }
        if is_cut {
            let pieces = part.part(kinds - 1, kinds).knowing(lowest_peak(&outcomes));
            outcomes.extend(own.micro_batches(pieces, best_seconds));
        }
        share = share.knowing(lowest_peak(&outcomes));
        for outcome in &mut outcomes {
            outcome.way = step.alternative.way.clone();
            outcome.way_promise = step.promise;
            outcome.way_index = Some(index);
        }
        found.extend(outcomes);
    }
    found
}

/// Whether a way is tried on pieces of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InPieces {
    No,
    Too,
    Only,
}

/// What a way promises about numbers. Without a graph torch may choose other ops for the same, as attention has.
fn promise(trace: &Trace, alternative: &Alternative) -> Class {
    let way = &alternative.way;
    let rounds = way.no_graph && !runs_the_same(trace, &alternative.trace);
    let kinds = [
        way.chunk.as_ref().map(|_| ActionKind::Chunk),
        way.autocast.as_ref().map(autocast::kind_of),
        narrowing(way),
    ];
    let promises = kinds.into_iter().flatten().map(|it| it.technique().promise);
    promises
        .chain(rounds.then_some(Class::Equivalent))
        .max()
        .unwrap_or_default()
}

/// Do two steps run the same ops with the same arguments, but for views?
fn runs_the_same(a: &Trace, b: &Trace) -> bool {
    fn ops(trace: &Trace) -> impl Iterator<Item = (&str, &str)> {
        let computing = trace.ops.iter().filter(|op| !op.view);
        computing.map(|op| (trace.string(op.name), trace.string(op.arguments)))
    }
    ops(a).eq(ops(b))
}

impl<'t> Planner<'t> {
    /// The same for the step in another way, of which nothing was tried yet. What is uncertain about that step's peak
    /// in addition is kept free too.
    fn in_way<'w>(&self, step: &'w OtherWay<'t>) -> Planner<'w>
    where
        't: 'w,
    {
        let trace = &step.alternative.trace;
        let own = predict::margin(trace, predict::unplanned_peak(trace));
        let more = own - predict::margin(self.trace, self.unplanned_peak);
        Planner {
            trace,
            costs: &step.costs,
            request: &step.request,
            ways: &[],
            target: self.target - more,
            may_narrow_state: self.may_narrow_state || half_parameters::must_narrow_state(trace),
            is_new: true,
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::{Budget, Bytes};
    use crate::plan::technique::chunk;
    use crate::plan::{Action, Details, plan};
    use crate::trace::{Alternatives, LossChunk, sample};

    fn request(budget: u64, allow: Class) -> PlanRequest {
        PlanRequest {
            budget: Budget::Absolute(Bytes(budget)),
            allow,
            ..PlanRequest::default()
        }
    }

    fn source(trace: &Trace) -> CostSource {
        CostSource::profile(vec![1.0; trace.ops.len()])
    }

    /// A chain whose alternative makes everything in half of the bytes.
    fn chain() -> Trace {
        let mut trace = sample::chain();
        let mut halved = trace.clone();
        for allocation in &mut halved.allocations {
            if allocation.producer.is_some() {
                allocation.bytes = Bytes(allocation.bytes.0 / 2);
            }
        }
        let loss = LossChunk {
            slices: 8,
            weight: "head.weight".to_owned(),
            rows: 4,
            classes: 8,
            logit_bytes: Bytes(128),
        };
        let chunk = Chunk {
            loss: Some(loss),
            ..Chunk::default()
        };
        let steps = vec![Alternative {
            way: Way::in_slices(chunk),
            trace: halved,
        }];
        trace.alternatives = Some(Alternatives {
            steps,
            ..Alternatives::default()
        });
        trace
    }

    #[test]
    fn where_nothing_exact_fits_the_step_runs_in_slices_with_its_own_peak() {
        let trace = chain();
        let lowest = plan(&trace, &source(&trace), &request(1, Class::Exact)).unwrap();
        assert_eq!(lowest.verdict, Verdict::DoesNotFit);
        let exact = PlanRequest {
            forbid: vec![ActionKind::Chunk, ActionKind::MicroBatch],
            ..request(1, Class::Exact)
        };
        let exact = plan(&trace, &source(&trace), &exact).unwrap();
        assert!(lowest.minimum_peak_bytes < exact.minimum_peak_bytes);
        let budget = lowest.minimum_budget_bytes();
        let made = plan(&trace, &source(&trace), &request(budget.0, Class::Exact)).unwrap();
        assert_eq!(
            (made.verdict, made.promise),
            (Verdict::Fits, Class::Equivalent)
        );
        let chunk = made
            .actions
            .iter()
            .find(|it| it.kind() == ActionKind::Chunk);
        let action = chunk.expect("only slices fit");
        let Details::Chunk { chunk } = &action.details else {
            panic!("{action:?}")
        };
        assert_eq!(chunk.slices(), 8);
        let saved = predict::unplanned_peak(&trace)
            - predict::unplanned_peak(&trace.alternatives()[0].trace);
        assert_eq!((action.count, action.bytes), (8, saved));
    }

    #[test]
    fn an_exact_plan_that_fits_comes_first_and_a_forbidden_kind_is_left_out() {
        let trace = chain();
        let ample = plan(
            &trace,
            &source(&trace),
            &request(1 << 20, Class::Equivalent),
        )
        .unwrap();
        assert!(ample.actions.is_empty());
        let forbidden = PlanRequest {
            forbid: vec![ActionKind::Chunk],
            ..request(1, Class::Equivalent)
        };
        let made = plan(&trace, &source(&trace), &forbidden).unwrap();
        assert!(made.actions.iter().all(|it| it.kind() != ActionKind::Chunk));
        let refusal = made.refusals.iter().find(|it| it.kind == ActionKind::Chunk);
        assert!(refusal.expect("it is said").reason.contains("forbidden"));
    }

    #[test]
    fn slices_work_inside_the_users_own_loop() {
        let trace = chain();
        let own = PlanRequest {
            own_loop: true,
            forbid: vec![ActionKind::Remat],
            ..request(1, Class::Exact)
        };
        let made = plan(&trace, &source(&trace), &own).unwrap();
        assert!(made.actions.iter().any(|it| it.kind() == ActionKind::Chunk));
    }

    #[test]
    fn a_capture_is_asked_for_only_where_it_may_help() {
        let mut trace = chain();
        let none = ways(&trace, &request(1, Class::Equivalent), None);
        assert!(none.is_empty(), "captured already");
        trace.alternatives = None;
        let none = ways(&trace, &request(1, Class::Equivalent), None);
        assert!(none.is_empty(), "this step has no loss over classes");
        let reason = chunk::refusal(&trace, &request(1, Class::Exact)).unwrap();
        assert!(reason.contains("straight from a linear layer"), "{reason}");
    }

    /// Leave for autocast and nothing else.
    fn may_cast(budget: u64) -> PlanRequest {
        PlanRequest {
            allow_kinds: vec![ActionKind::Autocast],
            forbid: vec![ActionKind::Chunk, ActionKind::MicroBatch],
            ..request(budget, Class::Exact)
        }
    }

    /// A step with a matrix product, and the same under autocast: all that it makes in half of the bytes.
    fn product(cached: &[bool]) -> Trace {
        let mut trace = sample::loss_over_classes(512, None);
        trace.ops[0].flops = 1 << 20;
        let mut halved = trace.clone();
        for allocation in &mut halved.allocations {
            if allocation.producer.is_some() {
                allocation.bytes = Bytes(allocation.bytes.0 / 2);
            }
        }
        let steps = cached.iter().map(|&cache| Alternative {
            way: Way {
                autocast: Some(Autocast {
                    dtype: "bfloat16".to_owned(),
                    cache,
                    keep: Vec::new(),
                }),
                ..Way::default()
            },
            trace: halved.clone(),
        });
        let steps = steps.collect();
        trace.alternatives = (!cached.is_empty()).then(|| Alternatives {
            steps,
            ..Alternatives::default()
        });
        trace
    }

    #[test]
    fn autocast_is_asked_for_with_leave_alone_and_with_the_smallest_slices() {
        let trace = product(&[]);
        let casts = |request: &PlanRequest| {
            let asked = ways(&trace, request, None).into_iter();
            let asked = asked.filter_map(|way| Some((way.autocast?.cache, way.chunk.is_some())));
            asked.collect::<Vec<_>>()
        };
        let both = PlanRequest {
            forbid: Vec::new(),
            ..may_cast(1)
        };
        assert_eq!(casts(&both), [(false, false), (true, false), (false, true)]);
        assert_eq!(casts(&may_cast(1)), [(false, false), (true, false)]);
        assert_eq!(casts(&request(1, Class::Equivalent)), []);
        assert_eq!(casts(&request(1, Class::Exact)), []);
    }

    #[test]
    fn autocast_that_slows_down_waits_until_nothing_else_fits_unless_it_is_named() {
        let trace = product(&[]);
        let request = PlanRequest {
            forbid: Vec::new(),
            ..may_cast(1)
        };
        let has = |found: &[Way]| {
            let is_sliced = |way: &Way| way.autocast.is_none() && way.chunk.is_some();
            (found.iter().any(is_cast), found.iter().any(is_sliced))
        };
        let with_leave = PlanRequest {
            allow_kinds: Vec::new(),
            allow: Class::Approximate,
            ..request.clone()
        };
        let first = ways_by(&trace, &with_leave, None, true);
        assert_eq!(has(&first), (false, true), "and slices wait for no cast");
        assert_eq!(has(&ways(&trace, &with_leave, None)), (true, false));
        let mut made = plan(&trace, &source(&trace), &with_leave).unwrap();
        assert_eq!(made.verdict, Verdict::DoesNotFit);
        assert!(has(&ways_by(&trace, &with_leave, Some(&made), true)).0);
        made.verdict = Verdict::Fits;
        made.predicted_step_ratio = 1.1;
        assert!(!has(&ways_by(&trace, &with_leave, Some(&made), true)).0);
        assert!(has(&ways_by(&trace, &request, None, true)).0, "it is named");
    }

    #[test]
    fn slices_alone_wait_for_a_plan_that_they_may_be_faster_than() {
        let trace = product(&[false]);
        let request = request(1, Class::Approximate);
        let sliced = |found: &[Way]| {
            let slices = found.iter().filter(|way| way.autocast.is_none());
            slices.filter(|way| way.chunk.is_some()).count()
        };
        let plain = Trace {
            alternatives: None,
            ..trace.clone()
        };
        assert_eq!(sliced(&ways(&plain, &request, None)), 0);
        let mut made = plan(&trace, &source(&trace), &request).unwrap();
        assert_eq!(made.verdict, Verdict::DoesNotFit);
        let all = sliced(&ways(&trace, &request, Some(&made)));
        assert!(all > 0);
        made.verdict = Verdict::Fits;
        made.predicted_step_ratio = 0.9;
        assert_eq!(ways(&trace, &request, Some(&made)), []);
        made.predicted_step_ratio = 1.1;
        let late = ways(&trace, &request, Some(&made));
        assert_eq!((late.len(), sliced(&late)), (all, all));
        let exact = PlanRequest {
            allow: Class::Equivalent,
            ..request
        };
        assert_eq!(sliced(&ways(&plain, &exact, None)), all, "none casts");
    }

    #[test]
    fn a_plan_under_autocast_has_its_own_peak_and_promise() {
        let trace = product(&[false, true]);
        let peak = predict::unplanned_peak(&trace.alternatives()[0].trace);
        let exact = PlanRequest {
            allow_kinds: Vec::new(),
            ..may_cast(1)
        };
        let exact = plan(&trace, &source(&trace), &exact).unwrap();
        let lowest = plan(&trace, &source(&trace), &may_cast(1)).unwrap();
        assert!(lowest.minimum_peak_bytes < exact.minimum_peak_bytes);
        let budget = lowest.minimum_budget_bytes().0.max(peak.0);
        let made = plan(&trace, &source(&trace), &may_cast(budget)).unwrap();
        assert_eq!(
            (made.verdict, made.promise),
            (Verdict::Fits, Class::Approximate)
        );
        let action = made
            .actions
            .iter()
            .find(|it| it.kind() == ActionKind::Autocast);
        let action = action.expect("nothing else fits");
        let Details::Autocast { autocast } = &action.details else {
            panic!("{action:?}")
        };
        assert!(!autocast.cache, "of equal plans the first is taken");
        assert_eq!(action.bytes, predict::unplanned_peak(&trace) - peak);
    }

    #[test]
    fn without_leave_or_where_it_is_forbidden_a_captured_step_under_autocast_is_not_run() {
        let trace = product(&[true]);
        let forbidden = PlanRequest {
            forbid: vec![ActionKind::Autocast],
            ..may_cast(1)
        };
        for request in [request(1, Class::Equivalent), forbidden.clone()] {
            let made = plan(&trace, &source(&trace), &request).unwrap();
            assert!(
                made.actions
                    .iter()
                    .all(|it| it.kind() != ActionKind::Autocast)
            );
        }
        let made = plan(&trace, &source(&trace), &forbidden).unwrap();
        let said = made
            .refusals
            .iter()
            .find(|it| it.kind == ActionKind::Autocast);
        assert_eq!(said.unwrap().reason, "forbidden by the request");
    }

    #[test]
    fn float16_is_for_those_who_name_it_and_updates_nothing_inside_backward() {
        let trace = product(&[]);
        let dtypes = |request: &PlanRequest| {
            let asked = ways(&trace, request, None).into_iter();
            let mut dtypes: Vec<_> = asked.filter_map(|way| Some(way.autocast?.dtype)).collect();
            dtypes.dedup();
            dtypes
        };
        let named = PlanRequest {
            allow_kinds: vec![ActionKind::AutocastFp16],
            ..may_cast(1)
        };
        assert_eq!(dtypes(&request(1, Class::Approximate)), ["bfloat16"]);
        assert_eq!(dtypes(&named), ["float16"]);
        let own_loop = PlanRequest {
            own_loop: true,
            ..named.clone()
        };
        assert!(dtypes(&own_loop).is_empty());

        let mut trace = chain();
        trace.ops[0].flops = 1 << 20;
        let found = trace.alternatives.as_mut().unwrap();
        found.steps[0].way = Way {
            autocast: Some(Autocast {
                dtype: "float16".to_owned(),
                cache: true,
                keep: Vec::new(),
            }),
            ..Way::default()
        };
        let made = plan(&trace, &source(&trace), &named).unwrap();
        let kinds: Vec<_> = made.actions.iter().map(Action::kind).collect();
        assert!(kinds.contains(&ActionKind::AutocastFp16), "{kinds:?}");
        assert!(!kinds.contains(&ActionKind::FuseOptimizer), "{kinds:?}");
        let costs = Costs::new(&trace, &source(&trace)).unwrap();
        let way = &with_costs(&trace, &source(&trace), &costs, &named).unwrap()[0];
        assert!(way.request.forbid.contains(&ActionKind::FuseOptimizer));
    }
}

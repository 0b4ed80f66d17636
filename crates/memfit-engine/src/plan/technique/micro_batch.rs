//! The batch in pieces, whose gradients add up.
//!
//! Responsible for the proof that the batch may be cut, for the words where it fails, for the numbers of pieces, and
//! for the action. Not responsible for whether cutting it pays (`combinations.rs`).

use super::addresses::interned;
use super::{ActsOn, Technique, counted, no_graph};
use crate::bytes::Bytes;
use crate::plan::choice::Chosen;
use crate::plan::{
    Action, ActionKind, CallInPieces, Class, Details, MicroBatch, Plan, PlanRequest,
};
use crate::predict;
use crate::trace::{Coupling, CouplingKind, Op, Phase, Trace, element_bytes};

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::MicroBatch,
    name: "micro_batch",
    title: "micro-batches",
    help: "Split the batch and accumulate gradients",
    promise: Class::Equivalent,
    effect: |action| format!("the batch in {}", counted(action.count, "piece")),
    short: Some(|count| format!("{count} micro-batches")),
    acts_on: ActsOn::Batch,
    only_where_needed: false,
    refusal,
    is_used: |outcome, _| outcome.pieces > 1,
    write,
};

impl MicroBatch {
    fn of(trace: &Trace, request: &PlanRequest) -> Self {
        let ops = &trace.ops[..trace.forward_end().index()];
        let (names, forward) = interned(ops.iter().map(|op| fixed_text(trace, op)));
        let results = if trace.meta.training {
            Vec::new()
        } else {
            results(trace, request).unwrap_or_default()
        };
        Self {
            names,
            forward,
            call: request.own_loop.then(CallInPieces::default),
            results,
        }
    }
}

fn fixed_text(trace: &Trace, op: &Op) -> String {
    let name = trace.string(op.name);
    match trace.string(op.arguments) {
        _ if op.arguments_vary => format!("{name} *"),
        "" => name.to_owned(),
        arguments => format!("{name} {arguments}"),
    }
}

/// Why the batch cannot be cut; `None` when it can, in some way of running the step.
fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    let mut others = trace.alternatives().iter().filter(|it| it.way.no_graph);
    if no_graph::may(trace, request) && others.any(|it| may_cut(&it.trace, request)) {
        return None;
    }
    plain_refusal(trace, request)
}

/// Can the batch of a step be cut?
pub(in crate::plan) fn may_cut(trace: &Trace, request: &PlanRequest) -> bool {
    plain_refusal(trace, request).is_none()
}

/// Why the batch cannot be cut in the step as it was captured.
fn plain_refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if request.forbid.contains(&ActionKind::MicroBatch) {
        return Some("forbidden by the request".to_owned());
    }
    let feeds_itself = trace.meta.training || !is_model_call(trace);
    if request.own_loop && feeds_itself {
        return Some("the batch is fed by the user's own loop".to_owned());
    }
    if trace.meta.batch < 2 {
        return Some("the batch cannot be cut".to_owned());
    }
    if trace.couplings.is_some() && piece_counts(trace).next().is_none() {
        return Some(format!(
            "a batch of {} would be cut into single items, on which torch may run other ops",
            trace.meta.batch
        ));
    }
    let Some(couplings) = &trace.couplings else {
        return Some("the step was captured at one batch size only".to_owned());
    };
    if let Some(reason) = coupled(trace, couplings) {
        return Some(reason);
    }
    if let Some(reason) = &trace.meta.micro_batch_refusal {
        return Some(reason.clone());
    }
    if !trace.meta.training {
        return results(trace, request).err();
    }
    if trace.meta.loss_reduction.is_empty() {
        return Some("how the loss reduces over the batch was not recognised".to_owned());
    }
    None
}

fn is_model_call(trace: &Trace) -> bool {
    let inference = trace.meta.inference.as_ref();
    inference.is_some_and(|it| it.is_model_call)
}

/// For each tensor that a forward of inference returns, the dimension along which those of the pieces are put together.
///
/// # Errors
///
/// Why they cannot be, as a sentence without full stop.
fn results(trace: &Trace, request: &PlanRequest) -> Result<Vec<u64>, String> {
    let Some(inference) = &trace.meta.inference else {
        return Err("what the forward returns was not recorded".to_owned());
    };
    if inference.has_graph {
        return Err("autograd records the forward, and what it returns has a graph".to_owned());
    }
    if let Some((op, name)) = trace.ops.iter().find_map(|op| written_before(trace, op)) {
        return Err(format!("`{}` writes to {name}", trace.string(op.name)));
    }
    let mut dims = Vec::new();
    for value in &inference.returns {
        let value = &trace.values[value.index()];
        let mut batched = value.shape_per_item.iter().enumerate();
        let mut batched = batched.by_ref().filter(|&(_, &rate)| rate != 0);
        let is_known = element_bytes(trace.string(value.dtype)).is_some();
        match (batched.next(), batched.next()) {
            (Some((dim, 1)), None)
                if value.shape[dim] == trace.meta.batch
                    && is_known
                    && (dim == 0 || !request.own_loop) =>
            {
                dims.push(dim as u64);
            }
            _ => {
                let (dtype, shape) = (trace.string(value.dtype), &value.shape);
                return Err(format!(
                    "it returns a tensor of {dtype} {shape:?}, which has no entry for each item of the batch"
                ));
            }
        }
    }
    if dims.is_empty() {
        return Err("the forward returns no tensor".to_owned());
    }
    Ok(dims)
}

/// What an op writes to that was there before the step, by its name: each piece would write to it.
fn written_before<'t>(trace: &'t Trace, op: &'t Op) -> Option<(&'t Op, String)> {
    let mut written = op.writes.iter().map(|&value| {
        let allocation = trace.allocation_of(value);
        &trace.allocations[allocation.index()]
    });
    let before = written.find(|it| it.producer.is_none())?;
    let name = trace.string(before.name);
    let name = if name.is_empty() {
        "what it is given".to_owned()
    } else {
        format!("`{name}`")
    };
    Some((op, name))
}

/// The whole of what a forward of inference returns, put together from pieces of the batch; nothing in training.
pub(in crate::plan) fn result_bytes(trace: &Trace) -> Bytes {
    let returns = trace.meta.inference.iter().flat_map(|it| &it.returns);
    let bytes = returns.map(|value| {
        let value = &trace.values[value.index()];
        let element = element_bytes(trace.string(value.dtype)).unwrap_or_default();
        Bytes(value.numel().saturating_mul(element))
    });
    bytes.sum()
}

/// Which op mixes the items of the batch, and how, as a clause; `None` where none does.
fn coupled(trace: &Trace, couplings: &[Coupling]) -> Option<String> {
    let coupling = couplings.first()?;
    let op = &trace.ops[coupling.op.index()];
    let how = match coupling.kind {
        CouplingKind::Statistic => "computes a statistic over the batch",
        CouplingKind::Cross => "compares the items of the batch with each other",
        CouplingKind::Along => "works along the batch dimension",
    };
    let place = [trace.string(op.module), trace.string(op.source)];
    let place = place.into_iter().find(|text| !text.is_empty());
    let place = place.unwrap_or("the loss");
    Some(format!("`{}` in `{place}` {how}", trace.string(op.name)))
}

/// Why a recorded forward does not treat the items of its batch apart, as a clause; `None` where two batch sizes show
/// that it does.
#[must_use]
pub fn mixed_items(trace: &Trace) -> Option<String> {
    match &trace.couplings {
        Some(couplings) => coupled(trace, couplings),
        None => Some("it was recorded at one batch size only".to_owned()),
    }
}

/// A batch is not cut into more pieces than this.
const MOST_PIECES: u64 = 1024;
/// Numbers of pieces that are tried, at most.
const MOST_COUNTS: usize = 6;

/// Numbers of pieces to try: those that divide the batch, the powers of two, and the most that the trace speaks for,
/// which is always among them. Pieces differ by one item at most, the last being one of the larger. On a batch of one,
/// torch runs other ops (a size of one needs no copy), so a piece of one item counts only where one was captured.
pub(in crate::plan) fn piece_counts(trace: &Trace) -> impl Iterator<Item = u64> + use<> {
    let batch = trace.meta.batch;
    let least_items = if trace.meta.second_batch == 1 { 1 } else { 2 };
    let most = (batch / least_items).min(MOST_PIECES);
    let is_tried = move |pieces: &u64| batch.is_multiple_of(*pieces) || pieces.is_power_of_two();
    let few = (2..most).filter(is_tried).take(MOST_COUNTS - 1);
    few.chain((most > 1).then_some(most))
}

/// Items of the largest piece.
pub(in crate::plan) const fn piece_items(trace: &Trace, pieces: u64) -> u64 {
    trace.meta.batch.div_ceil(pieces)
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let pieces = chosen.outcome.pieces;
    let whole = chosen.peak_in(&chosen.outcome.way);
    let less = whole - predict::unplanned_peak(&chosen.outcome.trace);
    let micro_batch = Some(MicroBatch::of(
        &chosen.outcome.trace,
        chosen.planner.request,
    ));
    let details = Details::MicroBatch { micro_batch };
    plan.actions.push(Action::new(details, pieces, less));
    let mut ops = chosen.planner.trace.ops.iter();
    if ops.any(|op| op.random && op.phase == Phase::Forward) {
        let what = if chosen.planner.trace.meta.training {
            "the gradients equal"
        } else {
            "the results equal"
        };
        plan.notes.push(format!(
            "the model draws random numbers (dropout): each piece of the batch draws its own, so {what} the \
             unplanned ones in distribution, not in value"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Budget;
    use crate::cost::CostSource;
    use crate::plan::{Verdict, plan};
    use crate::trace::{Category, Inference, ValueId, sample};

    fn request(percent: f64) -> PlanRequest {
        PlanRequest {
            budget: Budget::Percent(percent),
            ..PlanRequest::default()
        }
    }

    fn planned(trace: &Trace, request: &PlanRequest) -> Plan {
        let source = CostSource::profile(vec![1.0; trace.ops.len()]);
        plan(trace, &source, request).unwrap()
    }

    #[test]
    fn inference_runs_in_pieces_beside_its_whole_result() {
        let trace = sample::inference(64);
        let made = planned(&trace, &request(40.0));
        assert_eq!(
            (made.verdict, made.promise),
            (Verdict::Fits, Class::Equivalent)
        );
        let [action] = made.actions.as_slice() else {
            panic!("{:?}", made.actions)
        };
        let Details::MicroBatch {
            micro_batch: Some(ops),
        } = &action.details
        else {
            panic!("{action:?}")
        };
        assert_eq!((ops.results.as_slice(), &ops.call), (&[0][..], &None));
        let piece = predict::unplanned_peak(&trace.at_batch(64 / action.count).unwrap());
        let whole = |it: &Trace| {
            let inputs = it.allocations.iter();
            let inputs = inputs.filter(|it| it.category == Category::Input);
            result_bytes(it) + inputs.map(|it| it.bytes).sum()
        };
        let of_piece: Bytes = trace.at_batch(64 / action.count).unwrap().allocations[2].bytes;
        assert_eq!(result_bytes(&trace), Bytes(64 * 8 * 4));
        assert_eq!(
            made.planned.predicted_peak_bytes,
            piece - of_piece + whole(&trace)
        );
        let own_loop = PlanRequest {
            own_loop: true,
            ..request(40.0)
        };
        let made = planned(&trace, &own_loop);
        let json = serde_json::to_value(&made.actions[0]).unwrap();
        assert_eq!(json["micro_batch"]["call"]["cut"], serde_json::json!([]));
    }

    /// Why inference is not cut that differs from the sample.
    fn reason(change: impl FnOnce(&mut Trace), own_loop: bool) -> String {
        let mut trace = sample::inference(64);
        change(&mut trace);
        let request = PlanRequest {
            own_loop,
            ..request(40.0)
        };
        refusal(&trace, &request).unwrap()
    }

    #[test]
    fn what_cannot_be_put_together_is_not_cut() {
        fn returns(trace: &mut Trace) -> &mut Inference {
            trace.meta.inference.as_mut().unwrap()
        }
        let unknown = reason(|it| it.meta.inference = None, false);
        assert_eq!(unknown, "what the forward returns was not recorded");
        let none = reason(|it| returns(it).returns.clear(), false);
        assert_eq!(none, "the forward returns no tensor");
        // The parameter is returned as well.
        let whole = reason(|it| returns(it).returns.push(ValueId(0)), false);
        assert_eq!(
            whole,
            "it returns a tensor of float32 [8, 800], which has no entry for each item of the batch"
        );
        let graph = reason(|it| returns(it).has_graph = true, false);
        assert!(graph.contains("autograd records"), "{graph}");
        let written = reason(|it| it.ops[0].writes = vec![ValueId(0)], false);
        assert_eq!(written, "`aten.mm.default` writes to what it is given");
        let more = reason(|it| returns(it).is_model_call = false, true);
        assert!(more.contains("own loop"), "{more}");
        let hook = reason(
            |it| it.meta.micro_batch_refusal = Some("a hook".to_owned()),
            false,
        );
        assert_eq!(hook, "a hook");
    }
}

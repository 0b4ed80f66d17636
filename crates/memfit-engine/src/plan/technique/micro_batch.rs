//! The batch in pieces, whose gradients add up.
//!
//! Responsible for the proof that the batch may be cut, for the words where it fails, for the numbers of pieces, and
//! for the action. Not responsible for whether cutting it pays (`combinations.rs`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::addresses::interned;
use super::{ActsOn, Technique, counted};
use crate::plan::actions::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan, PlanRequest};
use crate::predict;
use crate::trace::{Coupling, CouplingKind, Op, Phase, Trace};

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

/// The ops that the proof is about: each treats the items of the batch alike and apart.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize, Default)]
pub struct MicroBatch {
    /// Distinct ops of forward: name, a space and the arguments, or `*` where another batch size changes them.
    pub names: Vec<String>,
    /// Forward op by op: index into `names`. The executor compares it with what really runs.
    pub forward: Vec<u32>,
    /// How the model's call alone runs in pieces, where the rest of the step is a script's own; absent where the whole
    /// step does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<CallInPieces>,
}

/// What a model's call needs to run on one piece of its batch after the other.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize, Default)]
pub struct CallInPieces {
    /// The tensors that are cut, by their places among those that it is given; the others go to every piece whole.
    pub cut: Vec<u64>,
    /// For each op that draws random numbers, in order, whether it draws for every item of the batch. A piece gets
    /// those numbers of the whole draw that are its own.
    pub draws: Vec<bool>,
    /// The loss, where the call computes it; absent where all that it returns has an entry for each item.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossOfPieces>,
}

/// A loss that a model's call returns, put together from those of the pieces.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct LossOfPieces {
    /// Its place among the tensors that the call returns.
    pub place: u64,
    /// How it reduces over the batch, see `Meta.loss_reduction`.
    pub reduction: String,
}

impl MicroBatch {
    fn of(trace: &Trace) -> Self {
        let ops = &trace.ops[..trace.forward_end().index()];
        let (names, forward) = interned(ops.iter().map(|op| fixed_text(trace, op)));
        let call = None;
        Self {
            names,
            forward,
            call,
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

const RANDOM_NOTE: &str = "the model draws random numbers (dropout): each piece of the batch draws its \
     own, so the gradients equal the unplanned ones in distribution, not in value";

/// Why the batch cannot be cut; `None` when it can.
pub(in crate::plan) fn refusal(trace: &Trace, request: &PlanRequest) -> Option<String> {
    if request.forbid.contains(&ActionKind::MicroBatch) {
        return Some("forbidden by the request".to_owned());
    }
    if request.own_loop {
        return Some("the batch is fed by the user's own loop".to_owned());
    }
    if !trace.meta.training {
        return Some("the step does not train".to_owned());
    }
    if trace.meta.batch < 2 {
        return Some("the batch cannot be cut".to_owned());
    }
    if trace.couplings.is_some() && piece_counts(trace).next().is_none() {
        return Some(format!(
            "a batch of {} cannot be cut evenly",
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
    if trace.meta.loss_reduction.is_empty() {
        return Some("how the loss reduces over the batch was not recognised".to_owned());
    }
    None
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

/// Numbers of pieces that the trace speaks for. On a batch of one, torch runs other ops (a size of one
/// needs no copy), so a piece of one item counts only where one was captured.
pub(in crate::plan) fn piece_counts(trace: &Trace) -> impl Iterator<Item = u64> + '_ {
    let meta = &trace.meta;
    let divisors =
        (2..=meta.batch.min(MOST_PIECES)).filter(|pieces| meta.batch.is_multiple_of(*pieces));
    divisors.filter(|pieces| meta.batch / pieces > 1 || meta.second_batch == 1)
}

fn write(chosen: &Chosen<'_>, plan: &mut Plan) {
    let pieces = chosen.outcome.pieces;
    let less = chosen.planner.unplanned_peak - predict::unplanned_peak(&chosen.outcome.trace);
    let micro_batch = Some(MicroBatch::of(&chosen.outcome.trace));
    let details = Details::MicroBatch { micro_batch };
    plan.actions.push(Action::new(details, pieces, less));
    let mut ops = chosen.planner.trace.ops.iter();
    if ops.any(|op| op.random && op.phase == Phase::Forward) {
        plan.notes.push(RANDOM_NOTE.to_owned());
    }
}

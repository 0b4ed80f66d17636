//! The batch in pieces, whose gradients add up.
//!
//! Responsible for the proof that the batch may be cut, for the words where it fails, and for the numbers of pieces.
//! Not responsible for whether cutting it pays (`combinations.rs`).

use crate::plan::{ActionKind, PlanRequest};
use crate::trace::{CouplingKind, Trace};

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
    if let Some(coupling) = couplings.first() {
        let op = &trace.ops[coupling.op.index()];
        let how = match coupling.kind {
            CouplingKind::Statistic => "computes a statistic over the batch",
            CouplingKind::Cross => "compares the items of the batch with each other",
            CouplingKind::Along => "works along the batch dimension",
        };
        let place = [trace.string(op.module), trace.string(op.source)];
        let place = place
            .into_iter()
            .find(|text| !text.is_empty())
            .unwrap_or("the loss");
        return Some(format!("`{}` in `{place}` {how}", trace.string(op.name)));
    }
    if trace.meta.loss_reduction.is_empty() {
        return Some("how the loss reduces over the batch was not recognised".to_owned());
    }
    None
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

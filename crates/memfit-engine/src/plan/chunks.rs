//! What of a step is worth running in slices, and in how many.
//!
//! Responsible for finding a loss over many classes whose logits come straight from a linear layer, and for
//! the slice counts worth a capture each. Not responsible for what a step in slices does to memory: that is
//! captured, and what turns out not to run in slices is no alternative.

use super::{ActionKind, Class, Plan, PlanRequest, Verdict};
use crate::bytes::Bytes;
use crate::predict;
use crate::trace::{Category, Chunk, Op, OpIndex, Phase, Trace, ValueId};

/// Slice counts tried: a few, as matrix products are the faster the larger; and many, as what is left of
/// the logits is then small beside everything else.
const SLICES: [u64; 2] = [8, 32];
/// Rows below which a slice is too small to be worth its ops.
const LEAST_ROWS: u64 = 16;
/// Part of the peak that logits must be to be worth a capture.
const LEAST_PART: u64 = 100;
/// Ops between logits and loss, and between a weight and its product, at most.
const MOST_STEPS: usize = 16;

/// The ways of running a step in slices that are worth a capture each, in ascending number of slices.
///
/// # Errors
///
/// Why there is none, as a sentence without full stop.
pub fn chunks(trace: &Trace) -> Result<Vec<Chunk>, String> {
    if !trace.meta.training {
        return Err("the step does not train".to_owned());
    }
    let found = trace.ops[..trace.forward_end().index()]
        .iter()
        .filter(|op| trace.string(op.name).starts_with("aten._log_softmax."))
        .filter_map(|op| head(trace, op))
        .max_by_key(|head| head.logit_bytes);
    let Some(head) = found else {
        return Err("no loss takes its logits straight from a linear layer".to_owned());
    };
    let peak = predict::unplanned_peak(trace);
    if head.logit_bytes.0.saturating_mul(LEAST_PART) < peak.0 {
        return Err(format!(
            "the logits of `{}` are only {} of {peak}",
            head.weight, head.logit_bytes
        ));
    }
    let found: Vec<Chunk> = SLICES
        .into_iter()
        .filter(|slices| head.rows / slices >= LEAST_ROWS)
        .map(|slices| Chunk {
            slices,
            ..head.clone()
        })
        .collect();
    if found.is_empty() {
        return Err(format!(
            "the logits of `{}` have only {} rows",
            head.weight, head.rows
        ));
    }
    Ok(found)
}

/// Whether a plan may get better by a capture of the alternatives: `plan` is the one made without them, or
/// absent before any.
#[must_use]
pub fn wants_alternatives(trace: &Trace, request: &PlanRequest, plan: Option<&Plan>) -> bool {
    if trace.alternatives.is_some() || request.forbid.contains(&ActionKind::Chunk) {
        return false;
    }
    let may_help = match plan {
        None => request.allow >= Class::Equivalent,
        Some(plan) => plan.verdict == Verdict::DoesNotFit,
    };
    may_help && chunks(trace).is_ok()
}

/// The linear layer whose result a softmax takes.
fn head(trace: &Trace, softmax: &Op) -> Option<Chunk> {
    let logits = trace.values.get(softmax.reads.first()?.index())?;
    let product = producer(trace, *softmax.reads.first()?, |op| {
        PRODUCTS.iter().any(|name| is(trace, op, name))
    })?;
    let classes = *trace
        .values
        .get(product.outputs.first()?.index())?
        .shape
        .last()?;
    let weight = product
        .reads
        .iter()
        .find_map(|&read| parameter(trace, read, classes))?;
    let elements: u64 = logits.shape.iter().fold(1, |n, &s| n.saturating_mul(s));
    let size = trace.allocations[logits.allocation.index()].bytes;
    Some(Chunk {
        slices: 1,
        weight,
        rows: elements / classes.max(1),
        classes,
        logit_bytes: Bytes(size.0.max(elements)),
    })
}

/// Ops that multiply rows by a matrix.
const PRODUCTS: [&str; 5] = ["mm", "addmm", "bmm", "linear", "matmul"];
/// Ops that copy their argument, or select rows of it.
const COPIES: [&str; 4] = ["_to_copy", "clone", "index", "_unsafe_view"];

fn is(trace: &Trace, op: &Op, operator: &str) -> bool {
    trace
        .string(op.name)
        .strip_prefix("aten.")
        .and_then(|rest| rest.split('.').next())
        == Some(operator)
}

/// The op that made a value, seen through views and copies, if it is one of those wanted.
fn producer(trace: &Trace, mut value: ValueId, is_wanted: impl Fn(&Op) -> bool) -> Option<&Op> {
    let mut before = trace.forward_end().index();
    for _ in 0..MOST_STEPS {
        let made = (0..before).rev().find(|&index| {
            let op = &trace.ops[index];
            op.outputs.contains(&value) && op.phase == Phase::Forward
        })?;
        let op = &trace.ops[made];
        if is_wanted(op) {
            return Some(op);
        }
        if !op.view && !COPIES.iter().any(|name| is(trace, op, name)) {
            return None;
        }
        value = *op.reads.first()?;
        before = made;
    }
    None
}

/// The name of the parameter that a value shows or is a copy of, if it is a matrix over these classes.
fn parameter(trace: &Trace, value: ValueId, classes: u64) -> Option<String> {
    let shape = &trace.values[value.index()].shape;
    if shape.len() != 2 || !shape.contains(&classes) {
        return None;
    }
    let own = trace.allocation_of(value);
    let allocation = if trace.allocations[own.index()].category == Category::Parameter {
        own
    } else {
        let copy = producer(trace, value, |op| {
            let read = op.reads.first().map(|&read| trace.allocation_of(read));
            read.is_some_and(|read| trace.allocations[read.index()].category == Category::Parameter)
        })?;
        trace.allocation_of(*copy.reads.first()?)
    };
    let found = &trace.allocations[allocation.index()];
    let name = trace.string(found.name);
    let is_whole = found
        .natural
        .first()
        .is_some_and(|&(start, _)| start == OpIndex(0));
    (is_whole && !name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample::Builder;

    /// `log_softmax(float(view(x @ t(weight))))` over some rows, with something between product and loss.
    fn step(rows: u64, between: Option<&str>) -> Trace {
        let mut builder = Builder::new(rows);
        let weight = builder.allocation(&[100, 8], Category::Parameter, 0);
        let own = builder.trace.allocation_of(weight);
        builder.trace.allocations[own.index()].name = builder.string("head.weight");
        let input = builder.allocation(&[rows, 8], Category::Input, 0);
        let turned = builder.value(own, 0, &[8, 100]);
        let shape = [rows, 100];
        let forward = Phase::Forward;
        let mut logits = builder.op("aten.mm.default", forward, &[input, turned], &shape);
        if let Some(name) = between {
            logits = builder.op(name, forward, &[logits], &shape);
        }
        let wide = builder.op("aten._to_copy.default", forward, &[logits], &shape);
        builder.op("aten._log_softmax.default", forward, &[wide], &shape);
        builder.finish()
    }

    #[test]
    fn a_loss_over_the_product_with_a_parameter_is_found_through_copies() {
        let found = chunks(&step(512, Some("aten.clone.default"))).unwrap();
        let slices: Vec<u64> = found.iter().map(|chunk| chunk.slices).collect();
        assert_eq!(slices, SLICES);
        let first = &found[0];
        assert_eq!((first.rows, first.classes), (512, 100));
        assert_eq!(first.weight, "head.weight");
        assert_eq!(first.logit_bytes, Bytes(512 * 100 * 4));
    }

    #[test]
    fn what_cannot_be_sliced_is_named() {
        let capped = chunks(&step(512, Some("aten.tanh.default")));
        assert!(capped.unwrap_err().contains("straight from a linear layer"));
        assert!(
            chunks(&step(64, None))
                .unwrap_err()
                .contains("only 64 rows")
        );
        let mut still = step(512, None);
        still.meta.training = false;
        assert!(chunks(&still).unwrap_err().contains("does not train"));
        let mut small = step(512, None);
        small.allocations[1].bytes = Bytes(1 << 30);
        assert!(
            chunks(&small)
                .unwrap_err()
                .contains("are only 200.0 KiB of")
        );
    }

    #[test]
    fn few_rows_are_cut_into_fewer_slices() {
        let found = chunks(&step(256, None)).unwrap();
        assert_eq!(found.iter().map(|chunk| chunk.slices).max(), Some(8));
    }
}

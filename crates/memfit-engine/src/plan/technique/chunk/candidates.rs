//! What of a step is worth running in slices, and in how many.
//!
//! Responsible for finding a loss over many classes whose logits come straight from a linear layer, logits of inference of
//! which not all rows are used, module calls that widen rows they treat one by one, messages along edges that are summed
//! into nodes, and large images and scores of
//! attention of inference; and for the slice counts worth a capture each. Not responsible
//! for the proof that a call treats rows one by one (`row_proof.rs`), nor for what a step in slices does to memory:
//! that is captured, and what turns out not to run in slices is no alternative.

use super::row_proof::by_rows;
use crate::bytes::Bytes;
use crate::predict;
use crate::trace::{
    CallChunk, Category, Chunk, Edges, Head, LossChunk, Op, OpIndex, Phase, Region, Strips, Trace,
    ValueId,
};

/// Slice counts of a loss: a few, as matrix products are the faster the larger; and many, as what is left of
/// the logits is then small beside everything else.
const LOSS_SLICES: [u64; 2] = [8, 32];
/// Slices of a module call. A feed-forward network widens rows to four times their size: in four slices it
/// holds no more at a time than its input.
const CALL_SLICES: u64 = 4;
/// Rows below which a slice is too small to be worth its ops.
const LEAST_ROWS: u64 = 16;
/// Part of the peak that logits, or what a call makes, must be to be worth a capture.
const LEAST_PART: u64 = 100;
/// Strips of an image, or of the scores of attention.
const STRIPS: u64 = 16;
/// Part of the peak that a tensor must be to be put off.
const LEAST_PART_OF_STRIPS: u64 = 50;
/// Rows of an image below which strips are too low.
const LEAST_IMAGE_ROWS: u64 = 16;
/// Slices of edges: what is left of the messages is then small beside the nodes.
const EDGE_SLICES: u64 = 16;
/// Part of the peak that gathered rows must be to be put off.
const LEAST_PART_OF_EDGES: u64 = 50;
/// Ops between logits and loss, and between a weight and its product, at most.
const MOST_STEPS: usize = 16;
/// Ops of a call that is looked at, at most: a feed-forward network has about ten.
const MOST_OPS: usize = 128;

/// The ways of running a step in slices that are worth a capture each, from the least to the most in slices.
///
/// # Errors
///
/// Why there is none, as a sentence without full stop.
pub(in crate::plan) fn chunks(trace: &Trace) -> Result<Vec<Chunk>, String> {
    let peak = predict::unplanned_peak(trace);
    let calls = wide_calls(trace, peak);
    let of_loss = |loss| Chunk {
        loss: Some(loss),
        ..Chunk::default()
    };
    let heads = losses(trace, peak).map(|found| found.into_iter().map(of_loss).collect());
    let heads: Result<Vec<Chunk>, _> = heads.or_else(|reason| match used_rows(trace, peak) {
        Some(head) => Ok(vec![Chunk {
            head: Some(head),
            ..Chunk::default()
        }]),
        None if trace.meta.training => Err(reason),
        None => Err("no logits are computed of which few rows are used".to_owned()),
    });
    let strips = strips(trace, peak);
    let edges = edges(trace, peak);
    let mut chunks = match heads {
        Ok(heads) => heads,
        Err(_) if !calls.is_empty() || strips.is_some() || edges.is_some() => Vec::new(),
        Err(reason) if trace.meta.training => {
            return Err(format!(
                "{reason}, and no module call widens rows that it treats one by one"
            ));
        }
        Err(reason) => {
            return Err(format!(
                "{reason}, no module call widens rows that it treats one by one, and no image or score of attention \
                 is large enough"
            ));
        }
    };
    // Calls that are cut look at what they are given, so edges go without.
    if edges.is_some() {
        let most = chunks.last().cloned().unwrap_or_default();
        chunks.push(Chunk { edges, ..most });
    }
    if !calls.is_empty() {
        let mut most = chunks.last().cloned().unwrap_or_default();
        most.edges = None;
        chunks.push(Chunk { calls, ..most });
    }
    if strips.is_some() {
        let most = chunks.last().cloned().unwrap_or_default();
        chunks.push(Chunk { strips, ..most });
    }
    Ok(chunks)
}

/// Slices of edges, where a step gathers many rows and sums as many into fewer. What of it can be put off, the capture
/// shows.
fn edges(trace: &Trace, peak: Bytes) -> Option<Edges> {
    if !trace.meta.training {
        return None;
    }
    let least = (peak.0 / LEAST_PART_OF_EDGES).max(1);
    let forward = &trace.ops[..trace.forward_end().index()];
    let named = |op: &Op, names: &[&str]| names.iter().any(|name| is(trace, op, name));
    let is_large = |&value: &ValueId| {
        let bytes = trace.allocations[trace.allocation_of(value).index()].bytes;
        let rows = trace.values[value.index()].shape.first();
        bytes.0 >= least && rows.is_some_and(|&rows| rows / EDGE_SLICES >= LEAST_ROWS)
    };
    let mut gathers = forward.iter().filter(|op| named(op, &GATHERS));
    let is_worth = gathers.any(|op| op.outputs.iter().any(is_large));
    let is_summed = forward.iter().any(|op| named(op, &SUMS));
    (is_worth && is_summed).then(|| Edges {
        slices: EDGE_SLICES,
        least_bytes: Bytes(least),
        kept: Vec::new(),
    })
}

/// Strips, where a forward of inference convolves large images or multiplies large matrices item by item, as attention
/// does. What of it can be put off, the capture shows.
fn strips(trace: &Trace, peak: Bytes) -> Option<Strips> {
    if trace.meta.training {
        return None;
    }
    let least = (peak.0 / LEAST_PART_OF_STRIPS).max(1);
    let is_large = |&value: &ValueId| {
        let bytes = trace.allocations[trace.allocation_of(value).index()]
            .bytes
            .0;
        let rows = trace.values[value.index()].shape.iter().rev().nth(1);
        bytes >= least && rows.is_some_and(|&rows| rows >= LEAST_IMAGE_ROWS)
    };
    let takes_strips = |op: &&Op| is(trace, op, "convolution") || is(trace, op, "bmm");
    let mut takers = trace.ops.iter().filter(takes_strips);
    let is_worth = takers.any(|op| op.reads.iter().chain(&op.outputs).any(&is_large));
    let items = |op: &Op| {
        let image = op.outputs.first().map(|it| &trace.values[it.index()].shape);
        image.filter(|shape| shape.len() == 4).map(|shape| shape[0])
    };
    let convolutions = trace.ops.iter().filter(|op| is(trace, op, "convolution"));
    let items = convolutions.filter_map(items).max().unwrap_or(1).max(1);
    is_worth.then(|| Strips {
        strips: STRIPS,
        least_bytes: Bytes((least / items).max(1)),
        kept: Vec::new(),
    })
}

/// The largest product with a parameter in a forward of inference, where something looks at fewer of its rows. Whether
/// nothing looks at all of them, the capture shows.
fn used_rows(trace: &Trace, peak: Bytes) -> Option<Head> {
    if trace.meta.training {
        return None;
    }
    let sizes = trace.ops.iter().filter(|op| is_product(trace, op));
    let made = sizes.filter_map(|op| op.outputs.first().copied());
    let bytes = |value: ValueId| trace.allocations[trace.allocation_of(value).index()].bytes;
    let logits = made.max_by_key(|&value| bytes(value))?;
    let whole = &trace.values[logits.index()];
    let is_part = |value: &ValueId| {
        let value = &trace.values[value.index()];
        value.allocation == whole.allocation && value.numel() < whole.numel()
    };
    let returns = trace.meta.inference.iter().flat_map(|it| &it.returns);
    let mut seen = trace.ops.iter().flat_map(|op| &op.outputs).chain(returns);
    let is_large = bytes(logits).0.saturating_mul(LEAST_PART) >= peak.0;
    if !is_large || !seen.any(is_part) {
        return None;
    }
    let classes = *whole.shape.last()?;
    let product = trace.ops.iter().find(|op| op.outputs.contains(&logits))?;
    let mut reads = product.reads.iter();
    Some(Head {
        weight: reads.find_map(|&read| parameter(trace, read, classes))?,
        logit_bytes: bytes(logits),
    })
}

fn is_product(trace: &Trace, op: &Op) -> bool {
    PRODUCTS.iter().any(|name| is(trace, op, name))
}

/// The loss over many classes, in every number of slices that is tried.
fn losses(trace: &Trace, peak: Bytes) -> Result<Vec<LossChunk>, String> {
    let found = trace.ops[..trace.forward_end().index()]
        .iter()
        .filter(|op| trace.string(op.name).starts_with("aten._log_softmax."))
        .filter_map(|op| head(trace, op))
        .max_by_key(|head| head.logit_bytes);
    let Some(head) = found else {
        return Err("no loss takes its logits straight from a linear layer".to_owned());
    };
    if head.logit_bytes.0.saturating_mul(LEAST_PART) < peak.0 {
        return Err(format!(
            "the logits of `{}` are only {} of {peak}",
            head.weight, head.logit_bytes
        ));
    }
    let found: Vec<LossChunk> = LOSS_SLICES
        .into_iter()
        .filter(|slices| head.rows / slices >= LEAST_ROWS)
        .map(|slices| LossChunk {
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

/// The outermost module calls that treat rows one by one and make them wider on the way.
fn wide_calls(trace: &Trace, peak: Bytes) -> Vec<CallChunk> {
    let mut found = Vec::new();
    let mut done = OpIndex(0);
    for region in &trace.regions {
        if region.start < done || !is_worth_a_proof(trace, region, peak) {
            continue;
        }
        let Ok(proved) = by_rows(trace, region) else {
            continue;
        };
        let elements = |value: ValueId| trace.values[value.index()].numel();
        let widest = made_in(trace, region).map(elements).max();
        let given = elements(proved.input).max(elements(proved.output));
        if widest.is_none_or(|widest| widest <= given) {
            continue;
        }
        let shape = &trace.values[proved.input.index()].shape;
        if let Some((dim, slices)) = cut(shape) {
            found.push(CallChunk {
                module: trace.string(region.module).to_owned(),
                dim,
                slices,
                draws: proved.draws,
                ops: texts(trace, region),
            });
            done = region.end;
        }
    }
    found
}

/// The ops of a call with their arguments.
fn texts(trace: &Trace, region: &Region) -> Vec<String> {
    let ops = &trace.ops[region.start.index()..region.end.index()];
    let text = |op: &Op| format!("{} {}", trace.string(op.name), trace.string(op.arguments));
    ops.iter()
        .map(|op| text(op).trim_end().to_owned())
        .collect()
}

/// Whether a call of a module that is called once makes enough, in few enough ops.
fn is_worth_a_proof(trace: &Trace, region: &Region, peak: Bytes) -> bool {
    let ops = region.end.index().saturating_sub(region.start.index());
    let calls = trace
        .regions
        .iter()
        .filter(|other| other.module == region.module);
    let made: Bytes = made_in(trace, region)
        .map(|value| trace.allocations[trace.allocation_of(value).index()].bytes)
        .sum();
    region.end <= trace.forward_end()
        && !trace.string(region.module).is_empty()
        && (1..=MOST_OPS).contains(&ops)
        && made.0.saturating_mul(LEAST_PART) >= peak.0
        && calls.count() == 1
}

/// What the ops of a call allocate.
fn made_in(trace: &Trace, region: &Region) -> impl Iterator<Item = ValueId> {
    let ops = &trace.ops[region.start.index()..region.end.index()];
    (region.start.0..).zip(ops).flat_map(move |(index, op)| {
        let is_fresh = move |output: &&ValueId| {
            let allocation = trace.allocation_of(**output);
            trace.allocations[allocation.index()].producer == Some(OpIndex(index))
        };
        op.outputs.iter().filter(is_fresh).copied()
    })
}

/// Which dimension to cut, and into how many slices: the first if it is long enough, since its slices are
/// contiguous; else the longest.
fn cut(shape: &[u64]) -> Option<(u64, u64)> {
    let (_, lead) = shape.split_last()?;
    let rows: u64 = lead.iter().product();
    if rows / CALL_SLICES < LEAST_ROWS {
        return None;
    }
    let size = *lead.iter().max()?;
    let longest = lead.iter().position(|&other| other == size)?;
    let (dim, size) = if lead[0] >= CALL_SLICES {
        (0, lead[0])
    } else {
        (u64::try_from(longest).ok()?, size)
    };
    (size > 1).then_some((dim, size.min(CALL_SLICES)))
}

/// The linear layer whose result a softmax takes.
fn head(trace: &Trace, softmax: &Op) -> Option<LossChunk> {
    let logits = trace.values.get(softmax.reads.first()?.index())?;
    let product = producer(trace, *softmax.reads.first()?, |op| is_product(trace, op))?;
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
    Some(LossChunk {
        slices: 1,
        weight,
        rows: elements / classes.max(1),
        classes,
        logit_bytes: Bytes(size.0.max(elements)),
    })
}

/// Ops that multiply rows by a matrix.
const PRODUCTS: [&str; 5] = ["mm", "addmm", "bmm", "linear", "matmul"];
/// Ops that gather a row for each edge.
const GATHERS: [&str; 2] = ["index_select", "index"];
/// Ops that sum rows into nodes.
const SUMS: [&str; 8] = [
    "index_add",
    "index_add_",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "scatter_reduce_",
    "index_put",
    "index_put_",
];
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
    use crate::trace::Inference;
    use crate::trace::sample::{Builder, loss_over_classes as step};

    #[test]
    fn a_loss_over_the_product_with_a_parameter_is_found_through_copies() {
        let found = chunks(&step(512, Some("aten.clone.default"))).unwrap();
        let slices: Vec<u64> = found.iter().map(Chunk::slices).collect();
        assert_eq!(slices, LOSS_SLICES);
        let first = found[0].loss.as_ref().unwrap();
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
        assert_eq!(found.iter().map(Chunk::slices).max(), Some(8));
    }

    #[test]
    fn logits_of_which_few_rows_are_used_are_found() {
        let mut trace = step(512, Some("aten.tanh.default"));
        trace.meta.training = false;
        let reason = chunks(&trace).unwrap_err();
        assert!(reason.contains("few rows are used"), "{reason}");
        // Something looks at the last row.
        let logits = trace.ops[0].outputs[0];
        let mut last = trace.values[logits.index()].clone();
        last.shape[0] = 1;
        trace.values.push(last);
        let value = ValueId(u32::try_from(trace.values.len() - 1).unwrap());
        trace.meta.inference = Some(Inference {
            returns: vec![value],
            is_model_call: true,
            has_graph: false,
        });
        let found = chunks(&trace).unwrap();
        let [
            Chunk {
                head: Some(head), ..
            },
        ] = found.as_slice()
        else {
            panic!("{found:?}")
        };
        assert_eq!(head.weight, "head.weight");
        assert_eq!(head.logit_bytes, Bytes(512 * 100 * 4));
    }

    /// A convolution of images of inference, so many of so many rows.
    fn images(count: u64, rows: u64) -> Trace {
        let mut builder = Builder::new(count);
        builder.trace.meta.training = false;
        let shape = [count, 8, rows, 64];
        let weight = builder.allocation(&[8, 8, 3, 3], Category::Parameter, 0);
        let input = builder.allocation(&shape, Category::Input, 0);
        let given = [input, weight];
        builder.op("aten.convolution.default", Phase::Forward, &given, &shape);
        builder.finish()
    }

    #[test]
    fn large_images_of_inference_are_made_in_strips() {
        let of =
            |trace: &Trace| chunks(trace).map(|mut found| found.pop().unwrap().strips.unwrap());
        let one = of(&images(1, 64)).unwrap();
        assert_eq!((one.strips, one.kept), (STRIPS, Vec::new()));
        // Of one item, so that a batch of another size runs the same ops.
        assert!(of(&images(4, 64)).unwrap().least_bytes <= Bytes(one.least_bytes.0 + 1));
        let mut trains = images(1, 64);
        trains.meta.training = true;
        let low = images(1, LEAST_IMAGE_ROWS - 1);
        for trace in [trains, low] {
            assert!(chunks(&trace).is_err(), "{:?}", trace.meta.training);
        }
        assert!(chunks(&images(1, 8)).unwrap_err().contains("no image"));
    }

    /// A step that gathers a row of 16 for each of so many edges, and adds them up for eight nodes by an op.
    fn messages(edges: u64, sum: &str) -> Trace {
        let mut builder = Builder::new(1);
        let nodes = builder.allocation(&[8, 16], Category::Input, 0);
        let index = builder.allocation(&[edges], Category::Input, 0);
        let gather = "aten.index.Tensor";
        let rows = builder.op(gather, Phase::Forward, &[nodes, index], &[edges, 16]);
        builder.op(sum, Phase::Forward, &[nodes, index, rows], &[8, 16]);
        builder.finish()
    }

    #[test]
    fn messages_of_many_edges_that_are_summed_into_nodes_are_found() {
        let of = |edges, sum| chunks(&messages(edges, sum)).map(|mut found| found.pop().unwrap());
        for sum in ["aten.index_add.default", "aten.scatter_add_.default"] {
            let found = of(512, sum).unwrap();
            let edges = found.edges.as_ref().unwrap();
            assert_eq!(found.slices(), EDGE_SLICES);
            assert!(edges.kept.is_empty() && edges.least_bytes <= Bytes(512 * 64 / 32));
        }
        assert!(of(512, "aten.relu.default").is_err(), "nothing sums them");
        assert!(of(EDGE_SLICES * LEAST_ROWS - 1, "aten.index_add.default").is_err());
        let mut infers = messages(512, "aten.index_add.default");
        infers.meta.training = false;
        assert!(chunks(&infers).is_err());
    }
}

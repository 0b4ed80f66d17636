//! Op times of one way of running a step, from those of another.
//!
//! Responsible for which op of the one is an op of the other, and for the time of one that is none. Not
//! responsible for times of a batch of another size ([`super::Costs::scaled`]): there the ops are the same.

use std::collections::{BTreeMap, VecDeque};

use crate::trace::{Op, Phase, Trace};

/// What makes two ops of two traces the same op: name, module, phase and the shapes read.
type Key<'t> = (&'t str, &'t str, Phase, Vec<&'t [u64]>);

/// Seconds of each op of `to`, where those of `from` took `seconds`. One that computes in another type takes them by
/// the rates of both in `flops_per_second`, where those are known.
pub(super) fn seconds(
    from: &Trace,
    seconds: &[f64],
    flops_per_second: &BTreeMap<String, f64>,
    to: &Trace,
) -> Vec<f64> {
    // In seconds of float32: the one rate for all of a timed step.
    let slowness = |trace: &Trace, op: &Op| {
        let rates = flops_per_second;
        let (plain, own) = (rates.get("float32"), rates.get(computed_in(trace, op)));
        match (op.flops > 0, plain, own) {
            (true, Some(plain), Some(own)) => plain / own,
            _ => 1.0,
        }
    };
    let mut known: BTreeMap<Key<'_>, VecDeque<f64>> = BTreeMap::new();
    let mut rates = Rates::default();
    for (op, &seconds) in from.ops.iter().zip(seconds) {
        let seconds = seconds / slowness(from, op);
        known.entry(key(from, op)).or_default().push_back(seconds);
        rates.add(from, op, seconds);
    }
    let times = to.ops.iter().map(|op| {
        let same = known.get_mut(&key(to, op)).and_then(VecDeque::pop_front);
        same.unwrap_or_else(|| rates.seconds(to, op)) * slowness(to, op)
    });
    times.collect()
}

fn key<'t>(trace: &'t Trace, op: &Op) -> Key<'t> {
    let shapes = op
        .reads
        .iter()
        .map(|&read| trace.values[read.index()].shape.as_slice());
    (
        trace.string(op.name),
        trace.string(op.module),
        op.phase,
        shapes.collect(),
    )
}

/// Work done and the time it took.
#[derive(Debug, Clone, Copy, Default)]
struct Rate {
    work: f64,
    seconds: f64,
}

impl Rate {
    fn add(&mut self, work: f64, seconds: f64) {
        self.work += work;
        self.seconds += seconds;
    }

    /// Seconds of so much work; `None` where none was timed.
    fn seconds(self, work: f64) -> Option<f64> {
        (self.work > 0.0).then(|| work * self.seconds / self.work)
    }
}

/// Rates of a timed step.
#[derive(Debug, Default)]
struct Rates<'t> {
    /// Of ops that compute, by longest dimension and name: a slice of a product over many classes keeps it.
    compute: BTreeMap<(u64, &'t str), Rate>,
    compute_by_longest: BTreeMap<u64, Rate>,
    all_compute: Rate,
    /// Of ops that move bytes, by name: one that draws random numbers is no copy.
    moving: BTreeMap<&'t str, Rate>,
    all_moving: Rate,
    /// By the number of ops that do next to nothing: views, and what moves little.
    dispatch: Rate,
}

impl<'t> Rates<'t> {
    fn add(&mut self, trace: &'t Trace, op: &Op, seconds: f64) {
        let (name, work) = (trace.string(op.name), work_of(op));
        if op.flops > 0 {
            let longest = longest(trace, op);
            let alike = self.compute.entry((longest, name));
            alike.or_default().add(work, seconds);
            let near = self.compute_by_longest.entry(longest);
            near.or_default().add(work, seconds);
            self.all_compute.add(work, seconds);
        } else if is_slight(op) {
            self.dispatch.add(1.0, seconds);
        } else {
            self.moving.entry(name).or_default().add(work, seconds);
            self.all_moving.add(work, seconds);
        }
    }

    fn seconds(&self, trace: &Trace, op: &Op) -> f64 {
        let dispatch = self.dispatch.seconds(1.0).unwrap_or(0.0);
        if is_slight(op) {
            return dispatch;
        }
        let name = trace.string(op.name);
        let rate = if op.flops > 0 {
            let longest = longest(trace, op);
            let alike = self.compute.get(&(longest, name));
            let near = alike.or_else(|| self.compute_by_longest.get(&longest));
            near.copied().unwrap_or(self.all_compute)
        } else {
            let alike = self.moving.get(name);
            alike.copied().unwrap_or(self.all_moving)
        };
        rate.seconds(work_of(op)).unwrap_or(0.0).max(dispatch)
    }
}

/// Whether an op says more about dispatch than about a rate.
fn is_slight(op: &Op) -> bool {
    op.flops == 0 && (op.view || op.moved_bytes.0 <= SMALL)
}

/// Most bytes that an op without FLOPs moves to be one.
const SMALL: u64 = 1 << 16;

#[expect(clippy::cast_precision_loss, reason = "a ratio")]
fn work_of(op: &Op) -> f64 {
    if op.flops > 0 {
        op.flops as f64
    } else {
        op.moved_bytes.as_f64()
    }
}

/// The longest dimension of what an op reads or makes: that of the classes, for the products of a head.
fn longest(trace: &Trace, op: &Op) -> u64 {
    let values = op.reads.iter().chain(&op.outputs);
    let sizes = values.flat_map(|&value| trace.values[value.index()].shape.iter().copied());
    sizes.max().unwrap_or(0)
}

/// The element type that an op with FLOPs computes in, by which its rate is known: that of what it makes. Products of
/// 8 bits make sums of 32.
pub(super) fn computed_in<'t>(trace: &'t Trace, op: &Op) -> &'t str {
    if trace.string(op.name).contains("_int_mm") {
        return "int8";
    }
    let made = op.outputs.first();
    made.map_or("", |value| trace.string(trace.values[value.index()].dtype))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::ValueId;
    use crate::trace::sample::Builder;

    /// Rows in slices times a matrix, then something that both steps have.
    fn head(slices: u64) -> Trace {
        let mut builder = Builder::new(8);
        let weight = builder.allocation(&[4, 1000], crate::trace::Category::Parameter, 0);
        let input = builder.allocation(&[8, 4], crate::trace::Category::Input, 0);
        let rows = 8 / slices;
        let mut last: ValueId = input;
        for _ in 0..slices {
            let part = builder.value(builder.trace.allocation_of(input), 0, &[rows, 4]);
            last = builder.op(
                "aten.mm.default",
                Phase::Forward,
                &[part, weight],
                &[rows, 1000],
            );
            builder.trace.ops.last_mut().unwrap().flops = rows * 8000;
        }
        builder.op("aten.sum.default", Phase::Forward, &[last], &[]);
        builder.op("aten.exp.default", Phase::Forward, &[weight], &[4, 1000]);
        builder.finish()
    }

    #[test]
    fn a_product_in_slices_takes_its_time_in_parts_and_what_stays_takes_its_own() {
        let (whole, parts) = (head(1), head(4));
        let times = seconds(&whole, &[8.0, 1.0, 0.5], &BTreeMap::new(), &parts);
        assert_eq!(times.len(), 6);
        assert!(times[..4].iter().all(|time| (time - 2.0).abs() < 1e-12));
        assert!((times[5] - 0.5).abs() < 1e-12);
    }

    /// Random numbers and a sum of some tensors of so many rows each, then views of them.
    fn moves(parts: u64) -> Trace {
        let mut builder = Builder::new(8);
        for _ in 0..parts {
            let shape = [(8 << 10) / parts, 16];
            let input = builder.allocation(&shape, crate::trace::Category::Input, 0);
            let drawn = builder.op("aten.bernoulli.default", Phase::Forward, &[input], &shape);
            let sum = builder.op("aten.add.Tensor", Phase::Forward, &[drawn, input], &shape);
            builder.op("aten.view.default", Phase::Forward, &[sum], &shape);
            builder.trace.ops.last_mut().unwrap().view = true;
        }
        builder.finish()
    }

    #[test]
    fn each_kind_of_op_keeps_its_rate_and_a_view_its_dispatch() {
        let (whole, parts) = (moves(1), moves(2));
        let times = seconds(&whole, &[6.0, 1.0, 0.01], &BTreeMap::new(), &parts);
        assert_eq!(times, [3.0, 0.5, 0.01].repeat(2));
    }

    #[test]
    fn what_moves_next_to_nothing_takes_what_dispatch_takes() {
        let (whole, parts) = (moves(1), moves(1 << 10));
        let times = seconds(&whole, &[6.0, 1.0, 0.01], &BTreeMap::new(), &parts);
        assert_eq!(times, [0.01; 3].repeat(1 << 10));
    }

    #[test]
    fn the_same_step_keeps_its_times() {
        let trace = crate::trace::sample::chain();
        let times: Vec<f64> = (1..=9).map(f64::from).collect();
        assert_eq!(seconds(&trace, &times, &BTreeMap::new(), &trace), times);
    }

    #[test]
    fn a_product_in_a_type_with_another_rate_takes_its_time_by_both() {
        let whole = head(1);
        let mut half = whole.clone();
        let product = half.ops[0].outputs[0];
        let bfloat16 = u32::try_from(half.strings.len()).unwrap();
        half.strings.push("bfloat16".to_owned());
        half.values[product.index()].dtype = bfloat16;
        let rates =
            [("float32", 1e9), ("bfloat16", 4e9)].map(|(name, rate)| (name.to_owned(), rate));
        let times = seconds(&whole, &[8.0, 1.0, 0.5], &BTreeMap::from(rates), &half);
        assert_eq!(times, [2.0, 1.0, 0.5]);
        let unknown = seconds(&whole, &[8.0, 1.0, 0.5], &BTreeMap::new(), &half);
        assert_eq!(unknown, [8.0, 1.0, 0.5]);
    }
}

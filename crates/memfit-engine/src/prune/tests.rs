//! Groups of small steps that are written out by hand.

use crate::prune::{Request, Separation, separate};
use crate::trace::sample::Builder;
use crate::trace::{Category, OpIndex, Phase, Region, ValueId};

/// A step being written; shapes are contiguous unless said.
struct Step(Builder);

impl Step {
    fn new() -> Self {
        Self(Builder::new(2))
    }

    fn parameter(&mut self, name: &str, shape: &[u64]) -> ValueId {
        let value = self.0.allocation(shape, Category::Parameter, 0);
        let name = self.0.string(name);
        let allocation = self.0.trace.allocation_of(value).index();
        self.0.trace.allocations[allocation].name = name;
        self.contiguous(value)
    }

    fn input(&mut self, shape: &[u64]) -> ValueId {
        let value = self.0.allocation(shape, Category::Input, 0);
        self.contiguous(value)
    }

    fn op(&mut self, name: &str, reads: &[ValueId], shape: &[u64]) -> ValueId {
        let value = self.0.op(name, Phase::Forward, reads, shape);
        self.contiguous(value)
    }

    fn op_with(
        &mut self,
        name: &str,
        arguments: &str,
        reads: &[ValueId],
        shape: &[u64],
    ) -> ValueId {
        let value = self.op(name, reads, shape);
        let arguments = self.0.string(arguments);
        self.0.trace.ops.last_mut().unwrap().arguments = arguments;
        value
    }

    fn contiguous(&mut self, value: ValueId) -> ValueId {
        let value_of = &mut self.0.trace.values[value.index()];
        let mut stride = 1;
        for (at, size) in value_of.shape.iter().enumerate().rev() {
            value_of.stride[at] = stride;
            stride *= i64::try_from(*size).unwrap();
        }
        value
    }

    /// A view: an op that computes nothing.
    fn view(&mut self, of: ValueId, offset: u64, shape: &[u64], stride: &[i64]) -> ValueId {
        let allocation = self.0.trace.allocation_of(of);
        let value = self.0.value(allocation, 0, shape);
        self.0.trace.values[value.index()].offset = offset;
        self.0.trace.values[value.index()].stride = stride.to_vec();
        self.0
            .push("aten.view.default", Phase::Forward, &[of], &[], &[value]);
        self.0.trace.ops.last_mut().unwrap().view = true;
        value
    }

    /// A linear layer without bias, on rows.
    fn linear(&mut self, name: &str, input: ValueId, ins: u64, outs: u64) -> ValueId {
        let rows = self.0.trace.values[input.index()].shape[0];
        let weight = self.parameter(name, &[outs, ins]);
        let across = i64::try_from(ins).unwrap();
        let turned = self.view(weight, 0, &[ins, outs], &[1, across]);
        self.op("aten.mm.default", &[input, turned], &[rows, outs])
    }

    /// Ends the model at the last op, whose output is read once more.
    fn end(mut self, output: ValueId) -> Self {
        let end = OpIndex(u32::try_from(self.0.trace.ops.len()).unwrap());
        self.0.trace.regions.push(Region {
            module: 0,
            class: 0,
            call: 0,
            start: OpIndex(0),
            end,
        });
        let allocation = self.0.trace.allocation_of(output).index();
        self.op("aten.mse_loss.default", &[output], &[]);
        self.0.trace.allocations[allocation].natural =
            vec![(OpIndex(end.0 - 1), OpIndex(end.0 + 1))];
        self
    }

    fn separate(&self, stays: &[usize]) -> Separation {
        separate(
            &self.0.trace,
            &Request {
                through_norms: false,
                stays: stays.to_vec(),
            },
        )
    }
}

/// For each group, how many channels, and for each member its name, dimension, unit and the positions of channel 1.
fn told(found: &Separation) -> Vec<String> {
    let members = |members: &[crate::prune::Member]| {
        let one = |it: &crate::prune::Member| {
            format!(
                "{}.{} unit {} at {:?}",
                it.name, it.dimension, it.unit, it.positions[1]
            )
        };
        members.iter().map(one).collect::<Vec<_>>().join("; ")
    };
    let groups = found.groups.iter();
    groups
        .map(|it| format!("{}: {}", it.channels, members(&it.members)))
        .collect()
}

fn two_layers() -> Step {
    let mut step = Step::new();
    let input = step.input(&[5, 3]);
    let hidden = step.linear("fc1", input, 3, 8);
    let active = step.op("aten.gelu.default", &[hidden], &[5, 8]);
    let output = step.linear("fc2", active, 8, 4);
    step.end(output)
}

#[test]
fn a_hidden_dimension_is_a_group_and_the_ends_stay() {
    let step = two_layers();
    let found = step.separate(&[]);
    assert_eq!(
        told(&found),
        ["8: fc1.0 unit 1 at [1]; fc2.1 unit 1 at [1]"]
    );
    let whys: Vec<_> = found
        .stays
        .iter()
        .map(|it| (it.why.as_str(), &it.parameters[..]))
        .collect();
    assert_eq!(whys.len(), 2);
    assert_eq!(whys[0].1, ["fc1"]);
    assert_eq!(whys[1], ("the model returns it", &["fc2".to_owned()][..]));
}

#[test]
fn an_op_without_a_rule_has_its_dimensions_stay() {
    let mut step = Step::new();
    let input = step.input(&[5, 3]);
    let hidden = step.linear("fc1", input, 3, 8);
    let sorted = step.op("aten.sort.default", &[hidden], &[5, 8]);
    let output = step.linear("fc2", sorted, 8, 4);
    let found = step.end(output).separate(&[]);
    assert!(found.groups.is_empty());
    assert!(
        found
            .stays
            .iter()
            .any(|it| it.why.starts_with("`sort` is not understood"))
    );
}

#[test]
fn what_was_tried_stays() {
    let step = two_layers();
    let gelu = 2;
    assert!(step.separate(&[gelu]).groups.is_empty());
    assert_eq!(
        step.separate(&[usize::MAX]).groups.len(),
        1,
        "an op that there is not is passed over"
    );
}

/// `q`, `k` and `v` of three heads of four in one product, split and laid out by heads.
fn packed_heads() -> Step {
    let mut step = Step::new();
    let input = step.input(&[5, 12]);
    let packed = step.linear("qkv", input, 12, 36);
    let heads = |step: &mut Step, which: u64| {
        step.view(packed, 12 * which, &[1, 3, 5, 4], &[180, 4, 36, 1])
    };
    let (q, k, v) = (
        heads(&mut step, 0),
        heads(&mut step, 1),
        heads(&mut step, 2),
    );
    let name = "aten._scaled_dot_product_flash_attention_for_cpu.default";
    let mixed = step.op(name, &[q, k, v], &[1, 3, 5, 4]);
    step.0.trace.values[mixed.index()].stride = vec![60, 4, 12, 1];
    let rows = step.view(mixed, 0, &[5, 12], &[12, 1]);
    let output = step.linear("out", rows, 12, 12);
    step.end(output)
}

#[test]
fn a_head_goes_whole_with_its_rows_of_all_three() {
    let found = packed_heads().separate(&[]);
    assert_eq!(
        told(&found),
        ["3: qkv.0 unit 4 at [1, 4, 7]; out.1 unit 4 at [1]"]
    );
}

#[test]
fn channels_keep_their_places_in_what_is_concatenated() {
    let mut step = Step::new();
    let input = step.input(&[5, 3]);
    let first = step.linear("first", input, 3, 4);
    let second = step.linear("second", input, 3, 6);
    let both = step.op_with("aten.cat.default", "dim=1", &[first, second], &[5, 10]);
    let output = step.linear("out", both, 10, 2);
    let found = step.end(output).separate(&[]);
    let first = "4: first.0 unit 1 at [1]; out.1 unit 1 at [1]";
    let second = "6: second.0 unit 1 at [1]; out.1 unit 1 at [5]";
    assert_eq!(told(&found), [first, second]);
}

#[test]
fn another_step_than_meant_is_named() {
    let (step, found) = (two_layers(), two_layers().separate(&[]));
    let trace = &step.0.trace;
    assert_eq!(found.deviation(trace, &[vec![]], trace), None);
    let product = 1;
    assert_eq!(
        found.deviation(trace, &[vec![0]], trace),
        Some(product),
        "nothing went"
    );
    let mut again = trace.clone();
    again.ops.truncate(3);
    assert_eq!(
        found.deviation(trace, &[vec![]], &again),
        Some(4),
        "an op is missing"
    );
}

const SIZES: [u64; 7] = [0, 1, 2, 3, 12, 36, u64::MAX];
const STRIDES: [i64; 7] = [-1, 0, 1, 4, 5, 12, i64::MAX];
const NAMES: [&str; 12] = [
    "aten.convolution.default",
    "aten.addmm.default",
    "aten.native_layer_norm.default",
    "aten.native_group_norm.default",
    "aten.mean.dim",
    "aten._softmax.default",
    "aten.cat.default",
    "aten.stack.default",
    "aten.embedding.default",
    "aten.constant_pad_nd.default",
    "aten.avg_pool2d.default",
    "_",
];
const ARGUMENTS: [&str; 5] = [
    "",
    "dim=-1, keepdim=True, groups=3, group=4, normalized_shape=[12], pad=[1,1]",
    "dim=[0,-9], groups=0, group=0, normalized_shape=[], transposed=True",
    "dim=x, groups=-1, pad=[1",
    "dim=[0], groups=18446744073709551615, group=18446744073709551615",
];

proptest::proptest! {
    #[test]
    fn no_trace_makes_it_panic(
        values in proptest::collection::vec((0_usize..64, 0_usize..4, 0_usize..7, 0_usize..7), 0..6),
        ops in proptest::collection::vec((0_usize..16, 0_usize..12, 0_usize..5), 0..4),
        through_norms: bool,
    ) {
        let mut trace = packed_heads().0.trace;
        for (at, dimension, size, stride) in values {
            let count = trace.values.len();
            let value = &mut trace.values[at % count];
            if dimension < value.shape.len() {
                value.shape[dimension] = SIZES[size];
                value.stride[dimension] = STRIDES[stride];
            } else {
                value.offset = SIZES[size];
                value.shape.pop();
                value.stride.pop();
            }
        }
        for (at, name, arguments) in ops {
            let first = u32::try_from(trace.strings.len()).unwrap();
            trace.strings.extend([NAMES[name].to_owned(), ARGUMENTS[arguments].to_owned()]);
            let count = trace.ops.len();
            let op = &mut trace.ops[at % count];
            (op.name, op.arguments, op.view) = (first, first + 1, false);
        }
        let found = separate(&trace, &Request { through_norms, stays: vec![0] });
        for group in &found.groups {
            for member in &group.members {
                proptest::prop_assert_eq!(member.positions.len(), group.channels);
            }
        }
        let removed: Vec<_> = found.groups.iter().map(|_| vec![0, usize::MAX]).collect();
        let _ = found.deviation(&trace, &removed, &trace);
    }
}

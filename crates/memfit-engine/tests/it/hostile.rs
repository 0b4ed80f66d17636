//! Traces that pass the check but make no sense: predicted and planned without a panic.

use std::collections::BTreeMap;

use memfit_engine::bytes::{Budget, Bytes};
use memfit_engine::cost::{CostSource, DeviceProfile};
use memfit_engine::plan::{PlanRequest, plan};
use memfit_engine::predict::{PredictRequest, predict};
use memfit_engine::trace::{
    Allocation, AllocationId, Category, Coupling, CouplingKind, Law, Meta, Op, OpIndex,
    ParameterUpdate, Phase, Region, SavedTensor, Trace, Value, ValueId,
};
use proptest::prelude::*;

const OPS: u32 = 12;
const VALUES: u32 = 14;
const ALLOCATIONS: u32 = 9;

fn values() -> impl Strategy<Value = Vec<ValueId>> {
    prop::collection::vec((0..VALUES).prop_map(ValueId), 0..4)
}

fn position() -> impl Strategy<Value = OpIndex> {
    (0..=OPS).prop_map(OpIndex)
}

fn allocation() -> impl Strategy<Value = Allocation> {
    let size = prop_oneof![8 => 0_u64..100, 1 => Just(1 << 55)];
    let ranges = prop::collection::btree_set(0..=OPS, 0..5);
    let category = prop_oneof![
        Just(Category::Parameter),
        Just(Category::Gradient),
        Just(Category::Activation),
        Just(Category::Input),
    ];
    let law = prop::option::of((any::<i64>(), any::<i64>()));
    (size, category, prop::option::of(0..OPS), ranges, law).prop_map(
        |(bytes, category, producer, ranges, law)| {
            let edges: Vec<u32> = ranges
                .into_iter()
                .filter(|&p| Some(p) >= producer)
                .collect();
            let natural = edges
                .chunks_exact(2)
                .map(|c| (OpIndex(c[0]), OpIndex(c[1])))
                .collect();
            Allocation {
                bytes: Bytes(bytes),
                device: 0,
                category,
                producer: producer.map(OpIndex),
                natural,
                name: 0,
                law: law.map(|(fixed, per_item)| Law { fixed, per_item }),
            }
        },
    )
}

fn value() -> impl Strategy<Value = Value> {
    let shape = prop::collection::vec(prop_oneof![0_u64..9, Just(u64::MAX)], 0..3);
    (
        0..ALLOCATIONS,
        0_u32..4,
        shape,
        prop::collection::vec(any::<i64>(), 0..3),
    )
        .prop_map(|(allocation, version, shape, shape_per_item)| Value {
            allocation: AllocationId(allocation),
            version,
            offset: 0,
            stride: vec![1; shape.len()],
            shape,
            dtype: 0,
            shape_per_item,
        })
}

fn op(phase: Phase) -> impl Strategy<Value = Op> {
    let bytes = prop_oneof![9 => 0_u64..50, 1 => Just(1 << 54)];
    (
        values(),
        values(),
        values(),
        bytes,
        any::<bool>(),
        any::<i64>(),
        0_u32..3,
    )
        .prop_map(
            move |(reads, writes, outputs, bytes, replayable, rate, name)| Op {
                name,
                phase,
                module: 0,
                source: 0,
                arguments: 3,
                arguments_vary: false,
                node: None,
                reads,
                writes,
                outputs,
                flops: bytes,
                moved_bytes: Bytes(bytes),
                flops_per_item: rate,
                moved_bytes_per_item: rate,
                workspace_per_item: Some(rate),
                workspace_bytes: Bytes(bytes / 3),
                random: false,
                view: false,
                replayable,
                shape_only: !replayable,
            },
        )
}

fn saved() -> impl Strategy<Value = SavedTensor> {
    (0..VALUES, position(), position(), position(), any::<bool>()).prop_map(
        |(value, a, b, c, asked)| {
            let mut order = [a, b, c];
            order.sort_unstable();
            let [pack, unpack, release] = order;
            let unpack = asked.then_some(unpack);
            SavedTensor {
                value: ValueId(value),
                node: 0,
                pack,
                unpack,
                release,
            }
        },
    )
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    (1..OPS, 0..OPS).prop_flat_map(|(forward, backward)| {
        let phase = move |i: u32| match i {
            i if i < forward => Phase::Forward,
            i if i < forward + backward => Phase::Backward,
            _ => Phase::Optimizer,
        };
        (0..OPS).map(|i| op(phase(i))).collect::<Vec<_>>()
    })
}

prop_compose! {
    fn traces()(
        allocations in prop::collection::vec(allocation(), ALLOCATIONS as usize),
        values in prop::collection::vec(value(), VALUES as usize),
        ops in ops(),
        saved in prop::collection::vec(saved(), 0..8),
        updates in prop::collection::vec((0..ALLOCATIONS, 0..ALLOCATIONS, position()), 0..4),
        batch in prop_oneof![0_u64..20, Just(u64::MAX)],
        coupled in any::<bool>(),
    ) -> Trace {
        let update = |(parameter, gradient, ready)| ParameterUpdate {
            parameter: AllocationId(parameter),
            gradient: AllocationId(gradient),
            ready,
            temporary_bytes: Bytes(u64::from(parameter) << 50),
            moved_bytes: Bytes(1),
            state: vec![AllocationId(gradient), AllocationId(parameter)],
        };
        let coupling = Coupling { op: OpIndex(0), kind: CouplingKind::Along };
        let region = |start, end| Region {
            module: 3, class: 0, call: 0, start: OpIndex(start), end: OpIndex(end),
        };
        Trace {
            meta: Meta {
                target: String::new(),
                torch_version: String::new(),
                device_kind: "cpu".into(),
                optimizer: "SGD".into(),
                batch,
                second_batch: 1,
                training: true,
                captured: "fake".into(),
                probe_threads: 1,
                probed_batch: 3,
                fused_optimizer_refusal: None,
            micro_batch_refusal: None,
            per_parameter_refusal: None,
            eight_bit_refusal: None,
            half_parameters: false,
            offloaded_parameters_refusal: None,
                loss_reduction: "mean".into(),
                fixed_parameters: Vec::new(),
                inference: None,
                checkpoints: None,
                notes: Vec::new(),
            },
            devices: vec!["cpu".into()],
            strings: vec![String::new(), "aten.index.Tensor".into(), "aten.sort".into(), "layer.1 dim=-9".into()],
            allocations,
            values,
            ops,
            saved,
            regions: vec![region(0, 3), region(3, 7)],
            updates: updates.into_iter().map(update).collect(),
            couplings: Some(if coupled { vec![coupling] } else { Vec::new() }),
            alternatives: None,
            pieces: Vec::new(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]
    #[test]
    fn nonsense_that_passes_the_check_panics_nowhere(trace in traces(), percent in 1_u32..120) {
        prop_assume!(trace.check().is_ok());
        let request = PredictRequest { batch: Some(7), budget: Some(Budget::Absolute(Bytes(1000))), gpu: None };
        let _ = predict(&trace, &request);
        let prediction = predict(&trace, &PredictRequest::default()).unwrap();
        prop_assert!(prediction.interval_bytes.0 <= prediction.interval_bytes.1);
        let _ = trace.clone().with_second(&trace.at_batch(2).unwrap_or_else(|_| trace.clone()));
        let profile = DeviceProfile {
            name: "test".into(),
            flops_per_second: BTreeMap::new(),
            bytes_per_second: 1e9,
            op_overhead_seconds: 1e-6,
            ..DeviceProfile::default()
        };
        let request = PlanRequest { budget: Budget::Percent(f64::from(percent)), ..PlanRequest::default() };
        // Nonsense may fail the plan's own check, as two readings of it can differ; nothing else.
        let _ = plan(&trace, &CostSource::Roofline { profile }, &request);
    }
}

/// A step of a small network in which autograd saves what is written to in place, and never asks for it: found by the
/// fuzzer `check_trace` after 4.7 million executions.
#[test]
fn a_trace_that_lets_go_of_more_than_there_is() {
    let seed = include_str!("../../../../fuzz/seeds/step.json");
    let mut step: serde_json::Value = serde_json::from_str(seed).unwrap();
    step["allocations"][9]["producer"] = 2.into();
    step["allocations"][22]["bytes"] = 16385.into();
    step["allocations"][22]["law"]["per_item"] = 464.into();
    step["saved"][4]["value"] = 20.into();
    step["saved"][4]["unpack"] = serde_json::Value::Null;
    let trace: Trace = serde_json::from_value(step).unwrap();
    trace.check().unwrap();
    let profile = DeviceProfile {
        name: "odd".to_owned(),
        flops_per_second: BTreeMap::from([("float32".to_owned(), 1e11)]),
        bytes_per_second: 1e10,
        op_overhead_seconds: 1e-6,
        ..DeviceProfile::default()
    };
    let request = PlanRequest {
        budget: Budget::Percent(60.0),
        ..PlanRequest::default()
    };
    let _plan = plan(&trace, &CostSource::Roofline { profile }, &request);
}

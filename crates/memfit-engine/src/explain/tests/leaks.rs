//! What looks like a leak and is none, and whose line is named.

use super::*;

/// Steps of training with what `each` does in them, under the optimizer's annotations or by its stacks.
fn trained(
    is_annotated: bool,
    steps: u64,
    mut each: impl FnMut(&mut Machine, u64),
) -> DeviceExplanation {
    let mut machine = Machine::new();
    let it = training(&mut machine);
    for n in 0..steps {
        step(&mut machine, &it, n == 0, false, false);
        each(&mut machine, n);
        if is_annotated {
            machine.annotate("Optimizer.step#Adam.step", false);
        }
    }
    machine.explained(0)
}

#[test]
fn no_line_is_named_for_what_another_keeps() {
    // A loss is added up, as it may be; a list grows.
    let device = trained(true, 6, |machine, _| {
        let list = machine.stack(&["train.py:50 main"]);
        machine.malloc(MIB, 0, list);
    });
    let said = device.growth_summary.as_deref();
    assert_eq!(said, Some("1.0 MiB more stay after every step"));
}

/// A checkpoint, a log or a validation comes every few steps. What comes twice and no more is none.
#[test]
fn what_is_kept_every_few_steps_is_a_leak() {
    for is_annotated in [true, false] {
        for (every, last, is_named) in
            [(3, 24, true), (5, 24, true), (3, 7, false), (12, 24, false)]
        {
            let device = trained(is_annotated, 24, |machine, n| {
                let list = machine.stack(&["train.py:50 main"]);
                if n % every == 0 && n < last {
                    machine.malloc(MIB, 0, list);
                }
            });
            assert_eq!(device.growth.len(), usize::from(is_named), "{every} {last}");
            let said = device.growth_summary.unwrap_or_default();
            assert_eq!(
                said.contains("more stay after a step, on average"),
                is_named,
                "{said}"
            );
        }
    }
}

/// Experts that are used late.
#[test]
fn states_and_gradients_that_come_late_are_no_leak() {
    const NODES: [&str; 2] = [
        "?? torch::autograd::AccumulateGrad::apply(x)",
        "?? torch::autograd::Engine::evaluate_function(x)",
    ];
    for frames in [OPTIMIZER, NODES] {
        let device = trained(true, 6, |machine, _| {
            let late = machine.stack(&frames);
            machine.malloc(3 * MIB, 0, late);
        });
        assert_eq!(device.growth, [], "{frames:?}");
        let said = device.growth_summary.unwrap();
        assert!(
            said.contains("which may be parameters and caches"),
            "{said}"
        );
    }
}

/// The last batch lives on until the next comes. Sizes that rise a few times are chance; what is put together
/// anew ten times is not.
#[test]
fn what_is_replaced_by_larger_ones_has_to_rise_often() {
    for (steps, is_named) in [(5, false), (9, false), (12, true)] {
        let mut held = None;
        let device = trained(true, steps, |machine, n| {
            let batch = machine.stack(&["train.py:39 main"]);
            let larger = machine.malloc((4 + 2 * n) * MIB, 0, batch);
            if let Some(smaller) = held.replace(larger) {
                machine.free(smaller, false);
            }
        });
        assert_eq!(!device.growth.is_empty(), is_named, "{steps}");
    }
}

/// Without stacks the optimizer's states are not told with what else has none.
#[test]
fn what_has_no_stack_is_told_apart_by_its_purpose() {
    let mut machine = Machine::new();
    for _ in 0..7 {
        let activation = machine.malloc(2 * MIB, 0, StackIndex::NONE);
        machine.annotate("Optimizer.step#Adam.step", true);
        machine.malloc(3 * MIB, 0, StackIndex::NONE);
        machine.annotate("Optimizer.step#Adam.step", false);
        machine.free(activation, false);
    }
    let device = machine.explained(0);
    assert_eq!(
        device.steps.map(|it| it.source),
        Some(StepSource::Annotations)
    );
    assert_eq!(device.growth, []);
}

/// Graphs are captured for one size after another; each has an input that stays.
#[test]
fn inputs_of_captured_graphs_are_no_leak() {
    let mut machine = Machine::new();
    let input = machine.stack(&["runner.py:20 capture"]);
    let layer = machine.stack(&["block.py:5 forward", "runner.py:22 capture"]);
    let pool = machine.snapshot.pools.index_of((0, 1)).unwrap();
    for _ in 0..6 {
        machine.malloc(2 * MIB, 0, input);
        let scratch = machine.malloc(3 * MIB, 0, layer);
        machine.free(scratch, false);
        machine.pool = pool;
        machine.malloc(4 * MIB, 0, layer);
        machine.pool = crate::snapshot::PoolIndex::DEFAULT;
    }
    let device = machine.explained(0);
    assert_eq!(device.steps.map(|it| it.source), Some(StepSource::Rhythm));
    assert_eq!(device.growth, []);
}

/// Each layer is run and replaced by a smaller one, as quantization does.
#[test]
fn layers_that_are_replaced_are_no_leak() {
    let mut machine = Machine::new();
    let load = machine.stack(&["load.py:9 place", "quantize.py:3 main"]);
    let run = machine.stack(&["block.py:5 forward", "quantize.py:8 main"]);
    let packed = machine.stack(&["quantize.py:9 main"]);
    let full: Vec<u64> = (0..8).map(|_| machine.malloc(40 * MIB, 0, load)).collect();
    for layer in full {
        let outputs = machine.malloc(5 * MIB, 0, run);
        machine.malloc(10 * MIB, 0, packed);
        machine.free(layer, false);
        machine.free(outputs, false);
    }
    let device = machine.explained(0);
    assert_eq!(device.steps.map(|it| it.source), Some(StepSource::Rhythm));
    assert_eq!(device.growth, []);
}

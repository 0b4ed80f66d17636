//! The rollback against an allocator that knows the truth at every event, and what is said of made-up runs.

use proptest::prelude::*;

use super::sample::Machine;
use super::{
    Category, Cause, DeviceExplanation, Evidence, History, NEVER, Pattern, Peaks, Request,
    Rounding, StepSource, Verdict, explain, totals,
};
use crate::bytes::Bytes;
use crate::snapshot::{Action, Annotation, Snapshot, StackIndex};

mod leaks;
mod limits;
mod purposes;
mod refusals;
mod truth;

const MIB: u64 = 1 << 20;

/// One thing to do: which kind, and a number that says on what or how much.
type Step = (u8, u32);

fn steps() -> impl Strategy<Value = (Vec<Step>, bool, bool, u16)> {
    let step = (0u8..20, any::<u32>());
    (
        prop::collection::vec(step, 1..160),
        any::<bool>(),
        any::<bool>(),
        any::<u16>(),
    )
}

const SIZES: [u64; 12] = [
    1,
    512,
    4000,
    300_000,
    1 << 20,
    1_500_000,
    3 << 20,
    5_000_000,
    9_999_999,
    12 << 20,
    21_500_000,
    33_554_433,
];

fn run(steps: &[Step], is_expandable: bool, has_max_split: bool) -> Machine {
    let mut machine = Machine::new();
    machine.is_expandable = is_expandable;
    machine.max_split = (has_max_split && !is_expandable).then_some(20 << 20);
    let stacks: Vec<StackIndex> = (0..4)
        .map(|n| machine.stack(&[&format!("a.py:{n} f")]))
        .collect();
    let (mut held, mut waiting) = (Vec::new(), Vec::new());
    for &(kind, n) in steps {
        let pick = n as usize;
        match kind {
            0..=10 => {
                let size = SIZES[pick % SIZES.len()] + u64::from(n >> 28) * 1000;
                let stream = u64::from(n >> 8) % 2 * 7;
                held.push(machine.malloc(size, stream, stacks[pick % 4]));
            }
            11..=16 if !held.is_empty() => {
                let address = held.swap_remove(pick % held.len());
                machine.free(address, kind == 16);
                if kind == 16 {
                    waiting.push(address);
                }
            }
            17 if !waiting.is_empty() => {
                machine.complete(waiting.swap_remove(pick % waiting.len()));
            }
            18 if n % 4 == 0 => machine.empty_cache(),
            _ => {}
        }
    }
    machine
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// At every event of every cut-off trace: the same totals, blocks, requests and stacks.
    #[test]
    fn the_rollback_finds_the_truth((steps, is_expandable, has_max_split, cut) in steps()) {
        let machine = run(&steps, is_expandable, has_max_split);
        let cut = usize::from(cut) % (machine.events.len() + 1);
        let device = machine.device(cut);
        let rounding = Rounding {
            max_split_bytes: machine.max_split.unwrap_or(u64::MAX),
            ..Rounding::default()
        };
        let history = History::of(&device, &rounding);
        prop_assert_eq!(&history.problems, &vec![]);
        let doubt = history.uncertain_bytes;
        let mut highest = 0;
        for (state, totals) in totals(&device, &history).enumerate() {
            let (truth, alive) = &machine.truth[cut + state];
            prop_assert_eq!(totals.reserved_bytes, truth.reserved_bytes);
            for (said, truth) in [
                (totals.allocated_bytes.0, truth.allocated_bytes.0),
                (totals.active_bytes.0, truth.active_bytes.0),
            ] {
                prop_assert!(said <= truth && truth <= said + doubt, "{said} {truth} {doubt}");
            }
            highest = highest.max(truth.allocated_bytes.0);
            let state = u32::try_from(state).unwrap();
            let found: Vec<_> = history.active_at(state).into_iter().collect();
            prop_assert_eq!(found.len(), alive.len());
            for (found, truth) in found.iter().zip(alive) {
                let held = found.is_allocated_at(state);
                prop_assert_eq!((found.address, found.requested_size, held), (truth.0, truth.2, truth.3));
                // The stack of what was there before recording and is gone is not in the file.
                if found.start > 0 || found.end == NEVER {
                    prop_assert_eq!(found.stack, truth.4);
                    prop_assert_eq!(found.size, truth.1);
                }
            }
        }
        let peaks = Peaks::of(&device, &history);
        prop_assert!(peaks.allocated.bytes.0 <= highest);
        prop_assert!(highest <= peaks.allocated.bytes.0 + doubt);
        prop_assert_eq!(peaks.last, machine.truth.last().unwrap().0);
    }
}

impl Machine {
    /// The whole snapshot, with the events from `cut` on.
    fn snapshot(&self, cut: usize) -> Snapshot {
        Snapshot {
            devices: vec![self.device(cut)],
            ..self.snapshot.clone()
        }
    }

    fn explained(&self, cut: usize) -> DeviceExplanation {
        let explanation = explain(&self.snapshot(cut), &Request::default());
        assert_eq!(explanation.problems, []);
        explanation.devices.into_iter().next().unwrap()
    }

    fn annotate(&mut self, name: &str, is_start: bool) {
        let name = self.snapshot.texts.push(name).unwrap();
        let time_us = self.events.last().unwrap().time_us;
        self.snapshot.annotations.push(Annotation {
            is_start,
            name,
            device: 0,
            time_us,
        });
    }
}

/// Stacks of a training loop.
struct Loop {
    forward: Vec<StackIndex>,
    loss: StackIndex,
    node: StackIndex,
    accumulate: StackIndex,
    state: StackIndex,
    scratch: StackIndex,
    batch: StackIndex,
}

const ENGINE: &str = "?? torch::autograd::Engine::evaluate_function(x)";
const OPTIMIZER: [&str; 2] = ["/x/torch/optim/adam.py:9 step", "train.py:44 main"];

fn training(machine: &mut Machine) -> Loop {
    let module = "/x/torch/nn/modules/module.py:1790 _call_impl";
    let layers = (0..4).map(|layer| {
        let line = format!("model.py:{} forward", 10 + layer);
        machine.stack(&[
            &line,
            module,
            "model.py:3 forward",
            module,
            "train.py:40 main",
        ])
    });
    let forward: Vec<StackIndex> = layers.collect();
    Loop {
        forward,
        loss: machine.stack(&[
            "python_variable_methods.cpp torch::autograd::THPVariable_add(x)",
            "train.py:41 main",
        ]),
        node: machine.stack(&[
            "?? torch::autograd::generated::MmBackward0::apply(x)",
            ENGINE,
        ]),
        accumulate: machine.stack(&["?? torch::autograd::AccumulateGrad::apply(x)", ENGINE]),
        state: machine.stack(&OPTIMIZER),
        scratch: machine.stack(&["/x/torch/optim/adam.py:12 step", "train.py:44 main"]),
        batch: machine.stack(&[
            "/x/torch/utils/data/_utils/collate.py:3 default_collate",
            "train.py:39 main",
        ]),
    }
}

/// One step; activations stay when the graph is kept, and then there is no backward.
fn step(machine: &mut Machine, it: &Loop, is_first: bool, keeps_graph: bool, keeps_loss: bool) {
    let batch = machine.malloc(18 * MIB, 0, it.batch);
    let activations: Vec<u64> = it
        .forward
        .iter()
        .map(|&s| machine.malloc(12 * MIB, 0, s))
        .collect();
    let loss = machine.malloc(4, 0, it.loss);
    let mut gradients = Vec::new();
    if !keeps_graph {
        for &activation in activations.iter().rev() {
            let temporary = machine.malloc(22 * MIB, 0, it.node);
            gradients.push(machine.malloc(14 * MIB, 0, it.accumulate));
            machine.free(activation, false);
            machine.free(temporary, false);
        }
    }
    let scratch = machine.malloc(10 * MIB, 0, it.scratch);
    if is_first {
        machine.malloc(16 * MIB, 0, it.state);
    }
    machine.free(scratch, false);
    for gradient in gradients {
        machine.free(gradient, false);
    }
    machine.free(batch, false);
    if !keeps_loss {
        machine.free(loss, false);
    }
}

#[test]
fn owners_of_a_training_step_have_their_categories() {
    let mut machine = Machine::new();
    let it = training(&mut machine);
    for n in 0..3 {
        step(&mut machine, &it, n == 0, false, false);
    }
    let device = machine.explained(0);
    let sum: Bytes = device.owners.iter().map(|owner| owner.bytes).sum();
    assert_eq!(sum, device.peak.allocated_bytes);
    let mut said: Vec<String> = device
        .owners
        .iter()
        .map(|it| format!("{} {} in {}", it.category.name(), it.bytes, it.module))
        .collect();
    said.sort();
    // At the peak all four gradients are there, and the first layer's activation with its temporary.
    insta_like(
        &said,
        &[
            "activation 12.0 MiB in model.py:3 > model.py:10",
            "gradient 56.0 MiB in AccumulateGrad",
            "input 18.0 MiB in train.py:39 main",
            "optimizer_state 16.0 MiB in train.py:44 main",
            "temporary 22.0 MiB in MmBackward0",
            "unknown 512 B in train.py:41 main",
        ],
    );
    assert!(device.growth.is_empty(), "{:?}", device.growth);
    assert_eq!(device.steps.map(|it| it.source), None);
}

fn insta_like(said: &[String], expected: &[&str]) {
    assert_eq!(said, expected, "{said:#?}");
}

#[test]
fn what_was_alive_before_recording_is_told_by_who_lets_it_go() {
    let mut machine = Machine::new();
    let it = training(&mut machine);
    let zero = machine.stack(&[
        "/x/torch/optim/optimizer.py:7 zero_grad",
        "train.py:38 main",
    ]);
    let parameter = machine.malloc(9 * MIB, 0, StackIndex::NONE);
    let gradient = machine.malloc(8 * MIB, 0, StackIndex::NONE);
    let state = machine.malloc(7 * MIB, 0, StackIndex::NONE);
    let activation = machine.malloc(6 * MIB, 0, StackIndex::NONE);
    let cut = machine.events.len();
    machine.malloc(512, 0, it.node);
    machine.free(activation, false);
    machine.malloc(512, 0, it.state);
    machine.free(state, false);
    machine.malloc(512, 0, it.loss);
    machine.free(gradient, false);
    let let_go = machine.events.len() - 2;
    machine.events[let_go].stack = zero;
    let device = machine.explained(cut);
    assert_eq!(device.live_before_recording_bytes, Bytes(30 * MIB));
    let of = |bytes: u64| {
        device
            .owners
            .iter()
            .find(|it| it.bytes == Bytes(bytes * MIB))
            .unwrap()
    };
    for (bytes, category, evidence) in [
        (9, Category::Unknown, Evidence::None),
        (8, Category::Gradient, Evidence::Life),
        (7, Category::OptimizerState, Evidence::Life),
        (6, Category::Activation, Evidence::Life),
    ] {
        assert_eq!(
            (of(bytes).category, of(bytes).evidence),
            (category, evidence)
        );
        assert_eq!(of(bytes).stack, super::BEFORE_RECORDING);
    }
    assert_ne!(parameter, gradient);
}

#[test]
fn a_kept_graph_is_found_with_the_line_that_keeps_it() {
    for is_annotated in [true, false] {
        let mut machine = Machine::new();
        let it = training(&mut machine);
        for n in 0..6 {
            step(&mut machine, &it, n == 0, true, true);
            if is_annotated {
                machine.annotate("Optimizer.step#Adam.step", false);
            }
        }
        let device = machine.explained(0);
        let source = if is_annotated {
            StepSource::Annotations
        } else {
            StepSource::OptimizerStacks
        };
        assert_eq!(device.steps.map(|it| it.source), Some(source));
        let patterns: Vec<_> = device
            .growth
            .iter()
            .map(|it| (it.pattern, it.bytes_per_step))
            .collect();
        let mut expected = vec![(Pattern::KeptGraph, Bytes(12 * MIB)); 4];
        expected.push((Pattern::KeptScalar, Bytes(512)));
        assert_eq!(patterns, expected);
        let said = device.growth_summary.unwrap();
        assert!(
            said.starts_with("48.0 MiB more stay after every step"),
            "{said}"
        );
        assert!(
            said.contains("`total_loss += loss`") && said.ends_with("train.py:41 main"),
            "{said}"
        );
    }
}

#[test]
fn a_kept_loss_is_found_and_what_falls_back_is_not() {
    let mut machine = Machine::new();
    let it = training(&mut machine);
    for n in 0..8 {
        step(&mut machine, &it, n == 0, false, true);
    }
    let device = machine.explained(0);
    let [only] = &device.growth[..] else {
        panic!("{:?}", device.growth)
    };
    assert_eq!(
        (only.pattern, only.bytes_per_step),
        (Pattern::KeptScalar, Bytes(512))
    );
    assert_eq!(only.stack.lines().last(), Some("train.py:41 main"));

    // A list that grows for a while and is then dropped.
    let mut machine = Machine::new();
    let it = training(&mut machine);
    let list = machine.stack(&["train.py:50 main"]);
    let mut kept = Vec::new();
    for n in 0..8 {
        step(&mut machine, &it, n == 0, false, false);
        kept.push(machine.malloc(MIB, 0, list));
    }
    assert_eq!(machine.explained(0).growth.len(), 1);
    for block in kept {
        machine.free(block, false);
    }
    assert_eq!(machine.explained(0).growth, []);
}

#[test]
fn layers_of_one_forward_are_no_steps() {
    let mut machine = Machine::new();
    let layer = machine.stack(&[
        "block.py:5 forward",
        "model.py:9 forward",
        "infer.py:2 main",
    ]);
    let other = machine.stack(&[
        "block.py:6 forward",
        "model.py:9 forward",
        "infer.py:2 main",
    ]);
    for _ in 0..12 {
        machine.malloc(2 * MIB, 0, layer);
        let scratch = machine.malloc(MIB, 0, other);
        machine.free(scratch, false);
    }
    let device = machine.explained(0);
    assert_eq!((device.steps, device.growth), (None, vec![]));
}

#[test]
fn a_loop_without_optimizer_is_found_by_its_rhythm() {
    let mut machine = Machine::new();
    let results = machine.stack(&["infer.py:7 main"]);
    let layer = machine.stack(&["block.py:5 forward", "infer.py:6 main"]);
    for _ in 0..9 {
        for _ in 0..5 {
            let scratch = machine.malloc(MIB, 0, layer);
            machine.free(scratch, false);
        }
        machine.malloc(3 * MIB, 0, results);
    }
    let device = machine.explained(0);
    assert_eq!(
        device.steps.map(|it| (it.source, it.boundary_count)),
        Some((StepSource::Rhythm, 9))
    );
    let growth: Vec<_> = device
        .growth
        .iter()
        .map(|it| (it.bytes_per_step, it.pattern))
        .collect();
    assert_eq!(growth, [(Bytes(3 * MIB), Pattern::Kept)]);
}

const NO_STEPS: &str = "no steps found: leaks not looked for; give two snapshots \
                        (`memfit explain before.pickle after.pickle`)";

/// Allocations at even distances that are no steps: equal ones in a row, a cache for every layer, and weights
/// that come through a copy which is dropped.
#[test]
fn loading_and_caches_made_ahead_are_no_steps() {
    for kind in 0..3 {
        let mut machine = Machine::new();
        let keys = machine.stack(&["cache.py:18 allocate", "engine.py:77 __init__"]);
        let values = machine.stack(&["cache.py:19 allocate", "engine.py:77 __init__"]);
        let read = machine.stack(&["load.py:4 read", "serve.py:3 main"]);
        for _ in 0..32 {
            let copy = (kind == 2).then(|| machine.malloc(24 * MIB, 0, read));
            machine.malloc(12 * MIB, 0, keys);
            if kind == 1 {
                machine.malloc(12 * MIB, 0, values);
            }
            if let Some(copy) = copy {
                machine.free(copy, false);
            }
        }
        let device = machine.explained(0);
        assert_eq!((device.steps, device.growth), (None, vec![]), "{kind}");
        assert_eq!(device.growth_summary.as_deref(), Some(NO_STEPS), "{kind}");
    }
}

/// Decoding: a token comes outside the model each time, and the keys and values grow with it, by one block
/// that a larger one replaces, or in the cache that transformers has.
#[test]
fn a_cache_that_fills_while_tokens_come_is_no_leak() {
    for file in [
        "model.py:30 attend",
        "/x/transformers/cache_utils.py:99 update",
    ] {
        let mut machine = Machine::new();
        let token = machine.stack(&["generate.py:8 main"]);
        let layer = machine.stack(&["block.py:5 forward", "generate.py:7 main"]);
        let cache = machine.stack(&[file, "block.py:6 forward", "generate.py:7 main"]);
        let mut held = Vec::new();
        for n in 1..10 {
            let scratch = machine.malloc(MIB, 0, layer);
            let larger = machine.malloc(n * 12 * MIB, 0, cache);
            if let Some(smaller) = held.pop() {
                machine.free(smaller, false);
            }
            held.push(larger);
            machine.free(scratch, false);
            let token = machine.malloc(512, 0, token);
            machine.free(token, false);
        }
        let device = machine.explained(0);
        assert_eq!(device.steps.map(|it| it.source), Some(StepSource::Rhythm));
        assert_eq!(device.growth, []);
        assert_eq!(
            device.growth_summary.as_deref(),
            Some(
                "84.0 MiB more are held after 7 steps, which may be parameters and caches that are \
                 filled; whether they ever stop, two snapshots tell"
            )
        );
    }
}

#[test]
fn two_snapshots_are_compared_by_stack() {
    let mut machine = Machine::new();
    let (kept, steady) = (machine.stack(&["a.py:1 f"]), machine.stack(&["a.py:2 g"]));
    machine.malloc(4 * MIB, 0, steady);
    machine.malloc(MIB, 0, kept);
    let before = machine.snapshot(0);
    for _ in 0..5 {
        machine.malloc(MIB, 0, kept);
    }
    let after = machine.snapshot(0);
    for (steps, per_step) in [(None, 5 * MIB), (Some(5), MIB)] {
        let request = Request {
            before: Some(("before.pickle", &before)),
            steps,
            ..Request::default()
        };
        let explanation = explain(&after, &request);
        let growth = &explanation.devices[0].growth;
        let said: Vec<_> = growth
            .iter()
            .map(|it| (it.stack.as_str(), it.bytes, it.bytes_per_step))
            .collect();
        assert_eq!(said, [("a.py:1 f", Bytes(5 * MIB), Bytes(per_step))]);
        let back = Request {
            before: Some(("after.pickle", &after)),
            ..Request::default()
        };
        assert_eq!(explain(&before, &back).devices[0].growth, []);
    }
}

#[test]
fn contradictions_are_told_with_their_event_and_the_rest_is_analysed() {
    let mut machine = Machine::new();
    let stack = machine.stack(&["a.py:1 f"]);
    let block = machine.malloc(4 * MIB, 0, stack);
    let honest = machine.explained(0);
    machine.record(Action::Alloc, 0x10, 512, stack);
    machine.record(Action::FreeCompleted, block, 512, stack);
    machine.record(Action::SegmentAlloc, 0x1000, 512, stack);
    let explanation = explain(&machine.snapshot(0), &Request::default());
    let events: Vec<_> = explanation.problems.iter().map(|it| it.event).collect();
    assert_eq!(
        events,
        [Some(2), Some(3), Some(4)],
        "{:?}",
        explanation.problems
    );
    assert_eq!(
        explanation.devices[0].peak.allocated_bytes,
        honest.peak.allocated_bytes
    );
    assert_eq!(explanation.devices[0].owners, honest.owners);
}

#[test]
fn nothing_is_explained_of_nothing() {
    let explanation = explain(&Snapshot::default(), &Request::default());
    assert_eq!((explanation.events, explanation.devices), (0, vec![]));
    let machine = Machine::new();
    let device = machine.explained(0);
    assert_eq!(device.peak.event, None);
    assert_eq!(device.owners, []);
}

/// After `del` of a model half the memory stays reserved. A block that waits for another stream holds nothing
/// back: `empty_cache()` waits for it.
#[test]
fn what_the_end_gives_back_and_who_keeps_the_rest_is_told() {
    let mut machine = Machine::new();
    let (model, kept) = (
        machine.stack(&["a.py:1 load"]),
        machine.stack(&["a.py:2 keep"]),
    );
    let weights: Vec<u64> = (0..4).map(|_| machine.malloc(30 * MIB, 0, model)).collect();
    let (before, after) = (
        machine.malloc(8 * MIB, 0, model),
        machine.malloc(2 * MIB, 0, kept),
    );
    let waits = machine.malloc(50 * MIB, 7, model);
    machine.malloc(60 * MIB, 0, kept);
    for block in weights {
        machine.free(block, false);
    }
    machine.free(before, false);
    machine.free(waits, true);
    let device = machine.explained(0);
    let end = device.end;
    assert!(device.has_history);
    assert_eq!(end.releasable_bytes, Bytes(170 * MIB));
    assert_eq!(end.stuck_bytes, Bytes(18 * MIB));
    assert_eq!(
        (end.pinned_segment_count, end.pinning_bytes),
        (1, Bytes(2 * MIB))
    );
    let [segment] = &end.pinned_segments[..] else {
        panic!("{:?}", end.pinned_segments)
    };
    assert_eq!(
        (segment.bytes, segment.inactive_bytes),
        (Bytes(20 * MIB), Bytes(18 * MIB))
    );
    assert_eq!(segment.blocks[0].stack, "a.py:2 keep");
    let owners: Vec<_> = end.owners.iter().map(|it| (it.bytes, &*it.stack)).collect();
    assert_eq!(owners, [(Bytes(62 * MIB), "a.py:2 keep")]);
    assert_eq!(
        end.summary,
        "tensors hold 62.0 MiB of 250.0 MiB reserved; `torch.cuda.empty_cache()` gives 170.0 MiB back now, \
         but not 18.0 MiB that blocks of 2.0 MiB keep in 1 segment"
    );
    assert_ne!(after, before);
}

/// A cache of 40 MiB and a segment that a survivor keeps, known without any event, or by the last one alone.
#[test]
fn without_a_history_nothing_is_judged_but_what_the_segments_show() {
    let mut machine = Machine::new();
    let stack = machine.stack(&["a.py:1 big"]);
    let large = machine.malloc(40 * MIB, 0, stack);
    let blocks = [8, 8].map(|mib| machine.malloc(mib * MIB, 0, stack));
    machine.malloc(4 * MIB, 0, stack);
    for block in blocks {
        machine.free(block, false);
    }
    machine.free(large, false);
    let all = machine.events.len();
    for cut in [all, all - 1] {
        let device = machine.explained(cut);
        assert!(!device.has_history);
        assert_eq!(device.fragmentation.verdict, Verdict::Unknown);
        assert_eq!((device.steps, device.growth_summary), (None, None));
        assert_eq!(device.counterfactual_summary, None);
        assert_eq!(device.counterfactuals, []);
        assert_eq!(device.peak.allocated_bytes, Bytes(4 * MIB));
        assert_eq!(device.peak.event, None);
        let held: Bytes = device.owners.iter().map(|it| it.bytes).sum();
        assert_eq!(held, device.last.allocated_bytes);
        assert_eq!(device.end.releasable_bytes, Bytes(40 * MIB));
        assert_eq!(device.end.stuck_bytes, Bytes(16 * MIB));
        assert_eq!(
            device.end.summary,
            "tensors hold 4.0 MiB of 60.0 MiB reserved; `torch.cuda.empty_cache()` gives 40.0 MiB back \
             now, but not 16.0 MiB that blocks of 4.0 MiB keep in 1 segment"
        );
    }
    let device = machine.explained(0);
    assert!(device.has_history);
    assert_ne!(device.fragmentation.verdict, Verdict::Unknown);
}

const ACTIONS: [Action; 10] = [
    Action::Alloc,
    Action::FreeRequested,
    Action::FreeCompleted,
    Action::SegmentAlloc,
    Action::SegmentFree,
    Action::SegmentMap,
    Action::SegmentUnmap,
    Action::Snapshot,
    Action::OutOfMemory,
    Action::Annotate,
];

proptest! {
    /// Events that were never recorded like this: no panic, and owners still add up.
    #[test]
    fn no_sequence_of_events_panics(
        steps in prop::collection::vec((0u8..10, 0u64..12, 0u64..6), 0..60),
        blocks in 0u8..4,
    ) {
        let mut machine = Machine::new();
        let stack = machine.stack(&["a.py:1 f"]);
        for n in 0..blocks {
            machine.malloc(u64::from(n + 1) * 3 * MIB, 0, stack);
        }
        for (action, place, size) in steps {
            let address = match place {
                0 => u64::MAX - 1000,
                1 => 0,
                place => (1 << 40) + (place - 2) * 2 * MIB,
            };
            let size = [0, 512, 2 * MIB, 20 * MIB, u64::MAX, 1 << 63][usize::try_from(size).unwrap()];
            machine.record(ACTIONS[usize::from(action)], address, size, stack);
        }
        let explanation = explain(&machine.snapshot(0), &Request::default());
        let device = &explanation.devices[0];
        let sum: Bytes = device.owners.iter().map(|it| it.bytes).sum();
        prop_assert_eq!(sum, device.peak.allocated_bytes);
    }
}

//! Random traces for property tests: every feature the transformed trace knows, in small.

use std::ops::Range;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{TestCaseError, TestRunner};

use super::{
    EightBitState, Evaluator, IncrementalEvaluator, Narrow, ParametersAway, StateAway, StepModel,
    Transfer, Treatment, UpdateTurn, Variant, lives, naive, update_turns,
};
use crate::bytes::Bytes;
use crate::trace::sample::Builder;
use crate::trace::{
    Allocation, AllocationId, Category, OpIndex, ParameterUpdate, Phase, Trace, ValueId,
};

/// What to build a trace from: one tuple per forward op (kind, first operand, second operand, size,
/// workspace, saves), and drops chosen by index.
pub(crate) type Recipe = Vec<(u8, u8, u8, u8, u8, u8)>;

pub(crate) fn recipes() -> impl Strategy<Value = (Recipe, Vec<bool>, u8)> {
    recipes_of(2..14)
}

/// Recipes of so many ops in forward.
pub(crate) fn recipes_of(ops: Range<usize>) -> impl Strategy<Value = (Recipe, Vec<bool>, u8)> {
    let op = (0u8..8, any::<u8>(), any::<u8>(), 1u8..9, 0u8..3, 0u8..8);
    (
        prop::collection::vec(op, ops),
        prop::collection::vec(any::<bool>(), 40),
        any::<u8>(),
    )
}

/// A forward of pointwise ops, two-operand ops, in-place ops and ops with two outputs on random
/// operands; a backward that visits the nodes in reverse, unpacking what they saved.
pub(crate) fn build(recipe: &Recipe) -> Trace {
    let mut builder = Builder::new(1);
    let parameter = builder.allocation(&[4], Category::Parameter, 0);
    let input = builder.allocation(&[3], Category::Input, 0);
    let mut values: Vec<ValueId> = vec![input];
    let mut to_save: Vec<(ValueId, u32)> = Vec::new();
    for &(kind, first, second, size, workspace, saves) in recipe {
        let at = u32::try_from(builder.trace.ops.len()).unwrap();
        let pick = |n: u8| values[n as usize % values.len()];
        let (x, y) = (
            latest(&builder, pick(first)),
            latest(&builder, pick(second)),
        );
        let shape = [u64::from(size)];
        let in_forward = builder.trace.allocations[builder.trace.allocation_of(x).index()]
            .producer
            .is_some();
        let out = match kind {
            0 => builder.op("aten.empty_like.default", Phase::Forward, &[x], &shape),
            1..=2 => builder.op("aten.a.default", Phase::Forward, &[x], &shape),
            3 => builder.op("aten.b.default", Phase::Forward, &[x, parameter], &shape),
            4 if in_forward => builder.op_in_place("aten.c_.default", Phase::Forward, x, &[y]),
            5 => {
                let out = builder.op("aten.d.default", Phase::Forward, &[x, y], &shape);
                let other = builder.allocation(&[2], Category::Temporary, at);
                let id = builder.trace.allocation_of(other);
                builder.trace.allocations[id.index()].producer = Some(OpIndex(at));
                builder.trace.ops[at as usize].outputs.push(other);
                values.push(other);
                out
            }
            _ => builder.op("aten.e.default", Phase::Forward, &[x, y], &shape),
        };
        builder.trace.ops[at as usize].workspace_bytes = Bytes(u64::from(workspace) * 4);
        if saves & 1 != 0 {
            to_save.push((x, at));
        }
        if saves & 2 != 0 {
            to_save.push((out, at + 1));
        }
        if saves & 4 != 0 {
            values.push(out);
        } else {
            values = vec![input, out];
        }
    }
    let loss = latest(&builder, *values.last().unwrap());
    backward(&mut builder, &to_save, loss, parameter);
    if recipe.first().is_some_and(|op| op.2 % 4 == 3) {
        for name in &mut builder.trace.strings {
            if name == "float32" {
                "bfloat16".clone_into(name);
            }
        }
        builder.trace.meta.half_parameters = true;
    }
    if recipe.first().is_some_and(|op| op.1 % 8 == 7) {
        let fixed = builder.trace.allocation_of(parameter);
        builder.trace.meta.fixed_parameters = vec![fixed];
    }
    builder.finish()
}

/// The newest version of a value's allocation: programs see no older one.
fn latest(builder: &Builder, value: ValueId) -> ValueId {
    let allocation = builder.trace.allocation_of(value);
    let newest = builder
        .trace
        .values
        .iter()
        .rposition(|v| v.allocation == allocation)
        .unwrap();
    ValueId(u32::try_from(newest).unwrap())
}

fn backward(builder: &mut Builder, to_save: &[(ValueId, u32)], loss: ValueId, parameter: ValueId) {
    let mut gradient = builder.op("aten.ones.default", Phase::Backward, &[loss], &[1]);
    for (i, &(value, pack)) in to_save.iter().enumerate().rev() {
        let at = u32::try_from(builder.trace.ops.len()).unwrap();
        gradient = builder.op(
            "aten.g.default",
            Phase::Backward,
            &[gradient],
            &[1 + i as u64 % 5],
        );
        builder.save(value, pack, at, at + 1);
        let allocation = builder.trace.allocation_of(value).index();
        if builder.trace.allocations[allocation].producer.is_some() && i % 2 == 0 {
            // The node's local variable holds what it unpacked while it runs.
            let range = (OpIndex(at), OpIndex(at + 1));
            let natural = &mut builder.trace.allocations[allocation].natural;
            if natural.last().is_none_or(|&(_, end)| end <= range.0) {
                natural.push(range);
            }
        }
    }
    let gw = builder.op("aten.h.default", Phase::Backward, &[gradient], &[4]);
    let ready = u32::try_from(builder.trace.ops.len()).unwrap();
    let (parameter_id, gradient_id) = (
        builder.trace.allocation_of(parameter),
        builder.trace.allocation_of(gw),
    );
    builder.trace.allocations[gradient_id.index()].category = Category::Gradient;
    if to_save.len().is_multiple_of(2) {
        // Otherwise the last gradient is complete at the very end of backward.
        builder.op("aten.i.default", Phase::Backward, &[gradient], &[2]);
    }
    builder.op_in_place("aten.add_.Tensor", Phase::Optimizer, parameter, &[gw]);
    builder.keep_until(gw, u32::try_from(builder.trace.ops.len()).unwrap());
    let state = [6, 4, 1].map(|size| {
        let value = builder.allocation(&[size], Category::OptimizerState, 0);
        builder.trace.allocation_of(value)
    });
    builder.trace.updates.push(ParameterUpdate {
        parameter: parameter_id,
        gradient: gradient_id,
        ready: OpIndex(ready),
        temporary_bytes: Bytes(12),
        moved_bytes: Bytes(48),
        state: state.to_vec(),
    });
}

/// What to do with each allocation (kind, home), and the variant (flags, window).
type Choices = (Vec<(u8, u8)>, (u8, u8));

fn choices() -> impl Strategy<Value = Choices> {
    let kinds = prop::collection::vec((any::<u8>(), any::<u8>()), 40);
    (kinds, (any::<u8>(), any::<u8>()))
}

fn variant(flags: u8, window: u8) -> Variant {
    // Sizes are 4 to 32 bytes.
    let bytes = |window: u8| {
        Bytes(match window % 4 {
            0 => 0,
            1 => u64::MAX,
            _ => u64::from(window),
        })
    };
    let away = StateAway {
        window_bytes: bytes(window / 4),
        least_bytes: Bytes(u64::from(flags >> 3) % 8),
    };
    let parameters = ParametersAway {
        room_bytes: bytes(window / 16),
        ahead_bytes: bytes(flags),
        least_bytes: Bytes(u64::from(flags >> 5) * 4),
    };
    Variant {
        offload_parameters: (window & 64 != 0).then_some(parameters),
        one_by_one: flags & 0b1_1000 == 0b0_1000,
        fuse_optimizer: flags & 1 != 0,
        accumulate: flags & 2 != 0,
        offload_optimizer: (flags & 4 != 0).then_some(away),
        eight_bit_state: (flags & 0x20 != 0).then_some(EightBitState {
            least_bytes: Bytes(u64::from(window & 1) * 17),
            lower_halves: window & 2 != 0,
        }),
        window_bytes: bytes(window),
    }
}

/// More updates, each of the one parameter, by what is no gradient of its own, with a state of its own.
fn with_more_updates(mut trace: Trace, kinds: &[(u8, u8)]) -> Trace {
    let sample = trace.updates[0].clone();
    let state = trace.allocations[sample.state[0].index()].clone();
    let temporary = AllocationId(u32::try_from(trace.allocations.len()).unwrap());
    trace.allocations.push(Allocation {
        category: Category::Temporary,
        natural: Vec::new(),
        ..state.clone()
    });
    let begin = trace.forward_end().0;
    let end = u32::try_from(trace.ops.len()).unwrap();
    for &(size, at) in kinds.iter().take(6) {
        let id = u32::try_from(trace.allocations.len()).unwrap();
        trace.allocations.push(Allocation {
            bytes: Bytes(u64::from(size % 40)),
            ..state.clone()
        });
        trace.updates.push(ParameterUpdate {
            gradient: temporary,
            ready: OpIndex(begin + u32::from(at) % (end - begin)),
            temporary_bytes: Bytes(u64::from(at % 16)),
            state: vec![AllocationId(id)],
            ..sample.clone()
        });
    }
    assert_eq!(trace.check(), Ok(()));
    trace
}

/// The same recorded with its parameter and the state of updates in 16 bits.
fn with_half_parameter(mut trace: Trace) -> Trace {
    trace.meta.half_parameters = true;
    trace.strings.push("bfloat16".to_owned());
    let dtype = u32::try_from(trace.strings.len() - 1).unwrap();
    let updates = trace.updates.iter();
    let narrow: Vec<AllocationId> = updates
        .flat_map(|update| update.state.iter().copied().chain([update.parameter]))
        .collect();
    for &allocation in &narrow {
        for value in &mut trace.values {
            if value.allocation == allocation {
                value.dtype = dtype;
            }
        }
        let mut value = trace.values[0].clone();
        (value.allocation, value.version, value.dtype) = (allocation, 0, dtype);
        trace.values.push(value);
    }
    assert_eq!(trace.check(), Ok(()));
    trace
}

fn allocations(trace: &Trace) -> impl Iterator<Item = AllocationId> {
    (0..u32::try_from(trace.allocations.len()).unwrap()).map(AllocationId)
}

/// Treatments that are allowed for each allocation alone; few are kept that need not be.
fn treatments(trace: &Trace, model: &StepModel, kinds: &[(u8, u8)]) -> Vec<Treatment> {
    let treatment = |id: AllocationId| {
        let (kind, home) = kinds[id.index() % kinds.len()];
        let drop = model.is_droppable(id).then_some(Treatment::DROP);
        let store = model.is_storable(id).then_some(Treatment::STORE);
        let either = if kind % 2 == 0 {
            drop.or(store)
        } else {
            store.or(drop)
        };
        let narrow = [Narrow::Half, Narrow::EightBit][usize::from(home & 1)];
        let shrunk = model.is_shrinkable(id).then_some(Treatment::shrunk(narrow));
        let either = shrunk.filter(|_| kind & 0x30 == 0).or(either);
        let chosen = either.filter(|_| kind < 220).unwrap_or_default();
        // Most often soon after the op that makes it, where more requests are far.
        let after = trace.allocations[id.index()]
            .producer
            .map_or(0, |op| op.0 + 1);
        if kind & 8 != 0 && model.may_have_home(id) {
            chosen.with_home(OpIndex(after + u32::from(home % 4)))
        } else {
            chosen
        }
    };
    allocations(trace).map(treatment).collect()
}

/// Holds the sweep, its timeline, its holdings and its lives against the slow twin. Tells whether the
/// treatments are valid.
fn compare(
    trace: &Trace,
    variant: Variant,
    treatments: &[Treatment],
) -> Result<bool, TestCaseError> {
    let model = StepModel::new(trace, variant);
    let mut evaluator = Evaluator::new(&model);
    let fast = evaluator.evaluate(treatments);
    let slow = naive::evaluate(trace, variant, treatments);
    prop_assert_eq!(fast.valid, slow.stale.is_none() && slow.refused.is_none());
    if !fast.valid {
        return Ok(false);
    }
    prop_assert_eq!(evaluator.replayed().collect::<Vec<_>>(), slow.replayed);
    prop_assert_eq!(evaluator.transfers(), slow.transfers);
    prop_assert_eq!(fast.peak_bytes, slow.peak_bytes);
    let timeline = evaluator.timeline(treatments);
    prop_assert_eq!(timeline.into_iter().max().unwrap(), slow.peak_bytes);
    let holdings = evaluator.holdings_at_peak(treatments);
    let held: Bytes = holdings.iter().map(|h| h.bytes).sum();
    // None of these is an allocation held: workspaces, an update's temporaries, a replay's unwanted outputs, gradients
    // of earlier pieces, state that is fetched for its update, and offloaded parameters apart from their room.
    let away = variant.offload_optimizer;
    let state = |update| away.map_or(Bytes::ZERO, |away| away.bytes(trace, update));
    let passing: Bytes = trace.updates.iter().map(state).sum();
    prop_assert!(held <= fast.peak_bytes);
    let room = variant.offload_parameters;
    let room = room.map_or(Bytes::ZERO, |away| away.held_bytes(trace));
    // Of one update, whose parameter has 4 numbers.
    let is_on_gpu = trace.meta.device_kind == "cuda" && variant.eight_bit_state.is_some();
    let sliced = Bytes(if is_on_gpu { 4 * 18 } else { 0 });
    prop_assert!(held + passing + room + sliced + Bytes(120) >= fast.peak_bytes);
    let lives = lives::lives(trace, &model, treatments);
    prop_assert_eq!(lives::highest(&lives), slow.peak_bytes);
    prop_assert!(lives.is_sorted_by_key(|life| life.start));
    prop_assert!(lives.iter().all(|life| life.start < life.end));
    Ok(true)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn the_sweep_agrees_with_its_slow_twin((recipe, drops, flags) in recipes()) {
        let trace = build(&recipe);
        let variant = variant(flags, 0);
        let model = StepModel::new(&trace, variant);
        let drop = |id: AllocationId| drops[id.index() % drops.len()] && model.is_droppable(id);
        let treatments: Vec<_> = allocations(&trace).map(|id| Treatment::dropped(drop(id))).collect();
        compare(&trace, variant, &treatments)?;
    }

    #[test]
    fn the_sweep_agrees_with_its_slow_twin_on_stores_and_homes(
        (recipe, _, _) in recipes(),
        (kinds, (flags, window)) in choices(),
    ) {
        let mut trace = with_more_updates(build(&recipe), &kinds);
        if recipe.len().is_multiple_of(3) {
            // There updates of state in 8 bits take room.
            trace.meta.device_kind = "cuda".to_owned();
        }
        if recipe.len().is_multiple_of(2) {
            trace = with_half_parameter(trace);
        }
        let variant = variant(flags, window);
        let treatments = treatments(&trace, &StepModel::new(&trace, variant), &kinds);
        compare(&trace, variant, &treatments)?;
    }
}

/// A walk through treatments: some allocations otherwise at a time, stored only where `stores`; now and then back to
/// before, and with a limit near the peak. Every answer is that of a sweep. Tells how many sections were swept, and of
/// how many.
fn walk(
    trace: &Trace,
    variant: Variant,
    kinds: &[(u8, u8)],
    stores: bool,
) -> Result<(usize, usize), TestCaseError> {
    let model = StepModel::new(trace, variant);
    let (mut sweeping, mut incremental) =
        (Evaluator::new(&model), IncrementalEvaluator::new(&model));
    let count = trace.allocations.len();
    let mut at = vec![Treatment::Keep; count];
    let (mut peak, mut swept) = (Bytes::ZERO, (0, 0));
    for (number, &(kind, place)) in kinds.iter().enumerate() {
        let mut next = at.clone();
        let others = treatments(trace, &model, &kinds[number..]);
        for step in 0..=usize::from(kind >> 5) {
            let index = (usize::from(place) * 7 + step * (1 + usize::from(kind & 3))) % count;
            let other = others[index];
            let may = stores || !other.is_fetched();
            next[index] = if may && next[index].is_keep() {
                other
            } else {
                Treatment::Keep
            };
        }
        let limit = match kind % 5 {
            0 => peak,
            1 => Bytes(peak.0 * 7 / 8),
            2 => peak + Bytes(u64::from(place) / 8),
            _ => Bytes(u64::MAX),
        };
        let expected = sweeping.evaluate_within(&next, limit);
        prop_assert_eq!(incremental.evaluate_within(&next, limit), expected);
        prop_assert_eq!(incremental.swept(), sweeping.swept());
        prop_assert!(incremental.replayed().eq(sweeping.replayed()));
        prop_assert_eq!(incremental.transfers(), sweeping.transfers());
        let (some, all) = incremental.sections_swept();
        swept = (swept.0 + some, swept.1 + all);
        if expected.valid && place % 3 == 0 {
            prop_assert_eq!(incremental.timeline(&next), sweeping.timeline(&next));
            let held = incremental.holdings_at_peak(&next);
            prop_assert_eq!(held, sweeping.holdings_at_peak(&next));
        }
        if expected.valid && expected.peak_bytes <= limit && place % 4 != 0 {
            (at, peak) = (next, expected.peak_bytes);
        }
    }
    Ok(swept)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn what_differs_little_is_evaluated_as_by_a_sweep(
        (recipe, _, _) in recipes_of(2..40),
        (kinds, (flags, window)) in choices(),
    ) {
        let trace = with_more_updates(build(&recipe), &kinds);
        walk(&trace, variant(flags, window), &kinds, flags & 16 != 0)?;
    }
}

#[test]
fn what_differs_little_is_swept_in_part() {
    let mut runner = TestRunner::deterministic();
    let mut swept = (0, 0);
    for _ in 0..20 {
        let (recipe, _, _) = recipes_of(150..160)
            .new_tree(&mut runner)
            .unwrap()
            .current();
        let (kinds, _) = choices().new_tree(&mut runner).unwrap().current();
        let (some, all) = walk(&build(&recipe), Variant::default(), &kinds, false).unwrap();
        swept = (swept.0 + some, swept.1 + all);
    }
    assert!(swept.0 * 2 < swept.1, "{swept:?}");
}

proptest! {
    // Each compares every allocation of a trace.
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn only_what_the_page_allows_is_storable_or_has_a_home(
        (recipe, _, _) in recipes(),
        (kinds, (flags, window)) in choices(),
    ) {
        let mut trace = build(&recipe);
        for (number, value) in trace.values.iter_mut().enumerate() {
            if kinds[number % kinds.len()].0 >= 240 {
                value.dtype = 0;
            }
        }
        let variant = variant(flags, window);
        let model = StepModel::new(&trace, variant);
        // One allocation at a time is treated as it may be or not.
        for id in allocations(&trace) {
            let (kind, home) = kinds[id.index() % kinds.len()];
            let home = OpIndex(u32::from(home % 16));
            let chosen = match kind % 5 {
                0 => Treatment::STORE,
                1 => Treatment::Store { home },
                2 => Treatment::shrunk(Narrow::Half),
                3 => Treatment::shrunk(Narrow::EightBit).with_home(home),
                _ if model.is_droppable(id) => Treatment::Drop { home },
                _ => Treatment::Keep,
            };
            let mut treatments = vec![Treatment::Keep; trace.allocations.len()];
            treatments[id.index()] = chosen;
            let valid = compare(&trace, variant, &treatments)?;
            if chosen == Treatment::STORE {
                prop_assert_eq!(valid, model.is_storable(id));
            }
            if chosen == Treatment::shrunk(Narrow::Half) {
                prop_assert_eq!(valid, model.is_shrinkable(id));
            }
        }
    }
}

/// What the comparisons above must have met: a test on treatments that never matter would prove nothing.
#[test]
fn random_treatments_reach_every_kind_of_transfer_and_runs_of_one_op_again() {
    let mut runner = TestRunner::deterministic();
    let mut met = [0; 9];
    let (mut moved, mut sliced) = ([0; 6], [0; 2]);
    for number in 0..2000 {
        let (recipe, _, _) = recipes().new_tree(&mut runner).unwrap().current();
        let (kinds, (flags, window)) = choices().new_tree(&mut runner).unwrap().current();
        let mut trace = with_more_updates(build(&recipe), &kinds);
        if number % 2 == 0 {
            trace = with_half_parameter(trace);
        }
        let variant = variant(flags, window);
        for moment in variant.offloaded_moments(&trace).iter().flatten() {
            sliced[usize::from(moment.lower_bytes > Bytes::ZERO)] += 1;
        }
        for (_, turn) in update_turns(&trace, variant) {
            moved[match turn {
                UpdateTurn::Fetch(_) => 0,
                UpdateTurn::Ahead(_) => 1,
                UpdateTurn::Asked(_) => 2,
                UpdateTurn::Update(_) => 3,
                UpdateTurn::Out(_) => 4,
                UpdateTurn::Settled(_) => 5,
            }] += 1;
        }
        let model = StepModel::new(&trace, variant);
        let treatments = treatments(&trace, &model, &kinds);
        let mut evaluator = Evaluator::new(&model);
        if !evaluator.evaluate(&treatments).valid {
            continue;
        }
        let mut replayed: Vec<_> = evaluator.replayed().collect();
        let runs = replayed.len();
        replayed.sort_unstable();
        replayed.dedup();
        met[0] += usize::from(replayed.len() < runs);
        let mut fetched = vec![0; trace.allocations.len()];
        for transfer in evaluator.transfers() {
            let kind = match transfer {
                Transfer::Out { .. } => 1,
                Transfer::Settled { .. } => 2,
                Transfer::Fetch { allocation, .. } => {
                    fetched[allocation.index()] += 1;
                    3
                }
                Transfer::Ahead { .. } => 4,
                Transfer::Asked { .. } => 5,
                Transfer::Shrunk { .. } => 7,
                Transfer::Expanded { .. } => 8,
            };
            met[kind] += 1;
        }
        met[6] += usize::from(fetched.iter().any(|&times| times > 1));
    }
    assert!(met.iter().all(|&times| times >= 20), "{met:?}");
    assert!(moved.iter().all(|&times| times >= 200), "{moved:?}");
    assert!(sliced.iter().all(|&times| times >= 100), "{sliced:?}");
}

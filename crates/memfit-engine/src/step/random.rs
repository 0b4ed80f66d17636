//! Random traces for property tests: every feature the transformed trace knows, in small.

use proptest::prelude::*;

use crate::bytes::Bytes;
use crate::trace::sample::Builder;
use crate::trace::{Category, OpIndex, ParameterUpdate, Phase, Trace, ValueId};

/// What to build a trace from: one tuple per forward op (kind, first operand, second operand, size,
/// workspace, saves), and drops chosen by index.
pub(crate) type Recipe = Vec<(u8, u8, u8, u8, u8, u8)>;

pub(crate) fn recipes() -> impl Strategy<Value = (Recipe, Vec<bool>, u8)> {
    let op = (0u8..8, any::<u8>(), any::<u8>(), 1u8..9, 0u8..3, 0u8..8);
    (
        prop::collection::vec(op, 2..14),
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
    builder.trace.updates.push(ParameterUpdate {
        parameter: parameter_id,
        gradient: gradient_id,
        ready: OpIndex(ready),
        temporary_bytes: Bytes(12),
        moved_bytes: Bytes(48),
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn the_sweep_agrees_with_its_slow_twin((recipe, drops, variant) in recipes()) {
        use super::{Evaluator, StepModel, Variant, naive};
        let trace = build(&recipe);
        let variant = Variant { fuse_optimizer: variant & 1 != 0, accumulate: variant & 2 != 0 };
        let model = StepModel::new(&trace, variant);
        let mut dropped: Vec<bool> = (0..trace.allocations.len()).map(|i| drops[i % drops.len()]).collect();
        for (i, drop) in dropped.iter_mut().enumerate() {
            let id = crate::trace::AllocationId(u32::try_from(i).unwrap());
            *drop &= model.is_droppable(id);
        }
        let mut evaluator = Evaluator::new(&model);
        let fast = evaluator.evaluate(&dropped);
        let slow = naive::evaluate(&trace, variant, &dropped);
        prop_assert_eq!(fast.valid, slow.stale.is_none());
        if fast.valid {
            prop_assert_eq!(evaluator.replayed().collect::<Vec<_>>(), slow.replayed);
            prop_assert_eq!(fast.peak_bytes, slow.peak_bytes);
            let timeline = evaluator.timeline(&dropped);
            prop_assert_eq!(timeline.into_iter().max().unwrap(), slow.peak_bytes);
            let held: Bytes = evaluator.holdings_at_peak(&dropped).iter().map(|h| h.bytes).sum();
            // Workspaces, an update's temporaries, a replay's unwanted outputs and the gradients of earlier
            // pieces are no allocation held.
            prop_assert!(held <= fast.peak_bytes);
            prop_assert!(held + Bytes(120) >= fast.peak_bytes);
            let lives = super::lives::lives(&trace, &model, &dropped);
            prop_assert_eq!(super::lives::highest(&lives), slow.peak_bytes);
            prop_assert!(lives.is_sorted_by_key(|life| life.start));
            prop_assert!(lives.iter().all(|life| life.start < life.end));
        }
    }
}

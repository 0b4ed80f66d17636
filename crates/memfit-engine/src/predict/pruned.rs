//! What masks of `torch.nn.utils.prune` add to a peak.
//!
//! Responsible for finding them and for the peak that `prune.remove` leaves. Not responsible for making a model
//! smaller, which masks do not: a zero takes as much as another number.

use std::collections::BTreeMap;

use crate::bytes::Bytes;
use crate::trace::{AllocationId, Category, Op, Phase, Trace};

/// A sentence about a pruned model's masks, where there are any and the step multiplies by them.
pub(super) fn pruning_note(trace: &Trace, peak_bytes: Bytes) -> Option<String> {
    let masks = masks(trace);
    if masks.is_empty() {
        return None;
    }
    let removed = without_masks(trace, &masks)?;
    let peak = super::unplanned::unplanned_peak(&removed);
    let added = peak_bytes - peak;
    let of_masks: Bytes = masks
        .values()
        .map(|mask| trace.allocations[mask.index()].bytes)
        .sum();
    (added > Bytes::ZERO).then(|| {
        format!(
            "pruning adds {added} to the peak: masks of {of_masks}, and weights that each step multiplies by them; \
             `torch.nn.utils.prune.remove` makes the peak {peak}, as without pruning and no less, since a zero takes as \
             much as another number"
        )
    })
}

/// The mask of each pruned parameter, as torch names them.
fn masks(trace: &Trace) -> BTreeMap<AllocationId, AllocationId> {
    let named = |category: Category, ending: &str| -> BTreeMap<&str, AllocationId> {
        let allocations = trace.allocations.iter().zip(0..);
        let of_category = allocations.filter(|(it, _)| it.category == category);
        let named = of_category.filter_map(|(it, id)| {
            let name = trace.string(it.name).strip_suffix(ending)?;
            Some((name, AllocationId(id)))
        });
        named.collect()
    };
    let buffers = named(Category::ModuleBuffer, "_mask");
    let parameters = named(Category::Parameter, "_orig").into_iter();
    parameters
        .filter_map(|(name, parameter)| Some((parameter, *buffers.get(name)?)))
        .collect()
}

/// The step after `prune.remove`: without masks, products by them, and gradients of these products. Absent where no op
/// multiplies a parameter by its mask.
fn without_masks(trace: &Trace, masks: &BTreeMap<AllocationId, AllocationId>) -> Option<Trace> {
    let mut removed = trace.clone();
    let mut is_multiplied = false;
    for op in &trace.ops {
        let Some((other, mask, product)) = masked(trace, op, masks) else {
            continue;
        };
        match op.phase {
            Phase::Forward if masks.get(&other) == Some(&mask) => {
                is_multiplied = true;
                removed.allocations[mask.index()].bytes = Bytes::ZERO;
                removed.allocations[product.index()].bytes = Bytes::ZERO;
            }
            // The gradient of the product is then the parameter's, and there from its beginning.
            Phase::Backward => {
                let starts = trace.allocations[other.index()].natural.first();
                let gradient = &mut removed.allocations[product.index()];
                if let (Some(&(start, _)), Some(first)) = (starts, gradient.natural.first_mut()) {
                    first.0 = first.0.min(start);
                }
                removed.allocations[other.index()].bytes = Bytes::ZERO;
            }
            Phase::Forward | Phase::Optimizer => {}
        }
    }
    is_multiplied.then_some(removed)
}

/// What an op multiplies by a mask, that mask, and the product.
fn masked(
    trace: &Trace,
    op: &Op,
    masks: &BTreeMap<AllocationId, AllocationId>,
) -> Option<(AllocationId, AllocationId, AllocationId)> {
    let ([one, other], [product]) = (op.reads.as_slice(), op.outputs.as_slice()) else {
        return None;
    };
    if trace.string(op.name) != "aten.mul.Tensor" {
        return None;
    }
    let (one, other) = (trace.allocation_of(*one), trace.allocation_of(*other));
    let product = trace.allocation_of(*product);
    let is_mask = |id: AllocationId| masks.values().any(|&mask| mask == id);
    match (is_mask(one), is_mask(other)) {
        (true, false) => Some((other, one, product)),
        (false, true) => Some((one, other, product)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sample::Builder;

    fn step(mask_name: &str) -> Trace {
        let mut builder = Builder::new(1);
        let weight = builder.allocation(&[64, 64], Category::Parameter, 0);
        let mask = builder.allocation(&[64, 64], Category::ModuleBuffer, 0);
        for (value, name) in [(weight, "0.weight_orig"), (mask, mask_name)] {
            let name = builder.string(name);
            let id = builder.trace.allocation_of(value);
            builder.trace.allocations[id.index()].name = name;
        }
        builder.op(
            "aten.mul.Tensor",
            Phase::Forward,
            &[mask, weight],
            &[64, 64],
        );
        builder.finish()
    }

    #[test]
    fn a_mask_and_its_product_are_said_to_be_given_back() {
        let note = pruning_note(&step("0.weight_mask"), Bytes(3 * 64 * 64 * 4));
        let note = note.expect("a pruned weight");
        assert!(
            note.starts_with("pruning adds 32.0 KiB to the peak: masks of 16.0 KiB"),
            "{note}"
        );
        assert!(note.contains("makes the peak 16.0 KiB"), "{note}");
    }

    #[test]
    fn a_mask_of_another_weight_is_none() {
        assert_eq!(
            pruning_note(&step("1.weight_mask"), Bytes(3 * 64 * 64 * 4)),
            None
        );
    }
}

//! Random operations on both sides, in every case; a difference is shrunk before it is shown. One JSON line a case
//! says how many were the same.

use memfit_engine::allocator::Device;

use crate::cases::{CASES, Case};
use crate::random;
use crate::real::{Oracle, oracle_or_skip};
use crate::script::{Operation, script, simulate};

/// Operations of one stream; longer runs take more streams.
const STREAM_OPERATIONS: usize = 10_000;

fn operation_count() -> usize {
    let text = std::env::var("MEMFIT_ORACLE_OPERATIONS");
    text.map_or(2_000, |text| text.parse().expect("a number of operations"))
}

#[test]
fn random_operations_have_the_same_outcome() {
    let Some(oracle) = oracle_or_skip() else {
        return;
    };
    for (number, case) in (0_u64..).zip(CASES) {
        let mut left = operation_count();
        let mut seed = number << 32;
        let mut total = 0;
        while left > 0 {
            let count = left.min(STREAM_OPERATIONS);
            let operations = random::operations(seed, count, case.mix);
            compare(oracle, case, &operations);
            total += operations.len();
            left -= count;
            seed += 1;
        }
        println!(
            "{{\"case\": \"{}\", \"settings\": \"{}\", \"operations\": {total}, \"mismatches\": 0}}",
            case.name, case.settings
        );
    }
}

fn compare(oracle: &Oracle, case: &Case, operations: &[Operation]) {
    if difference(oracle, case.settings, case.device, operations).is_none() {
        return;
    }
    let small = shrink(oracle, case, operations);
    let (line, real, simulated) = difference(oracle, case.settings, case.device, &small).unwrap();
    panic!(
        "case `{}` ({}, {:?}) differs at answer {line}\n     real: {real}\nsimulated: {simulated}\n{}",
        case.name,
        case.settings,
        case.device,
        script(&small)
    );
}

/// The first answer that differs: its number, the real one, the simulated one.
pub(crate) fn difference(
    oracle: &Oracle,
    settings: &str,
    device: Device,
    operations: &[Operation],
) -> Option<(usize, String, String)> {
    let real = in_any_order(&oracle.run(settings, device, &script(operations)));
    let simulated = in_any_order(&simulate(settings, device, operations));
    if real == simulated {
        return None;
    }
    let (mut real, mut simulated) = (real.lines(), simulated.lines());
    (1..).find_map(|line| match (real.next(), simulated.next()) {
        (Some(one), Some(other)) if one == other => None,
        (one, other) => Some((
            line,
            one.unwrap_or("nothing").to_owned(),
            other.unwrap_or("nothing").to_owned(),
        )),
    })
}

/// The answers with segments that were given back one after the other sorted: PyTorch visits released pools
/// in the order of a hash table.
fn in_any_order(answers: &str) -> String {
    let is_return =
        |line: &str| line.starts_with("segment_free") || line.starts_with("segment_unmap");
    let mut lines: Vec<&str> = answers.lines().collect();
    for run in lines.chunk_by_mut(|one, next| is_return(one) && is_return(next)) {
        run.sort_unstable();
    }
    lines.join("\n")
}

/// Drops stretches of operations while the two sides still differ.
fn shrink(oracle: &Oracle, case: &Case, operations: &[Operation]) -> Vec<Operation> {
    let differs = |operations: &[Operation]| {
        difference(oracle, case.settings, case.device, operations).is_some()
    };
    let mut kept = operations.to_vec();
    let mut stretch = kept.len() / 2;
    while stretch > 0 {
        let mut start = 0;
        while start < kept.len() {
            let mut shorter = kept.clone();
            shorter.drain(start..(start + stretch).min(kept.len()));
            if is_sound(&shorter) && differs(&shorter) {
                kept = shorter;
            } else {
                start += stretch;
            }
        }
        stretch /= 2;
    }
    kept
}

/// Whether pools are begun before they are ended and released; PyTorch aborts otherwise.
fn is_sound(operations: &[Operation]) -> bool {
    let mut uses = std::collections::BTreeMap::<u64, i64>::new();
    let mut begun = std::collections::BTreeSet::new();
    operations.iter().all(|operation| match operation {
        Operation::Begin { pool, .. } => {
            let uses = uses.entry(*pool).or_insert(0);
            *uses += 1;
            begun.insert(*pool)
        }
        Operation::End { pool } => begun.remove(pool),
        Operation::Release { pool } => {
            let uses = uses.entry(*pool).or_insert(0);
            *uses -= 1;
            *uses >= i64::from(begun.contains(pool))
        }
        Operation::LastResort { pool, .. } | Operation::NoSplit { pool } => uses.contains_key(pool),
        _ => true,
    })
}

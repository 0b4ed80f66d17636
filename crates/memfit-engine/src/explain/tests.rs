//! The rollback against an allocator that knows the truth at every event.

use proptest::prelude::*;

use super::sample::Machine;
use super::{History, NEVER, Peaks, Rounding, totals};
use crate::snapshot::StackIndex;

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

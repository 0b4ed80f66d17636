//! The levels of detail by plain counting, to test against.
//!
//! Responsible for asking every moment anew which lives contain it. Shares nothing with `columns.rs` but the
//! lives.

#![expect(
    clippy::cast_possible_truncation,
    reason = "the sizes of tests are small"
)]

use proptest::prelude::*;

use super::columns::{self, Columns, Grid};
use super::forward;
use super::lives::Lives;
use super::sample::{Random, Recorder, Shape, waves};
use super::segments::{self, SegmentLife};
use super::{Life, Moment, Packed, Subject, pack, subjects};
use crate::snapshot::{Action, Snapshot, StackIndex};

fn allocated(lives: &[Life], moment: Moment, of: impl Fn(&Life) -> bool) -> u64 {
    let there = |life: &&Life| life.birth <= moment && moment < life.released;
    lives
        .iter()
        .filter(there)
        .filter(|life| of(life))
        .map(|life| life.size)
        .sum()
}

fn active(lives: &[Life], moment: Moment) -> u64 {
    let there = |life: &&Life| life.birth <= moment && moment < life.end;
    lives.iter().filter(there).map(|life| life.size).sum()
}

fn reserved(segments: &[SegmentLife], moment: Moment) -> u64 {
    let there = |life: &&SegmentLife| life.birth <= moment && moment < life.end;
    segments.iter().filter(there).map(|life| life.size).sum()
}

/// The first of the moments at which the value is highest, and that value.
fn highest(moments: impl Iterator<Item = Moment>, value: impl Fn(Moment) -> u64) -> (Moment, u64) {
    let all: Vec<(Moment, u64)> = moments.map(|moment| (moment, value(moment))).collect();
    let most = all.iter().map(|one| one.1).max().unwrap();
    *all.iter().find(|one| one.1 == most).unwrap()
}

fn shape(events: usize) -> Shape {
    Shape {
        events,
        segments: 3,
        stacks: 5,
        depth: 3,
        letters: 8,
    }
}

/// Owners 0, 1, 2 by stack number.
fn three_owners(snapshot: &Snapshot) -> Subject<'_> {
    let device = &snapshot.devices[0];
    let mut lives = forward::of(device);
    for life in &mut lives {
        life.owner = life.stack.0 % 3;
    }
    Subject::new(
        device,
        lives,
        ["zero", "one", "two"].map(str::to_owned).to_vec(),
    )
}

/// All of a snapshot within a budget.
fn packed(snapshot: &Snapshot, budget: usize) -> Packed {
    let subject = |device| forward::subject(snapshot, device);
    let subjects: Vec<Subject<'_>> = snapshot.devices.iter().map(subject).collect();
    pack(snapshot, &subjects, budget)
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
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn columns_are_the_maxima_and_bands_add_up(
        seed: u64,
        events in 0_usize..200,
        most in 1_u32..80,
        first in 0_u32..300,
    ) {
        let snapshot = waves(&shape(events), seed);
        let subject = three_owners(&snapshot);
        let (lives, segments) = (Lives::new(&subject.lives, super::moments(subject.device)), segments::of(&snapshot.devices[0]));
        let whole = Grid::whole(lives.moments, most);
        prop_assert!(whole.count <= most);
        let part = Grid { first: first.min(lives.moments - 1), width: 1, count: 1 };
        let band = [0, 1, 1];
        for grid in [whole, part] {
            let columns = Columns::sweep(&lives, &segments, &band, 2, grid);
            for column in 0..grid.count {
                let start = grid.first + column * grid.width;
                let moments = || start..(start + grid.width).min(lives.moments);
                let index = column as usize;
                let (at, most) = highest(moments(), |m| allocated(lives.all, m, |_| true));
                prop_assert_eq!((columns.at[index], columns.allocated[index]), (at, most));
                prop_assert_eq!(
                    columns.active[index],
                    highest(moments(), |m| active(lives.all, m)).1
                );
                prop_assert_eq!(
                    columns.reserved[index],
                    highest(moments(), |m| reserved(&segments, m)).1
                );
                for (number, bytes) in columns.bands.iter().enumerate() {
                    let of = |life: &Life| usize::from(!life.stack.0.is_multiple_of(3)) == number;
                    prop_assert_eq!(bytes[index], allocated(lives.all, at, of));
                }
            }
        }
        let double = Grid {
            width: whole.width * 2,
            count: whole.count.div_ceil(2),
            ..whole
        };
        let sweep = |grid| Columns::sweep(&lives, &segments, &band, 2, grid);
        prop_assert_eq!(sweep(whole).halved(), sweep(double));
    }

    #[test]
    fn the_peak_is_the_highest_moment(seed: u64, events in 0_usize..300) {
        let snapshot = waves(&shape(events), seed);
        let subject = three_owners(&snapshot);
        let lives = Lives::new(&subject.lives, super::moments(subject.device));
        let peak = columns::peak(&lives, 3);
        let (at, most) = highest(0..lives.moments, |m| allocated(lives.all, m, |_| true));
        prop_assert_eq!((peak.moment, peak.allocated), (at, i128::from(most)));
        for owner in 0..3 {
            let of = |life: &Life| life.stack.0 % 3 == owner;
            let owner = owner as usize;
            prop_assert_eq!(
                peak.owners[owner].0,
                i128::from(allocated(lives.all, at, of))
            );
            prop_assert_eq!(
                peak.highest[owner],
                i128::from(highest(0..lives.moments, |m| allocated(lives.all, m, of)).1)
            );
        }
    }

    /// Backwards or forwards, the lives are the same. Sizes are not: only the rollback knows the layout.
    #[test]
    fn lives_are_those_of_a_walk_forwards(seed: u64, events in 0_usize..300) {
        let snapshot = waves(&shape(events), seed);
        let sorted = |lives: &[Life]| {
            let key = |life: &Life| (life.birth, life.address, life.end, life.released);
            let mut keys: Vec<_> = lives.iter().map(key).collect();
            keys.sort_unstable();
            keys
        };
        let explained = subjects(&snapshot);
        prop_assert_eq!(
            sorted(&explained[0].lives),
            sorted(&forward::of(&snapshot.devices[0]))
        );
    }

    /// Contradictions of every kind: nothing panics, and the packed bytes stay within the budget.
    #[test]
    fn any_events_pack_within_the_budget(seed: u64, events in 0_usize..200) {
        let mut random = Random(seed);
        let mut recorder = Recorder::default();
        let number = |random: &mut Random| match random.below(8) {
            0 => u64::MAX - random.below(3),
            1 => 0,
            2 => random.next(),
            _ => 512 * random.below(6),
        };
        for _ in 0..events {
            let action = ACTIONS[random.below(10) as usize];
            let (address, size) = (number(&mut random), number(&mut random));
            recorder.event(action, address, size);
        }
        recorder.segment(number(&mut random), number(&mut random), random.below(2) == 0);
        let snapshot = recorder.snapshot();
        for subjects in [subjects(&snapshot), vec![forward::subject(&snapshot, &snapshot.devices[0])]] {
            let packed = pack(&snapshot, &subjects, 20_000);
            prop_assert!(packed.bytes() <= 20_000, "{}", packed.bytes());
        }
    }
}

#[test]
fn the_budget_holds_whatever_the_input() {
    let hard = [
        // All stacks distinct and deep.
        Shape {
            events: 6_000,
            segments: 40,
            stacks: 4_000,
            depth: 12,
            letters: 30,
        },
        // Many segments.
        Shape {
            events: 6_000,
            segments: 10_000,
            stacks: 3,
            depth: 2,
            letters: 8,
        },
        // Very long names.
        Shape {
            events: 3_000,
            segments: 4,
            stacks: 200,
            depth: 3,
            letters: 5_000,
        },
    ];
    for shape in &hard {
        let snapshot = waves(shape, 7);
        for budget in [3_500_000, 200_000, 40_000] {
            let packed = packed(&snapshot, budget);
            assert!(packed.bytes() <= budget, "{} > {budget}", packed.bytes());
            // A budget is for being used: no level is dropped without need.
            if budget == 40_000 {
                assert!(
                    packed.bytes() > budget / 4,
                    "{} of {budget}",
                    packed.bytes()
                );
            }
        }
    }
}

#[test]
fn nothing_and_one_event_are_pictures_too() {
    let empty = Snapshot::default();
    assert!(packed(&empty, 10_000).devices.is_empty());

    for events in 0..2 {
        let mut recorder = Recorder::default();
        if events == 1 {
            recorder.event_of(Action::Alloc, 0x1000, 700, StackIndex::NONE);
        }
        let snapshot = recorder.snapshot();
        let packed = packed(&snapshot, 10_000);
        assert_eq!(packed.devices.len(), 1);
        assert!(packed.bytes() < 2_000);
    }
}

#[test]
fn the_same_snapshot_packs_to_the_same_bytes() {
    let snapshot = waves(&shape(3000), 3);
    assert_eq!(packed(&snapshot, 50_000), packed(&snapshot, 50_000));
}

#[test]
fn allocations_from_before_the_recording_count() {
    let mut recorder = Recorder::default();
    // Freed in the trace, so it was there from the start; another only finishes its free.
    recorder.event(Action::FreeCompleted, 0x4000, 1024);
    recorder.event(Action::Alloc, 0x1000, 700);
    recorder.free(0x2000, 512);
    let lives = forward::of(&recorder.device);
    let total = |moment| allocated(&lives, moment, |_| true);
    assert_eq!([0, 1, 2, 3, 4].map(total), [512, 512, 1536, 1024, 1024]);
    let total = |moment| active(&lives, moment);
    assert_eq!([0, 1, 2, 3, 4].map(total), [1536, 512, 1536, 1536, 1024]);
}

//! What a pool of a device does with what its allocator keeps and with copies in the host's memory, move by
//! move; that no history breaks the rules is shown in `histories.rs`.

use super::histories::{BUDGET, PIECE, World};
use super::*;

/// Models of 30 bytes, of which three fit, that are awake as far as they fit.
fn models(count: usize, host: u64) -> World {
    World::of(Some(host), &vec![(30, false, true); count])
}

#[test]
fn what_calls_took_counts_until_it_is_released_and_the_same_model_has_it_again() {
    let mut world = models(2, 90);
    world.call(0, 20);
    assert_eq!(world.machine.counted(), Bytes(80));
    // The same blocks: nothing more counts, and nothing has to be done.
    world.call(0, 20);
    world.ask(ModelId(0), 25, Client(1));
    assert!(world.waiting.is_empty());
    assert_eq!(world.machine.counted(), Bytes(85));
    world.end(*world.uses.keys().next().unwrap());
    // Another model's call may not find them.
    world.ask(ModelId(1), 20, Client(1));
    assert_eq!(world.waiting.len(), 1);
    assert!(world.begin());
    assert_eq!(world.jobs, [Job::Release]);
    // One is enough, and nothing is parked for what it frees.
    assert!(!world.begin());
    world.finish(0, true);
    assert!(world.waiting.is_empty());
    assert_eq!(world.machine.counted(), Bytes(80));
    assert_eq!(world.machine.statistics().releases, 1);
    assert_eq!(world.machine.statistics().parks, 0);
}

#[test]
fn a_budget_comes_down_past_what_is_only_kept() {
    let mut world = models(2, 90);
    world.call(0, 35);
    world.aim(60);
    assert_eq!(world.machine.budget(), Bytes(95));
    assert!(world.shed(60));
    assert_eq!(world.jobs, [Job::Release]);
    world.finish(0, true);
    assert_eq!(world.machine.budget(), Bytes(60));
    assert!(!world.shed(60));
}

#[test]
fn what_its_own_calls_left_is_in_no_models_way() {
    // With all that a large call left, the model itself would never fit again.
    let mut world = World::of(Some(0), &[(60, false, true), (60, false, false)]);
    world.call(0, 40);
    world.call(1, 0);
    world.call(0, 40);
    world.aim(75);
    while world.shed(75) {
        world.finish(0, true);
    }
    world.ask(ModelId(0), 10, Client(1));
    world.drain();
    assert_eq!(world.machine.budget(), Bytes(75));
    assert_eq!(world.uses.len(), 1);
}

#[test]
fn the_copy_that_is_expected_last_moves_on_and_a_model_that_is_expected_later_goes_there_at_once() {
    let mut world = models(5, 60);
    assert_eq!(world.resident, [true, true, true, false, false]);
    assert_eq!(world.copies, [0, 0, 0, 28, 28]);
    // No request ever wants 3 and 4, whose copies fill the share: 3 makes way, being the first of equals.
    for _ in 0..3 {
        for model in 0..3 {
            world.call(model, 0);
        }
    }
    world.ask(ModelId(4), 0, Client(1));
    assert!(world.begin());
    assert_eq!(world.jobs, [Job::Spill(ModelId(3))]);
    assert!(!world.begin(), "it is waited for");
    world.finish(0, true);
    assert!(world.begin());
    let parked = world.jobs[0];
    assert!(matches!(parked, Job::Park(_, Bytes(30))), "{parked:?}");
    world.finish(0, true);
    world.drain();
    assert_eq!(world.machine.statistics().spills, 1);
    assert_eq!(world.copies.iter().sum::<u64>(), 30 / PIECE * PIECE);
    // Model 4 was used once, and each of the others more often: it goes to the disk as far as it must.
    world.end(*world.uses.keys().next().unwrap());
    let before = world.machine.statistics().spills;
    for model in 0..3 {
        world.call(model, 0);
    }
    assert!(!world.resident[4]);
    assert_eq!(world.machine.statistics().spills, before);
    assert!(world.machine.statistics().host_peak <= Bytes(60));
}

#[test]
fn a_copy_that_cannot_move_stays_and_the_next_goes_to_the_disk() {
    let mut world = models(4, 30);
    assert_eq!(world.copies, [0, 0, 0, 28]);
    world.aim(BUDGET - 30);
    for model in [0, 1, 2] {
        world.call(model, 0);
    }
    assert!(world.shed(60));
    assert_eq!(world.jobs, [Job::Spill(ModelId(3))]);
    world.finish(0, false);
    assert!(world.shed(60));
    assert!(matches!(world.jobs[0], Job::Park(_, Bytes(2))));
    world.finish(0, true);
    assert_eq!(world.copies[3], 28);
    // Woken, it may move again.
    world.call(3, 0);
    assert_eq!(world.copies[3], 0);
}

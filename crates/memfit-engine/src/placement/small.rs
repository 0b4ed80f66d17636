//! Tests on small problems, against all orders.
//!
//! The slow twin places in every order, each allocation at the lowest place above those before it that it
//! overlaps; some order gives the optimum, because pushing down an optimal placement gives one.

use proptest::prelude::*;

use super::canonical::{Found, Instance, Key, Preorder, Search, Switches};
use super::prepare::Prepared;
use super::{Allocation, Answer, Goal, Problem, Request, Status, StopReason, place, validate};

/// The least height over all orders.
fn optimum(problem: &Problem) -> u64 {
    fn extend(
        allocations: &[Allocation],
        placed: &mut Vec<(usize, u64)>,
        height: u64,
        best: &mut u64,
    ) {
        if height >= *best {
            return;
        }
        if placed.len() == allocations.len() {
            *best = height;
            return;
        }
        for (index, a) in allocations.iter().enumerate() {
            if placed.iter().any(|&(other, _)| other == index) {
                continue;
            }
            let below = placed.iter().filter_map(|&(other, offset)| {
                let b = &allocations[other];
                (a.lower < b.upper && b.lower < a.upper).then_some(offset + b.size)
            });
            let offset = below.max().unwrap_or(0).next_multiple_of(a.alignment);
            placed.push((index, offset));
            extend(allocations, placed, height.max(offset + a.size), best);
            placed.pop();
        }
    }
    let mut best = u64::MAX;
    extend(problem.allocations(), &mut Vec::new(), 0, &mut best);
    if problem.allocations().is_empty() {
        0
    } else {
        best
    }
}

fn allocations(alignments: &'static [u64]) -> impl Strategy<Value = Problem> {
    let allocation = (
        0..8_i64,
        1..6_i64,
        1..9_u64,
        proptest::sample::select(alignments),
    );
    let allocation = allocation.prop_map(|(lower, width, size, alignment)| Allocation {
        lower,
        upper: lower + width,
        size,
        alignment,
    });
    proptest::collection::vec(allocation, 0..7).prop_map(|list| Problem::new(list).unwrap())
}

fn solve(problem: &Problem, goal: Goal, threads: usize) -> Answer {
    let request = Request {
        threads,
        ..Request::new(goal)
    };
    let answer = place(problem, &request, &|| false).unwrap();
    assert_eq!(validate(problem, &answer.placement), Ok(()));
    answer
}

/// All words of the answer follow from the optimum.
fn check(problem: &Problem) {
    let optimum = optimum(problem);
    let lowest = solve(problem, Goal::Lowest, 1);
    assert_eq!(lowest.placement.height, optimum);
    assert_eq!(lowest.lower_bound, optimum);
    assert_eq!(lowest.status, Status::Optimal);
    assert_eq!(lowest.stop_reason, StopReason::ProvedOptimal);
    for capacity in [0, optimum.saturating_sub(1), optimum, optimum + 1, u64::MAX] {
        let within = solve(problem, Goal::Within(capacity), 1);
        let possible = capacity >= optimum;
        assert!(within.lower_bound <= optimum);
        assert_eq!(within.placement.height <= capacity, possible);
        match within.status {
            Status::Optimal => assert_eq!(within.placement.height, optimum),
            Status::Feasible => assert!(possible),
            Status::Infeasible => assert!(!possible),
            Status::Unknown => panic!("undecided on {problem:?}"),
        }
    }
}

fn switches(bits: u32) -> Switches {
    let on = |bit: u32| bits & (1 << bit) != 0;
    Switches {
        dominance: on(0),
        release_times: on(1),
        lifting: on(2),
        hatless: on(3),
        decomposition: on(4),
        reranking: on(5),
    }
}

/// Whether a placement within `capacity` exists, as one search sees it.
fn exists(problem: &Problem, capacity: u64, preorder: Preorder, switches: Switches) -> bool {
    let prepared = Prepared::new(problem);
    let Some(limits) = prepared.limits(capacity) else {
        return false;
    };
    let instance = Instance::new(&prepared);
    let mut search = Search::new(&instance, limits, preorder, switches);
    match search.run(u64::MAX, &|| false) {
        Found::Placed(offsets) => {
            let placement = prepared.placement(problem.allocations().len(), &offsets);
            assert_eq!(validate(problem, &placement), Ok(()));
            assert!(placement.height <= capacity);
            true
        }
        Found::Impossible => false,
        Found::Limit => panic!("a limit where there is none"),
    }
}

const KEYS: [Key; 3] = [
    Key::TotalWidthArea,
    Key::TotalAreaWidth,
    Key::WidthAreaTotal,
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn the_answer_is_the_optimum(problem in allocations(&[1])) {
        check(&problem);
    }

    #[test]
    fn the_answer_is_the_optimum_with_one_alignment(problem in allocations(&[4])) {
        check(&problem);
    }

    #[test]
    fn the_answer_is_the_optimum_with_many_alignments(problem in allocations(&[1, 2, 3, 4, 8])) {
        check(&problem);
    }

    #[test]
    fn every_combination_of_switches_gives_the_same_answer(
        problem in allocations(&[1, 1, 1, 2, 4]), key in 0..3_usize, seed in 0..4_u64,
    ) {
        let optimum = optimum(&problem);
        let preorder = Preorder { key: KEYS[key], seed };
        for bits in 0..64 {
            let switches = switches(bits);
            prop_assert!(exists(&problem, optimum, preorder, switches), "{switches:?}");
            if optimum > 0 {
                prop_assert!(!exists(&problem, optimum - 1, preorder, switches), "{switches:?}");
            }
        }
    }
}

/// Boxes cut from a square: the optimum is its side, and no order is likely to find it.
pub(super) fn cut_square(seed: u64, side: u64, time: i64, pieces: usize) -> Problem {
    let mut boxes = vec![(0_i64, time, 0_u64, side)];
    let mut step = 0;
    let mut chance = |count: u64| {
        step += 1;
        super::canonical::mix(seed, step) % count
    };
    while boxes.len() < pieces {
        let at = usize::try_from(chance(boxes.len() as u64)).unwrap();
        let (left, right, low, high) = boxes[at];
        if chance(2) == 0 && right - left >= 2 {
            let cut = left + 1 + i64::try_from(chance((right - left - 1).unsigned_abs())).unwrap();
            boxes[at] = (left, cut, low, high);
            boxes.push((cut, right, low, high));
        } else if high - low >= 2 {
            let cut = low + 1 + chance(high - low - 1);
            boxes[at] = (left, right, low, cut);
            boxes.push((left, right, cut, high));
        }
    }
    let allocation = |&(lower, upper, low, high): &(i64, i64, u64, u64)| Allocation {
        lower,
        upper,
        size: high - low,
        alignment: 1,
    };
    Problem::new(boxes.iter().map(allocation).collect()).unwrap()
}

#[test]
fn the_number_of_threads_changes_nothing() {
    for seed in 0..12 {
        let problem = cut_square(seed, 64, 40, 45);
        for goal in [Goal::Lowest, Goal::Within(64), Goal::Within(66)] {
            let mut answers = [1, 2, 5].map(|threads| {
                let request = Request {
                    threads,
                    work_limit: 20_000,
                    ..Request::new(goal)
                };
                place(&problem, &request, &|| false).unwrap()
            });
            let (first, others) = answers.split_first_mut().unwrap();
            for other in others {
                assert_eq!(first, other, "seed {seed}, {goal:?}");
            }
        }
    }
}

#[test]
fn what_is_stopped_at_once_still_answers() {
    let problem = cut_square(3, 64, 40, 60);
    for goal in [Goal::Lowest, Goal::Within(64)] {
        let answer = place(&problem, &Request::new(goal), &|| true).unwrap();
        assert_eq!(validate(&problem, &answer.placement), Ok(()));
        assert!(answer.placement.height >= answer.lower_bound);
        if answer.status != Status::Optimal {
            assert_eq!(answer.stop_reason, StopReason::TimeLimit);
        }
    }
}

#[test]
fn a_work_limit_is_said_and_is_no_proof() {
    let problem = cut_square(5, 512, 300, 150);
    let request = Request {
        work_limit: 1,
        ..Request::new(Goal::Within(512))
    };
    let answer = place(&problem, &request, &|| false).unwrap();
    if answer.placement.height > 512 {
        assert_eq!(
            (answer.status, answer.stop_reason),
            (Status::Unknown, StopReason::WorkLimit)
        );
    }
}

/// Numbers at which arithmetic goes wrong.
fn extreme() -> impl Strategy<Value = i64> {
    let near = proptest::sample::select(vec![i64::MIN, -1, 0, 1, 1 << 32, 1 << 62, i64::MAX]);
    (near, -2..3_i64).prop_map(|(number, more)| number.saturating_add(more))
}

proptest! {
    #[test]
    fn no_numbers_break_it(
        rows in proptest::collection::vec((extreme(), extreme(), extreme(), extreme()), 0..6),
        capacity in extreme(),
    ) {
        let rows = rows.iter().map(|&(lower, upper, size, alignment)| Allocation {
            lower,
            upper,
            size: size.unsigned_abs() >> 1,
            alignment: alignment.unsigned_abs() >> 2,
        });
        if let Ok(problem) = Problem::new(rows.collect()) {
            for goal in [Goal::Lowest, Goal::Within(capacity.unsigned_abs())] {
                let answer = solve(&problem, goal, 1);
                prop_assert!(answer.lower_bound <= answer.placement.height);
            }
        }
    }

    #[test]
    fn no_text_breaks_the_reader(text in "[a-e0-9,.\\-\r\n ]{0,80}", header in 0..3_usize) {
        let header = ["", "id,lower,upper,size\n", "id,size,begin,end,alignment,gaps\r\n"][header];
        if let Ok(table) = super::csv::parse(format!("{header}{text}").as_bytes(), 1) {
            prop_assert_eq!(table.ids.len(), table.problem.allocations().len());
        }
    }
}

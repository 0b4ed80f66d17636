//! Many searches for one capacity, side by side.
//!
//! Responsible for trying preorders in turn with growing node limits, on as many threads as are given.
//! The search is heavy-tailed in its order: where one preorder is lost for minutes another is done at
//! once, so each is left early and taken up again later. Not responsible for which capacity to ask for.
//!
//! # Invariant
//!
//! The answer does not depend on the number of threads or on which of them ends first: searches are
//! numbered, and the lowest number that decides counts.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::canonical::{Found, Instance, Key, Preorder, Search, Stop, Switches};

/// Preorders of every round; later rounds add disturbed ones.
const KEYS: [Key; 3] = [
    Key::TotalWidthArea,
    Key::TotalAreaWidth,
    Key::WidthAreaTotal,
];
/// Node limit of the first round, and what each round multiplies it by.
const FIRST_NODES: u64 = 512;
const GROWTH: u64 = 4;
/// Round from which on disturbed preorders take part, as many as undisturbed ones.
const DISTURBED_FROM: u32 = 2;
/// Stack of a search: its depth is the number of items, and a frame takes a few hundred bytes.
const STACK_BASE: usize = 1 << 20;
const STACK_PER_ITEM: usize = 4 << 10;

/// What may be spent, and who may end it.
#[derive(Clone, Copy)]
pub(super) struct Effort<'s> {
    pub(super) threads: usize,
    pub(super) stop: Stop<'s>,
}

/// One search of a round.
#[derive(Debug, Clone, Copy)]
struct Lane {
    preorder: Preorder,
    node_limit: u64,
}

/// The answer to a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Probe {
    pub(super) found: Found,
    /// Nodes of the searches up to the one that decided.
    pub(super) nodes: u64,
}

/// Asks for a placement within `limits`, for rounds `rounds.start..rounds.end` at most and about
/// `node_limit` nodes.
pub(super) fn probe(
    instance: &Instance<'_>,
    limits: &[u64],
    rounds: std::ops::Range<u32>,
    node_limit: u64,
    effort: Effort<'_>,
) -> Probe {
    let mut nodes: u64 = 0;
    for round in rounds {
        let lanes = lanes(round);
        let (found, spent) = run_round(instance, limits, &lanes, effort);
        nodes = nodes.saturating_add(spent);
        if found != Found::Limit {
            return Probe { found, nodes };
        }
        if nodes >= node_limit || (effort.stop)() {
            break;
        }
    }
    Probe {
        found: Found::Limit,
        nodes,
    }
}

fn lanes(round: u32) -> Vec<Lane> {
    let node_limit = FIRST_NODES.saturating_mul(GROWTH.saturating_pow(round));
    let mut lanes = Vec::with_capacity(2 * KEYS.len());
    let disturbed = round >= DISTURBED_FROM;
    for seed in std::iter::once(0).chain(disturbed.then_some(u64::from(round))) {
        lanes.extend(KEYS.iter().map(|&key| Lane {
            preorder: Preorder { key, seed },
            node_limit,
        }));
    }
    lanes
}

/// Runs the lanes of a round until the first in number that decides is known.
fn run_round(
    instance: &Instance<'_>,
    limits: &[u64],
    lanes: &[Lane],
    effort: Effort<'_>,
) -> (Found, u64) {
    let next = AtomicUsize::new(0);
    let decided = AtomicUsize::new(usize::MAX);
    let results: Mutex<Vec<Option<(Found, u64)>>> = Mutex::new(vec![None; lanes.len()]);
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(lane) = lanes.get(number) else {
                return;
            };
            let stop = || decided.load(Ordering::Relaxed) < number || (effort.stop)();
            if stop() {
                return;
            }
            let limits = limits.to_vec();
            let mut search = Search::new(instance, limits, lane.preorder, Switches::default());
            let found = search.run(lane.node_limit, &stop);
            if found != Found::Limit {
                decided.fetch_min(number, Ordering::Relaxed);
            }
            if let Ok(mut results) = results.lock() {
                results[number] = Some((found, search.nodes()));
            }
        }
    };
    let stack = STACK_BASE + STACK_PER_ITEM * instance.prepared.items.len();
    let threads = effort.threads.clamp(1, lanes.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let builder = std::thread::Builder::new().stack_size(stack);
            // A thread that the system refuses leaves the work to the others, and where it refuses all
            // the round finds nothing.
            let _refused = builder.spawn_scoped(scope, work);
        }
    });
    let results = results.into_inner().unwrap_or_default();
    let mut nodes: u64 = 0;
    for (found, spent) in results.into_iter().flatten() {
        nodes = nodes.saturating_add(spent);
        if found != Found::Limit {
            return (found, nodes);
        }
    }
    (Found::Limit, nodes)
}

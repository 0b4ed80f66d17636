//! Snapshots whose truth is known: the cause that is named is the true one, or none is.
//!
//! Made-up programs run on the simulated allocator (`scenario.rs`, `steps.rs`), which knows what they keep, what is stuck
//! and what would have served a request (`refusal.rs`). Every cause that [`explain`] names of their snapshots is
//! held against that.
//!
//! `MEMFIT_EXPLAIN_CASES=10000` runs so many instead of a few hundred.

use std::collections::{BTreeMap, BTreeSet};

use super::super::sites::{NO_STACK, Sites};
use super::super::{Cause, DeviceExplanation, Pattern, Request, Verdict, explain};
use crate::bytes::Bytes;
use crate::snapshot::{BlockState, Snapshot};

mod program;
mod refusal;
mod scenario;
mod steps;

use program::Program;

/// All that can be named.
const NAMED: [&str; 14] = [
    "LiveSet",
    "Fragmentation",
    "Cap",
    "NonTorch",
    "Pending",
    "PrivatePools",
    "LiveSetOrNonTorch",
    "KeptGraph",
    "KeptScalar",
    "Kept",
    "Fragmented",
    "Cached",
    "Negligible",
    "Unknown",
];

fn case_count() -> u64 {
    let text = std::env::var("MEMFIT_EXPLAIN_CASES");
    text.map_or(300, |text| text.parse().expect("a number of cases"))
}

/// How much of a run its snapshot has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recorded {
    All,
    /// The ring buffer lost the events before this one.
    From(usize),
    Nothing,
}

struct Case {
    seed: u64,
    name: &'static str,
    program: Program,
    snapshot: Snapshot,
    recorded: Recorded,
    device: DeviceExplanation,
}

impl Case {
    fn of(seed: u64) -> Self {
        let (name, mut program) = scenario::run(seed, usize::MAX);
        let events = program.event_count();
        let recorded = match program.random.below(5) {
            0 => Recorded::Nothing,
            1 => Recorded::From(usize::try_from(program.random.below(events as u64 + 1)).unwrap()),
            _ => Recorded::All,
        };
        let snapshot = program.taken(match recorded {
            Recorded::All => 0,
            Recorded::From(event) => event,
            Recorded::Nothing => events,
        });
        let is_known = program.one_in(2);
        let request = Request {
            device_memory: is_known.then_some(Bytes(program.place.device.total_bytes)),
            ..Request::default()
        };
        let mut explanation = explain(&snapshot, &request);
        assert_eq!(explanation.problems, [], "seed {seed}");
        let device = explanation.devices.remove(0);
        Self {
            seed,
            name,
            program,
            snapshot,
            recorded,
            device,
        }
    }

    fn assert(&self, is_true: bool, what: &str) {
        assert!(
            is_true,
            "seed {} ({}, {:?}, {:?}): {what}",
            self.seed, self.name, self.recorded, self.program.place
        );
    }

    /// What is named, leaks that were missed included.
    fn named(&self) -> Vec<String> {
        let device = &self.device;
        let refused = device.oom.iter().map(|it| format!("{:?}", it.cause));
        let grown = device.growth.iter().map(|it| format!("{:?}", it.pattern));
        let verdict = format!("{:?}", device.fragmentation.verdict);
        let leak = match (
            self.program.kept.stacks.is_empty(),
            device.growth.is_empty(),
        ) {
            (false, false) => Some("a leak"),
            (false, true) => Some("no leak, though there is one"),
            (true, _) => None,
        };
        let mut all: Vec<String> = refused.chain(grown).collect();
        all.push(verdict);
        all.extend(leak.map(str::to_owned));
        all
    }

    /// A stack that grows is one that the program keeps blocks of, and the line named is one that keeps them.
    fn judge_growth(&self) {
        let kept = &self.program.kept;
        let sites = Sites::of(&self.snapshot);
        let stacks: BTreeSet<String> = kept.stacks.iter().map(|&it| sites.text(it)).collect();
        for it in &self.device.growth {
            let is_true = match it.stack.as_str() {
                NO_STACK => kept.rises,
                stack => stacks.contains(stack),
            };
            self.assert(is_true, &format!("{it:?}"));
            let is_true = match it.pattern {
                Pattern::KeptGraph => kept.has_graph,
                Pattern::KeptScalar => kept.has_scalar,
                Pattern::Kept => true,
            };
            self.assert(is_true, &format!("{it:?}"));
        }
        let said = self.device.growth_summary.as_deref().unwrap_or_default();
        if let Some((_, line)) = said.split_once("; look at ") {
            let is_true = kept
                .stacks
                .iter()
                .any(|&stack| sites.user_frame(stack).as_deref() == Some(line));
            self.assert(is_true, said);
        }
    }

    /// The cause of a refusal is one without which the request is served.
    fn judge_refusal(&self) {
        let Some(refusal) = &self.program.refusal else {
            self.assert(self.device.oom.is_empty(), "nothing was refused");
            return;
        };
        let causes = refusal::causes(refusal, &self.program.place, self.program.pool());
        for it in &self.device.oom {
            let is_true = match it.cause {
                Cause::LiveSetOrNonTorch => {
                    causes.contains(&Cause::LiveSet) || causes.contains(&Cause::NonTorch)
                }
                cause => causes.contains(&cause),
            };
            self.assert(
                is_true,
                &format!("{causes:?} and not {it:?}; {:?}", refusal.error),
            );
            let is_named = self.device.fragmentation.verdict == Verdict::Fragmented;
            let is_history = self.device.has_history;
            self.assert(
                is_named == (is_history && it.cause == Cause::Fragmentation),
                &self.device.fragmentation.summary,
            );
        }
    }

    /// What is said to be stuck, or cache, at the peak stays, or goes, when the cache is emptied there.
    fn judge_peak(&self) {
        let found = &self.device.fragmentation;
        if !self.device.has_history {
            self.assert(found.verdict == Verdict::Unknown, &found.summary);
            self.assert(self.device.growth.is_empty(), "nothing grows unseen");
            return;
        }
        let cut = match self.recorded {
            Recorded::From(event) => event,
            _ => 0,
        };
        let events = self
            .device
            .peak
            .event
            .map_or(cut, |event| cut + usize::try_from(event).unwrap() + 1);
        let ends = &self.program.ends;
        // The state of a cut lies within an operation now and then.
        let Ok(operation) = ends.binary_search(&events) else {
            return;
        };
        if found.refusal_event.is_some() {
            return;
        }
        let (_, at_peak) = scenario::run(self.seed, operation + 1);
        let mut simulator = at_peak.simulator;
        let reserved = simulator.statistics().reserved_bytes.all.current;
        simulator.empty_cache(None);
        let after = simulator.statistics().reserved_bytes.all.current;
        let segments = simulator.segments();
        let shared = segments.iter().filter(|it| it.pool == (0, 0));
        let free = shared
            .flat_map(|it| &it.blocks)
            .filter(|it| it.state == BlockState::Inactive);
        let stuck: u64 = free.map(|it| it.size).sum();
        let said = format!("{} stuck of {}: {found:?}", Bytes(stuck), Bytes(reserved));
        if found.verdict == Verdict::Fragmented {
            self.assert(stuck * 10 >= reserved, &said);
        }
        self.assert(found.releasable_bytes <= Bytes(reserved - after), &said);
    }

    /// What is said of the end comes true when the cache is emptied.
    fn judge_end(&self) {
        let end = &self.device.end;
        let mut simulator = self.program.simulator.clone();
        let reserved = simulator.statistics().reserved_bytes.all.current;
        simulator.empty_cache(None);
        let after = simulator.statistics().reserved_bytes.all.current;
        self.assert(
            end.releasable_bytes == Bytes(reserved - after),
            &end.summary,
        );
        let of_pools: u64 = simulator
            .segments()
            .iter()
            .filter(|it| it.pool != (0, 0))
            .flat_map(|it| &it.blocks)
            .filter(|it| it.state == BlockState::Inactive)
            .map(|it| it.size)
            .sum();
        let said: Bytes = end.private_pools.iter().map(|it| it.inactive_bytes).sum();
        self.assert(said == Bytes(of_pools), &end.summary);
    }
}

#[test]
fn the_cause_that_is_named_is_the_true_one_or_none_is() {
    let mut named: BTreeMap<String, u64> = BTreeMap::new();
    for seed in 0..case_count() {
        let case = Case::of(seed);
        case.judge_growth();
        case.judge_refusal();
        case.judge_peak();
        case.judge_end();
        for name in case.named() {
            *named.entry(name).or_default() += 1;
        }
    }
    // An explanation that names no cause is never wrong.
    for name in NAMED {
        assert!(named.contains_key(name), "{name}: {named:?}");
    }
}

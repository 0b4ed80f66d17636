//! Where one training or inference step ends and the next begins.
//!
//! Responsible for finding the boundaries in a trace that does not name them. Not responsible for what
//! grows from one to the next (`growth.rs`).
//!
//! The first of these that gives at least [`MIN_BOUNDARIES`] boundaries decides:
//!
//! 1. annotations: the ends of `Optimizer.step#..`, or the starts of `ProfilerStep#..`;
//! 2. stacks: the ends of runs of allocations under an optimizer's step;
//! 3. stacks: the ends of runs of allocations under autograd's engine;
//! 4. rhythm: a stack outside modules, backward and optimizer that allocates again and again at even
//!    distances, with a module's forward each time in between, the rarest such. Inside a module's forward
//!    the layers have a rhythm too; without a forward in between, a model is loaded or a cache is allocated.

use std::collections::BTreeMap;

use super::owners::Judge;
use super::sites::Phase;
use crate::snapshot::{Action, DeviceRecord, Snapshot, StackIndex};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Three whole steps lie between four boundaries.
pub(super) const MIN_BOUNDARIES: usize = 4;

/// How the boundaries were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepSource {
    /// Rule 1.
    Annotations,
    /// Rule 2.
    OptimizerStacks,
    /// Rule 3.
    BackwardStacks,
    /// Rule 4.
    Rhythm,
}

/// The states at which steps end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Steps {
    pub(super) boundaries: Vec<u32>,
    pub(super) source: StepSource,
}

impl Steps {
    /// The boundaries of a device's steps, if there are enough.
    pub(super) fn of(judge: &Judge<'_>) -> Option<Self> {
        let (snapshot, device, runs) = (judge.snapshot, judge.device, judge.runs);
        let ends = |phase| {
            runs.whole(phase)
                .into_iter()
                .map(|(_, end)| end - 1)
                .collect()
        };
        let found = [
            (StepSource::Annotations, annotated(snapshot, device)),
            (StepSource::OptimizerStacks, ends(Phase::Optimizer)),
            (StepSource::BackwardStacks, ends(Phase::Backward)),
        ];
        let found = found
            .into_iter()
            .find(|(_, boundaries)| boundaries.len() >= MIN_BOUNDARIES);
        let (source, boundaries) = found.or_else(|| Some((StepSource::Rhythm, rhythm(judge)?)))?;
        Some(Self { boundaries, source })
    }
}

/// The states at the times of annotations.
fn annotated(snapshot: &Snapshot, device: &DeviceRecord) -> Vec<u32> {
    for (name, is_start) in [("Optimizer.step", false), ("ProfilerStep", true)] {
        let marks = snapshot.annotations.iter().filter(|mark| {
            mark.device == device.index
                && mark.is_start == is_start
                && snapshot.texts.get(mark.name).starts_with(name)
        });
        let mut states: Vec<u32> = marks.map(|mark| state_at(device, mark.time_us)).collect();
        states.sort_unstable();
        states.dedup();
        if states.len() >= MIN_BOUNDARIES {
            return states;
        }
    }
    Vec::new()
}

/// The state at a time: after every event up to it. Times rise along a trace.
fn state_at(device: &DeviceRecord, time_us: u64) -> u32 {
    let (mut low, mut high) = (0, device.events.len());
    while low < high {
        let middle = usize::midpoint(low, high);
        match device.events.get(middle) {
            Some(event) if event.time_us <= time_us => low = middle + 1,
            _ => high = middle,
        }
    }
    u32::try_from(low).unwrap_or(u32::MAX - 1)
}

/// How evenly a stack allocates, counted in allocations.
#[derive(Clone, Copy)]
struct Beat {
    count: u64,
    first: u64,
    last: u64,
    shortest: u64,
    longest: u64,
}

/// The states after the allocations of the rarest such stack at even distances: no distance, counted
/// in allocations, is more than half above the smallest, and together they span half the trace. Between any
/// two a module's forward has run.
fn rhythm(judge: &Judge<'_>) -> Option<Vec<u32>> {
    let device = judge.device;
    let mut beats: BTreeMap<StackIndex, Beat> = BTreeMap::new();
    let mut number = 0;
    for event in device.events.iter() {
        if event.action != Action::Alloc {
            continue;
        }
        number += 1;
        let beat = beats.entry(event.stack).or_insert(Beat {
            count: 0,
            first: number,
            last: number,
            shortest: u64::MAX,
            longest: 0,
        });
        if beat.count > 0 {
            let distance = number - beat.last;
            beat.shortest = beat.shortest.min(distance);
            beat.longest = beat.longest.max(distance);
        }
        beat.count += 1;
        beat.last = number;
    }
    let is_even = |stack: StackIndex, beat: &Beat| {
        let site = judge.sites.get(stack);
        stack != StackIndex::NONE
            && site.phase() == Phase::Forward
            && !site.is_in_forward()
            && beat.count >= MIN_BOUNDARIES as u64
            && beat.longest <= beat.shortest.saturating_add(beat.shortest / 2)
            && (beat.last - beat.first) * 2 >= number
    };
    let mut even: Vec<(StackIndex, Beat)> = beats.into_iter().collect();
    even.retain(|(stack, beat)| is_even(*stack, beat));
    even.sort_by_key(|&(stack, beat)| (beat.count, beat.first, stack));
    let mut on_beat: BTreeMap<StackIndex, Vec<u32>> =
        even.iter().map(|&(stack, _)| (stack, Vec::new())).collect();
    let mut forward: Vec<u32> = Vec::new();
    let states = (1..u32::MAX).zip(device.events.iter());
    for (state, event) in states.filter(|(_, event)| event.action == Action::Alloc) {
        if let Some(states) = on_beat.get_mut(&event.stack) {
            states.push(state);
        } else if judge.sites.get(event.stack).is_in_forward() {
            forward.push(state);
        }
    }
    let runs_between = |pair: &[u32]| {
        let before = |state: u32| forward.partition_point(|&it| it < state);
        before(pair[0]) < before(pair[1])
    };
    even.iter()
        .filter_map(|(stack, _)| on_beat.remove(stack))
        .find(|states| states.windows(2).all(runs_between))
}

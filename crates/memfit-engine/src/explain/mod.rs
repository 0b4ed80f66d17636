//! What happened to a device's memory, in words: the peak, its owners, and what kept it.
//!
//! Responsible for turning a [`Snapshot`] into an [`Explanation`]. Not responsible for reading the file,
//! nor for printing.

mod counterfactual;
mod document;
mod end;
mod fragmentation;
mod growth;
mod history;
mod life;
mod moment;
mod oom;
mod owners;
mod peak;
mod private;
mod regions;
mod sites;
mod sizes;
mod steps;

pub use document::{
    Contradiction, Counterfactual, DeviceExplanation, Explanation, Held, Peak, SCHEMA_VERSION,
    StepsFound,
};
pub use end::End;
pub use fragmentation::{Fragmentation, PinnedSegment, PinningBlock, Verdict};
pub use growth::{Growth, Pattern};
pub use history::History;
pub use life::{Allocation, NEVER};
pub use oom::{Cause, OutOfMemory, Parts};
pub use owners::{Category, Evidence, Judge, Owner, Runs};
pub use peak::{Highest, Peaks, Totals, event_of, totals};
pub use private::PrivatePool;
pub use sites::{BEFORE_RECORDING, NO_STACK, Phase, Site, Sites};
pub use sizes::Rounding;
pub use steps::StepSource;

use crate::bytes::Bytes;
use crate::snapshot::{Action, DeviceRecord, Problem, Snapshot};

/// Refusals explained; a loop that retries for ever makes no more.
const MAX_OUT_OF_MEMORY: usize = 100;
/// Events of the allocator that make a history. A ring buffer of one tells nothing that the segments do not.
const MIN_EVENTS: usize = 2;

/// What to explain beside the snapshot itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Request<'a> {
    /// The snapshot's name, for the report.
    pub source: &'a str,
    /// An earlier snapshot with its name, to compare with.
    pub before: Option<(&'a str, &'a Snapshot)>,
    /// Steps between the two; found by annotations when left out.
    pub steps: Option<u64>,
    /// Bytes of the device, which no snapshot has.
    pub device_memory: Option<Bytes>,
}

/// Explains a snapshot.
#[must_use]
pub fn explain(snapshot: &Snapshot, request: &Request<'_>) -> Explanation {
    let sites = Sites::of(snapshot);
    let before = request
        .before
        .map(|(name, before)| (name, before, Sites::of(before)));
    let rounding = Rounding::of_settings(&snapshot.settings);
    let mut problems: Vec<Problem> = snapshot.problems.clone();
    let devices = snapshot.devices.iter().map(|device| {
        let history = History::of(device, &rounding);
        // What the reader said of an event need not be said again.
        for problem in &history.problems {
            let same = |it: &Problem| {
                it.event.is_some() && (it.device, it.event) == (problem.device, problem.event)
            };
            if !problems.iter().any(same) {
                problems.push(problem.clone());
            }
        }
        let runs = Runs::of(snapshot, device, &sites);
        let subject = Subject {
            device,
            history: &history,
            peaks: Peaks::of(device, &history),
            judge: Judge {
                snapshot,
                device,
                sites: &sites,
                runs: &runs,
            },
        };
        let earlier = before.as_ref().and_then(|(_, before, sites)| {
            let device = before.devices.iter().find(|it| it.index == device.index)?;
            let steps = request
                .steps
                .or_else(|| growth::steps_between(before, snapshot));
            Some((device, sites, steps))
        });
        subject.explain(earlier, before.is_some(), request.device_memory)
    });
    let devices = devices.collect();
    Explanation {
        schema_version: SCHEMA_VERSION,
        source: request.source.to_owned(),
        before: before.as_ref().map(|(name, ..)| (*name).to_owned()),
        events: snapshot
            .devices
            .iter()
            .map(|it| it.events.len() as u64)
            .sum(),
        devices,
        problems: problems.into_iter().map(Contradiction::from).collect(),
    }
}

impl From<Problem> for Contradiction {
    fn from(problem: Problem) -> Self {
        Self {
            device: problem.device,
            event: problem.event,
            what: problem.what,
        }
    }
}

/// One device with what is known of it.
struct Subject<'a> {
    device: &'a DeviceRecord,
    history: &'a History,
    peaks: Peaks,
    judge: Judge<'a>,
}

impl Subject<'_> {
    fn explain(
        &self,
        earlier: Option<(&DeviceRecord, &Sites<'_>, Option<u64>)>,
        is_compared: bool,
        device_memory: Option<Bytes>,
    ) -> DeviceExplanation {
        let Self {
            device,
            history,
            peaks,
            judge,
        } = self;
        let has_history = has_history(device);
        let state = if has_history {
            peaks.allocated.state
        } else {
            end::last_state(history)
        };
        let steps = steps::Steps::of(judge).filter(|_| has_history);
        let found = match (earlier, &steps) {
            (Some((before, sites, count)), _) => {
                growth::between((before, sites), (device, judge), count)
            }
            (None, Some(steps)) if !is_compared => growth::within(device, history, steps, judge),
            (None, None) if !is_compared && has_history => growth::no_steps(),
            _ => growth::Found::default(),
        };
        let refusals = self.refusals(device_memory);
        let replayed = if has_history {
            counterfactual::replay(
                judge.snapshot,
                device,
                (history, peaks),
                (&refusals, device_memory),
            )
        } else {
            counterfactual::Replayed::default()
        };
        let judged_at = if has_history { &refusals[..] } else { &[] };
        let fragmentation = Fragmentation::of((device, history), state, judged_at, judge);
        DeviceExplanation {
            index: device.index,
            has_history,
            peak: if has_history {
                self.peak()
            } else {
                held_at_end(peaks)
            },
            live_before_recording_bytes: peaks.first.active_bytes,
            owners: owners::limited(judge.owners(history, state)),
            fragmentation: if has_history {
                fragmentation
            } else {
                fragmentation.unjudged()
            },
            oom: refusals,
            growth: found.growth,
            counterfactuals: replayed.counterfactuals,
            counterfactual_summary: replayed.summary,
            replayed_reserved_bytes: replayed.as_recorded,
            growth_summary: found.summary,
            steps: steps.map(|steps| StepsFound {
                boundary_count: steps.boundaries.len() as u64,
                source: steps.source,
            }),
            last: Held {
                allocated_bytes: peaks.last.allocated_bytes,
                active_bytes: peaks.last.active_bytes,
                reserved_bytes: peaks.last.reserved_bytes,
            },
            end: End::of(history, peaks.last, judge),
            uncertain_bytes: Bytes(history.uncertain_bytes),
        }
    }

    fn peak(&self) -> Peak {
        let peaks = &self.peaks;
        let event = event_of(peaks.allocated.state);
        let time = |position: u64| {
            let event = self.device.events.get(usize::try_from(position).ok()?)?;
            Some(event.time_us).filter(|&time| time > 0)
        };
        let after_us = event.and_then(|event| time(event)?.checked_sub(time(0)?));
        Peak {
            allocated_bytes: peaks.allocated.bytes,
            active_bytes: peaks.active.bytes,
            reserved_bytes: peaks.reserved.bytes,
            event,
            active_event: event_of(peaks.active.state),
            reserved_event: event_of(peaks.reserved.state),
            after_us,
        }
    }

    fn refusals(&self, device_memory: Option<Bytes>) -> Vec<OutOfMemory> {
        let moments = (0..NEVER).zip(totals(self.device, self.history));
        let refused = self
            .device
            .events
            .iter()
            .zip(moments)
            .filter(|(event, _)| event.action == Action::OutOfMemory);
        let text = |stack| match stack {
            crate::snapshot::StackIndex::NONE => NO_STACK.to_owned(),
            stack => self.judge.sites.text(stack),
        };
        refused
            .take(MAX_OUT_OF_MEMORY)
            .map(|(event, (position, totals))| {
                let at = (position, &event);
                let pools = &self.judge.snapshot.pools;
                oom::explain(
                    (self.device, pools),
                    self.history,
                    totals,
                    at,
                    device_memory,
                    text,
                )
            })
            .collect()
    }
}

/// Whether the allocator's events say more than the segments do. Marks of the user and of snapshots do not.
fn has_history(device: &DeviceRecord) -> bool {
    let told = device
        .events
        .iter()
        .filter(|event| !matches!(event.action, Action::Snapshot | Action::Annotate));
    told.take(MIN_EVENTS).count() == MIN_EVENTS
}

/// What was held when the snapshot was taken: it stands in for the peak where no events were recorded.
const fn held_at_end(peaks: &Peaks) -> Peak {
    Peak {
        allocated_bytes: peaks.last.allocated_bytes,
        active_bytes: peaks.last.active_bytes,
        reserved_bytes: peaks.last.reserved_bytes,
        event: None,
        active_event: None,
        reserved_event: None,
        after_us: None,
    }
}

#[cfg(test)]
mod sample;
#[cfg(test)]
mod tests;

//! Whether the events of a device agree with each other.
//!
//! Responsible for finding events that cannot have happened after the events before them. Not responsible
//! for the readability of single events (`rows.rs`), nor for what follows from the events.
//!
//! The trace is a ring buffer: a free of what was never handed out is what one recorded before the first
//! event, and an allocation may outlive the last one. Neither is a contradiction. Sizes in the trace are
//! those requested, so ranges are never larger than the blocks; overlapping ranges are overlapping blocks.

use std::collections::BTreeMap;

use super::problems::Problems;
use super::{Action, DeviceRecord, Event, Problem};

/// Adds what contradicts itself in the events of a device.
pub(super) fn check(record: &DeviceRecord, problems: &mut Problems) {
    let mut blocks = Ranges::default();
    let mut segments = Ranges::default();
    for (at, event) in (0..).zip(record.events.iter()) {
        let contradiction = match event.action {
            Action::Alloc => blocks
                .add(at, &event)
                .map(|other| format!("allocates what event {other} allocated")),
            Action::FreeRequested => blocks
                .inside(&event)
                .map(|other| format!("frees a part of what event {other} allocated")),
            Action::FreeCompleted => {
                let inside = blocks.inside(&event);
                blocks.live.remove(&event.address);
                inside.map(|other| format!("frees a part of what event {other} allocated"))
            }
            Action::SegmentAlloc => segments
                .add(at, &event)
                .map(|other| format!("overlaps the segment of event {other}")),
            Action::SegmentFree => {
                segments.live.remove(&event.address);
                let held = blocks.first_within(&event);
                held.map(|other| {
                    format!("gives back the segment in which event {other} still holds memory")
                })
            }
            // Ranges of an expandable segment are mapped and unmapped in other pieces.
            Action::SegmentMap
            | Action::SegmentUnmap
            | Action::Snapshot
            | Action::OutOfMemory
            | Action::Annotate => None,
        };
        if let Some(what) = contradiction {
            problems.add(Problem {
                device: Some(record.index),
                event: Some(at),
                what,
            });
        }
    }
}

/// Live address ranges that do not overlap: start to end and the event that made it.
#[derive(Default)]
struct Ranges {
    live: BTreeMap<u64, (u64, u64)>,
}

impl Ranges {
    /// Adds a range; what it overlaps is forgotten, and the first of it named.
    fn add(&mut self, at: u64, event: &Event) -> Option<u64> {
        let (start, end) = (event.address, event.address + event.size);
        let mut overlapped = None;
        while let Some((&other_start, &(other_end, other))) = self.live.range(..end).next_back()
            && other_end > start
        {
            self.live.remove(&other_start);
            overlapped = Some(other);
        }
        if end > start {
            self.live.insert(start, (end, at));
        }
        overlapped
    }

    /// The range in which the event starts without being its start.
    fn inside(&self, event: &Event) -> Option<u64> {
        let (&start, &(end, other)) = self.live.range(..=event.address).next_back()?;
        (start < event.address && event.address < end).then_some(other)
    }

    /// The first range that starts within the event's.
    fn first_within(&self, event: &Event) -> Option<u64> {
        let mut within = self.live.range(event.address..event.address + event.size);
        within.next().map(|(_, &(_, other))| other)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{PoolIndex, StackIndex, TextIndex};
    use super::*;

    fn record(events: &[(Action, u64, u64)]) -> DeviceRecord {
        let mut record = DeviceRecord::default();
        for &(action, address, size) in events {
            let event = Event {
                action,
                address,
                size,
                stream: 0,
                time_us: 0,
                stack: StackIndex::NONE,
                pool: PoolIndex::DEFAULT,
                label: TextIndex::default(),
            };
            record.events.push(event).unwrap();
        }
        record
    }

    fn found(events: &[(Action, u64, u64)]) -> Vec<(u64, String)> {
        let mut problems = Problems::default();
        check(&record(events), &mut problems);
        let problems = problems.finish().into_iter();
        problems.filter_map(|p| Some((p.event?, p.what))).collect()
    }

    #[test]
    fn a_ring_buffer_that_forgot_the_beginning_is_no_contradiction() {
        let events = [
            (Action::FreeRequested, 64, 8),
            (Action::FreeCompleted, 64, 8),
            (Action::Alloc, 64, 8),
            (Action::FreeRequested, 64, 8),
            (Action::FreeCompleted, 64, 8),
            (Action::Alloc, 60, 16),
            (Action::SegmentFree, 0, 32),
        ];
        assert_eq!(found(&events), []);
    }

    #[test]
    fn each_contradiction_names_its_event_and_the_other() {
        let events = [
            (Action::SegmentAlloc, 0, 128),
            (Action::Alloc, 0, 32),
            (Action::Alloc, 16, 32),
            (Action::FreeRequested, 20, 4),
            (Action::SegmentAlloc, 64, 128),
            (Action::SegmentFree, 0, 128),
        ];
        let found = found(&events);
        let said: Vec<(u64, &str)> = found.iter().map(|(at, what)| (*at, &what[..])).collect();
        assert_eq!(
            said,
            [
                (2, "allocates what event 1 allocated"),
                (3, "frees a part of what event 2 allocated"),
                (4, "overlaps the segment of event 0"),
                (
                    5,
                    "gives back the segment in which event 2 still holds memory"
                ),
            ]
        );
    }

    /// The same rule for allocations and frees, by scanning all that is live.
    fn naive(events: &[(Action, u64, u64)]) -> Vec<u64> {
        let mut live: Vec<(u64, u64)> = Vec::new();
        let mut wrong = Vec::new();
        for (at, &(action, address, size)) in (0..).zip(events) {
            let inside = live
                .iter()
                .any(|&(start, end)| start < address && address < end);
            let before = live.len();
            match action {
                Action::Alloc => {
                    let apart =
                        |&(start, end): &(u64, u64)| end <= address || address + size <= start;
                    live.retain(apart);
                    if live.len() < before {
                        wrong.push(at);
                    }
                    live.push((address, address + size));
                }
                _ if inside => wrong.push(at),
                _ => (),
            }
            if action == Action::FreeCompleted {
                live.retain(|&(start, _)| start != address);
            }
        }
        wrong
    }

    proptest! {
        #[test]
        fn a_sweep_finds_what_a_scan_finds(
            events in prop::collection::vec(
                (
                    prop::sample::select(vec![
                        Action::Alloc,
                        Action::Alloc,
                        Action::FreeRequested,
                        Action::FreeCompleted,
                    ]),
                    0_u64..64,
                    1_u64..12,
                ),
                0..60,
            )
        ) {
            let swept: Vec<u64> = found(&events).into_iter().map(|(at, _)| at).collect();
            prop_assert_eq!(swept, naive(&events));
        }
    }
}

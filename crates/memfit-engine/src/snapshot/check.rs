//! Whether the events of a device agree with each other.
//!
//! Responsible for finding events that cannot have happened after the events before them. Not responsible
//! for the readability of single events (`rows.rs`), nor for what follows from the events.
//!
//! The trace is a ring buffer: a free of what was never handed out is what one recorded before the first
//! event, and an allocation may outlive the last one. Neither is a contradiction. Sizes in the trace are
//! those requested, so ranges are never larger than the blocks; overlapping ranges are overlapping blocks.

use std::collections::BTreeMap;

use super::assemble::Problems;
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

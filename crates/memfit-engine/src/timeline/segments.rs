//! When each segment was there.
//!
//! Responsible for walking the trace backwards from the segments at its end, undoing what happened to them.
//! A segment that grows or shrinks is a new life from that moment on. Not responsible for blocks.
//!
//! Invariants: the lives that contain a moment do not overlap where the snapshot is consistent;
//! `birth < end`.

use std::collections::BTreeMap;

use super::Moment;
use crate::snapshot::{Action, DeviceRecord, Event, PoolIndex};

/// Segments up to this size serve small blocks (`kSmallBuffer`, `c10/cuda/CUDACachingAllocator.h`).
const SMALL_SEGMENT_BYTES: u64 = 2 << 20;

/// A segment, or a stage in the life of one that grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentLife {
    /// Where it starts.
    pub address: u64,
    /// Its bytes.
    pub size: u64,
    /// First moment at which it is there.
    pub birth: Moment,
    /// First moment at which it is not.
    pub end: Moment,
    /// The stream it serves.
    pub stream: u64,
    /// Whether it serves blocks of up to 1 MiB.
    pub is_small: bool,
    /// Whether it can grow.
    pub is_expandable: bool,
    /// Private pool.
    pub pool: PoolIndex,
}

pub(super) fn of(device: &DeviceRecord) -> Vec<SegmentLife> {
    let last = Moment::try_from(device.events.len()).unwrap_or(Moment::MAX - 1);
    let mut rollback = Rollback::default();
    for segment in &device.segments {
        rollback.open(SegmentLife {
            address: segment.address,
            size: segment.total_size,
            birth: 0,
            end: last + 1,
            stream: segment.stream,
            is_small: segment.is_small,
            is_expandable: segment.is_expandable,
            pool: segment.pool,
        });
    }
    for (position, event) in device.events.iter().enumerate().rev() {
        let moment = Moment::try_from(position + 1).map_or(last, |moment| moment.min(last));
        match event.action {
            Action::SegmentAlloc => rollback.close(event.address, moment),
            Action::SegmentFree => rollback.open(life(&event, moment, false)),
            Action::SegmentMap => rollback.unmap(&event, moment),
            Action::SegmentUnmap => rollback.map(&event, moment),
            _ => {}
        }
    }
    rollback.finish()
}

fn life(event: &Event, end: Moment, is_expandable: bool) -> SegmentLife {
    SegmentLife {
        address: event.address,
        size: event.size,
        birth: 0,
        end,
        stream: event.stream,
        is_small: event.size <= SMALL_SEGMENT_BYTES,
        is_expandable,
        pool: event.pool,
    }
}

#[derive(Default)]
struct Rollback {
    /// What is there at the moment reached, by address.
    open: BTreeMap<u64, SegmentLife>,
    closed: Vec<SegmentLife>,
}

impl Rollback {
    /// A second segment at an address contradicts the first and is left out.
    fn open(&mut self, life: SegmentLife) {
        if life.size > 0 {
            self.open.entry(life.address).or_insert(life);
        }
    }

    fn close(&mut self, address: u64, birth: Moment) {
        if let Some(life) = self.open.remove(&address) {
            // Two undone at one moment leave a stage of no length.
            if birth < life.end {
                self.closed.push(SegmentLife { birth, ..life });
            }
        }
    }

    /// Undoes a mapping: what it added to a segment was not there before.
    fn unmap(&mut self, event: &Event, moment: Moment) {
        let end = event.address.saturating_add(event.size);
        let Some((&address, &whole)) = self.open.range(..=event.address).next_back() else {
            return;
        };
        let whole_end = address.saturating_add(whole.size);
        if whole_end <= event.address {
            return;
        }
        self.close(address, moment);
        let rest = SegmentLife {
            end: moment,
            ..whole
        };
        self.open(SegmentLife {
            size: event.address - address,
            ..rest
        });
        self.open(SegmentLife {
            address: end,
            size: whole_end.saturating_sub(end),
            ..rest
        });
    }

    /// Undoes an unmapping: the range was there, together with its neighbours.
    fn map(&mut self, event: &Event, moment: Moment) {
        let mut whole = life(event, moment, true);
        let is_same = |other: &SegmentLife| {
            other.is_expandable && other.stream == event.stream && other.pool == event.pool
        };
        let before = self.open.range(..event.address).next_back();
        if let Some((&address, &left)) = before
            && is_same(&left)
            && address.checked_add(left.size) == Some(event.address)
        {
            self.close(address, moment);
            whole = SegmentLife {
                address,
                size: left.size.saturating_add(whole.size),
                is_small: left.is_small,
                ..whole
            };
        }
        let end = event.address.saturating_add(event.size);
        if let Some(&right) = self.open.get(&end)
            && is_same(&right)
        {
            self.close(end, moment);
            whole.size = whole.size.saturating_add(right.size);
            whole.is_small = right.is_small;
        }
        self.open(whole);
    }

    fn finish(mut self) -> Vec<SegmentLife> {
        self.closed.extend(self.open.into_values());
        self.closed
            .sort_unstable_by_key(|life| (life.birth, life.address, life.end));
        self.closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::sample::Recorder;

    fn stages(device: &DeviceRecord) -> Vec<(u64, u64, Moment, Moment)> {
        let mut stages: Vec<_> = of(device)
            .iter()
            .map(|life| (life.address, life.size, life.birth, life.end))
            .collect();
        stages.sort_unstable();
        stages
    }

    #[test]
    fn an_expandable_segment_grows_in_stages() {
        let mut recorder = Recorder::default();
        recorder.event(Action::SegmentMap, 0x1000, 0x100);
        recorder.event(Action::SegmentMap, 0x1100, 0x100);
        recorder.event(Action::SegmentUnmap, 0x1080, 0x80);
        recorder.segment(0x1000, 0x80, true);
        recorder.segment(0x1100, 0x100, true);
        assert_eq!(
            stages(&recorder.device),
            [
                (0x1000, 0x80, 3, 4),
                (0x1000, 0x100, 1, 2),
                (0x1000, 0x200, 2, 3),
                (0x1100, 0x100, 3, 4),
            ]
        );
    }

    #[test]
    fn freed_segments_were_there() {
        let mut recorder = Recorder::default();
        recorder.event(Action::SegmentAlloc, 0x2000, 0x200);
        recorder.event(Action::SegmentFree, 0x1000, 0x100);
        recorder.segment(0x2000, 0x200, false);
        assert_eq!(
            stages(&recorder.device),
            [(0x1000, 0x100, 0, 2), (0x2000, 0x200, 1, 3)]
        );
    }
}

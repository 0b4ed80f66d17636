//! Which lives a page lists one by one, when it cannot list them all.
//!
//! Responsible for the moments at which the map of segments shall be complete, and for ranking lives: first those
//! that are there at the peak, then those at the other chosen moments, then the rest; within each, bytes times
//! duration. Not responsible for how many fit.

use serde::Serialize;

use super::Moment;
use crate::snapshot::{Action, Annotation, DeviceRecord};

/// Moments that are spread evenly over the trace.
const BETWEEN: u32 = 24;
/// Starts of annotated stretches.
const STEPS: usize = 16;
/// Refused requests.
const REFUSALS: usize = 16;

/// Why a moment is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reason {
    Peak,
    OutOfMemory,
    End,
    Start,
    Step,
    Between,
}

/// The chosen moments in order, each once, with the best reason for it.
pub(super) fn moments(
    device: &DeviceRecord,
    annotations: &[(Moment, &Annotation)],
    peak: Moment,
    moments: Moment,
) -> Vec<(Moment, Reason)> {
    let last = moments.saturating_sub(1);
    let mut chosen = vec![
        (peak, Reason::Peak),
        (last, Reason::End),
        (0, Reason::Start),
    ];
    let refusals = refusals(device).into_iter().map(|(moment, _)| moment);
    chosen.extend(refusals.take(REFUSALS).map(|m| (m, Reason::OutOfMemory)));
    let steps: Vec<Moment> = annotations
        .iter()
        .filter(|(_, annotation)| annotation.is_start)
        .map(|&(moment, _)| moment)
        .collect();
    let stride = steps.len().div_ceil(STEPS).max(1);
    chosen.extend(steps.into_iter().step_by(stride).map(|m| (m, Reason::Step)));
    let spread = |part: u32| u64::from(last) * u64::from(part) / u64::from(BETWEEN);
    chosen.extend((0..=BETWEEN).map(|part| {
        (
            Moment::try_from(spread(part)).unwrap_or(last),
            Reason::Between,
        )
    }));
    chosen.sort_unstable();
    chosen.dedup_by_key(|chosen| chosen.0);
    chosen
}

/// The refused requests: the moment before each, for nothing changes by it, and the event's index.
pub(super) fn refusals(device: &DeviceRecord) -> Vec<(Moment, usize)> {
    let events = device.events.iter().enumerate();
    events
        .filter(|(_, event)| event.action == Action::OutOfMemory)
        .filter_map(|(index, _)| Some((Moment::try_from(index).ok()?, index)))
        .collect()
}

/// Something with a beginning, an end and a size.
pub(super) trait Ranked {
    fn range(&self) -> std::ops::Range<Moment>;
    fn size(&self) -> u64;
}

impl Ranked for super::Life {
    fn range(&self) -> std::ops::Range<Moment> {
        self.birth..self.end
    }
    fn size(&self) -> u64 {
        self.size
    }
}

impl Ranked for super::SegmentLife {
    fn range(&self) -> std::ops::Range<Moment> {
        self.birth..self.end
    }
    fn size(&self) -> u64 {
        self.size
    }
}

/// The indices of the `most` lives that matter most, the first of them first.
pub(super) fn ranked<T: Ranked>(
    lives: &[T],
    chosen: &[(Moment, Reason)],
    peak: Moment,
    most: usize,
) -> Vec<u32> {
    let mut keys: Vec<(u64, u32)> = (0..)
        .zip(lives)
        .map(|(index, life)| {
            let range = life.range();
            let next = chosen.partition_point(|&(moment, _)| moment < range.start);
            let tier: u64 = if range.contains(&peak) {
                2
            } else {
                u64::from(chosen.get(next).is_some_and(|next| next.0 < range.end))
            };
            let area = u128::from(life.size()) * u128::from(range.end - range.start) / 16;
            let area = u64::try_from(area).unwrap_or(u64::MAX).min((1 << 62) - 1);
            // Largest first, then in order.
            (u64::MAX - (tier << 62 | area), index)
        })
        .collect();
    if most < keys.len() {
        keys.select_nth_unstable(most);
        keys.truncate(most);
    }
    keys.sort_unstable();
    keys.into_iter().map(|(_, index)| index).collect()
}

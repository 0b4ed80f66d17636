//! How long a search may take.
//!
//! Responsible for dividing a limit among searches and for telling when a part is spent. Without a time limit the
//! limit is on work, so that the answer is the same on every machine; with one, a clock decides that the caller reads:
//! the engine has none. Not responsible for what is worth the work.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::bytes::Bytes;
use crate::plan::StopReason;

/// Events one inner search may ask for; a candidate asks for each event of the model at most once, whether it has to be
/// swept or is known from the candidate before.
const EVENTS: u64 = 40_000_000;
/// Events that a machine sweeps in a second, about: how much work a longer time limit is worth.
const EVENTS_PER_SECOND: f64 = 20_000_000.0;

/// A time limit, by the caller's clock.
#[derive(Clone, Copy)]
pub struct TimeLimit<'a> {
    /// The limit.
    pub seconds: f64,
    /// Seconds since the caller began to wait.
    pub elapsed: &'a (dyn Fn() -> f64 + Sync),
}

impl std::fmt::Debug for TimeLimit<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("TimeLimit")
            .field("seconds", &self.seconds)
            .finish_non_exhaustive()
    }
}

/// What a whole plan may cost.
#[derive(Debug, Clone, Copy, Default)]
pub enum Limit<'a> {
    /// As much work for each search as is ever worth it.
    #[default]
    None,
    /// Seconds.
    Time(TimeLimit<'a>),
    /// The work of so many seconds, whatever the machine is doing: all searches together.
    Work(f64),
}

/// Which combinations are followed down to their smallest peak, more of them first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Bottoms {
    /// All.
    OfEach,
    /// Those that may be faster than the best so far, and the last.
    OfLast,
    /// Those that may be faster than the best so far.
    OfFaster,
    /// None.
    Never,
}

/// What one search may spend.
#[derive(Debug, Clone, Copy)]
pub(in crate::plan) struct Share<'a> {
    events: u64,
    bottoms: Bottoms,
    /// The smallest peak that is known.
    known: Bytes,
    /// Nothing is left out, however hopeless.
    #[cfg(test)]
    is_thorough: bool,
    /// The work of the searches before this one, where work is the clock.
    work: Option<&'a AtomicU64>,
    /// The limit, and the part of its time at whose start and end this share begins and ends.
    time: Option<(TimeLimit<'a>, f64, f64)>,
}

impl<'a> Share<'a> {
    /// All there is.
    pub(in crate::plan) const FULL: Self = Self {
        events: EVENTS,
        bottoms: Bottoms::OfEach,
        known: Bytes(u64::MAX),
        #[cfg(test)]
        is_thorough: false,
        work: None,
        time: None,
    };

    /// A quarter of the events.
    pub(in crate::plan) const fn quarter(self) -> Self {
        Self {
            events: self.events / 4,
            ..self
        }
    }

    /// A quarter: the answer only tells what another class would gain.
    pub(in crate::plan) fn glance(self) -> Self {
        Self {
            bottoms: self.bottoms.max(Bottoms::OfFaster),
            ..self.quarter()
        }
    }

    /// The same beside a plan that takes so many seconds; they are infinite where there is none yet. Where there is, of
    /// several combinations that cannot be faster the last alone is followed down to its smallest peak: it narrows and cuts
    /// what the others do.
    pub(in crate::plan) fn beside(self, best_seconds: f64) -> Self {
        let bottoms = match self.bottoms {
            Bottoms::OfEach if best_seconds.is_finite() => Bottoms::OfLast,
            bottoms => bottoms,
        };
        Self { bottoms, ..self }
    }

    /// The same for one of several combinations.
    pub(in crate::plan) const fn for_one(self, is_last: bool) -> Self {
        let bottoms = match self.bottoms {
            Bottoms::OfLast if !is_last => Bottoms::OfFaster,
            bottoms => bottoms,
        };
        Self { bottoms, ..self }
    }

    /// All of a limit, by a clock that [`Share::done`] moves on where work is the limit.
    pub(in crate::plan) fn within(limit: Limit<'a>, clock: &'a WorkClock<'a>) -> Self {
        let (limit, work) = match limit {
            Limit::None => return Self::FULL,
            Limit::Time(limit) => (limit, None),
            Limit::Work(seconds) => {
                let elapsed = clock.elapsed;
                (TimeLimit { seconds, elapsed }, Some(clock.events))
            }
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and `as` saturates"
        )]
        let events = (limit.seconds * EVENTS_PER_SECOND).max(0.0) as u64;
        Self {
            events: events.max(EVENTS),
            work,
            time: Some((limit, 0.0, 1.0)),
            ..Self::FULL
        }
    }

    /// Takes note that a search is over.
    pub(super) fn done(&self, events: u64) {
        if let Some(work) = self.work {
            work.fetch_add(events, Ordering::Relaxed);
        }
    }

    /// One of `count` equal parts of the time, of which the last may use what the others left. All have all of
    /// the events.
    #[expect(clippy::cast_precision_loss, reason = "a handful of parts")]
    pub(in crate::plan) fn part(self, number: usize, count: usize) -> Self {
        let time = self.time.map(|(limit, from, until)| {
            let width = (until - from) / count.max(1) as f64;
            let end = from + width * (number + 1) as f64;
            (limit, from + width * number as f64, end)
        });
        Self { time, ..self }
    }

    /// From one part of the time to another.
    pub(in crate::plan) fn between(self, from: f64, until: f64) -> Self {
        let time = self.time.map(|(limit, ..)| (limit, from, until));
        Self { time, ..self }
    }

    /// The same without the way to any smallest peak.
    pub(in crate::plan) const fn without_bottoms(self) -> Self {
        Self {
            bottoms: Bottoms::Never,
            ..self
        }
    }

    /// The same for a search that leaves nothing out.
    #[cfg(test)]
    pub(in crate::plan) const fn thorough(self) -> Self {
        Self {
            is_thorough: true,
            ..self
        }
    }

    /// Whether what a bound shows to be hopeless is left out.
    #[cfg_attr(
        not(test),
        expect(clippy::unused_self, reason = "it is, but for tests")
    )]
    pub(super) const fn leaves_out(&self) -> bool {
        #[cfg(test)]
        return !self.is_thorough;
        #[cfg(not(test))]
        true
    }

    /// The same where a plan of such a peak is known.
    pub(in crate::plan) fn knowing(self, peak: Bytes) -> Self {
        let known = self.known.min(peak);
        Self { known, ..self }
    }

    /// Whether a combination, none of whose plans has a lower peak than `least`, is followed down to its smallest though
    /// it cannot be faster.
    pub(super) fn has_bottom(&self, least: Bytes) -> bool {
        least <= self.known && matches!(self.bottoms, Bottoms::OfEach | Bottoms::OfLast)
    }

    /// Whether smallest peaks are looked for at all.
    pub(in crate::plan) fn has_bottoms(&self) -> bool {
        self.bottoms != Bottoms::Never
    }

    /// Which limit says that this part of the share is spent; `None` while it is not.
    #[expect(clippy::cast_precision_loss, reason = "a part of a limit")]
    pub(super) fn spent(&self, events: u64, part: f64) -> Option<StopReason> {
        let own = self.work.map_or(0.0, |_| seconds_of(events));
        let is_late = |(limit, from, until): (TimeLimit<'_>, f64, f64)| {
            (limit.elapsed)() + own >= limit.seconds * (from + (until - from) * part)
        };
        if self.time.is_some_and(is_late) {
            Some(match self.work {
                Some(_) => StopReason::MoveLimit,
                None => StopReason::TimeLimit,
            })
        } else if events as f64 >= self.events as f64 * part {
            Some(StopReason::MoveLimit)
        } else {
            None
        }
    }
}

/// A clock that work moves on.
#[derive(Clone, Copy)]
pub(in crate::plan) struct WorkClock<'a> {
    events: &'a AtomicU64,
    elapsed: &'a (dyn Fn() -> f64 + Sync),
}

/// Runs something with a clock that stands at zero.
pub(in crate::plan) fn with_work_clock<T>(run: impl FnOnce(&WorkClock<'_>) -> T) -> T {
    let events = AtomicU64::new(0);
    let elapsed = || seconds_of(events.load(Ordering::Relaxed));
    run(&WorkClock {
        events: &events,
        elapsed: &elapsed,
    })
}

#[expect(clippy::cast_precision_loss, reason = "a part of a limit")]
fn seconds_of(events: u64) -> f64 {
    events as f64 / EVENTS_PER_SECOND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_time_limit_follow_each_other() {
        let elapsed = || 4.0;
        let limit = TimeLimit {
            seconds: 10.0,
            elapsed: &elapsed,
        };
        with_work_clock(|clock| {
            let whole = Share::within(Limit::Time(limit), clock);
            assert_eq!(whole.spent(0, 1.0), None);
            assert_eq!(whole.spent(0, 0.4), Some(StopReason::TimeLimit));
            assert!(whole.part(0, 3).spent(0, 1.0).is_some());
            assert!(whole.part(1, 3).spent(0, 1.0).is_none());
            assert!(whole.part(1, 3).spent(0, 0.1).is_some());
        });
    }

    #[test]
    fn where_work_is_the_limit_all_searches_share_it() {
        let second = 20_000_000;
        with_work_clock(|clock| {
            let whole = Share::within(Limit::Work(1.0), clock);
            let (first, last) = (whole.part(0, 2), whole.part(1, 2));
            assert_eq!(first.spent(second / 2 - 1, 1.0), None);
            assert_eq!(first.spent(second / 2, 1.0), Some(StopReason::MoveLimit));
            first.done(second / 4);
            // The last one has what is left of all.
            assert_eq!(last.spent(second / 2, 1.0), None);
            assert_eq!(
                last.spent(3 * (second / 4), 1.0),
                Some(StopReason::MoveLimit)
            );
        });
    }

    #[test]
    fn what_cannot_be_lower_than_what_is_known_is_not_followed_down() {
        let share = Share::FULL.knowing(Bytes(7)).knowing(Bytes(9));
        assert!(share.has_bottom(Bytes(7)) && !share.has_bottom(Bytes(8)));
        assert!(!share.beside(1.0).for_one(false).has_bottom(Bytes(7)));
    }

    #[test]
    fn without_a_time_limit_only_work_counts() {
        assert_eq!(Share::FULL.spent(EVENTS - 1, 1.0), None);
        let limit = Some(StopReason::MoveLimit);
        assert_eq!(Share::FULL.spent(EVENTS, 1.0), limit);
        assert_eq!(Share::FULL.glance().spent(EVENTS / 4, 1.0), limit);
    }
}

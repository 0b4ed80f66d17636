//! When somebody wants to look at what is live, because it has risen.
//!
//! Who holds a block can be found out only while it lives. So to say later what was
//! live at a peak sets this alarm: it rings at the first allocation that comes past the bounds, once,
//! and is then silent until it is set again.
//!
//! Responsible for the bounds. Not responsible for looking, which is left to what
//! [`crate::on_alarm`] was given.

use std::time::{Duration, Instant};

/// Bounds, any of which rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Live bytes beyond which it rings at once.
    pub above_bytes: u64,
    /// Live bytes beyond which it rings after a while.
    pub later_above_bytes: u64,
    /// From when on.
    pub later: Instant,
    /// Number of the event from which on it rings after that while, however little is live.
    pub later_from_event: u64,
}

impl Bounds {
    /// Bounds of which those for later hold from so many seconds from now on.
    #[must_use]
    pub fn from_now(
        above_bytes: u64,
        later_above_bytes: u64,
        later_seconds: f64,
        later_from_event: u64,
    ) -> Self {
        let later = Duration::try_from_secs_f64(later_seconds).unwrap_or(Duration::MAX);
        let now = Instant::now();
        Self {
            above_bytes,
            later_above_bytes,
            later: now.checked_add(later).unwrap_or(now),
            later_from_event,
        }
    }
}

/// How long it is silent where no look was possible.
const DELAY: Duration = Duration::from_millis(20);

/// The alarm of one process.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    bounds: Option<Bounds>,
    /// Those that it rang past last.
    passed: Option<Bounds>,
    rang_at_event: u64,
}

impl Alarm {
    pub(crate) const fn new() -> Self {
        Self {
            bounds: None,
            passed: None,
            rang_at_event: 0,
        }
    }

    /// Sets it, or switches it off.
    pub(crate) const fn set(&mut self, bounds: Option<Bounds>) {
        self.bounds = bounds;
    }

    /// Whether it rings after an allocation that has brought the live bytes up to so many.
    pub(crate) fn rings(&mut self, live_bytes: u64, event: u64) -> bool {
        let Some(bounds) = self.bounds else {
            return false;
        };
        let is_later = || {
            (live_bytes > bounds.later_above_bytes || event >= bounds.later_from_event)
                && Instant::now() >= bounds.later
        };
        if live_bytes > bounds.above_bytes || is_later() {
            self.passed = self.bounds.take();
            self.rang_at_event = event;
            return true;
        }
        false
    }

    /// Sets it again as it was when it rang, to ring after a while: no look was possible.
    pub(crate) fn put_off(&mut self) {
        if let (None, Some(passed)) = (self.bounds, self.passed) {
            self.bounds = Some(Bounds {
                above_bytes: u64::MAX,
                later: Instant::now() + DELAY,
                ..passed
            });
        }
    }

    /// Number of the event that rang it last; 0 where none has.
    pub(crate) const fn rang_at_event(&self) -> u64 {
        self.rang_at_event
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn it_rings_once_past_a_bound() {
        let mut alarm = Alarm::new();
        assert!(!alarm.rings(u64::MAX, 1), "it is off");
        let never = Instant::now() + Duration::from_secs(3600);
        let bounds = Bounds {
            above_bytes: 100,
            later_above_bytes: 50,
            later: never,
            later_from_event: 10,
        };
        alarm.set(Some(bounds));
        assert!(!alarm.rings(100, 20));
        assert!(alarm.rings(101, 21));
        assert!(!alarm.rings(102, 22), "once");
        assert_eq!(alarm.rang_at_event(), 21);
        let later = Instant::now();
        alarm.set(Some(Bounds { later, ..bounds }));
        assert!(!alarm.rings(50, 9));
        assert!(alarm.rings(51, 9));
        alarm.set(Some(Bounds { later, ..bounds }));
        assert!(alarm.rings(1, 10), "it is time for a look");
    }
}

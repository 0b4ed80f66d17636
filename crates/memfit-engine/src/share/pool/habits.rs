//! When a model will be used next, and what moving bytes takes: estimates from the past.
//!
//! Responsible for the numbers that a loss is made of. Estimates choose between models; whether anything
//! fits never depends on them.
//!
//! "When" is counted in requests to the pool, not in seconds: while a model is woken no request is served, and
//! seconds would make the models that come next look rare.

use super::Micros;
use crate::bytes::Bytes;

/// Requests that the pool had so far: its clock for habits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Tick(pub(super) u64);

/// What an observation still weighs when the next one comes: about the last eight count.
const MEMORY: f64 = 0.875;

/// Requests between the uses of one model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrivals {
    last: Tick,
    gaps: f64,
    count: f64,
}

impl Arrivals {
    pub(super) const fn new(now: Tick) -> Self {
        Self {
            last: now,
            gaps: 0.0,
            count: 0.0,
        }
    }

    /// It is used now.
    pub(super) fn arrived(&mut self, now: Tick) {
        self.gaps = self.gaps * MEMORY + since(self.last, now);
        self.count = self.count * MEMORY + 1.0;
        self.last = self.last.max(now);
    }

    /// Requests until the next use, at least one.
    ///
    /// Uses that come at random at a steady rate are expected after the mean gap, however long the last
    /// one was ago; the gap that has begun counts as one that is at least so long. A model that was never
    /// used counts as one that was used half a time since it came.
    pub(super) fn until_next(&self, now: Tick) -> f64 {
        let gaps = self.gaps + since(self.last, now);
        (gaps / self.count.max(0.5)).max(1.0)
    }
}

/// Bytes by microsecond.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    bytes: f64,
    micros: f64,
}

impl Rate {
    /// A guess that the first observations replace.
    pub(super) const fn guess(bytes_by_micro: f64) -> Self {
        Self {
            bytes: bytes_by_micro,
            micros: 1.0,
        }
    }

    pub(super) fn observe(&mut self, moved: Bytes, took: Micros) {
        if moved > Bytes::ZERO && took.0 > 0 {
            self.bytes = self.bytes * MEMORY + moved.as_f64();
            self.micros = self.micros * MEMORY + Bytes(took.0).as_f64();
        }
    }

    /// Microseconds that so many bytes take.
    pub(super) fn micros(&self, bytes: Bytes) -> f64 {
        bytes.as_f64() * self.micros / self.bytes
    }
}

fn since(last: Tick, now: Tick) -> f64 {
    Bytes(now.0.saturating_sub(last.0)).as_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_rate_is_found_and_a_silent_model_is_expected_later_and_later() {
        let mut arrivals = Arrivals::new(Tick(0));
        for arrival in 1..=50 {
            arrivals.arrived(Tick(arrival * 10));
        }
        assert!((arrivals.until_next(Tick(500)) - 10.0).abs() < 0.1);
        let soon = arrivals.until_next(Tick(510));
        let late = arrivals.until_next(Tick(900));
        assert!(soon > 10.0 && soon < 12.0);
        assert!(late > 5.0 * soon);
    }

    #[test]
    fn a_model_that_was_never_used_is_expected_later_than_one_that_was() {
        let never = Arrivals::new(Tick(0));
        let mut once = never;
        once.arrived(Tick(500));
        assert!(never.until_next(Tick(1000)) > once.until_next(Tick(1000)));
    }

    #[test]
    fn a_rate_follows_what_is_measured() {
        let mut rate = Rate::guess(1000.0);
        for _ in 0..40 {
            rate.observe(Bytes(1_000_000), Micros(500));
        }
        rate.observe(Bytes(0), Micros(7));
        rate.observe(Bytes(7), Micros(0));
        assert!((rate.micros(Bytes(4_000_000)) - 2000.0).abs() < 1.0);
    }
}

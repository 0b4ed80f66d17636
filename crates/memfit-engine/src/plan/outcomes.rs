//! Which of several solved combinations is taken.
//!
//! Responsible for the order: what keeps updates whole before what rounds them, then by time or by peak. Not responsible for
//! which combinations there are (`combinations.rs`) nor for what is planned where none fits (`choose.rs`).

use super::context::Outcome;
use super::search::problem::Candidate;
use super::technique::half_parameters;
use crate::bytes::Bytes;

/// Seconds of the fastest plan that fits; infinite without one.
pub(super) fn best_seconds(outcomes: &[Outcome]) -> f64 {
    let seconds = outcomes.iter().filter_map(Outcome::best_seconds);
    seconds.fold(f64::INFINITY, f64::min)
}

/// Seconds that a plan takes at most, to be taken as one of so many is: times differ where that is more than rounding.
pub(super) fn at_most_equal(seconds: f64) -> f64 {
    seconds * (1.0 + 2.0 * EQUAL)
}

/// The part of a time by which another is equal.
const EQUAL: f64 = 1e-9;

/// The smallest peak of all.
pub(super) fn lowest_peak(outcomes: &[Outcome]) -> Bytes {
    let peaks = outcomes.iter().map(|it| it.lowest.evaluation.peak_bytes);
    peaks.min().unwrap_or(Bytes(u64::MAX))
}

/// The fastest plan that fits; one that keeps updates whole, if there is any, before those that round them.
pub(super) fn fastest(outcomes: &[Outcome]) -> Option<(&Outcome, &Candidate)> {
    let fitting = || {
        let all = outcomes.iter();
        all.filter_map(|outcome| Some((outcome, outcome.best.as_ref()?)))
    };
    // Time is no reason to round.
    let is_kept = fitting().any(|(outcome, _)| half_parameters::keeps_updates(outcome));
    let wanted =
        fitting().filter(|(outcome, _)| !is_kept || !half_parameters::rounds_updates(outcome));
    // Equal times go to the earlier outcome: fewer actions.
    wanted.reduce(|a, b| {
        let gain = a.0.seconds(a.1) - b.0.seconds(b.1);
        if gain > EQUAL * a.0.seconds(a.1) {
            b
        } else {
            a
        }
    })
}

/// The plan of least peak, whether or not it fits.
pub(super) fn lowest_of(outcomes: &[Outcome]) -> (&Outcome, &Candidate) {
    let pairs = outcomes.iter().map(|outcome| (outcome, &outcome.lowest));
    pairs
        .reduce(|a, b| {
            if b.1.evaluation.peak_bytes < a.1.evaluation.peak_bytes {
                b
            } else {
                a
            }
        })
        .expect("the plain variant is always tried")
}

/// The same without its combination.
pub(super) fn lowest(outcomes: &[Outcome]) -> &Candidate {
    lowest_of(outcomes).1
}

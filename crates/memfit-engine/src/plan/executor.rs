//! What the executor itself takes, in Python, for what it does to ops.
//!
//! Responsible for these seconds. Not responsible for those of the ops ([`crate::cost`]).

use crate::trace::Meta;

/// For one op that runs again: to record it, find it and put its arguments together. About what a replay takes more
/// than the op where kernels hardly count (small vision models, one core).
const REPLAY_SECONDS: f64 = 1.5e-4;

/// For one op of forward that is watched, whatever is done to it, with what autograd saves for it. Measured on 1,000 ops
/// of 64 by 64 numbers, of which every other one saves its input: 4.7 microseconds an op, and 4.6 a saved tensor.
const WATCH_SECONDS: f64 = 7.0e-6;

/// Seconds that an op takes longer where it runs again.
pub(super) fn replay_seconds(meta: &Meta) -> f64 {
    if is_in_the_way(meta) {
        REPLAY_SECONDS
    } else {
        0.0
    }
}

/// Seconds that an op of forward takes longer where it is watched.
pub(super) fn watch_seconds(meta: &Meta) -> f64 {
    if is_in_the_way(meta) {
        WATCH_SECONDS
    } else {
        0.0
    }
}

/// On a GPU the kernels before are still running; a compiled step has no executor.
fn is_in_the_way(meta: &Meta) -> bool {
    meta.device_kind == "cpu" && meta.captured != "joint"
}

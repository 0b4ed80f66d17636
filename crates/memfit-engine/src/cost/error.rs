//! Why op times cannot be used.
//!
//! Responsible for the causes and their words. Not responsible for finding them ([`crate::cost`], `curve.rs`).

/// Why op times cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CostError {
    /// The profile was taken of another trace.
    #[error(
        "the profile has {found} op times, the trace has {wanted} ops: profile this trace again"
    )]
    OtherTrace {
        /// Number of op times.
        found: usize,
        /// Number of ops.
        wanted: usize,
    },
    /// A rate or time is not a positive, finite number.
    #[error("`{what}` of the cost source is {value}, which is not a positive number")]
    NotPositive {
        /// Which number.
        what: String,
        /// Its value.
        value: f64,
    },
    /// A curve without points.
    #[error("`{0}` of the cost source has no points")]
    NoPoints(String),
    /// A curve whose work does not grow from point to point.
    #[error("the points of `{0}` of the cost source do not ascend")]
    NotAscending(String),
}

//! A refusal as the broker says it.
//!
//! Responsible for the answer without numbers. Not responsible for when a request is refused (`server.rs`, `devices.rs`).

use crate::lease::protocol::{Reason, Refused};

/// A refusal without numbers.
pub(super) fn refused(reason: Reason, message: String) -> Refused {
    Refused {
        reason,
        message,
        device: None,
        asked_bytes: None,
        largest_bytes: None,
        revision: None,
    }
}

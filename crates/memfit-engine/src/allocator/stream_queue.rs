//! What a free leaves behind on a stream: events, after which its block is free.
//!
//! Responsible for the two types. Not responsible for when events are recorded or complete (`streams.rs`).

use std::collections::VecDeque;

/// An event recorded at a free.
#[derive(Debug, Clone, Copy)]
pub(super) struct PendingEvent {
    pub(super) block: u32,
    pub(super) is_complete: bool,
}

/// The events of one stream, oldest first.
#[derive(Debug, Clone)]
pub(super) struct StreamQueue {
    pub(super) stream: u64,
    pub(super) events: VecDeque<PendingEvent>,
}

impl StreamQueue {
    pub(super) fn stream(&self) -> u64 {
        self.stream
    }
}

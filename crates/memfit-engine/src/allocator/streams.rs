//! Blocks that other streams use: they are free only when those streams are done with them.
//!
//! Responsible for `record_stream`, for the events that a free leaves behind and for the frees they
//! complete. When an event completes is not the allocator's to know: the caller says so, all at once
//! ([`Simulator::set_events_ready`]) or one by one ([`Simulator::complete_events`]).
//!
//! PyTorch visits streams in the order of a hash table of theirs; this visits them by handle. The
//! order shows in the trace of frees that complete at one moment, nowhere else.

use std::collections::VecDeque;

use super::Simulator;
use super::stream_queue::{PendingEvent, StreamQueue};

impl Simulator {
    /// Notes that another stream uses a block (`Tensor.record_stream`). A use on the block's own stream
    /// needs no note.
    pub fn record_stream(&mut self, block: super::BlockId, stream: u64) {
        let index = block.0;
        if !self.is_allocated(index) || self.streams[self.blocks[index].stream as usize] == stream {
            return;
        }
        self.blocks[index].has_uses = true;
        let uses = self.uses.entry(index).or_default();
        if !uses.contains(&stream) {
            uses.push(stream);
        }
        if self.is_capturing() {
            let uses = self.uses_in_capture.entry(index).or_default();
            if !uses.contains(&stream) {
                uses.push(stream);
            }
        }
    }

    /// Whether every event, recorded or yet to come, counts as complete. They do from the start.
    pub fn set_events_ready(&mut self, are_ready: bool) {
        self.are_events_ready = are_ready;
    }

    /// Completes the oldest `count` incomplete events of a stream.
    pub fn complete_events(&mut self, stream: u64, count: u64) {
        if let Some(queue) = self.queues.iter_mut().find(|queue| queue.stream == stream) {
            let incomplete = queue.events.iter_mut().filter(|event| !event.is_complete);
            for (_, event) in (0..count).zip(incomplete) {
                event.is_complete = true;
            }
        }
    }

    /// Takes a block back that other streams use, without saying which: it is free when
    /// [`Simulator::complete_free`] says so or all streams are waited for. For traces, which do not name them.
    pub(super) fn free_awaiting(&mut self, block: super::BlockId) {
        self.take_back(block.0, true);
    }

    /// Frees a block that was taken back so; `false` when it awaits nothing.
    pub(super) fn complete_free(&mut self, block: super::BlockId) -> bool {
        let is_awaited = self.awaited.remove(&block.0);
        if is_awaited {
            self.settle(block.0);
        }
        is_awaited
    }

    /// Turns the uses of a freed block into one event a stream.
    pub(super) fn insert_events(&mut self, index: u32) {
        let uses = self.uses.remove(&index).unwrap_or_default();
        self.blocks[index].has_uses = false;
        for stream in uses {
            self.blocks[index].event_count += 1;
            let event = PendingEvent {
                block: index,
                is_complete: false,
            };
            match self
                .queues
                .binary_search_by_key(&stream, |queue| queue.stream)
            {
                Ok(place) => self.queues[place].events.push_back(event),
                Err(place) => self.queues.insert(
                    place,
                    StreamQueue {
                        stream,
                        events: VecDeque::from([event]),
                    },
                ),
            }
        }
    }

    /// Frees blocks whose events have completed: each stream's queue from its front to the first event
    /// that has not.
    pub(super) fn process_events(&mut self) {
        self.insert_deferred_events();
        let mut place = 0;
        while place < self.queues.len() {
            while let Some(event) = self.queues[place].events.front().copied() {
                if !self.are_events_ready && !event.is_complete {
                    break;
                }
                self.settle(event.block);
                self.queues[place].events.pop_front();
            }
            if self.queues[place].events.is_empty() {
                self.queues.remove(place);
            } else {
                place += 1;
            }
        }
    }

    /// Waits for all events, or for those of one private pool, and frees their blocks.
    pub(super) fn synchronize_and_free_events(&mut self, private: Option<u32>) {
        self.statistics.num_sync_all_streams += 1;
        self.insert_deferred_events();
        for place in 0..self.queues.len() {
            let events = std::mem::take(&mut self.queues[place].events);
            for event in events {
                let pool = self.blocks[event.block].pool as usize;
                if private.is_some() && self.pools[pool].owner != private {
                    self.queues[place].events.push_back(event);
                } else {
                    self.settle(event.block);
                }
            }
        }
        self.queues.retain(|queue| !queue.events.is_empty());
        for index in std::mem::take(&mut self.awaited) {
            let pool = self.blocks[index].pool as usize;
            if private.is_some() && self.pools[pool].owner != private {
                self.awaited.insert(index);
            } else {
                self.settle(index);
            }
        }
    }

    fn settle(&mut self, block: u32) {
        self.blocks[block].event_count -= 1;
        if self.blocks[block].event_count == 0 {
            self.free_block(block);
        }
    }

    /// Frees that a capture put off.
    fn insert_deferred_events(&mut self) {
        for index in std::mem::take(&mut self.deferred) {
            // What was used during the capture alone is done when the capture is.
            if let (Some(used), Some(uses)) = (
                self.uses_in_capture.remove(&index),
                self.uses.get_mut(&index),
            ) {
                uses.retain(|stream| !used.contains(stream));
            }
            self.insert_events(index);
            if self.blocks[index].event_count == 0 {
                self.free_block(index);
            }
        }
    }
}

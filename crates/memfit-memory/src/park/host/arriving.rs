//! Bytes that are still on their way into an awake memory.
//!
//! Responsible for knowing which pieces have been compared since the wake began, and for a thread that
//! brings their pages in meanwhile, so that users of the first ones need not wait for the last. Not
//! responsible for comparing them (`copy.rs`), nor for keeping their users waiting
//! (`python/memfit/share/park`).
//!
//! Invariant: a piece is here once it was compared, and never before.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::layout::Piece;
use crate::arena::host::Ahead;

/// What the thread brings in at a time: ending it takes that long at most.
const AHEAD_BYTES: usize = 2 << 20;

/// The pieces of a memory, and which of them are here.
#[derive(Debug)]
pub(super) struct Arriving {
    is_here: Vec<bool>,
    left: usize,
    reader: Option<Reader>,
}

impl Arriving {
    /// None of so many pieces is here; `ahead` brings `length` bytes in from now on.
    pub(super) fn begin(pieces: usize, ahead: Ahead, length: usize) -> Self {
        Self {
            is_here: vec![false; pieces],
            left: pieces,
            reader: Reader::begin(ahead, length),
        }
    }

    /// Whether all are here.
    pub(super) const fn is_over(&self) -> bool {
        self.left == 0
    }

    /// By piece, whether it is here.
    pub(super) fn is_here(&self) -> &[bool] {
        &self.is_here
    }

    /// The pieces that parts of the memory lie on and that are not here, in order.
    pub(super) fn missing(&self, pieces: &[Piece], parts: &[Range<u64>]) -> Vec<usize> {
        let mut found: Vec<usize> = parts.iter().flat_map(|part| on(pieces, part)).collect();
        found.sort_unstable();
        found.dedup();
        found.retain(|&piece| self.is_here.get(piece) == Some(&false));
        found
    }

    /// A piece has been compared.
    pub(super) fn came(&mut self, piece: usize) {
        if let Some(is_here @ false) = self.is_here.get_mut(piece) {
            *is_here = true;
            self.left -= 1;
        }
    }

    /// Has the thread end; what is not here stays so.
    pub(super) fn stop_reading(&mut self) {
        self.reader = None;
    }
}

/// The numbers of the pieces that a part lies on.
fn on(pieces: &[Piece], part: &Range<u64>) -> Range<usize> {
    let first = pieces.partition_point(|piece| piece.range().end <= part.start);
    let end = pieces.partition_point(|piece| piece.start < part.end);
    first..end.max(first)
}

/// A thread that brings pages in; dropped, it has ended.
#[derive(Debug)]
struct Reader {
    process: u32,
    is_done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    /// `None` where no thread can be had: then pages come in when they are compared.
    fn begin(ahead: Ahead, length: usize) -> Option<Self> {
        let is_done = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&is_done);
        let read = move || {
            for start in (0..length).step_by(AHEAD_BYTES) {
                let part = AHEAD_BYTES.min(length - start);
                // What cannot be read is an error of the call that wants it.
                if told.load(Ordering::Relaxed) || ahead.bring_in(start, part).is_err() {
                    return;
                }
            }
        };
        let named = std::thread::Builder::new().name("memfit-wake".to_owned());
        Some(Self {
            process: std::process::id(),
            is_done,
            thread: Some(named.spawn(read).ok()?),
        })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.is_done.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else {
            return;
        };
        if std::process::id() == self.process {
            // It panics on nothing, and has nothing to tell.
            let _ended = thread.join();
        } else {
            // A forked child has no such thread to wait for or to let go.
            std::mem::forget(thread);
        }
    }
}

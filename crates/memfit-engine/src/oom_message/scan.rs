//! The messages of a log of any length.
//!
//! Responsible for finding them piece by piece, in memory that does not grow with the log, and for counting equal ones.
//! Not responsible for reading the log from anywhere.

use super::document::OomMessages;
use super::document::SCHEMA_VERSION;
use super::judge;
use super::log::Plain;
use super::read::Message;

/// Searched at once.
const CHUNK_BYTES: usize = 1 << 20;
/// More than [`MESSAGE_BYTES`], colours included: the end of a chunk is searched again with the next.
const OVERLAP_BYTES: usize = 32 << 10;
/// Read of one message, many processes and the prefixes of broken lines included.
const MESSAGE_BYTES: usize = 8 << 10;
/// What tells whether it is a message at all stands in its first bytes.
const START_BYTES: usize = 1 << 10;
/// Different messages kept; a loop that retries for ever writes no more.
const MAX_MESSAGES: usize = 100;
/// Words that stand before a message's first: enough for the longest.
const BEFORE_BYTES: usize = 40;

/// Collects the OOM messages of a log.
///
/// ```
/// use memfit_engine::oom_message::Scanner;
///
/// let mut scanner = Scanner::new();
/// scanner.push(b"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 6.00 GiB total capacity; ");
/// scanner.push(b"5.00 GiB already allocated; 512.00 MiB free; 5.10 GiB reserved in total by PyTorch)");
/// let found = scanner.finish("train.log");
/// assert_eq!(found.message_count, 1);
/// assert!(found.messages[0].summary.contains("too much is alive"));
/// ```
#[derive(Debug, Default)]
pub struct Scanner {
    pending: Vec<u8>,
    found: Vec<(Message, u64)>,
    message_count: u64,
    further_count: u64,
}

impl Scanner {
    /// A scanner that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in the next piece of the log.
    pub fn push(&mut self, piece: &[u8]) {
        for part in piece.chunks(CHUNK_BYTES) {
            self.pending.extend_from_slice(part);
            if self.pending.len() > CHUNK_BYTES + OVERLAP_BYTES {
                self.search(false);
            }
        }
    }

    /// Says what the messages decide; `source` names the log.
    #[must_use]
    pub fn finish(mut self, source: &str) -> OomMessages {
        self.search(true);
        let explained = self
            .found
            .iter()
            .map(|(message, count)| judge::explain(message, *count));
        OomMessages {
            schema_version: SCHEMA_VERSION,
            kind: "oom_messages".to_owned(),
            source: source.to_owned(),
            message_count: self.message_count,
            further_count: self.further_count,
            messages: explained.collect(),
        }
    }

    /// Searches what is pending, but for the end that may hold half a message.
    fn search(&mut self, is_last: bool) {
        let end = if is_last {
            self.pending.len()
        } else {
            let end = self.pending.len() - OVERLAP_BYTES.min(self.pending.len());
            let newline = self.pending[..end].iter().rposition(|&byte| byte == b'\n');
            // A log that is one line is cut anywhere.
            newline
                .filter(|it| end - it < OVERLAP_BYTES)
                .map_or(end, |it| it + 1)
        };
        let plain = Plain::of(&self.pending);
        let (squeezed, places) = plain.squeezed();
        for (at, start) in starts(&squeezed) {
            let place = places[at];
            if plain.places[place] >= end {
                break;
            }
            let before = &squeezed[at.saturating_sub(BEFORE_BYTES)..at];
            let read = |limit| {
                let text = plain.squeezed_from(place, limit);
                match start {
                    Start::OutOfMemory => Message::out_of_memory(before, &text),
                    // Found by the words before it already.
                    Start::Tried if before.ends_with("outofmemory.") => None,
                    Start::Tried => Message::headless(&text),
                    Start::Host => Message::of_host(&text),
                }
            };
            // A log that is full of these words and has no message is no reason to be slow.
            let message = read(START_BYTES).and_then(|_| read(MESSAGE_BYTES));
            if let Some(message) = message {
                self.count(message);
            }
        }
        self.pending.drain(..end);
    }

    fn count(&mut self, message: Message) {
        self.message_count += 1;
        if let Some((_, count)) = self.found.iter_mut().find(|(known, _)| *known == message) {
            *count += 1;
            return;
        }
        if self.found.len() < MAX_MESSAGES {
            self.found.push((message, 1));
        } else {
            self.further_count += 1;
        }
    }
}

/// Words that a message may start with.
#[derive(Debug, Clone, Copy)]
enum Start {
    OutOfMemory,
    Tried,
    Host,
}

/// Where messages may start, in order.
fn starts(squeezed: &str) -> impl Iterator<Item = (usize, Start)> {
    const WORDS: [(&str, Start); 3] = [
        ("outofmemory", Start::OutOfMemory),
        ("Triedtoallocate", Start::Tried),
        ("DefaultCPUAllocator:", Start::Host),
    ];
    let mut starts: Vec<(usize, Start)> = WORDS
        .iter()
        .flat_map(|&(words, start)| {
            squeezed
                .match_indices(words)
                .map(move |(at, _)| (at, start))
        })
        .collect();
    starts.sort_by_key(|&(at, _)| at);
    starts.into_iter()
}

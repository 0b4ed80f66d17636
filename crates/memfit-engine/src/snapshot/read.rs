//! Reading a snapshot from bytes.
//!
//! Responsible for the entry points, for gzip, and for the bound on memory. Not responsible for opening
//! files: the program hands over a source.
//!
//! ```
//! use memfit_engine::snapshot;
//!
//! // `pickle.dumps({"segments": [], "device_traces": [[]]}, protocol=4)`, shortened.
//! let empty = b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces]]au.";
//! assert!(snapshot::read_bytes(empty)?.devices.is_empty());
//!
//! let model = snapshot::read_bytes(b"PK\x03\x04...model/data.pkl").unwrap_err();
//! assert!(model.to_string().contains("model checkpoint"));
//! # Ok::<(), snapshot::SnapshotError>(())
//! ```

use std::io::{Cursor, Read};
use std::ops::ControlFlow;

use flate2::read::MultiGzDecoder;

use super::Snapshot;
use super::assemble::assemble;
use super::error::SnapshotError;
use super::pickle::{Bound, Machine};
use super::recognise;

/// How to read.
pub struct ReadOptions<'w> {
    /// What the reader may hold at most, counted in the sizes of its tables. Whatever stands here, it holds
    /// no more than 64 MiB and 8 bytes for each byte of the pickle read so far: real snapshots take less
    /// than one.
    pub memory_limit_bytes: u64,
    /// Told, at least every 256 KiB, how many bytes of the pickle were read; may end the reading.
    pub watch: Option<&'w mut dyn FnMut(u64) -> ControlFlow<()>>,
}

impl Default for ReadOptions<'_> {
    fn default() -> Self {
        Self {
            memory_limit_bytes: 8 << 30,
            watch: None,
        }
    }
}

const LEAST_BYTES: u64 = 64 << 20;
const BYTES_PER_BYTE: u64 = 8;

/// Reads a snapshot: a pickle of protocol 2 to 5, gzip'ed or not, as any torch from 2.0 on writes it.
///
/// Nothing in the pickle is executed. Memory is bounded by what was read, and what contradicts itself is
/// listed in [`Snapshot::problems`].
///
/// # Errors
///
/// Not a pickle, not a snapshot, cut off, damaged, larger than allowed, or asking to run code; a failing
/// source; a watcher that ended it.
pub fn read(source: impl Read, options: ReadOptions<'_>) -> Result<Snapshot, SnapshotError> {
    let mut source = source;
    let mut head = Vec::new();
    let magic = source.by_ref().take(2).read_to_end(&mut head);
    magic.map_err(|error| SnapshotError::Source { position: 0, error })?;
    let is_gzip = recognise::is_gzip(&head);
    let whole = Cursor::new(head).chain(source);
    let source: Box<dyn Read + '_> = if is_gzip {
        Box::new(MultiGzDecoder::new(whole))
    } else {
        Box::new(whole)
    };
    let mut ignore = |_| ControlFlow::Continue(());
    let watch = options.watch.unwrap_or(&mut ignore);
    let bound = Bound {
        least: LEAST_BYTES,
        per_byte: BYTES_PER_BYTE,
        most: options.memory_limit_bytes,
    };
    let (value, containers) = Machine::new(source, bound, watch).run()?;
    assemble(containers, value)
}

/// Reads a snapshot that lies in memory; see [`read`].
///
/// # Errors
///
/// Those of [`read`], except a failing source.
pub fn read_bytes(pickle: &[u8]) -> Result<Snapshot, SnapshotError> {
    read(pickle, ReadOptions::default())
}

//! A moving window over bytes that may never end.
//!
//! Responsible for reading ahead in large pieces, for the position, and for asking the watcher. Not
//! responsible for what the bytes mean. Invariant: memory is one window, whatever lengths the bytes
//! declare.

use std::io::{ErrorKind, Read};

use super::error::SnapshotError;

/// Large enough that a refill is rare, small enough to stay in the second-level cache.
pub(super) const WINDOW_BYTES: usize = 256 << 10;

pub(super) struct Window<'a> {
    source: Box<dyn Read + 'a>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes before `buffer[0]`.
    before: u64,
    /// Refills so far; what costs a little is done once for each.
    refills: u64,
}

impl<'a> Window<'a> {
    pub(super) fn new(source: Box<dyn Read + 'a>) -> Self {
        let buffer = vec![0; WINDOW_BYTES].into_boxed_slice();
        Self {
            source,
            buffer,
            start: 0,
            end: 0,
            before: 0,
            refills: 0,
        }
    }

    /// Position of the next byte.
    pub(super) fn position(&self) -> u64 {
        self.before + self.start as u64
    }

    pub(super) const fn refills(&self) -> u64 {
        self.refills
    }

    /// What lies ready, without reading on.
    #[inline]
    pub(super) fn ready(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Steps over bytes that lie ready.
    #[inline]
    pub(super) fn step(&mut self, bytes: usize) {
        debug_assert!(bytes <= self.end - self.start);
        self.start += bytes;
    }

    #[inline]
    pub(super) fn byte(&mut self) -> Result<u8, SnapshotError> {
        if self.start == self.end {
            self.want(1)?;
        }
        let byte = self.buffer[self.start];
        self.start += 1;
        Ok(byte)
    }

    #[inline]
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        if self.end - self.start < N {
            self.want(N)?;
        }
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.buffer[self.start..self.start + N]);
        self.start += N;
        Ok(bytes)
    }

    /// The next bytes, which are no more than [`WINDOW_BYTES`].
    pub(super) fn slice(&mut self, bytes: usize) -> Result<&[u8], SnapshotError> {
        if self.end - self.start < bytes {
            self.want(bytes)?;
        }
        let slice = &self.buffer[self.start..self.start + bytes];
        self.start += bytes;
        Ok(slice)
    }

    /// Appends the next bytes to `out`, which grows only as they arrive.
    pub(super) fn copy(&mut self, bytes: u64, out: &mut Vec<u8>) -> Result<(), SnapshotError> {
        self.pieces(bytes, |piece| out.extend_from_slice(piece))
    }

    /// Steps over bytes, however many.
    pub(super) fn skip(&mut self, bytes: u64) -> Result<(), SnapshotError> {
        self.pieces(bytes, |_| ())
    }

    /// The next line without its end; at most `limit` bytes of it.
    pub(super) fn line(&mut self, limit: usize) -> Result<String, SnapshotError> {
        let mut line = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => return Ok(String::from_utf8_lossy(&line).into_owned()),
                byte if line.len() < limit => line.push(byte),
                _ => (),
            }
        }
    }

    fn pieces(&mut self, mut bytes: u64, mut take: impl FnMut(&[u8])) -> Result<(), SnapshotError> {
        while bytes > 0 {
            if self.start == self.end {
                self.want(1)?;
            }
            let ready = self.end - self.start;
            let piece = usize::try_from(bytes).map_or(ready, |bytes| bytes.min(ready));
            take(&self.buffer[self.start..self.start + piece]);
            self.start += piece;
            bytes -= piece as u64;
        }
        Ok(())
    }

    /// Reads until so many bytes lie ready or the source ends; how many do.
    pub(super) fn peek(&mut self, bytes: usize) -> Result<usize, SnapshotError> {
        debug_assert!(bytes <= WINDOW_BYTES);
        self.buffer.copy_within(self.start..self.end, 0);
        self.before += self.start as u64;
        self.end -= self.start;
        self.start = 0;
        self.refills += 1;
        while self.end < bytes {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(0) => break,
                Ok(count) => self.end += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                // A compressed stream that stops early says so itself.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                Err(error) => {
                    let position = self.before + self.end as u64;
                    return Err(SnapshotError::Source { position, error });
                }
            }
        }
        Ok(self.end)
    }

    #[cold]
    fn want(&mut self, bytes: usize) -> Result<(), SnapshotError> {
        let ready = self.peek(bytes)?;
        if ready < bytes {
            return Err(SnapshotError::Truncated {
                position: self.before + self.end as u64,
            });
        }
        Ok(())
    }
}

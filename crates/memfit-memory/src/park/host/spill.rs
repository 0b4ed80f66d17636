//! The nameless files that pieces of a model are kept in.
//!
//! Responsible for writing what has changed to a new file, room first, and for closing those that nothing
//! is kept in any more. Not responsible for what has changed ([`super::copy`]).
//!
//! Invariant: what was written stays as it is for as long as the file lives. A model that is awake may
//! have the file's own pages in its memory, and so may children that were forked meanwhile: were the file
//! written over, they would see it, and were it cut off, they would be ended. So each file is written
//! once, a failed write leaves the others whole, and the system gives a file's room back when the last
//! mapping of it has gone. Every byte lies in its file where it lies in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::error::ParkError;
use super::parallel::in_parallel;
use crate::store::{Interrupted, Purpose, StoreError, StoreFile};

/// What is written in one system call: the file system then keeps it in large pages, which are mapped at
/// once where pages of the ordinary size are mapped one by one.
const WRITE_BYTES: u64 = 2 << 20;

/// Files, by their number; a later one has a greater number.
pub(super) struct Spill {
    /// The folder as it was given, to be named.
    pub(super) folder: PathBuf,
    /// The same, wherever the process goes.
    place: PathBuf,
    allow_memory: bool,
    files: BTreeMap<u32, Kept>,
    /// One that nothing was written to.
    unused: Option<StoreFile>,
}

struct Kept {
    file: StoreFile,
    /// Bytes of the disk that it takes.
    room: u64,
    /// Whether it has a time with which no writer leaves it.
    is_marked: bool,
}

/// When a whole file was last written, in seconds, as it is told to be: writing to it
/// afterwards changes that.
pub(super) const WRITTEN: Duration = Duration::from_secs(1 << 20);

impl Spill {
    pub(super) fn new(folder: &Path, allow_memory: bool) -> Result<Self, StoreError> {
        Ok(Self {
            unused: Some(StoreFile::create(folder, Purpose::PARKING, allow_memory)?),
            folder: folder.to_owned(),
            place: std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned()),
            allow_memory,
            files: BTreeMap::new(),
        })
    }

    /// Writes whole pages of `bytes` to a file of their own; returns its number. A failure leaves nothing.
    pub(super) fn write(
        &mut self,
        bytes: &[u8],
        pages: &[Range<u64>],
        interrupted: Interrupted<'_>,
    ) -> Result<u32, ParkError> {
        let file = match self.unused.take() {
            Some(file) => file,
            None => StoreFile::create(&self.place, Purpose::PARKING, self.allow_memory)?,
        };
        for run in pages {
            file.reserve(run.start, run.end - run.start)?;
        }
        let whole = bytes.len() as u64;
        let write = |part: Range<u64>| {
            let place = |offset| usize::try_from(offset).unwrap_or(usize::MAX);
            let some = bytes.get(place(part.start)..place(part.end));
            Ok(file.put(part.start, some.unwrap_or_default(), whole)?)
        };
        in_parallel(pages.iter().flat_map(parts).collect(), &write, interrupted)?;
        let number = self.files.keys().next_back().map_or(0, |last| last + 1);
        let room = pages.iter().map(|run| run.end - run.start).sum();
        let time = SystemTime::UNIX_EPOCH + WRITTEN;
        let is_marked = file.handle().set_modified(time).is_ok();
        let kept = Kept {
            file,
            room,
            is_marked,
        };
        self.files.insert(number, kept);
        Ok(number)
    }

    pub(super) fn file(&self, number: u32) -> Option<&StoreFile> {
        self.files.get(&number).map(|kept| &kept.file)
    }

    /// Whether none of them has been written to since.
    pub(super) fn are_as_written(&self) -> bool {
        let is_as_written = |kept: &Kept| {
            let modified = kept.file.handle().metadata().and_then(|it| it.modified());
            kept.is_marked && modified.is_ok_and(|time| time == SystemTime::UNIX_EPOCH + WRITTEN)
        };
        self.files.values().all(is_as_written)
    }

    /// Bytes of the disk that all files take.
    pub(super) fn room(&self) -> u64 {
        self.files.values().map(|kept| kept.room).sum()
    }

    /// Closes the files that nothing is kept in.
    pub(super) fn keep_only(&mut self, used: &BTreeSet<u32>) {
        self.files.retain(|number, _| used.contains(number));
    }

    /// The file that was written last, to be damaged.
    #[cfg(test)]
    pub(super) fn last(&self) -> Option<&StoreFile> {
        self.files.values().next_back().map(|kept| &kept.file)
    }
}

/// A run, cut at every multiple of [`WRITE_BYTES`].
fn parts(run: &Range<u64>) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    let mut start = run.start;
    while start < run.end {
        let end = run.end.min((start / WRITE_BYTES + 1) * WRITE_BYTES);
        parts.push(start..end);
        start = end;
    }
    parts
}

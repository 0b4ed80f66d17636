//! The copy of a model's bytes that outlives its pages.
//!
//! Responsible for writing what is not kept yet, for reading all of it back, and for telling whether it
//! is what was there. Not responsible for the memory itself ([`super::Parking`]).
//!
//! Invariants: a piece counts as kept only after all of its bytes were written; a kept piece is one
//! whose 128-bit hash is that of the bytes in memory, so that changes are found however they were made;
//! what was read has been compared with that hash before anyone sees it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use twox_hash::XxHash3_128;

use super::Statistics;
use super::error::ParkError;
use super::layout::{Copied, Piece, Place, Tensor, cut};
use super::weights::Weights;
use crate::store::{Interrupted, Purpose, StoreFile};

/// Most threads for one transfer: what a disk or memory can feed.
const MOST_THREADS: usize = 4;

/// Pieces of a model's memory and the files that keep them.
pub(super) struct Copy {
    spill: StoreFile,
    folder: PathBuf,
    source: Option<Weights>,
    tensors: Vec<Tensor>,
    pieces: Vec<Piece>,
}

impl Copy {
    pub(super) fn new(
        length: u64,
        tensors: Vec<Tensor>,
        folder: &Path,
        source: Option<&Path>,
        allow_memory: bool,
    ) -> Result<Self, ParkError> {
        let source = source.map(Weights::open).transpose()?;
        let offset = |tensor: &Tensor| {
            let source = source.as_ref()?;
            let mut names = tensor.names.iter();
            names.find_map(|name| source.offset(name, tensor.length))
        };
        let pieces = cut(length, &tensors, offset)?;
        Ok(Self {
            spill: StoreFile::create(folder, Purpose::PARKING, allow_memory)?,
            folder: folder.to_owned(),
            source,
            tensors,
            pieces,
        })
    }

    /// Sees to it that every piece of `bytes` is kept; what is kept already is not written again.
    pub(super) fn keep(
        &mut self,
        bytes: &[u8],
        statistics: &mut Statistics,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let source = self.source.as_ref();
        let compare = |piece: &mut Piece| {
            compare(piece, part(bytes, piece), source);
            Ok(())
        };
        in_parallel(self.pieces.iter_mut().collect(), &compare, interrupted)?;
        let written = self.reserve().and_then(|()| self.write(bytes, interrupted));
        if written.is_err() {
            self.forget_if_unused();
            return written;
        }
        for piece in &mut self.pieces {
            let place = piece.copy.map(|copy| copy.place);
            if piece.stale.take().is_some() {
                statistics.bytes_written += piece.length;
            } else if place == Some(Place::Source) {
                statistics.bytes_in_source += piece.length;
            } else {
                statistics.bytes_unchanged += piece.length;
            }
        }
        Ok(())
    }

    /// Reserves room for what has to be written, before anything is, a run of neighbours at a time.
    fn reserve(&mut self) -> Result<(), ParkError> {
        let lacks_room = |piece: &Piece| piece.stale.is_some() && !piece.is_reserved;
        let follows = |a: &Piece, b: &Piece| lacks_room(a) == lacks_room(b);
        for run in self.pieces.chunk_by_mut(follows) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else {
                continue;
            };
            if lacks_room(first) {
                let (start, end) = (first.start, last.start + last.length);
                self.spill.reserve(start, end - start)?;
                for piece in run {
                    piece.is_reserved = true;
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        let spill = &self.spill;
        let whole = bytes.len() as u64;
        let write = |piece: &mut Piece| {
            let Some(hash) = piece.stale else {
                return Ok(());
            };
            // While it is written over, the piece is nowhere but in memory.
            piece.copy = None;
            spill.put(piece.start, part(bytes, piece), whole)?;
            let place = Place::Spill;
            piece.copy = Some(Copied { hash, place });
            Ok(())
        };
        in_parallel(self.pieces.iter_mut().collect(), &write, interrupted)
    }

    /// The nameless file itself, to be damaged.
    #[cfg(test)]
    pub(super) const fn spill_handle(&self) -> &std::fs::File {
        self.spill.handle()
    }

    /// Gives the file's room back after a failure, unless something in it is kept.
    fn forget_if_unused(&mut self) {
        let in_spill = |piece: &Piece| piece.copy.is_some_and(|copy| copy.place == Place::Spill);
        if !self.pieces.iter().any(in_spill) {
            self.spill.clear();
            for piece in &mut self.pieces {
                piece.is_reserved = false;
            }
        }
    }

    /// Fills `bytes` with what is kept.
    pub(super) fn restore(
        &self,
        bytes: &mut [u8],
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let whole = bytes.len() as u64;
        let mut parts = Vec::with_capacity(self.pieces.len());
        let (mut rest, mut at) = (bytes, 0);
        for piece in &self.pieces {
            let (_, behind) = rest.split_at_mut(place(piece.start - at));
            let (part, behind) = behind.split_at_mut(place(piece.length));
            parts.push((piece, part));
            rest = behind;
            at = piece.start + piece.length;
        }
        let work = |(piece, part): (&Piece, &mut [u8])| self.restore_piece(piece, part, whole);
        in_parallel(parts, &work, interrupted)
    }

    fn restore_piece(&self, piece: &Piece, part: &mut [u8], whole: u64) -> Result<(), ParkError> {
        let copy = piece.copy.as_ref();
        let is_whole = match (copy.map(|copy| copy.place), piece.in_source, &self.source) {
            (Some(Place::Spill), ..) => {
                self.spill.take(piece.start, part, whole)?;
                true
            }
            // A file that became shorter has changed, as one whose bytes did.
            (Some(Place::Source), Some((offset, _)), Some(source)) => {
                source.read(offset, part).is_ok()
            }
            _ => false,
        };
        if is_whole && copy.map(|copy| copy.hash) == Some(XxHash3_128::oneshot(part)) {
            return Ok(());
        }
        match (copy.map(|copy| copy.place), piece.in_source, &self.source) {
            (Some(Place::Source), Some((_, tensor)), Some(source)) => {
                let tensor = self.tensors.get(tensor);
                Err(ParkError::SourceChanged {
                    path: source.path.clone(),
                    tensor: tensor.map_or_else(String::new, |tensor| tensor.names.join("`, `")),
                })
            }
            _ => Err(ParkError::Changed {
                folder: self.folder.clone(),
                start: piece.start,
                length: piece.length,
            }),
        }
    }
}

/// Finds out whether a piece, whose bytes are `part`, has to be written.
fn compare(piece: &mut Piece, part: &[u8], source: Option<&Weights>) {
    let hash = XxHash3_128::oneshot(part);
    piece.stale = None;
    if piece.copy.is_some_and(|copy| copy.hash == hash) {
        return;
    }
    if !piece.is_reserved && is_in_source(piece, part, source) {
        let place = Place::Source;
        piece.copy = Some(Copied { hash, place });
    } else {
        piece.stale = Some(hash);
    }
}

/// Whether the weights file has these bytes: byte for byte, not by hash.
fn is_in_source(piece: &Piece, part: &[u8], source: Option<&Weights>) -> bool {
    let (Some((offset, _)), Some(source)) = (piece.in_source, source) else {
        return false;
    };
    let mut there = vec![0; part.len()];
    source.read(offset, &mut there).is_ok() && there == part
}

/// The bytes of a piece; `cut` saw to it that they are there.
fn part<'a>(bytes: &'a [u8], piece: &Piece) -> &'a [u8] {
    let start = place(piece.start);
    bytes
        .get(start..start + place(piece.length))
        .unwrap_or_default()
}

/// An offset in memory, which a `usize` holds since the memory is there.
fn place(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

/// Does all jobs, in order, on a few threads; the first error ends it.
fn in_parallel<T: Send>(
    jobs: Vec<T>,
    work: &(impl Fn(T) -> Result<(), ParkError> + Sync),
    interrupted: Interrupted<'_>,
) -> Result<(), ParkError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = cores.min(MOST_THREADS).min(jobs.len());
    let jobs = Mutex::new(jobs.into_iter());
    let failed = AtomicBool::new(false);
    let turn = || {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(job) = job.filter(|_| !failed.load(Ordering::Relaxed)) else {
            return Ok(false);
        };
        work(job)
            .inspect_err(|_| failed.store(true, Ordering::Relaxed))
            .map(|()| true)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads)
            .filter_map(|_| {
                let named = std::thread::Builder::new().name("memfit-park".to_owned());
                // Where no thread can be had, the others do its work.
                named.spawn_scoped(scope, || while_true(&turn)).ok()
            })
            .collect();
        let mut own = Ok(true);
        while let Ok(true) = own {
            own = if interrupted() {
                failed.store(true, Ordering::Relaxed);
                Err(ParkError::Interrupted)
            } else {
                turn()
            };
        }
        let mut done = own.map(drop);
        for other in others {
            // It panics on nothing; if it did, its jobs are not done.
            let other = other.join().unwrap_or(Err(ParkError::Interrupted));
            done = done.and(other);
        }
        done
    })
}

/// Takes turns until there is none left.
fn while_true(turn: &impl Fn() -> Result<bool, ParkError>) -> Result<(), ParkError> {
    while turn()? {}
    Ok(())
}

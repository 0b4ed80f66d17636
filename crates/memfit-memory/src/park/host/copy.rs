//! The copy of a model's bytes that outlives its pages.
//!
//! Responsible for writing what is not kept yet, for having all of it back, and for telling whether it is
//! what was there. Not responsible for the memory itself ([`super::Parking`]), nor for files
//! ([`super::spill`]).
//!
//! Invariants: a piece counts as kept only after all of its bytes were written; a kept piece is one whose
//! 128-bit hash is that of the bytes in memory, so that changes are found however they were made; what
//! came from a file has been compared with that hash before anyone sees it.
//!
//! It comes back in one of two ways. Where every piece is in nameless files, their own pages are put in
//! the memory's place: nothing is copied, and when it is parked again the system tells which pages were
//! written to, so that only those are compared. They may be compared later than they are put there, if
//! nothing sees them in between ([`super::arriving`]). Otherwise new pages are filled by reading: a weights
//! file is never mapped, since somebody may write over it.
//!
//! What is compared is what may have come from a disk since it was last known: pages that were in the page
//! cache all the time since they were written or compared are memory like any other, and there is no need
//! to read all of them at every wake. A page has been there all the time if none was missing when the wake
//! began or had to be read meanwhile, if the files were not written to, and if the process had no major
//! fault while the memory was awake, by which a dropped page would have been read again ([`Stay`]). Only a
//! child that was forked could read it unseen.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::Path;

use twox_hash::XxHash3_128;

use super::arriving::Arriving;
use super::error::{ParkError, no_memory};
use super::layout::{Copied, Piece, Place, Tensor, cut, pages_in_files, stale_pages};
use super::parallel::in_parallel;
use super::spill::Spill;
use super::statistics::Statistics;
use super::weights::Weights;
use crate::arena::host::{Arena, FilePart, major_faults};
use crate::store::Interrupted;

/// Most that files take on the disk, in memories: what is out of date in an older file takes room until
/// nothing in that file is needed.
const MOST_ROOM: u64 = 3;

/// Pieces of a model's memory and the files that keep them.
pub(super) struct Copy {
    spill: Spill,
    source: Option<Weights>,
    tensors: Vec<Tensor>,
    pieces: Vec<Piece>,
    /// Length of the memory.
    length: u64,
    /// Bytes of a page.
    page: u64,
    stay: Stay,
}

/// What is known of the files' pages in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stay {
    /// Nothing: one may have been dropped, and read again without having been compared.
    Unknown,
    /// The memory is awake, and all were as kept when the process had had so many major faults.
    Until(u64),
    /// The memory is parked, and all were as kept then: one that is still there is so.
    AsKept,
}

/// How a memory came back.
pub(super) enum Woken {
    /// It did not: its files cannot be mapped.
    NotMapped,
    /// All of it, for which so many bytes were read and compared.
    Whole(u64),
    /// Its pieces are still to be compared.
    Arriving(Arriving),
}

impl Copy {
    pub(super) fn new(
        arena: &Arena,
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
        let length = arena.length() as u64;
        let pieces = cut(length, &tensors, offset)?;
        Ok(Self {
            spill: Spill::new(folder, allow_memory)?,
            source,
            tensors,
            pieces,
            length,
            page: Arena::page_bytes() as u64,
            stay: Stay::Unknown,
        })
    }

    /// Sees to it that every piece of `bytes` is kept; what is kept already is not written again. `written`
    /// says for each page whether it was written to since the bytes came back, where that is known, and
    /// `is_here` for each piece whether it has come back, where not all have.
    pub(super) fn keep(
        &mut self,
        bytes: &[u8],
        written: Option<&[bool]>,
        is_here: Option<&[bool]>,
        statistics: &mut Statistics,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let (source, page) = (self.source.as_ref(), self.page);
        let mut touched = Vec::new();
        for (number, piece) in self.pieces.iter_mut().enumerate() {
            piece.stale = None;
            // One that was never seen is what was kept, also if it was damaged: it must not be taken for
            // new bytes.
            let is_seen = is_here.is_none_or(|is_here| is_here.get(number) != Some(&false));
            if is_seen && !is_untouched(piece, written, page) {
                touched.push(piece);
            }
        }
        let compare = |piece: &mut Piece| {
            compare(piece, part(bytes, piece), source);
            Ok(())
        };
        in_parallel(touched, &compare, interrupted)?;
        let is_all_new = self.pieces.iter().all(|piece| piece.stale.is_some());
        self.write(bytes, interrupted)?;
        let has_stayed = major_faults().is_some_and(|faults| self.stay == Stay::Until(faults));
        self.stay = if is_all_new || has_stayed {
            Stay::AsKept
        } else {
            Stay::Unknown
        };
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

    /// Writes what is stale to a new file, and closes those that are out of date.
    fn write(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<(), ParkError> {
        let mut pages = stale_pages(&self.pieces, self.page);
        let room: u64 = pages.iter().map(|run| run.end - run.start).sum();
        if room > 0 && self.spill.room() + room > MOST_ROOM * self.length {
            self.write_all_anew();
            pages = stale_pages(&self.pieces, self.page);
        }
        if !pages.is_empty() {
            let number = self.spill.write(bytes, &pages, interrupted)?;
            for piece in &mut self.pieces {
                if let Some(hash) = piece.stale {
                    let place = Place::Spill(number);
                    piece.copy = Some(Copied { hash, place });
                }
            }
        }
        let used: BTreeSet<u32> = self.pieces.iter().filter_map(Piece::number).collect();
        self.spill.keep_only(&used);
        Ok(())
    }

    /// Has every piece written that is in a nameless file: then one file is enough.
    fn write_all_anew(&mut self) {
        for piece in &mut self.pieces {
            if let (None, Some(Copied { hash, .. }), Some(_)) =
                (piece.stale, piece.copy, piece.number())
            {
                piece.stale = Some(hash);
            }
        }
    }

    /// The nameless file that was written last, to be damaged.
    #[cfg(test)]
    pub(super) fn spill_handle(&self) -> Option<&std::fs::File> {
        self.spill.last().map(crate::store::StoreFile::handle)
    }

    /// Bytes of the disk that its files take.
    #[cfg(test)]
    pub(super) fn room(&self) -> u64 {
        self.spill.room()
    }

    /// Has the files' own pages stand in `arena`, compared where they need to be; all of them, unless
    /// `streams`: then no piece may be seen of those that arrive before [`Self::compare_in`] has.
    pub(super) fn show(
        &mut self,
        arena: &mut Arena,
        streams: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<Woken, ParkError> {
        let length = arena.length();
        let stay = std::mem::replace(&mut self.stay, Stay::Unknown);
        let Some(parts) = self.parts() else {
            return Ok(Woken::NotMapped);
        };
        // The files have no name, and are written once, before they are ever shown (`spill.rs`).
        let Ok(shown) = arena.show(&parts) else {
            return Ok(Woken::NotMapped);
        };
        let is_as_kept = stay == Stay::AsKept && self.spill.are_as_written();
        let has_stayed = is_as_kept && shown.were_in_memory(&parts);
        if !has_stayed && !streams {
            let work = |piece: &Piece| {
                let part = shown.bring_in(place(piece.start), place(piece.length));
                self.check(piece, part)
            };
            in_parallel(self.pieces.iter().collect(), &work, interrupted)?;
        }
        let opened = shown.open();
        opened.map_err(|error| no_memory(self.length, &error))?;
        if !has_stayed && streams {
            let arriving = Arriving::begin(self.pieces.len(), arena.ahead(), length);
            return Ok(Woken::Arriving(arriving));
        }
        drop(parts);
        self.stay = major_faults().map_or(Stay::Unknown, Stay::Until);
        let read = if has_stayed { 0 } else { self.length };
        Ok(Woken::Whole(read))
    }

    /// Compares what parts of an open memory lie on and has not been compared; returns how many bytes.
    ///
    /// On the caller's thread alone: it is in the middle of a model's ops, whose own threads wait for the
    /// next one on all cores, and another thread would come after them.
    pub(super) fn compare_in(
        &self,
        arena: &Arena,
        arriving: &mut Arriving,
        parts: &[Range<u64>],
        interrupted: Interrupted<'_>,
    ) -> Result<u64, ParkError> {
        let mut bytes = 0;
        for number in arriving.missing(&self.pieces, parts) {
            let Some(piece) = self.pieces.get(number) else {
                continue;
            };
            if interrupted() {
                return Err(ParkError::Interrupted);
            }
            let part = arena.bring_in(place(piece.start), place(piece.length));
            self.check(piece, part)?;
            arriving.came(number);
            bytes += piece.length;
        }
        Ok(bytes)
    }

    /// The parts of files that make up the memory, if every piece is in a file.
    fn parts(&self) -> Option<Vec<FilePart<'_>>> {
        let pages = pages_in_files(&self.pieces, self.page)?;
        let part = |(pages, number): (Range<u64>, u32)| {
            Some(FilePart {
                start: place(pages.start),
                length: place(pages.end - pages.start),
                file: self.spill.file(number)?.as_fd(),
            })
        };
        pages.into_iter().map(part).collect()
    }

    /// Compares a piece that stands in the memory, if its pages could be brought in.
    fn check(&self, piece: &Piece, part: io::Result<&[u8]>) -> Result<(), ParkError> {
        match part {
            Ok(part) if piece.has(part) => Ok(()),
            Ok(_) => Err(self.changed(piece)),
            Err(error) => {
                // Reading says more about why.
                self.restore_piece(piece, &mut vec![0; place(piece.length)])?;
                Err(ParkError::NotBroughtIn {
                    start: piece.start,
                    length: piece.length,
                    reason: error.to_string(),
                })
            }
        }
    }

    /// Fills `bytes` with what is kept.
    pub(super) fn restore(
        &self,
        bytes: &mut [u8],
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let mut parts = Vec::with_capacity(self.pieces.len());
        let (mut rest, mut at) = (bytes, 0);
        for piece in &self.pieces {
            let (_, behind) = rest.split_at_mut(place(piece.start - at));
            let (part, behind) = behind.split_at_mut(place(piece.length));
            parts.push((piece, part));
            rest = behind;
            at = piece.start + piece.length;
        }
        let work = |(piece, part): (&Piece, &mut [u8])| self.restore_piece(piece, part);
        in_parallel(parts, &work, interrupted)
    }

    fn restore_piece(&self, piece: &Piece, part: &mut [u8]) -> Result<(), ParkError> {
        let file = piece.number().and_then(|number| self.spill.file(number));
        let is_whole = match (file, piece.in_source, &self.source) {
            (Some(file), ..) => {
                file.take(piece.start, part, self.length)?;
                true
            }
            // A file that became shorter has changed, as one whose bytes did.
            (None, Some((offset, _)), Some(source)) => source.read(offset, part).is_ok(),
            _ => false,
        };
        if is_whole && piece.has(part) {
            return Ok(());
        }
        Err(self.changed(piece))
    }

    /// The error for a piece that is not what was kept.
    fn changed(&self, piece: &Piece) -> ParkError {
        match (piece.number(), piece.in_source, &self.source) {
            (None, Some((_, tensor)), Some(source)) => {
                let tensor = self.tensors.get(tensor);
                ParkError::SourceChanged {
                    path: source.path.clone(),
                    tensor: tensor.map_or_else(String::new, |tensor| tensor.names.join("`, `")),
                }
            }
            _ => ParkError::Changed {
                folder: self.spill.folder.clone(),
                start: piece.start,
                length: piece.length,
            },
        }
    }
}

impl Piece {
    /// Whether these are the bytes that are kept.
    fn has(&self, part: &[u8]) -> bool {
        self.copy
            .is_some_and(|copy| copy.hash == XxHash3_128::oneshot(part))
    }

    /// Number of the nameless file that it is in.
    const fn number(&self) -> Option<u32> {
        match self.copy {
            Some(Copied {
                place: Place::Spill(number),
                ..
            }) => Some(number),
            _ => None,
        }
    }
}

/// Whether the memory still has the very pages of the files that keep a piece.
fn is_untouched(piece: &Piece, written: Option<&[bool]>, page: u64) -> bool {
    let pages = piece.pages(page);
    let pages = place(pages.start / page)..place(pages.end / page);
    let told = written.and_then(|written| written.get(pages));
    piece.copy.is_some() && told.is_some_and(|told| !told.contains(&true))
}

/// Finds out whether a piece, whose bytes are `part`, has to be written.
fn compare(piece: &mut Piece, part: &[u8], source: Option<&Weights>) {
    let hash = XxHash3_128::oneshot(part);
    if piece.copy.is_some_and(|copy| copy.hash == hash) {
        return;
    }
    if piece.number().is_none() && is_in_source(piece, part, source) {
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

//! The copy of a model's bytes that outlives their place on a device.
//!
//! Responsible for keeping every byte, in the host's memory as far as it may and in a file beyond, for
//! bringing them back, and for telling whether they are what was there. Not responsible for the device's
//! memory ([`super::CudaParking`]).
//!
//! The host's memory is the cheaper place by far, to write and to wake from, so it is filled first, from the
//! start. What goes to the file is always the end, so that one piece meets its old copy there: a piece
//! whose bytes the file has already is not written again.
//!
//! Invariants: a piece counts as kept only after all of its bytes arrived, under the 128-bit hash of them;
//! no byte goes back to the device before its piece was compared with that hash.

use std::path::{Path, PathBuf};

use twox_hash::XxHash3_128;

use super::statistics::CudaStatistics;
use crate::arena::cuda::{Arena, HostMemory};
use crate::park::host::ParkError;
use crate::store::{Interrupted, Purpose, StoreFile};

/// Length of a piece: long enough for the bus, short enough for a Ctrl-C in between.
pub(super) const PIECE_BYTES: u64 = 4 << 20;

/// Pieces of a model's memory and where they are kept.
pub(super) struct Copy {
    spill: StoreFile,
    folder: PathBuf,
    allow_memory: bool,
    pieces: Vec<Piece>,
    /// The first pieces, if they are kept there.
    host: Option<HostMemory>,
    /// How many they are.
    in_host: usize,
}

struct Piece {
    start: u64,
    length: u64,
    /// Hash of what was parked.
    hash: u128,
    /// Hash of what the file has of it, if anything.
    spilled: Option<u128>,
    /// Whether the file has room for it.
    is_reserved: bool,
}

impl Copy {
    pub(super) fn new(length: u64, folder: &Path, allow_memory: bool) -> Result<Self, ParkError> {
        let starts = (0..length).step_by(usize::try_from(PIECE_BYTES).unwrap_or(usize::MAX));
        let pieces = starts.map(|start| Piece {
            start,
            length: PIECE_BYTES.min(length - start),
            hash: 0,
            spilled: None,
            is_reserved: false,
        });
        Ok(Self {
            spill: StoreFile::create(folder, Purpose::PARKING, allow_memory)?,
            folder: folder.to_owned(),
            allow_memory,
            pieces: pieces.collect(),
            host: None,
            in_host: 0,
        })
    }

    /// Bytes of the host's memory that it takes.
    pub(super) fn host_bytes(&self) -> u64 {
        let host = self.host.as_ref();
        host.map_or(0, |host| host.bytes().len() as u64)
    }

    /// Copies every piece from the device, as many as fit into `host_bytes` to the host's memory.
    pub(super) fn keep(
        &mut self,
        arena: &Arena,
        host_bytes: u64,
        statistics: &mut CudaStatistics,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let kept = self.keep_pieces(arena, host_bytes, statistics, interrupted);
        if kept.is_err() {
            self.let_host_go();
            self.forget_file_if_unused();
        }
        kept
    }

    fn keep_pieces(
        &mut self,
        arena: &Arena,
        host_bytes: u64,
        statistics: &mut CudaStatistics,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        self.take_host_memory(arena, host_bytes);
        let (in_host, in_file) = self.pieces.split_at_mut(self.in_host);
        // Before anything is copied: a full disk is found at once.
        reserve(&self.spill, in_file)?;
        if let Some(host) = &mut self.host {
            for piece in in_host {
                stop_if(interrupted)?;
                let part = part_mut(host.bytes_mut(), piece);
                arena.copy_out(piece.start, part)?;
                piece.hash = XxHash3_128::oneshot(part);
                statistics.bytes_to_host += piece.length;
            }
        }
        let Some(longest) = in_file.iter().map(|piece| piece.length).max() else {
            return Ok(());
        };
        let mut staging = HostMemory::new(arena.device().clone(), longest)?;
        for piece in in_file {
            stop_if(interrupted)?;
            let part = first_mut(staging.bytes_mut(), piece.length);
            arena.copy_out(piece.start, part)?;
            piece.hash = XxHash3_128::oneshot(part);
            if write_if_new(&self.spill, piece, part)? {
                statistics.bytes_written += piece.length;
            } else {
                statistics.bytes_unchanged += piece.length;
            }
        }
        Ok(())
    }

    /// Takes memory for the first pieces; where there is none, the file keeps them.
    fn take_host_memory(&mut self, arena: &Arena, host_bytes: u64) {
        let fitting = self.pieces.iter();
        let fitting = fitting.take_while(|piece| piece.start + piece.length <= host_bytes);
        self.in_host = fitting.count();
        let length: u64 = self
            .pieces
            .iter()
            .take(self.in_host)
            .map(|piece| piece.length)
            .sum();
        self.host = if length > 0 {
            HostMemory::new(arena.device().clone(), length).ok()
        } else {
            None
        };
        if self.host.is_none() {
            self.in_host = 0;
        }
    }

    /// Copies every piece back to the device.
    pub(super) fn restore(
        &self,
        arena: &mut Arena,
        statistics: &mut CudaStatistics,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let (in_host, in_file) = self.pieces.split_at(self.in_host);
        if let Some(host) = &self.host {
            for piece in in_host {
                stop_if(interrupted)?;
                let part = checked_part(host, piece)?;
                arena.copy_in(piece.start, part)?;
            }
        }
        let Some(longest) = in_file.iter().map(|piece| piece.length).max() else {
            return Ok(());
        };
        let mut staging = HostMemory::new(arena.device().clone(), longest)?;
        for piece in in_file {
            stop_if(interrupted)?;
            let part = first_mut(staging.bytes_mut(), piece.length);
            self.spill.take(piece.start, part, arena.length())?;
            if piece.spilled != Some(piece.hash) || XxHash3_128::oneshot(part) != piece.hash {
                return Err(ParkError::Changed {
                    folder: self.folder.clone(),
                    start: piece.start,
                    length: piece.length,
                });
            }
            arena.copy_in(piece.start, part)?;
            statistics.bytes_read += piece.length;
        }
        Ok(())
    }

    /// Writes the pieces in the host's memory to the file and lets that memory go.
    pub(super) fn move_to_disk(
        &mut self,
        statistics: &mut CudaStatistics,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        let Some(host) = self.host.take() else {
            return Ok(());
        };
        let written = self.write_host(&host, statistics, interrupted);
        if written.is_ok() {
            self.in_host = 0;
        } else {
            self.host = Some(host);
        }
        written
    }

    fn write_host(
        &mut self,
        host: &HostMemory,
        statistics: &mut CudaStatistics,
        interrupted: Interrupted<'_>,
    ) -> Result<(), ParkError> {
        reserve(&self.spill, self.pieces.split_at_mut(self.in_host).0)?;
        for number in 0..self.in_host {
            stop_if(interrupted)?;
            let part = checked_part(host, &self.pieces[number])?;
            if write_if_new(&self.spill, &mut self.pieces[number], part)? {
                statistics.bytes_written += part.len() as u64;
            }
        }
        Ok(())
    }

    /// Lets the host's memory go: the device has the bytes.
    pub(super) fn let_host_go(&mut self) {
        self.host = None;
        self.in_host = 0;
    }

    /// Gives the file's room back, unless something in it may spare a write.
    fn forget_file_if_unused(&mut self) {
        let is_used = self.pieces.iter().any(|piece| piece.spilled.is_some());
        let fresh = StoreFile::create(&self.folder, Purpose::PARKING, self.allow_memory);
        if let (false, Ok(fresh)) = (is_used, fresh) {
            self.spill = fresh;
            for piece in &mut self.pieces {
                piece.is_reserved = false;
            }
        }
    }

    /// The host's memory, to be damaged.
    #[cfg(test)]
    pub(super) const fn host_mut(&mut self) -> Option<&mut HostMemory> {
        self.host.as_mut()
    }

    /// The nameless file, to be damaged.
    #[cfg(test)]
    pub(super) const fn spill_handle(&self) -> &std::fs::File {
        self.spill.handle()
    }
}

/// Reserves room for pieces that have none, as one range if there are several.
fn reserve(spill: &StoreFile, pieces: &mut [Piece]) -> Result<(), ParkError> {
    for run in pieces.chunk_by_mut(|a, b| a.is_reserved == b.is_reserved) {
        if let (Some(first), Some(last)) = (run.first(), run.last())
            && !first.is_reserved
        {
            spill.reserve(first.start, last.start + last.length - first.start)?;
            for piece in run {
                piece.is_reserved = true;
            }
        }
    }
    Ok(())
}

/// Writes a piece, whose bytes are `part`, unless the file has them; says whether it did.
fn write_if_new(spill: &StoreFile, piece: &mut Piece, part: &[u8]) -> Result<bool, ParkError> {
    if piece.spilled == Some(piece.hash) {
        return Ok(false);
    }
    // While it is written over, the file has nothing of it.
    piece.spilled = None;
    spill.put(piece.start, part, piece.length)?;
    piece.spilled = Some(piece.hash);
    Ok(true)
}

fn stop_if(interrupted: Interrupted<'_>) -> Result<(), ParkError> {
    if interrupted() {
        return Err(ParkError::Interrupted);
    }
    Ok(())
}

/// A piece in the host's memory, if it is what was parked.
fn checked_part<'a>(host: &'a HostMemory, piece: &Piece) -> Result<&'a [u8], ParkError> {
    let start = place(piece.start);
    let part = host.bytes().get(start..start + place(piece.length));
    let part = part.filter(|part| XxHash3_128::oneshot(part) == piece.hash);
    part.ok_or(ParkError::HostChanged {
        start: piece.start,
        length: piece.length,
    })
}

/// A piece's part of the host's memory, which was taken so long that it has it.
fn part_mut<'a>(bytes: &'a mut [u8], piece: &Piece) -> &'a mut [u8] {
    let start = place(piece.start);
    bytes
        .get_mut(start..start + place(piece.length))
        .unwrap_or_default()
}

/// The first bytes of memory that is at least so long.
fn first_mut(bytes: &mut [u8], length: u64) -> &mut [u8] {
    bytes.get_mut(..place(length)).unwrap_or_default()
}

/// An offset in memory, which a `usize` holds since the memory is there.
fn place(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

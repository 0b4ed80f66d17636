//! The file that blocks are written to.
//!
//! Responsible for a file without a name, its room, and transfers that are whole and as they were
//! written, or an error. Not responsible for which block lies where ([`super::extents`]).
//!
//! Invariants: from the moment a block can be written the file has no name, so nothing is left when the
//! process ends, however it ends; room is reserved before a byte is written.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use memfit_engine::bytes::Bytes;
use rustix::fs::{Advice, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::error::{Purpose, StoreError};

/// Bytes of one system call: what is checksummed next is still in the processor's cache.
const PIECE_BYTES: usize = 1 << 20;

/// An open file without a name in a folder.
#[derive(Debug)]
pub(crate) struct StoreFile {
    file: File,
    folder: PathBuf,
    purpose: Purpose,
}

impl StoreFile {
    /// Opens one in `folder`, which may lie in memory only if `allow_memory`.
    pub(crate) fn create(
        folder: &Path,
        purpose: Purpose,
        allow_memory: bool,
    ) -> Result<Self, StoreError> {
        let not_writable = |error: &io::Error| StoreError::NotWritable {
            purpose,
            folder: folder.to_owned(),
            reason: error.to_string(),
        };
        let metadata = std::fs::metadata(folder).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => StoreError::Missing {
                purpose,
                folder: folder.to_owned(),
            },
            _ => not_writable(&error),
        })?;
        if !metadata.is_dir() {
            return Err(StoreError::NotAFolder {
                purpose,
                folder: folder.to_owned(),
            });
        }
        let file = open(folder).map_err(|error| not_writable(&error))?;
        if let (Some(filesystem), false) = (memory_filesystem(&file), allow_memory) {
            return Err(StoreError::InMemory {
                purpose,
                folder: folder.to_owned(),
                filesystem,
            });
        }
        Ok(Self {
            file,
            folder: folder.to_owned(),
            purpose,
        })
    }

    /// Sees to it that the file system has room for a range.
    pub(crate) fn reserve(&self, offset: u64, length: u64) -> Result<(), StoreError> {
        let available = self.available();
        // Asked first: a reservation that fails half-way may have taken the last byte of the disk.
        if available.is_some_and(|available| available < length) {
            return Err(self.no_space(length, available));
        }
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, length) {
            Err(Errno::NOSPC) => Err(self.no_space(length, self.available())),
            // The file system cannot reserve; then the write itself finds out.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            done => done.map_err(|error| self.failed("writing", length, &error.into())),
        }
    }

    /// Writes all of `bytes` and returns their checksum.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<u32, StoreError> {
        let mut checksum = crc32fast::Hasher::new();
        let mut at = offset;
        for piece in bytes.chunks(PIECE_BYTES) {
            checksum.update(piece);
            self.put(at, piece, bytes.len() as u64)?;
            at += piece.len() as u64;
        }
        Ok(checksum.finalize())
    }

    /// Writes a piece of a transfer of `whole` bytes.
    pub(crate) fn put(&self, offset: u64, piece: &[u8], whole: u64) -> Result<(), StoreError> {
        let written = self.file.write_all_at(piece, offset);
        written.map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull => self.no_space(whole, self.available()),
            _ => self.failed("writing", whole, &error),
        })
    }

    /// Reads a piece of a transfer of `whole` bytes, whatever is there now.
    pub(crate) fn take(&self, offset: u64, piece: &mut [u8], whole: u64) -> Result<(), StoreError> {
        let read = self.file.read_exact_at(piece, offset);
        read.map_err(|error| self.failed("reading", whole, &error))
    }

    /// Fills `bytes` with what was written, or says that it is not that any more.
    pub(crate) fn read(
        &self,
        offset: u64,
        bytes: &mut [u8],
        written: u32,
    ) -> Result<(), StoreError> {
        let length = bytes.len() as u64;
        let mut checksum = crc32fast::Hasher::new();
        let mut at = offset;
        for piece in bytes.chunks_mut(PIECE_BYTES) {
            self.take(at, piece, length)?;
            checksum.update(piece);
            at += piece.len() as u64;
        }
        let found = checksum.finalize();
        if found != written {
            return Err(StoreError::Changed {
                purpose: self.purpose,
                folder: self.folder.clone(),
                length,
                written,
                found,
            });
        }
        Ok(())
    }

    /// Asks the system to let its copy in memory go, for what has reached the disk, and to hurry with the
    /// rest.
    pub(crate) fn drop_cache(&self, offset: u64, length: u64) {
        // Advice: where the file system does not take it, only memory that can be had back is lost.
        let length = std::num::NonZeroU64::new(length);
        let _refused = rustix::fs::fadvise(&self.file, offset, length, Advice::DontNeed);
    }

    /// Cuts it, so that the file system has the room back.
    pub(crate) fn shorten(&self, length: u64) {
        // Where that cannot be, it stays as it is, and as right.
        let _refused = self.file.set_len(length);
    }

    fn available(&self) -> Option<u64> {
        let filesystem = rustix::fs::fstatvfs(&self.file).ok()?;
        Some(filesystem.f_bavail.saturating_mul(filesystem.f_frsize))
    }

    fn no_space(&self, wanted: u64, available: Option<u64>) -> StoreError {
        StoreError::NoSpace {
            purpose: self.purpose,
            folder: self.folder.clone(),
            wanted: Bytes(wanted),
            available: Bytes(available.unwrap_or(0)),
        }
    }

    fn failed(&self, verb: &'static str, length: u64, error: &io::Error) -> StoreError {
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof => "the file ends before them".to_owned(),
            _ => error.to_string(),
        };
        StoreError::Transfer {
            purpose: self.purpose,
            folder: self.folder.clone(),
            verb,
            length,
            reason,
        }
    }

    /// Writes to a given file instead.
    #[cfg(test)]
    pub(crate) fn over(file: File, folder: &Path) -> Self {
        Self {
            file,
            folder: folder.to_owned(),
            purpose: Purpose::OFFLOAD,
        }
    }

    /// The file itself, for what is asked and told of it apart from its bytes.
    pub(crate) const fn handle(&self) -> &File {
        &self.file
    }
}

impl AsFd for StoreFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A file that has no name, or has lost it before anything is written to it.
fn open(folder: &Path) -> io::Result<File> {
    let private = Mode::RUSR | Mode::WUSR;
    #[cfg(target_os = "linux")]
    {
        let nameless = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(folder, nameless, private) {
            // File systems that do not know nameless files say one of these.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
            opened => return Ok(File::from(opened?)),
        }
    }
    let process = std::process::id();
    for attempt in 0_u32.. {
        let path = folder.join(format!(".memfit-{process}-{attempt}"));
        let new = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(&path, new, private) {
            Err(Errno::EXIST) => {}
            opened => {
                let file = File::from(opened?);
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// The name of the file system, if it keeps its files in memory.
#[cfg(target_os = "linux")]
fn memory_filesystem(file: &File) -> Option<&'static str> {
    match rustix::fs::fstatfs(file).ok()?.f_type {
        0x0102_1994 => Some("tmpfs"),
        0x8584_58f6 => Some("ramfs"),
        _ => None,
    }
}

#[cfg(not(target_os = "linux"))]
const fn memory_filesystem(_: &File) -> Option<&'static str> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_used_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        let error = StoreFile::create(&missing, Purpose::OFFLOAD, true).unwrap_err();
        assert_eq!(
            error,
            StoreError::Missing {
                purpose: Purpose::OFFLOAD,
                folder: missing,
            }
        );
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = StoreFile::create(&file, Purpose::OFFLOAD, true).unwrap_err();
        assert_eq!(
            error,
            StoreError::NotAFolder {
                purpose: Purpose::OFFLOAD,
                folder: file,
            }
        );
    }

    #[test]
    fn the_file_has_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = StoreFile::create(folder.path(), Purpose::OFFLOAD, true).unwrap();
        file.write(0, b"something").unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_full_disk_is_said_before_anything_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let file = StoreFile::create(folder.path(), Purpose::OFFLOAD, true).unwrap();
        let StoreError::NoSpace {
            wanted, available, ..
        } = file.reserve(0, 1 << 60).unwrap_err()
        else {
            panic!("another error");
        };
        assert_eq!(wanted, Bytes(1 << 60));
        assert!(available.0 > 0 && available.0 < 1 << 60);
        assert_eq!(file.handle().metadata().unwrap().len(), 0);
    }

    #[test]
    fn memory_is_refused_where_a_disk_is_meant() {
        let Ok(file) = StoreFile::create(Path::new("/dev/shm"), Purpose::OFFLOAD, true) else {
            return; // no such folder on this system
        };
        let refused = StoreFile::create(Path::new("/dev/shm"), Purpose::OFFLOAD, false);
        assert_eq!(refused.is_err(), memory_filesystem(file.handle()).is_some());
    }

    #[test]
    fn damage_and_truncation_are_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let file = StoreFile::create(folder.path(), Purpose::OFFLOAD, true).unwrap();
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| i.to_le_bytes()[0]).collect();
        file.reserve(0, 3_000_000).unwrap();
        let checksum = file.write(0, &bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        file.read(0, &mut back, checksum).unwrap();
        assert_eq!(back, bytes);
        file.handle()
            .write_all_at(&[bytes[2_000_000] ^ 1], 2_000_000)
            .unwrap();
        let error = file.read(0, &mut back, checksum).unwrap_err();
        assert!(matches!(error, StoreError::Changed { .. }), "{error}");
        file.handle().set_len(2_500_000).unwrap();
        let error = file.read(0, &mut back, checksum).unwrap_err().to_string();
        assert!(
            error.contains("reading 2.9 MiB") && error.ends_with("ends before them"),
            "{error}"
        );
    }
}

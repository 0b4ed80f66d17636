//! Pages of files in an arena: its bytes without a copy of them.
//!
//! Responsible for having them stand there, first to be read and compared, then to be used; for telling
//! whether memory had all of them, and which were written to since; and for taking them over when the
//! files are to go. Not responsible for the files, nor for whether they hold what they should
//! ([`crate::park::host`]).
//!
//! The mapping is private: writing to a page makes a copy of it, the file never changes. Until then
//! the page is the one in the system's page cache, so nothing is copied and nothing zeroed, and it may be
//! a large one. The system may drop it when memory is short and read it again when it is touched, as it
//! does with memory that it swaps.
//!
//! A page that was written to is told from one that was not by the system's own account of this process's
//! pages, and so whatever wrote to it: torch, `NumPy`, another library, a device. That account is checked
//! once, on a page of which the answer is known: where it is not there, or always the same, nothing is
//! told.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use super::{Arena, page_bytes};

/// How much is taken over at a time: that much is there twice.
const TAKEN_OVER_BYTES: usize = 16 << 20;

/// A part of a file that stands where it stands in the file.
#[derive(Debug, Clone, Copy)]
pub struct FilePart<'a> {
    /// First byte in the arena and in the file; whole pages.
    pub start: usize,
    /// How many; whole pages.
    pub length: usize,
    /// The file.
    pub file: BorrowedFd<'a>,
}

/// Pages of files that stand in an arena which is closed to everybody else; dropped, they go.
#[derive(Debug)]
pub struct Shown<'a> {
    arena: &'a mut Arena,
}

impl Arena {
    /// Has parts of files stand in a closed arena; the rest of it stays without pages until it is open.
    /// On an error it is closed.
    ///
    /// # Errors
    ///
    /// What the system says; one that cannot say beforehand whether a page can be read is refused too,
    /// and so is an open arena.
    pub fn show(&mut self, parts: &[FilePart<'_>]) -> io::Result<Shown<'_>> {
        if !system::brings_pages_in() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if self.is_open {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // From here on a failure takes away what stands there already.
        let shown = Shown { arena: self };
        for part in parts {
            let place = shown.arena.pages(part.start, part.length)?;
            system::map_file(place, part)?;
        }
        Ok(shown)
    }

    /// For each page, whether it is known to be no file's any more because something wrote to it; `None`
    /// where no files stand here, or the system does not tell.
    #[must_use]
    pub fn written(&self) -> Option<Vec<bool>> {
        static IS_TOLD: OnceLock<bool> = OnceLock::new();
        if !self.has_files || !*IS_TOLD.get_or_init(system::tells_private_pages) {
            return None;
        }
        system::private_pages(self.address(), self.length / page_bytes()).ok()
    }

    /// Has pages of its own instead of those of files, with the same bytes at the same place. A
    /// read meanwhile finds those; nothing may write. On an error some pages are still the files'.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn take_over(&mut self) -> io::Result<()> {
        if !self.has_files {
            return Ok(());
        }
        for start in (0..self.length).step_by(TAKEN_OVER_BYTES) {
            let length = TAKEN_OVER_BYTES.min(self.length - start);
            system::copy_in_place(self.pages(start, length)?)?;
        }
        self.has_files = false;
        Ok(())
    }

    /// Has a part's pages brought in where files stand in an open arena, and lends them to be compared.
    ///
    /// # Errors
    ///
    /// As [`Shown::bring_in`]; where no files stand here too.
    pub fn bring_in(&self, start: usize, length: usize) -> io::Result<&[u8]> {
        if self.is_open && self.has_files {
            self.lend(start, length)
        } else {
            Err(io::ErrorKind::InvalidInput.into())
        }
    }

    /// What brings pages of it in without it, for another thread.
    #[must_use]
    pub fn ahead(&self) -> Ahead {
        Ahead(self.all())
    }

    /// Has the pages of a part brought in.
    fn lend(&self, start: usize, length: usize) -> io::Result<&[u8]> {
        system::bring_in(self.all().of(start, length)?)?;
        // SAFETY: the system has just read every page of the range, which lies in the arena; by the promise
        // given to `new` nothing writes to it or to the file.
        Ok(unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(start), length) })
    }

    /// Its pages.
    fn all(&self) -> Pages {
        Pages {
            address: self.address(),
            length: self.length,
        }
    }

    /// A range of whole pages of this arena.
    fn pages(&self, start: usize, length: usize) -> io::Result<Pages> {
        let page = page_bytes();
        let end = start
            .checked_add(length)
            .filter(|&end| {
                end <= self.length && start.is_multiple_of(page) && end.is_multiple_of(page)
            })
            .ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Pages {
            address: self.address() + start,
            length: end - start,
        })
    }
}

impl Shown<'_> {
    /// Has a part's pages brought in, and lends them to be compared.
    ///
    /// # Errors
    ///
    /// The system cannot read them: a disk that fails, a file that ends before them.
    pub fn bring_in(&self, start: usize, length: usize) -> io::Result<&[u8]> {
        self.arena.lend(start, length)
    }

    /// Has all of these parts' pages brought in if memory has every one of them, and says whether it
    /// had: then no byte of them came from the disk just now. Otherwise, and where the system does not tell
    /// (Linux before 6.5, file systems that keep their pages outside the page cache), not all of them are brought in.
    #[must_use]
    pub fn were_in_memory(&self, parts: &[FilePart<'_>]) -> bool {
        let before = system::major_faults(Whose::Thread);
        let all = parts.iter().all(|part| {
            let pages = self.arena.pages(part.start, part.length);
            system::is_cached(part) && pages.and_then(system::bring_in).is_ok()
        });
        // One that was dropped after it was asked for had to be read.
        all && before.is_some() && system::major_faults(Whose::Thread) == before
    }

    /// Opens the arena with those pages in it. On an error it is closed.
    ///
    /// # Errors
    ///
    /// What the system says: each of those pages may become one of the process's own, and all of them
    /// count against its limit.
    pub fn open(self) -> io::Result<()> {
        self.arena.allow()?;
        self.arena.has_files = true;
        Ok(())
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if !self.arena.is_open {
            // Should the system refuse even this, the pages can be read and are known to nothing else.
            let _kept = self.arena.close();
        }
    }
}

/// How often this process has waited for a page to be read, from a file or from where it was swapped to;
/// `None` where the system does not tell. While it stays the same, no page that is mapped here was dropped
/// and read again.
#[must_use]
pub fn major_faults() -> Option<u64> {
    system::major_faults(Whose::Process)
}

/// Whose faults are counted.
#[derive(Debug, Clone, Copy)]
enum Whose {
    Process,
    Thread,
}

/// Brings pages of an arena in, so that the next reader need not wait for the disk.
///
/// Only a hint: nothing comes of it where the arena has been closed, and once it has been dropped pages of
/// somebody else's may be brought in instead, which changes nothing but how soon they are there.
#[derive(Debug)]
pub struct Ahead(Pages);

impl Ahead {
    /// Has a part's pages brought in.
    ///
    /// # Errors
    ///
    /// What the system says; a part that does not lie in the arena.
    pub fn bring_in(&self, start: usize, length: usize) -> io::Result<()> {
        system::bring_in(self.0.of(start, length)?)
    }
}

/// Whole pages of an arena.
#[derive(Debug, Clone, Copy)]
struct Pages {
    address: usize,
    length: usize,
}

impl Pages {
    /// Those that a part of them lies on.
    fn of(self, start: usize, length: usize) -> io::Result<Self> {
        let page = page_bytes();
        let first = start - start % page;
        let end = start.checked_add(length).filter(|&end| end <= self.length);
        let end = end.and_then(|end| end.checked_next_multiple_of(page));
        let end = end.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            address: self.address + first,
            length: end - first,
        })
    }
}

#[cfg(target_os = "linux")]
mod system {
    //! What Linux is asked for.

    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::FileExt as _;
    use std::ptr::NonNull;

    use super::super::{map, page_bytes, unmap};
    use super::{FilePart, Pages, Whose};

    /// Of a page's entry in the account of pages: it is in memory.
    const PRESENT: u64 = 1 << 63;
    /// It has been swapped.
    const SWAPPED: u64 = 1 << 62;
    /// It is a file's, or shared.
    const OF_FILE: u64 = 1 << 61;

    /// The system call `cachestat`, of that number on all processors that Linux has it for.
    const CACHESTAT: libc::c_long = 451;

    /// Entries read at a time.
    const ENTRIES: usize = 1 << 15;

    /// Whether this system can bring pages in and say if that fails, which Linux can since 5.14.
    pub(super) fn brings_pages_in() -> bool {
        let nothing = std::ptr::without_provenance_mut(page_bytes());
        // SAFETY: of no byte at all; it is only asked whether the advice is known.
        unsafe { libc::madvise(nothing, 0, libc::MADV_POPULATE_READ) == 0 }
    }

    pub(super) fn bring_in(pages: Pages) -> io::Result<()> {
        let start = std::ptr::with_exposed_provenance_mut(pages.address);
        // SAFETY: reads pages of an arena.
        match unsafe { libc::madvise(start, pages.length, libc::MADV_POPULATE_READ) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Whether the page cache has every page of a part.
    pub(super) fn is_cached(part: &FilePart<'_>) -> bool {
        /// `struct cachestat_range` of `linux/mman.h`.
        #[repr(C)]
        struct Range {
            offset: u64,
            length: u64,
        }
        /// `struct cachestat`, of the same.
        #[repr(C)]
        #[derive(Default)]
        struct Found {
            cached: u64,
            dirty: u64,
            writeback: u64,
            evicted: u64,
            recently_evicted: u64,
        }
        let range = Range {
            offset: part.start as u64,
            length: part.length as u64,
        };
        if range.length == 0 {
            return true; // zero would ask for the rest of the file
        }
        let mut found = Found::default();
        let file = part.file.as_raw_fd();
        // SAFETY: both are what the call is documented to read and to write.
        let asked = unsafe { libc::syscall(CACHESTAT, file, &raw const range, &raw mut found, 0) };
        asked == 0 && found.cached == (part.length / page_bytes()) as u64
    }

    pub(super) fn major_faults(whose: Whose) -> Option<u64> {
        let who = match whose {
            Whose::Process => libc::RUSAGE_SELF,
            Whose::Thread => libc::RUSAGE_THREAD,
        };
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: it is what the call writes.
        if unsafe { libc::getrusage(who, usage.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: numbers, zero or written.
        u64::try_from(unsafe { usage.assume_init() }.ru_majflt).ok()
    }

    /// Maps a file's part over unused pages.
    pub(super) fn map_file(pages: Pages, part: &FilePart<'_>) -> io::Result<()> {
        let start = std::ptr::with_exposed_provenance_mut(pages.address);
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let offset = libc::off_t::try_from(part.start).map_err(io::Error::other)?;
        let file = part.file.as_raw_fd();
        // SAFETY: the range is an arena's, which is closed.
        let placed =
            unsafe { libc::mmap(start, pages.length, libc::PROT_READ, flags, file, offset) };
        if placed == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Puts new pages with the same bytes in place of these, in one step.
    pub(super) fn copy_in_place(pages: Pages) -> io::Result<()> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let new = map(None, pages.length, rights)?;
        let old = std::ptr::with_exposed_provenance_mut::<u8>(pages.address);
        // SAFETY: both ranges are that long, the new one is still unused, the old one is an open arena's.
        unsafe { std::ptr::copy_nonoverlapping(old, new.as_ptr(), pages.length) };
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let length = pages.length;
        // SAFETY: moves the pages made above to a range of an arena, which has the same bytes in it.
        let moved = unsafe { libc::mremap(new.as_ptr().cast(), length, length, flags, old) };
        if moved == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            // SAFETY: the pages made above, which stayed where they were.
            unsafe { unmap(new, 0, length) };
            return Err(error);
        }
        Ok(())
    }

    /// For `count` pages from `address`, whether each is the process's own.
    pub(super) fn private_pages(address: usize, count: usize) -> io::Result<Vec<bool>> {
        let account = File::open("/proc/self/pagemap")?;
        let mut offset = (address / page_bytes()) as u64 * 8;
        let mut found = Vec::with_capacity(count);
        let mut entries = vec![0; 8 * ENTRIES.min(count)];
        while found.len() < count {
            let length = entries.len().min(8 * (count - found.len()));
            let Some(some) = entries.get_mut(..length) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            account.read_exact_at(some, offset)?;
            let (each, _) = some.as_chunks::<8>();
            found.extend(
                each.iter()
                    .map(|&entry| is_private(u64::from_ne_bytes(entry))),
            );
            offset += length as u64;
        }
        Ok(found)
    }

    /// A file's page that is moved in memory just now is both swapped and a file's; one that was dropped
    /// is nothing at all.
    const fn is_private(entry: u64) -> bool {
        entry & (PRESENT | SWAPPED) != 0 && entry & OF_FILE == 0
    }

    /// Whether the account says of a page that is certainly the process's own that it is.
    pub(super) fn tells_private_pages() -> bool {
        let length = page_bytes();
        let page: io::Result<NonNull<u8>> = map(None, length, libc::PROT_READ | libc::PROT_WRITE);
        let Ok(page) = page else { return false };
        // SAFETY: the page is there, writable, and used by nothing else.
        unsafe { page.as_ptr().write_volatile(1) };
        let told = private_pages(page.as_ptr() as usize, 1);
        // SAFETY: it was mapped above.
        unsafe { unmap(page, 0, length) };
        told.is_ok_and(|told| told == [true])
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    //! On other systems files are read and not mapped.

    use std::io;

    use super::{FilePart, Pages, Whose};

    pub(super) const fn brings_pages_in() -> bool {
        false
    }

    pub(super) fn bring_in(_: Pages) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) const fn is_cached(_: &FilePart<'_>) -> bool {
        false
    }

    pub(super) const fn major_faults(_: Whose) -> Option<u64> {
        None
    }

    pub(super) fn map_file(_: Pages, _: &FilePart<'_>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn copy_in_place(_: Pages) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn private_pages(_: usize, _: usize) -> io::Result<Vec<bool>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) const fn tells_private_pages() -> bool {
        false
    }
}

//! Pages of files in an arena: its bytes without a copy of them.
//!
//! Responsible for having them stand there, first to be read and compared, then to be used; for telling
//! which of them were written to since; and for taking them over when the files are to go. Not
//! responsible for the files, nor for whether they hold what they should (`memfit::park`).
//!
//! The mapping is private: whoever writes to a page has a copy of it, the file never changes. Until then
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

// SAFETY: all that can be done through a shared one is to have pages brought in and to read them.
unsafe impl Sync for Shown<'_> {}

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

    /// Has pages of its own instead of those of files, with the same bytes at the same place. Whoever
    /// reads meanwhile reads those; nobody may write. On an error some pages are still the files'.
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
        let page = page_bytes();
        let first = start - start % page;
        let end = start.checked_add(length);
        let end = end.and_then(|end| end.checked_next_multiple_of(page));
        let end = end.ok_or(io::ErrorKind::InvalidInput)?;
        system::bring_in(self.arena.pages(first, end - first)?)?;
        // SAFETY: the system has just read every page of the range, which lies in the arena; nobody writes
        // to it, since nobody may use the arena before `open`, nor to the file, by the promise given to `new`.
        Ok(unsafe { std::slice::from_raw_parts(self.arena.start.as_ptr().add(start), length) })
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
            // Should the system refuse even this, the pages can be read and are known to nobody.
            let _kept = self.arena.close();
        }
    }
}

/// Whole pages of an arena.
#[derive(Debug, Clone, Copy)]
struct Pages {
    address: usize,
    length: usize,
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
    use super::{FilePart, Pages};

    /// Of a page's entry in the account of pages: it is in memory.
    const PRESENT: u64 = 1 << 63;
    /// It has been swapped.
    const SWAPPED: u64 = 1 << 62;
    /// It is a file's, or shared.
    const OF_FILE: u64 = 1 << 61;

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

    /// Maps a file's part over pages that nobody uses.
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
        // SAFETY: both ranges are that long, the new one is nobody's yet, the old one is an open arena's.
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
        // SAFETY: the page is there, writable, and nobody else's.
        unsafe { page.as_ptr().write_volatile(1) };
        let told = private_pages(page.as_ptr() as usize, 1);
        // SAFETY: it was mapped above.
        unsafe { unmap(page, 0, length) };
        told.is_ok_and(|told| told == [true])
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    //! Elsewhere files are read and not mapped.

    use std::io;

    use super::{FilePart, Pages};

    pub(super) const fn brings_pages_in() -> bool {
        false
    }

    pub(super) fn bring_in(_: Pages) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
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

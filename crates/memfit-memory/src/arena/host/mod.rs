//! Memory of its own, whose pages can be given back while its address stays taken.
//!
//! Responsible for mapping it, for letting its pages go and for having new ones at the same place. Not
//! responsible for what lies in it, nor for where that is kept meanwhile ([`crate::park::host`]). `files.rs` has
//! the pages of files stand in it.
//!
//! Invariant: from [`Arena::new`] to its drop the range is mapped by this arena and by nothing else. It is
//! either *open*, ordinary memory to its users, or *closed*: no page of it exists, and a touch ends
//! in a fault, never in zeros.
//!
//! Anonymous pages are of the ordinary size. Large ones were tried: waking was three times faster while
//! the system had some, and ten times slower when it first had to move others out of the way. The range
//! begins where a large page may, so that those that a file has in the page cache can be used as they are.

#![expect(unsafe_code, reason = "maps memory and makes slices of it")]

mod files;
mod lent;
#[cfg(test)]
mod tests;

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

pub use files::{Ahead, FilePart, Shown, major_faults};
pub use lent::{LentBytes, LentBytesMut, NoMemory};

/// What a large page's address is a multiple of, on the processors that PyTorch is built for.
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// A mapping.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    length: usize,
    is_open: bool,
    /// Whether pages of files may stand in it.
    has_files: bool,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Arena {}

// SAFETY: all that can be done through a shared one is to have pages brought in and to read them.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `length` bytes, rounded up to whole pages, open and zero.
    ///
    /// # Errors
    ///
    /// What the system says; a length of zero or beyond all memory is refused too.
    ///
    /// # Safety
    ///
    /// The memory at [`Self::address`] is used only while the arena lives and is open,
    /// writes to a part only while no slice that it lies in lives, of [`Self::bytes`], [`Self::bring_in`] or
    /// [`Self::open`], and reads it only while none of [`Self::open`] does. Files whose parts are to stand in
    /// it ([`Self::show`]) are neither changed nor cut off from then on, for as long as the arena or a
    /// forked child's copy of it may show them.
    pub unsafe fn new(length: usize) -> io::Result<Self> {
        let page = page_bytes();
        let rounded = length.checked_next_multiple_of(page);
        let length = rounded.filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok());
        let length = length.ok_or(io::ErrorKind::InvalidInput)?;
        let mut arena = Self {
            start: reserve(length)?,
            length,
            is_open: false,
            has_files: false,
        };
        arena.open()?;
        Ok(arena)
    }

    /// Where it is, for its whole life.
    #[must_use]
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.length
    }

    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes() -> usize {
        page_bytes()
    }

    /// What lies in it; `None` while it is closed.
    #[must_use]
    pub fn bytes(&self) -> Option<&[u8]> {
        if !self.is_open {
            return None;
        }
        // SAFETY: the range is mapped and readable while it is open, has been initialised by the system,
        // and by the promise given to `new` nothing writes to it meanwhile.
        Some(unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) })
    }

    /// Lets its pages go. On an error it is as before.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn close(&mut self) -> io::Result<()> {
        // One call: there is no moment at which the range could be taken by somebody else, or be zeros.
        map(Some(self.start), self.length, libc::PROT_NONE)?;
        self.is_open = false;
        self.has_files = false;
        Ok(())
    }

    /// Has pages again, zero at first, and lends them to be filled. On an error it is as before.
    ///
    /// # Errors
    ///
    /// What the system says: it may have no memory left, or the process be at its limit.
    pub fn open(&mut self) -> io::Result<&mut [u8]> {
        self.allow()?;
        // SAFETY: the range is mapped and writable now, zero pages are initialised bytes, and by the
        // promise given to `new` nothing else uses it before the slice has gone.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) })
    }

    /// Lets it be read and written.
    fn allow(&mut self) -> io::Result<()> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is this arena's own mapping.
        if unsafe { libc::mprotect(self.start.as_ptr().cast(), self.length, rights) } != 0 {
            return Err(io::Error::last_os_error());
        }
        self.is_open = true;
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the range is this arena's own, and by the promise given to `new` nothing uses it any more.
        unsafe { unmap(self.start, 0, self.length) };
    }
}

/// A range of its own without pages, that begins where a large page may if one has room in it.
fn reserve(length: usize) -> io::Result<NonNull<u8>> {
    if length < LARGE_PAGE_BYTES {
        return map(None, length, libc::PROT_NONE);
    }
    let whole = length.checked_add(LARGE_PAGE_BYTES);
    let whole = whole.ok_or(io::ErrorKind::InvalidInput)?;
    let found = map(None, whole, libc::PROT_NONE)?;
    let ahead = found.as_ptr() as usize % LARGE_PAGE_BYTES;
    let ahead = (LARGE_PAGE_BYTES - ahead) % LARGE_PAGE_BYTES;
    // SAFETY: both ranges are parts of what was mapped just now, and nothing else knows of them.
    unsafe {
        unmap(found, 0, ahead);
        unmap(found, ahead + length, LARGE_PAGE_BYTES - ahead);
    }
    // SAFETY: less than a large page from the start of a range that is longer than one.
    Ok(unsafe { found.add(ahead) })
}

/// Gives up `length` bytes at `offset` from `start`; what the system refuses stays reserved, unused.
///
/// # Safety
///
/// The range lies in a mapping of this arena, and nothing uses it any more.
unsafe fn unmap(start: NonNull<u8>, offset: usize, length: usize) {
    if length > 0 {
        // SAFETY: the caller's promise.
        let _kept = unsafe { libc::munmap(start.as_ptr().add(offset).cast(), length) };
    }
}

/// New anonymous pages, anywhere or in place of those at `place`.
fn map(place: Option<NonNull<u8>>, length: usize, rights: c_int) -> io::Result<NonNull<u8>> {
    let fixed = if place.is_some() { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    let hint = place.map_or(std::ptr::null_mut(), NonNull::as_ptr);
    // SAFETY: without a place nothing that exists is touched; a place is the range of an arena, with its
    // own length, whose owner wants its pages replaced.
    let start = unsafe { libc::mmap(hint.cast(), length, rights, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

fn page_bytes() -> usize {
    // SAFETY: asks for a constant.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes)
        .ok()
        .filter(|&bytes| bytes > 0)
        .unwrap_or(4096)
}

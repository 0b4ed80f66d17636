//! Memory of its own, whose pages can be given back while its address stays taken.
//!
//! Responsible for mapping it, for letting its pages go and for having new ones at the same place. Not
//! responsible for what lies in it, nor for where that is kept meanwhile (`memfit::park`).
//!
//! Invariant: from [`Arena::new`] to its drop the range is mapped by this arena and by nobody else. It is
//! either *open*, ordinary memory, or *closed*: no page of it exists, and a touch ends in a fault, never
//! in zeros.
//!
//! Pages are of the ordinary size. Large ones were tried: waking was three times faster while the system
//! had some, and ten times slower when it first had to move others out of the way.

#![expect(unsafe_code, reason = "maps memory and makes slices of it")]

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

/// An anonymous mapping.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    length: usize,
    is_open: bool,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Arena {}

impl Arena {
    /// Maps `length` bytes, rounded up to whole pages, open and zero.
    ///
    /// # Errors
    ///
    /// What the system says; a length of zero or beyond all memory is refused too.
    ///
    /// # Safety
    ///
    /// Whoever is given [`Self::address`] uses the memory there only while the arena lives and is open,
    /// writes to it only while no slice of [`Self::bytes`] or [`Self::open`] lives, and reads it only while
    /// none of [`Self::open`] does.
    pub unsafe fn new(length: usize) -> io::Result<Self> {
        let page = page_bytes();
        let rounded = length.checked_next_multiple_of(page);
        let length = rounded.filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok());
        let length = length.ok_or(io::ErrorKind::InvalidInput)?;
        let start = map(None, length, libc::PROT_READ | libc::PROT_WRITE)?;
        Ok(Self {
            start,
            length,
            is_open: true,
        })
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

    /// What lies in it; `None` while it is closed.
    #[must_use]
    pub fn bytes(&self) -> Option<&[u8]> {
        if !self.is_open {
            return None;
        }
        // SAFETY: the range is mapped and readable while it is open, has been initialised by the system,
        // and by the promise given to `new` nobody writes to it meanwhile.
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
        Ok(())
    }

    /// Has pages again, zero at first, and lends them to be filled. On an error it is as before.
    ///
    /// # Errors
    ///
    /// What the system says: it may have no memory left, or the process be at its limit.
    pub fn open(&mut self) -> io::Result<&mut [u8]> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is this arena's own mapping.
        if unsafe { libc::mprotect(self.start.as_ptr().cast(), self.length, rights) } != 0 {
            return Err(io::Error::last_os_error());
        }
        self.is_open = true;
        // SAFETY: the range is mapped and writable now, zero pages are initialised bytes, and by the
        // promise given to `new` nobody else uses it before the slice has gone.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the range is this arena's own, and by the promise given to `new` nobody uses it any more.
        let _kept = unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
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

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(length: usize) -> io::Result<Arena> {
        // SAFETY: the tests use the memory through the arena's own slices only.
        unsafe { Arena::new(length) }
    }

    /// Bytes of an arena that are in memory, by the system's own account.
    #[cfg(target_os = "linux")]
    fn resident_bytes(arena: &Arena) -> usize {
        let mut pages = vec![0_u8; arena.length / page_bytes()];
        // SAFETY: the range is a mapping, and there is a byte for each of its pages.
        let done = unsafe {
            libc::mincore(
                arena.start.as_ptr().cast(),
                arena.length,
                pages.as_mut_ptr(),
            )
        };
        assert_eq!(done, 0);
        pages.iter().filter(|&&page| page & 1 == 1).count() * page_bytes()
    }

    #[test]
    fn a_closed_arena_keeps_its_address_and_loses_its_pages() {
        let mut arena = arena(8 << 20).unwrap();
        let address = arena.address();
        arena.open().unwrap().fill(7);
        assert!(arena.bytes().unwrap().iter().all(|&byte| byte == 7));
        #[cfg(target_os = "linux")]
        assert_eq!(resident_bytes(&arena), 8 << 20);
        arena.close().unwrap();
        assert!(arena.bytes().is_none());
        #[cfg(target_os = "linux")]
        assert_eq!(resident_bytes(&arena), 0);
        assert!(arena.open().unwrap().iter().all(|&byte| byte == 0));
        assert_eq!(arena.address(), address);
    }

    #[test]
    fn a_touch_of_a_closed_arena_is_a_fault() {
        let mut arena = arena(1).unwrap();
        let page = arena.length();
        arena.close().unwrap();
        let address = arena.address();
        // The system itself reads the range for this call, and answers with an error where the process
        // would get a signal.
        let pipe = pipe();
        // SAFETY: the call checks the range and reads nothing that may not be read.
        let written = unsafe { libc::write(pipe, address as *const libc::c_void, page) };
        assert_eq!(written, -1);
        assert_eq!(
            io::Error::last_os_error().raw_os_error(),
            Some(libc::EFAULT)
        );
        // SAFETY: the descriptor is this test's.
        unsafe { libc::close(pipe) };
    }

    fn pipe() -> c_int {
        let mut ends = [0; 2];
        // SAFETY: there is room for the two ends of the pipe; the unused one stays open for the test.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        ends[1]
    }

    #[test]
    fn lengths_that_no_memory_has_are_refused() {
        assert!(arena(0).is_err());
        assert!(arena(usize::MAX).is_err());
        assert!(arena(usize::MAX / 2).is_err());
        assert_eq!(arena(1).unwrap().length() % 4096, 0);
    }
}

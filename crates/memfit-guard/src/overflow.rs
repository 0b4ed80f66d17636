//! Blocks that lie in files, as there is no room for them in memory.
//!
//! Responsible for making such a block, a mapping of a file of its own without a name, for letting it go, and for
//! knowing which blocks those are. Not responsible for what is counted ([`crate::ledger`]) nor for calls ([`crate::hook`]).
//!
//! The system writes such pages out when memory gets short, as it does with all files that it reads and writes. The
//! file's room on the disk is taken before the block is handed out, so that no write to it can fail for want of room.
//!
//! Invariant: a forked child has what its parent had, as with memory, and neither sees what the other writes from then
//! on: before a fork the pages become private, and those that are written to afterwards are memory. A child makes none.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::footprint::page_bytes;

/// Smaller ones stay in memory: a file for each would take longer than they are worth.
pub(crate) const LEAST_BYTES: usize = 256 << 10;

/// Each keeps its file open, of which a process may have so many.
const MOST_BLOCKS: usize = 256;

/// Whether any may be made: looked at without the lock.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// Whether a block of so many bytes may have to go to a file.
pub(crate) fn may_take(bytes: usize, alignment: usize) -> bool {
    bytes >= LEAST_BYTES && IS_ON.load(Ordering::Relaxed) && alignment <= page_bytes()
}

/// Where blocks go that memory has no room for.
#[derive(Debug)]
struct Place {
    folder: Arc<CStr>,
    /// What is live in memory at most.
    limit_bytes: u64,
    /// What lies in files at most.
    most_bytes: u64,
}

/// The blocks of one process.
#[derive(Debug)]
pub(crate) struct Overflow {
    place: Option<Place>,
    /// By its address, what is mapped for each, and its file, as long as the pages are the file's own.
    blocks: BTreeMap<usize, (usize, Option<libc::c_int>)>,
    bytes: u64,
    peak_bytes: u64,
    /// The most that was live when one came, in memory and in files.
    asked_bytes: u64,
}

impl Overflow {
    pub(crate) const fn new() -> Self {
        Self {
            place: None,
            blocks: BTreeMap::new(),
            bytes: 0,
            peak_bytes: 0,
            asked_bytes: 0,
        }
    }

    /// Has blocks go to files of a folder where more than `limit_bytes` would be live in memory; a new peak
    /// begins.
    pub(crate) fn begin(&mut self, folder: CString, limit_bytes: u64, most_bytes: u64) {
        self.place = Some(Place {
            folder: folder.into(),
            limit_bytes,
            most_bytes,
        });
        (self.peak_bytes, self.asked_bytes) = (self.bytes, 0);
        IS_ON.store(true, Ordering::Relaxed);
    }

    /// Makes no more; those that are there stay.
    pub(crate) fn end(&mut self) {
        self.place = None;
        IS_ON.store(false, Ordering::Relaxed);
    }

    /// The folder for a block; `None` where memory has room for it beside what is live, or files have none.
    pub(crate) fn folder_for(&self, bytes: u64, live_bytes: u64) -> Option<Arc<CStr>> {
        let place = self.place.as_ref()?;
        let lacks_room = live_bytes.saturating_add(bytes) > place.limit_bytes;
        let has_files =
            self.bytes.saturating_add(bytes) <= place.most_bytes && self.blocks.len() < MOST_BLOCKS;
        (lacks_room && has_files).then(|| Arc::clone(&place.folder))
    }

    /// Takes a block in, beside so many bytes that are live in memory.
    pub(crate) fn add(&mut self, block: &Mapped, live_bytes: u64) {
        self.blocks
            .insert(block.address, (block.length, block.file));
        self.bytes += block.length as u64;
        self.peak_bytes = self.peak_bytes.max(self.bytes);
        self.asked_bytes = self.asked_bytes.max(live_bytes.saturating_add(self.bytes));
    }

    /// The block at an address, to be let go.
    pub(crate) fn take(&mut self, address: usize) -> Option<Mapped> {
        let (length, file) = self.blocks.remove(&address)?;
        self.bytes -= length as u64;
        Some(Mapped {
            address,
            length,
            file,
        })
    }

    /// Has this process, and a child that is about to be forked, each see what it writes itself.
    pub(crate) fn before_fork(&mut self) {
        for (&address, (length, file)) in &mut self.blocks {
            if let Some(open) = file.take() {
                make_private(address, *length, open);
                close(open);
            }
        }
    }

    /// The most bytes that lay in files at once since the last begin, and the most that were live when a
    /// block came, in memory and in files.
    pub(crate) const fn peaks(&self) -> (u64, u64) {
        (self.peak_bytes, self.asked_bytes)
    }
}

/// A file's pages in the address space of this process.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) address: usize,
    length: usize,
    file: Option<libc::c_int>,
}

impl Mapped {
    /// Makes a file in a folder, with room for so many bytes, and maps it; `None` where the system refuses that.
    pub(crate) fn new(folder: &CStr, bytes: usize) -> Option<Self> {
        let length = bytes.checked_next_multiple_of(page_bytes())?;
        let size = libc::off_t::try_from(length).ok()?;
        let file = open(folder)?;
        let Some(address) = map(file, size, length) else {
            close(file);
            return None;
        };
        Some(Self {
            address,
            length,
            file: Some(file),
        })
    }

    /// Lets it go, and the file with it.
    #[expect(unsafe_code, reason = "unmaps pages")]
    pub(crate) fn unmap(self) {
        // SAFETY: mapped by this module, and torch gave the block to be freed: nothing else has it.
        let _done = unsafe { libc::munmap(self.address as *mut c_void, self.length) };
        if let Some(file) = self.file {
            close(file);
        }
    }
}

/// A new file, whose name is gone at once. Not by `O_TMPFILE`, which the layered file systems of containers lack.
#[expect(unsafe_code, reason = "makes a file")]
fn open(folder: &CStr) -> Option<libc::c_int> {
    let mut name = [folder.to_bytes(), b"/memfit-XXXXXX\0"].concat();
    let path = name.as_mut_ptr().cast();
    // SAFETY: a path that ends in a zero, of which the letters before it are replaced.
    let file = unsafe { libc::mkostemp(path, libc::O_CLOEXEC) };
    if file < 0 {
        return None;
    }
    // SAFETY: the path of the file that was just made.
    let _done = unsafe { libc::unlink(path) };
    Some(file)
}

#[expect(unsafe_code, reason = "maps a file")]
fn map(file: libc::c_int, size: libc::off_t, length: usize) -> Option<usize> {
    // SAFETY: a file of our own.
    if unsafe { libc::posix_fallocate(file, 0, size) } != 0 {
        return None;
    }
    let may = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: pages where the system likes, of a file of our own that is as long.
    let address = unsafe { libc::mmap(ptr::null_mut(), length, may, libc::MAP_SHARED, file, 0) };
    (address != libc::MAP_FAILED).then_some(address as usize)
}

/// Puts private pages of a file in the place of shared ones: the same bytes, copied when they are written to.
#[expect(unsafe_code, reason = "maps a file")]
fn make_private(address: usize, length: usize, file: libc::c_int) {
    let (may, how) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_FIXED,
    );
    // SAFETY: exactly the pages that `map` gave for this file, which show the same bytes before and after. Where the
    // system refuses, they stay as they were.
    let _same = unsafe { libc::mmap(address as *mut c_void, length, may, how, file, 0) };
}

#[expect(unsafe_code, reason = "closes a file")]
fn close(file: libc::c_int) {
    // SAFETY: opened by this module, and used by nothing else.
    let _done = unsafe { libc::close(file) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> CString {
        CString::new(std::env::temp_dir().to_str().unwrap()).unwrap()
    }

    #[test]
    fn blocks_go_to_files_only_where_memory_has_no_room() {
        let mut overflow = Overflow::new();
        assert!(overflow.folder_for(u64::MAX, u64::MAX).is_none());
        overflow.begin(folder(), 1000, 500);
        assert!(overflow.folder_for(400, 600).is_none());
        assert!(overflow.folder_for(401, 600).is_some());
        assert!(
            overflow.folder_for(501, 600).is_none(),
            "files have no room"
        );
        assert!(may_take(LEAST_BYTES, 64));
        assert!(!may_take(LEAST_BYTES - 1, 64));
        assert!(!may_take(LEAST_BYTES, 2 * page_bytes()));
        overflow.end();
        assert!(overflow.folder_for(401, 600).is_none());
        assert!(!may_take(LEAST_BYTES, 64));
    }

    #[expect(unsafe_code, reason = "writes to the block")]
    #[test]
    fn a_block_holds_what_is_written_and_goes_when_it_is_taken() {
        let mut overflow = Overflow::new();
        let bytes = 3 * page_bytes() + 1;
        let block = Mapped::new(&folder(), bytes).unwrap();
        let address = block.address;
        assert_eq!(block.length, 4 * page_bytes());
        overflow.add(&block, 100);
        // SAFETY: just mapped, and as long.
        let held = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) };
        assert!(held.iter().all(|&byte| byte == 0));
        held.fill(7);
        assert!(held.iter().all(|&byte| byte == 7));
        let length = 4 * page_bytes() as u64;
        assert_eq!(overflow.peaks(), (length, length + 100));
        assert!(overflow.take(address + 1).is_none());
        overflow.take(address).unwrap().unmap();
        assert!(overflow.take(address).is_none());
        assert_eq!(overflow.peaks().0, length);
        overflow.begin(folder(), 0, 0);
        assert_eq!(overflow.peaks(), (0, 0));
        overflow.end();
        assert_eq!((overflow.bytes, overflow.blocks.len()), (0, 0));
    }

    #[test]
    fn a_folder_that_is_not_there_and_a_file_that_is_too_large_make_no_block() {
        let missing = CString::new("/a/folder/that/is/not/there").unwrap();
        assert!(Mapped::new(&missing, LEAST_BYTES).is_none());
        assert!(Mapped::new(&folder(), usize::MAX).is_none());
        assert!(Mapped::new(&folder(), 1 << 60).is_none());
    }
}

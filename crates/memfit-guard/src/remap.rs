//! Pages of freed blocks, moved under a new one.
//!
//! Responsible for lifting pages off a block that has been freed and for laying them under one that
//! has just been handed out. Not responsible for which blocks give theirs ([`crate::hook`]).
//!
//! A page that the system clears and hands out costs about forty times as much as one that is moved
//! (1.5 against 0.04 microseconds where that was measured). Training steps ask for blocks of several
//! sizes, whose sum is more than is live at any moment: kept blocks of one size have to go when
//! blocks of another are asked for, though their pages are still good.
//!
//! Invariants: both blocks are the C library's own before and after, and may be freed past the hooks;
//! no address of a block is ever without a mapping, as another thread's could come to lie there; a
//! page is lifted before the block is asked for that it will lie under, so that the two together
//! never take more than the one before.

#![expect(unsafe_code, reason = "moves pages")]

use std::ffi::{c_int, c_void};

use crate::footprint::page_bytes;
use crate::free_blocks::KeptBlock;
use crate::remap_seams::Seams;

/// Most runs under one block.
const MOST_RUNS: usize = 64;

/// Shortest run that is worth its two calls to the system.
const SHORTEST_BYTES: usize = 32 << 10;

/// Linux 5.7: the addresses that pages are moved from stay mapped, without pages. Older ones refuse.
const MREMAP_DONTUNMAP: c_int = 4;

/// From the page where the mapping of a block begins to the one where it ends, if it has one of its
/// own, of exactly so many bytes. Another C library's blocks may not.
pub(crate) fn mapping(address: usize, taken_bytes: u64) -> Option<(usize, usize)> {
    let start = address - address % page_bytes();
    // SAFETY: a block of the C library, which is not freed meanwhile.
    let usable_bytes = unsafe { libc::malloc_usable_size(address as *mut c_void) };
    let end = address.checked_add(usable_bytes)?;
    ((end - start) as u64 == taken_bytes).then_some((start, end))
}

/// Shortens a block that has a mapping of its own by so many bytes, whole pages, at its end.
///
/// Where the C library does not, the block takes as much as before.
pub(crate) fn shortened(block: KeptBlock, by_bytes: usize) -> KeptBlock {
    let taken_bytes = block.taken_bytes.saturating_sub(by_bytes as u64);
    // The C library wants another word, and then comes to exactly those pages.
    let bytes = mapping(block.address, block.taken_bytes)
        .and_then(|(_, end)| end.checked_sub(by_bytes)?.checked_sub(block.address))
        .and_then(|bytes| bytes.checked_sub(size_of::<usize>()));
    let Some(bytes) = bytes.filter(|&bytes| bytes > 0) else {
        return block;
    };
    // SAFETY: a block of the C library that only this thread knows, and a size that is not zero.
    let address = unsafe { libc::realloc(block.address as *mut c_void, bytes) } as usize;
    if address == 0 {
        return block;
    }
    // Only another library than glibc would have moved it, and it may not take what glibc's would.
    let taken_bytes = match mapping(address, taken_bytes) {
        Some(_) => taken_bytes,
        None => block.taken_bytes,
    };
    KeptBlock {
        address,
        bytes,
        taken_bytes,
    }
}

/// Pages that lie under no block.
#[derive(Debug)]
pub(crate) struct Lifted {
    /// Address and bytes of each run.
    runs: [(usize, usize); MOST_RUNS],
    count: usize,
    /// Bytes that may yet be lifted.
    room_bytes: usize,
}

impl Lifted {
    /// Most seams there will be more when they are laid under a block.
    pub(crate) const MOST_SEAMS: usize = MOST_RUNS + 1;

    /// None yet, for a block that will take so many bytes.
    pub(crate) fn for_block(taking_bytes: u64) -> Self {
        // The C library writes to the first page before anything can be laid there.
        let taking_bytes = usize::try_from(taking_bytes).unwrap_or(0);
        Self {
            runs: [(0, 0); MOST_RUNS],
            count: 0,
            room_bytes: taking_bytes.saturating_sub(page_bytes()),
        }
    }

    /// Whether so many bytes are worth moving.
    pub(crate) const fn is_worth(bytes: u64) -> bool {
        bytes >= SHORTEST_BYTES as u64
    }

    /// Whether more could be used.
    pub(crate) const fn has_room(&self) -> bool {
        self.count < MOST_RUNS && self.room_bytes >= SHORTEST_BYTES
    }

    /// Lifts the last pages between two addresses, all in one mapping, and says where they began.
    ///
    /// What is too short or cannot be lifted is left where it is.
    pub(crate) fn lift(&mut self, start: usize, end: usize) -> usize {
        let from = start.max(end.saturating_sub(self.room_bytes));
        let bytes = end - from;
        if bytes < SHORTEST_BYTES || !self.has_room() {
            return from;
        }
        let flags = libc::MREMAP_MAYMOVE | MREMAP_DONTUNMAP;
        let anywhere = std::ptr::null_mut::<c_void>();
        // SAFETY: pages of a freed block that only this thread knows. They stay mapped, so that its
        // owner, the C library, may go on with it.
        let lifted = unsafe { libc::mremap(from as *mut c_void, bytes, bytes, flags, anywhere) };
        if lifted != libc::MAP_FAILED {
            self.runs[self.count] = (lifted as usize, bytes);
            self.count += 1;
            self.room_bytes -= bytes;
        }
        from
    }

    /// Lays them under a block that has just been handed out, or lets them go where it cannot be.
    pub(crate) fn lay_under(mut self, address: usize, taken_bytes: u64, seams: &mut Seams) {
        let Some((start, end)) = mapping(address, taken_bytes) else {
            return;
        };
        let mut place = start + page_bytes();
        while let Some(last) = self.count.checked_sub(1) {
            let (run, bytes) = self.runs[last];
            if place + bytes > end {
                return;
            }
            self.count = last;
            if lay(run, bytes, place) {
                seams.add(place);
                seams.add(place + bytes);
                place += bytes;
            }
        }
    }
}

impl Drop for Lifted {
    fn drop(&mut self) {
        for &(run, bytes) in &self.runs[..self.count] {
            let_go(run, bytes);
        }
    }
}

/// Moves a run to a place within a block; whether it did. Otherwise the run is let go.
fn lay(run: usize, bytes: usize, place: usize) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the place is within a block that only this thread knows, has a mapping of its own, and
    // holds nothing yet; the run is a mapping that only this thread knows.
    let laid = unsafe { libc::mremap(run as *mut c_void, bytes, bytes, flags, place) };
    if laid != libc::MAP_FAILED {
        return true;
    }
    let_go(run, bytes);
    // A system with too many mappings refuses before it changes anything, and this finds the place
    // taken. Should it ever refuse later, this closes the gap.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: takes nothing that is mapped.
    unsafe { libc::mmap(place as *mut c_void, bytes, rights, flags, -1, 0) };
    false
}

fn let_go(run: usize, bytes: usize) {
    // SAFETY: a mapping that only this thread knows.
    unsafe { libc::munmap(run as *mut c_void, bytes) };
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;
    use crate::footprint;
    use crate::mapped_block::mapped_block;

    const MIB: usize = 1 << 20;

    /// A block with a mapping of its own, filled.
    fn block(bytes: usize, value: u8) -> KeptBlock {
        let pointer = mapped_block(bytes, 64);
        // SAFETY: a block of so many bytes.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), value, bytes) };
        KeptBlock {
            address: pointer as usize,
            bytes,
            taken_bytes: footprint::of(bytes, 64),
        }
    }

    fn free(block: KeptBlock) {
        // SAFETY: a block of the C library, freed once.
        unsafe { libc::free(block.address as *mut c_void) };
    }

    /// Bytes between two addresses that are in memory, by the system's own account.
    fn resident_bytes(start: usize, end: usize) -> usize {
        let mut pages = vec![0_u8; (end - start) / page_bytes()];
        // SAFETY: the range is mapped, and there is a byte for each of its pages.
        let done = unsafe { libc::mincore(start as *mut c_void, end - start, pages.as_mut_ptr()) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        pages.iter().filter(|&&page| page & 1 == 1).count() * page_bytes()
    }

    #[test]
    fn pages_of_two_blocks_come_to_lie_under_a_third_and_all_can_be_freed() {
        let mut seams = Seams::new();
        let donors = [block(MIB, 7), block(2 * MIB, 7)];
        let taking_bytes = footprint::of(4 * MIB, 64);
        let mut lifted = Lifted::for_block(taking_bytes);
        for donor in donors {
            let (start, end) = mapping(donor.address, donor.taken_bytes).unwrap();
            let from = lifted.lift(start + page_bytes(), end);
            assert_eq!(from, start + page_bytes());
            assert_eq!(resident_bytes(start, end), page_bytes());
            free(donor);
        }
        let pointer = mapped_block(4 * MIB, 64);
        let address = pointer as usize;
        lifted.lay_under(address, taking_bytes, &mut seams);
        let (start, end) = mapping(address, taking_bytes).unwrap();
        // The two donors' pages but their first, and its own first.
        assert_eq!(resident_bytes(start, end), 3 * MIB + page_bytes());
        assert_eq!(seams.before(start + 2 * MIB, start), start + page_bytes());
        // SAFETY: the block is this test's.
        let laid = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), 4 * MIB) };
        let (moved, fresh) = laid[page_bytes() - 64..].split_at(3 * MIB);
        // Of a donor's last page only the first 64 bytes were its own.
        let filled: usize = moved.iter().map(|&byte| usize::from(byte == 7)).sum();
        assert_eq!(filled, 3 * MIB - 2 * (page_bytes() - 64));
        assert!(fresh.iter().all(|&byte| byte == 0));
        // SAFETY: freed once.
        unsafe { libc::free(pointer) };
    }

    #[test]
    fn a_block_is_shortened_to_the_page_and_keeps_its_address() {
        let before = block(4 * MIB, 3);
        let rest = shortened(before, MIB);
        assert_eq!(rest.address, before.address);
        assert_eq!(rest.taken_bytes, before.taken_bytes - MIB as u64);
        assert!(rest.bytes >= 3 * MIB);
        let (start, end) = mapping(rest.address, rest.taken_bytes).unwrap();
        assert_eq!((end - start) as u64, rest.taken_bytes);
        assert_eq!(mapping(rest.address, before.taken_bytes), None);
        assert_eq!(shortened(rest, 4 * MIB), rest);
        free(rest);
    }

    #[test]
    fn no_more_is_lifted_than_the_new_block_can_take() {
        let donor = block(4 * MIB, 1);
        let (start, end) = mapping(donor.address, donor.taken_bytes).unwrap();
        let mut lifted = Lifted::for_block(MIB as u64);
        let from = lifted.lift(start, end);
        assert_eq!(end - from, MIB - page_bytes());
        assert!(!lifted.has_room());
        assert_eq!(lifted.lift(start, from), from);
        drop(lifted);
        assert_eq!(
            resident_bytes(start, end),
            end - start - (MIB - page_bytes())
        );
        free(donor);
    }

    #[test]
    fn pages_for_a_block_that_never_came_go_back() {
        let donor = block(2 * MIB, 1);
        let (start, end) = mapping(donor.address, donor.taken_bytes).unwrap();
        let mut lifted = Lifted::for_block(donor.taken_bytes);
        lifted.lift(start + page_bytes(), end);
        let (run, bytes) = lifted.runs[0];
        assert_eq!(resident_bytes(run, run + bytes), end - start - page_bytes());
        drop(lifted);
        let mut pages = vec![0_u8; bytes / page_bytes()];
        // SAFETY: the call checks the range, which is mapped no more.
        let code = unsafe { libc::mincore(run as *mut c_void, bytes, pages.as_mut_ptr()) };
        assert_eq!(code, -1);
        free(donor);
    }

    #[test]
    fn a_block_on_the_heap_has_no_mapping_of_its_own() {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: room for a pointer.
        assert_eq!(
            unsafe { libc::posix_memalign(&raw mut pointer, 64, 10_000) },
            0
        );
        assert_eq!(mapping(pointer as usize, footprint::of(10_000, 64)), None);
        // SAFETY: freed once.
        unsafe { libc::free(pointer) };
    }
}

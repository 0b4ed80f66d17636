//! What a block really takes of the process's memory.
//!
//! Responsible for that one number, which a budget is held to. Not responsible for the budget
//! ([`crate::budget`]).
//!
//! From [`LARGE_BYTES`] on, a block is a mapping of its own while a budget is on
//! ([`crate::settings`]), so it takes whole pages: the tensor, the C library's words before it and
//! what the alignment asks for. Smaller blocks lie on the C library's heap and take the words
//! between them. What the heap keeps of its own after they are freed is not counted; it cannot be
//! large, since no large block is ever on it.
//!
//! The arithmetic is glibc's (`malloc.c`: `checked_request2size`, `_int_memalign`, `sysmalloc_mmap`).
//! Another allocator in its place takes about as much: a budget then holds for these numbers.

use std::sync::LazyLock;

/// Smallest block that is a mapping of its own while a budget is on.
pub(crate) const LARGE_BYTES: usize = 256 << 10;

/// The word before every block, and what sizes are rounded up to.
const WORD: u64 = size_of::<usize>() as u64;
const CHUNK: u64 = 2 * WORD;
const SMALLEST_CHUNK: u64 = 4 * WORD;

static PAGE_BYTES: LazyLock<u64> = LazyLock::new(asked_page_bytes);

/// Bytes that a block of so many takes, aligned so.
pub(crate) fn of(bytes: usize, alignment: usize) -> u64 {
    let asked = chunk(bytes as u64);
    if bytes < LARGE_BYTES {
        return asked;
    }
    let with_alignment = asked
        .saturating_add(alignment as u64)
        .saturating_add(SMALLEST_CHUNK);
    let mapping = chunk(with_alignment).saturating_add(WORD);
    mapping
        .checked_next_multiple_of(*PAGE_BYTES)
        .unwrap_or(u64::MAX)
}

/// Bytes of a page.
#[expect(
    clippy::cast_possible_truncation,
    reason = "only built where pointers have 64 bits"
)]
pub(crate) fn page_bytes() -> usize {
    *PAGE_BYTES as usize
}

/// A request as the heap rounds it.
fn chunk(bytes: u64) -> u64 {
    let rounded = bytes.saturating_add(WORD).checked_next_multiple_of(CHUNK);
    rounded.unwrap_or(u64::MAX).max(SMALLEST_CHUNK)
}

#[expect(unsafe_code, reason = "asks the system for a constant")]
fn asked_page_bytes() -> u64 {
    // SAFETY: asks for a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    #![expect(unsafe_code, reason = "asks the C library for blocks")]

    use proptest::prelude::*;

    use super::*;
    use crate::mapped_block::mapped_block;

    /// What the C library makes of a request that becomes a mapping: from its page to its end.
    fn mapped_bytes(bytes: usize, alignment: usize) -> u64 {
        let pointer = mapped_block(bytes, alignment);
        // SAFETY: a block of the C library.
        let usable = unsafe { libc::malloc_usable_size(pointer) };
        let address = pointer as u64;
        let start = address / *PAGE_BYTES * *PAGE_BYTES;
        // SAFETY: just handed out.
        unsafe { libc::free(pointer) };
        address + usable as u64 - start
    }

    proptest! {
        #[test]
        fn large_blocks_take_the_pages_of_their_mapping(
            bytes in LARGE_BYTES..(8_usize << 20),
            rounding in prop::sample::select(vec![1_usize, 64, 4096]),
        ) {
            let bytes = bytes / rounding * rounding;
            prop_assume!(bytes >= LARGE_BYTES);
            prop_assert_eq!(of(bytes, 64), mapped_bytes(bytes, 64));
        }
    }

    #[test]
    fn small_blocks_take_what_the_heap_rounds_them_to() {
        assert_eq!(of(0, 64), 32);
        assert_eq!(of(24, 64), 32);
        assert_eq!(of(25, 64), 48);
        assert_eq!(of(LARGE_BYTES - 1, 64), LARGE_BYTES as u64 + 16);
    }

    #[test]
    fn sizes_beyond_all_memory_do_not_wrap_round() {
        assert_eq!(of(usize::MAX, 64), u64::MAX);
        assert!(of(usize::MAX - 4096, 64) >= usize::MAX as u64 - 4096);
    }
}

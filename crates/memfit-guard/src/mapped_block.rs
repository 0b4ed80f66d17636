//! Blocks for tests that need one with a mapping of its own.
//!
//! What other tests of the process have freed lies on the C library's heap and serves requests first,
//! however large they are.

#![expect(unsafe_code, reason = "asks the C library for blocks")]

use std::ffi::c_void;

/// A block that has a mapping of its own; the caller frees it.
pub(crate) fn mapped_block(bytes: usize, alignment: usize) -> *mut c_void {
    let mut from_heap = Vec::new();
    loop {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: room for a pointer; the setting takes any value.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
            assert_eq!(libc::posix_memalign(&raw mut pointer, alignment, bytes), 0);
        }
        // SAFETY: glibc writes the block's size and flags before it; 2 is `IS_MMAPPED` in its `malloc.c`.
        if unsafe { pointer.cast::<usize>().sub(1).read() } & 2 != 0 {
            for pointer in from_heap {
                // SAFETY: handed out above, and nothing else has it.
                unsafe { libc::free(pointer) };
            }
            return pointer;
        }
        from_heap.push(pointer);
    }
}

//! Memory that somebody else owns, lent by its address for the time of a transfer.
//!
//! Responsible for making slices of it, and for saying what the lender promises. Python lends the memory
//! of a tensor this way to the thread that writes it to a disk: neither side could name the other's types.

#![expect(unsafe_code, reason = "makes slices of addresses")]

use std::ptr::NonNull;

/// There can be no memory where it is said to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory at that address")]
pub struct NoMemory;

/// Memory to read from.
#[derive(Debug)]
pub struct LentBytes {
    start: NonNull<u8>,
    length: usize,
}

/// Memory to write to.
#[derive(Debug)]
pub struct LentBytesMut {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the lender's promise holds for the value, whatever thread has it.
unsafe impl Send for LentBytes {}
// SAFETY: as above.
unsafe impl Send for LentBytesMut {}

impl LentBytes {
    /// Borrows `length` bytes at `address`.
    ///
    /// # Errors
    ///
    /// No memory can be there.
    ///
    /// # Safety
    ///
    /// Until the value is dropped, those bytes are memory of this process that has been initialised (as
    /// all memory from the system has), and nothing writes to them or gives them back.
    pub unsafe fn new(address: usize, length: usize) -> Result<Self, NoMemory> {
        let start = place(address, length).ok_or(NoMemory)?;
        Ok(Self { start, length })
    }
}

impl LentBytesMut {
    /// Borrows `length` bytes at `address`.
    ///
    /// # Errors
    ///
    /// No memory can be there.
    ///
    /// # Safety
    ///
    /// Until the value is dropped, those bytes are memory of this process that has been initialised (as
    /// all memory from the system has), and nothing else reads them, writes to them or gives them back.
    pub unsafe fn new(address: usize, length: usize) -> Result<Self, NoMemory> {
        let start = place(address, length).ok_or(NoMemory)?;
        Ok(Self { start, length })
    }
}

impl AsRef<[u8]> for LentBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: promised by the lender for as long as `self` lives, which the slice does not outlive;
        // `place` has checked that the range does not wrap round and is no longer than a slice may be.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl AsMut<[u8]> for LentBytesMut {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `LentBytes`, and exclusive: nothing else uses the range, and `self` is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

/// The start of a range that a slice can have; an empty one may be anywhere.
fn place(address: usize, length: usize) -> Option<NonNull<u8>> {
    if length == 0 {
        return Some(NonNull::dangling());
    }
    let fits = isize::try_from(length).is_ok() && address.checked_add(length).is_some();
    NonNull::new(address as *mut u8).filter(|_| fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lent_memory_is_read_and_written_where_it_is() {
        let mut bytes = vec![1_u8, 2, 3];
        let address = bytes.as_mut_ptr() as usize;
        {
            // SAFETY: `bytes` lives on, and nothing else uses it meanwhile.
            let mut lent = unsafe { LentBytesMut::new(address, 3) }.unwrap();
            lent.as_mut()[1] = 9;
        }
        // SAFETY: as above.
        let lent = unsafe { LentBytes::new(address, 3) }.unwrap();
        assert_eq!(lent.as_ref(), [1, 9, 3]);
    }

    #[test]
    fn addresses_where_no_memory_can_be_are_refused() {
        // SAFETY: nothing is made of what is refused, and an empty range is no memory.
        unsafe {
            assert!(LentBytes::new(0, 1).is_err());
            assert!(LentBytes::new(usize::MAX, 2).is_err());
            assert!(LentBytesMut::new(64, usize::MAX / 2 + 1).is_err());
            assert!(LentBytes::new(0, 0).unwrap().as_ref().is_empty());
        }
    }
}

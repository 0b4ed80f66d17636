//! How much of a block is in memory.
//!
//! Responsible for asking the system which pages of a range are there. Not responsible for which ranges.

use crate::footprint::page_bytes;

/// Pages that are asked for at once.
const AT_A_TIME: usize = 4096;

/// Bytes of a block that are in memory; pages that it shares with its neighbours count as far as it reaches.
pub(crate) fn of(address: usize, bytes: usize) -> u64 {
    let page = page_bytes();
    let end = address.saturating_add(bytes);
    let first = address.next_multiple_of(page);
    let last = end - end % page;
    if first >= last {
        return bytes as u64;
    }
    let mut resident = (first - address) + (end - last);
    let mut at = first;
    while at < last {
        let length = (last - at).min(AT_A_TIME * page);
        resident += pages(at, length) * page;
        at += length;
    }
    resident as u64
}

/// Pages of whole ones that are in memory; none where there is no mapping any more.
#[expect(unsafe_code, reason = "asks the system about its own process's pages")]
fn pages(at: usize, length: usize) -> usize {
    let mut found = [0_u8; AT_A_TIME];
    // SAFETY: one byte is written for each page of the range, which are no more than there are bytes; the pages
    // themselves are not looked into, and a range without a mapping is an error.
    let done = unsafe {
        libc::mincore(
            at as *mut libc::c_void,
            length,
            found.as_mut_ptr().cast::<libc::c_uchar>(),
        )
    };
    if done != 0 {
        return 0;
    }
    let asked = length.div_ceil(page_bytes());
    found[..asked]
        .iter()
        .filter(|flags| **flags & 1 != 0)
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_count_from_when_they_are_touched() {
        let page = page_bytes();
        let size = 9000 * page;
        // So large a block is a mapping of its own, with untouched pages.
        let mut block: Vec<u8> = Vec::with_capacity(size);
        let address = block.as_ptr() as usize;
        let untouched = of(address, size);
        assert!(untouched <= 3 * page as u64, "{untouched}");
        block.resize(5000 * page, 1);
        let touched = of(address, size);
        let expected = (5000 * page) as u64;
        // The system may give more at once than was touched.
        let at_most = expected + (4 << 20);
        assert!((expected..=at_most).contains(&touched), "{touched}");
        assert_eq!(of(address, 100), 100);
    }
}

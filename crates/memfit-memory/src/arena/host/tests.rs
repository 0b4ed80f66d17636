//! Arenas against the system's own account of pages.

use super::*;

fn arena(length: usize) -> io::Result<Arena> {
    // SAFETY: the tests use the memory through the arena's own slices only, and change no file in it.
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

#[cfg(target_os = "linux")]
mod with_files {
    use std::fs::File;
    use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _};
    use std::os::unix::fs::FileExt as _;

    use super::*;

    const LENGTH: usize = 5 << 20;

    /// A file without a name that holds `length` bytes that all differ from their neighbours.
    fn file(length: usize) -> (File, Vec<u8>) {
        let path =
            std::env::temp_dir().join(format!("memfit-arena-{:?}", std::thread::current().id()));
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(true);
        let file = options.open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let bytes: Vec<u8> = (0..length)
            .map(|at| (at * 7 + at / 4096).to_le_bytes()[0])
            .collect();
        file.write_all_at(&bytes, 0).unwrap();
        (file, bytes)
    }

    fn show<'a>(arena: &'a mut Arena, file: &File, length: usize) -> io::Result<Shown<'a>> {
        let parts = [FilePart {
            start: 0,
            length,
            file: file.as_fd(),
        }];
        arena.show(&parts)
    }

    /// An open arena that a file stands in, the file and its bytes; `None` where the system cannot.
    fn open(length: usize) -> Option<(Arena, File, Vec<u8>)> {
        let (file, bytes) = file(length);
        let mut arena = arena(length).unwrap();
        arena.close().unwrap();
        match show(&mut arena, &file, length) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => return None,
            shown => {
                let shown = shown.unwrap();
                assert_eq!(shown.bring_in(0, length).unwrap(), bytes);
                shown.open().unwrap();
            }
        }
        Some((arena, file, bytes))
    }

    #[test]
    fn a_file_that_stands_in_an_arena_is_read_there_and_never_written() {
        let Some((mut arena, file, bytes)) = open(LENGTH) else {
            return;
        };
        assert_eq!(arena.bytes().unwrap(), bytes);
        arena.open().unwrap().fill(3);
        assert!(arena.bytes().unwrap().iter().all(|&byte| byte == 3));
        let mut there = vec![0; LENGTH];
        file.read_exact_at(&mut there, 0).unwrap();
        assert_eq!(there, bytes);
        arena.close().unwrap();
        assert_eq!(resident_bytes(&arena), 0);
        assert!(arena.open().unwrap().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn pages_that_something_wrote_to_are_told_whatever_wrote() {
        let Some((mut arena, file, bytes)) = open(LENGTH) else {
            return;
        };
        let Some(written) = arena.written() else {
            return; // the system does not tell
        };
        assert_eq!(written, vec![false; LENGTH / page_bytes()]);
        let page = page_bytes();
        arena.open().unwrap()[3 * page + 1] = bytes[3 * page + 1];
        // The system writes this one, on its own.
        let (start, length) = (arena.address() + 700 * page, 2 * page);
        let start = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: two pages of the arena, which is open and has no slice.
        let read = unsafe { libc::pread(file.as_fd().as_raw_fd(), start, length, 0) };
        assert_eq!(usize::try_from(read).unwrap(), length);
        let told = arena.written().unwrap().into_iter().enumerate();
        let told: Vec<usize> = told.filter(|&(_, is)| is).map(|(page, _)| page).collect();
        assert_eq!(told, [3, 700, 701]);
        assert_eq!(
            arena.bytes().unwrap()[700 * page..702 * page],
            bytes[..2 * page]
        );
    }

    #[test]
    fn what_is_shown_and_not_opened_goes() {
        let (file, bytes) = file(LENGTH);
        let mut arena = arena(LENGTH).unwrap();
        assert!(show(&mut arena, &file, LENGTH).is_err(), "it is open");
        assert!(arena.bytes().is_some());
        arena.close().unwrap();
        let Ok(shown) = show(&mut arena, &file, LENGTH) else {
            return;
        };
        assert_eq!(shown.bring_in(4095, 2).unwrap(), &bytes[4095..4097]);
        drop(shown);
        assert!(arena.bytes().is_none());
        assert_eq!(resident_bytes(&arena), 0);
    }

    #[test]
    fn what_memory_has_of_a_file_is_told_from_what_it_lacks() {
        // Of memory alone: nothing of it ever leaves.
        // SAFETY: the name is a string that ends.
        let file = unsafe { libc::memfd_create(c"arena".as_ptr(), 0) };
        assert!(file >= 0);
        // SAFETY: it was opened just now, and is used by nothing else.
        let file = unsafe { File::from_raw_fd(file) };
        let page = page_bytes();
        file.write_all_at(&vec![7; 8 * page], 0).unwrap();
        file.set_len(12 * page as u64).unwrap();
        let mut arena = arena(16 * page).unwrap();
        arena.close().unwrap();
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let is_told = !["4.", "5.", "6.0.", "6.1.", "6.2.", "6.3.", "6.4."]
            .iter()
            .any(|old| release.starts_with(old));
        let Ok(shown) = show(&mut arena, &file, 8 * page) else {
            return;
        };
        let part = |start: usize, length: usize| FilePart {
            start: start * page,
            length: length * page,
            file: file.as_fd(),
        };
        assert_eq!(shown.were_in_memory(&[part(0, 8)]), is_told);
        assert_eq!(
            shown.were_in_memory(&[part(0, 3), part(3, 0), part(6, 2)]),
            is_told
        );
        assert!(!shown.were_in_memory(&[part(0, 8), part(8, 4)]), "a hole");
        assert!(
            !shown.were_in_memory(&[part(0, 16)]),
            "the end of the file, and of what stands there"
        );
        assert!(!shown.were_in_memory(&[part(0, 17)]), "no arena");
    }

    #[test]
    fn a_file_that_ends_too_early_is_an_error_and_no_signal() {
        let (file, bytes) = file(LENGTH);
        let mut arena = arena(LENGTH).unwrap();
        arena.close().unwrap();
        file.set_len(LENGTH as u64 - 8192).unwrap();
        let Ok(shown) = show(&mut arena, &file, LENGTH) else {
            return;
        };
        let whole = LENGTH - 8192;
        assert_eq!(shown.bring_in(0, whole).unwrap(), &bytes[..whole]);
        assert!(shown.bring_in(whole - 1, 2).is_err());
        assert!(shown.bring_in(LENGTH - 1, 2).is_err());
        assert!(shown.bring_in(usize::MAX, 2).is_err());
    }

    #[test]
    fn the_rest_of_an_arena_is_zero_and_its_own() {
        let (file, bytes) = file(LENGTH);
        let mut arena = arena(LENGTH).unwrap();
        arena.close().unwrap();
        let Ok(shown) = show(&mut arena, &file, 1 << 20) else {
            return;
        };
        assert!(shown.bring_in(1 << 20, 1).is_err());
        shown.open().unwrap();
        let found = arena.bytes().unwrap();
        assert_eq!(found[..1 << 20], bytes[..1 << 20]);
        assert!(found[1 << 20..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn an_arena_that_took_a_file_over_has_its_bytes_and_no_page_of_it() {
        let Some((mut arena, file, mut bytes)) = open(LENGTH) else {
            return;
        };
        arena.open().unwrap()[9] ^= 1;
        bytes[9] ^= 1;
        arena.take_over().unwrap();
        assert_eq!(arena.written(), None);
        // Were the file still there, this would end the process.
        file.set_len(0).unwrap();
        assert_eq!(arena.bytes().unwrap(), bytes);
        arena.take_over().unwrap();
    }

    #[test]
    fn an_arena_begins_where_a_large_page_may() {
        for length in [2 << 20, LENGTH] {
            assert_eq!(arena(length).unwrap().address() % LARGE_PAGE_BYTES, 0);
        }
    }
}

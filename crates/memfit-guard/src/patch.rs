//! Making libc10 call other functions than the C library's `posix_memalign` and `free`.
//!
//! Responsible for finding libc10 among the loaded libraries, the slots through which it calls the
//! two functions (ELF relocations of type `JUMP_SLOT` and `GLOB_DAT`; System V ABI, chapter 5, and
//! its processor supplements), and for writing them. Not responsible for what stands there then
//! ([`crate::hook`]).
//!
//! Only libc10 is touched: torch allocates all CPU tensors there (`c10/core/impl/alloc_cpu.cpp`).
//! Scratch memory that oneDNN, MKL or OpenMP take for themselves does not pass through it.

#![expect(unsafe_code, reason = "reads and writes the dynamic linker's tables")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{Elf64_Phdr, Elf64_Rela, Elf64_Sym, dl_phdr_info};

use crate::{InstallError, hook};

const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;

#[cfg(target_arch = "x86_64")]
const SLOT_TYPES: [u32; 2] = [6, 7]; // R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT
#[cfg(target_arch = "aarch64")]
const SLOT_TYPES: [u32; 2] = [1025, 1026]; // R_AARCH64_GLOB_DAT, R_AARCH64_JUMP_SLOT

/// One entry of the dynamic section.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

/// Which of the two functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Function {
    Memalign,
    Free,
}

impl Function {
    fn of_name(name: &[u8]) -> Option<Self> {
        match name {
            b"posix_memalign" => Some(Self::Memalign),
            b"free" => Some(Self::Free),
            _ => None,
        }
    }

    fn hook(self) -> usize {
        match self {
            Self::Memalign => hook::memalign as *const () as usize,
            Self::Free => hook::free as *const () as usize,
        }
    }

    /// The C library's own.
    fn plain(self) -> usize {
        match self {
            Self::Memalign => libc::posix_memalign as *const () as usize,
            Self::Free => libc::free as *const () as usize,
        }
    }

    const fn next(self) -> &'static AtomicUsize {
        match self {
            Self::Memalign => &hook::NEXT_MEMALIGN,
            Self::Free => &hook::NEXT_FREE,
        }
    }
}

/// A place through which libc10 calls a function.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    address: usize,
    function: Function,
}

/// libc10 as it lies in memory.
#[derive(Debug, Default)]
struct Library {
    found: bool,
    slots: Vec<Slot>,
    /// First and one past the last address of its segments.
    extent: (usize, usize),
}

/// Finds the slots of libc10 and leads them to the hooks; `is_again` where that was done before.
pub(crate) fn patch(is_again: bool) -> Result<Vec<Slot>, InstallError> {
    let mut library = Library::default();
    // SAFETY: the callback matches the type asked for, and `library` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut library).cast()) };
    if !library.found {
        return Err(InstallError::NotLoaded);
    }
    for function in [Function::Memalign, Function::Free] {
        if !library.slots.iter().any(|slot| slot.function == function) {
            return Err(InstallError::NoSlot {
                function: match function {
                    Function::Memalign => "posix_memalign",
                    Function::Free => "free",
                },
            });
        }
    }
    // `free` first: a block that is counted must be seen to go.
    library
        .slots
        .sort_by_key(|slot| (slot.function == Function::Memalign, slot.address));
    for slot in &library.slots {
        redirect(*slot, library.extent, is_again)?;
    }
    Ok(library.slots)
}

/// Whether every slot still leads to its hook: other tools patch the same places.
pub(crate) fn is_intact(slots: &[Slot]) -> bool {
    slots.iter().all(|slot| {
        // SAFETY: a slot of libc10, which is never unloaded; slots are pointers, aligned as such.
        let place = unsafe { AtomicUsize::from_ptr(slot.address as *mut usize) };
        place.load(Ordering::Relaxed) == slot.function.hook()
    })
}

/// Called by the dynamic linker for each loaded library.
unsafe extern "C" fn visit(info: *mut dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
    // SAFETY: `data` is the library that `patch` handed over, and nothing else uses it meanwhile.
    let library = unsafe { &mut *data.cast::<Library>() };
    // SAFETY: the linker hands over a valid description.
    let info = unsafe { &*info };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: the linker's names end with a zero.
    let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    if !name.starts_with(b"libc10.so") {
        return 0;
    }
    library.found = true;
    // SAFETY: the description says where its headers lie and how many there are.
    let headers: &[Elf64_Phdr] =
        unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let base = address(info.dlpi_addr);
    let segments = headers
        .iter()
        .filter(|header| header.p_type == libc::PT_LOAD);
    library.extent = segments.fold((usize::MAX, 0), |(first, last), segment| {
        let start = base + address(segment.p_vaddr);
        (first.min(start), last.max(start + address(segment.p_memsz)))
    });
    if let Some(dynamic) = headers
        .iter()
        .find(|header| header.p_type == libc::PT_DYNAMIC)
    {
        let section = (base + address(dynamic.p_vaddr)) as *const Dynamic;
        // SAFETY: the library is loaded, so its dynamic section is in place and well formed.
        library.slots = unsafe { slots(section, base) };
    }
    1
}

/// Addresses and sizes of a 64-bit ELF file fit a pointer.
#[expect(
    clippy::cast_possible_truncation,
    reason = "only built where pointers have 64 bits"
)]
const fn address(value: u64) -> usize {
    value as usize
}

/// Walks the relocations of a loaded library.
///
/// # Safety
///
/// `section` is the dynamic section of a library that is loaded at `base`.
unsafe fn slots(section: *const Dynamic, base: usize) -> Vec<Slot> {
    let mut tables = [(0, 0), (0, 0)];
    let (mut strings, mut symbols) = (0, 0);
    // The GNU linker has already added the base to these addresses; others leave that out.
    let absolute = |value: u64| {
        let value = address(value);
        if value < base { base + value } else { value }
    };
    let mut entry = section;
    loop {
        // SAFETY: the section ends with a zero tag, at which this loop ends.
        let Dynamic { tag, value } = unsafe { &*entry };
        match *tag {
            0 => break,
            DT_STRTAB => strings = absolute(*value),
            DT_SYMTAB => symbols = absolute(*value),
            DT_JMPREL => tables[0].0 = absolute(*value),
            DT_PLTRELSZ => tables[0].1 = address(*value),
            DT_RELA => tables[1].0 = absolute(*value),
            DT_RELASZ => tables[1].1 = address(*value),
            _ => {}
        }
        // SAFETY: not the last entry, so there is another.
        entry = unsafe { entry.add(1) };
    }
    let mut found = Vec::new();
    for (start, bytes) in tables {
        if start == 0 || symbols == 0 || strings == 0 {
            continue;
        }
        let count = bytes / size_of::<Elf64_Rela>();
        // SAFETY: the section says where the table lies and how long it is.
        let relocations = unsafe { std::slice::from_raw_parts(start as *const Elf64_Rela, count) };
        for relocation in relocations {
            // The low half is the type, the high half the symbol (`ELF64_R_TYPE`, `ELF64_R_SYM`).
            let [kind, symbol] = [relocation.r_info & 0xffff_ffff, relocation.r_info >> 32];
            if !SLOT_TYPES.iter().any(|&slot| u64::from(slot) == kind) {
                continue;
            }
            // SAFETY: the linker has resolved this symbol, so it lies within the table.
            let symbol = unsafe { &*(symbols as *const Elf64_Sym).add(address(symbol)) };
            let name = (strings + symbol.st_name as usize) as *const c_char;
            // SAFETY: names of symbols lie in the string table and end with a zero.
            let name = unsafe { CStr::from_ptr(name) }.to_bytes();
            if let Some(function) = Function::of_name(name) {
                let address = base + address(relocation.r_offset);
                found.push(Slot { address, function });
            }
        }
    }
    found
}

/// Writes a hook into a slot, whose page may be read-only.
fn redirect(slot: Slot, extent: (usize, usize), is_again: bool) -> Result<(), InstallError> {
    // SAFETY: a slot of libc10, which is never unloaded; slots are pointers, aligned as such.
    let place = unsafe { AtomicUsize::from_ptr(slot.address as *mut usize) };
    let hook = slot.function.hook();
    let before = place.load(Ordering::Relaxed);
    if before == hook {
        return Ok(());
    }
    // A slot not called yet leads back into libc10, to the linker's stub, which would overwrite it.
    let is_stub = (extent.0..extent.1).contains(&before);
    let next = slot.function.next();
    if !is_stub && before != slot.function.plain() {
        // Another tool's function, which is called in turn. Later ones are left in place: one that
        // came after this hook may call it, and the two would call each other for ever.
        if is_again && next.load(Ordering::Relaxed) != before {
            return Ok(());
        }
        next.store(before, Ordering::Relaxed);
    }
    let page_bytes = page_bytes();
    let page = (slot.address & !(page_bytes - 1)) as *mut c_void;
    let protection = protection(slot.address)?;
    let is_writable = protection & libc::PROT_WRITE != 0;
    if !is_writable {
        // SAFETY: a page of libc10's own tables; adding a right takes none from anyone.
        if unsafe { libc::mprotect(page, page_bytes, protection | libc::PROT_WRITE) } != 0 {
            return Err(InstallError::Protected(std::io::Error::last_os_error()));
        }
    }
    // One aligned store: a thread that calls just now sees the old function or the new one.
    place.store(hook, Ordering::Release);
    if !is_writable {
        // SAFETY: as it was before. If it fails, the page stays writable, which breaks nothing.
        unsafe { libc::mprotect(page, page_bytes, protection) };
    }
    Ok(())
}

fn page_bytes() -> usize {
    // SAFETY: asks for a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// The rights of the page at an address, as the system has them now.
fn protection(address: usize) -> Result<c_int, InstallError> {
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(InstallError::Protected)?;
    parse_protection(&maps, address)
        .ok_or_else(|| InstallError::Protected(std::io::Error::from(std::io::ErrorKind::NotFound)))
}

/// Finds the line `first-last rwxp ...` of an address.
fn parse_protection(maps: &str, address: usize) -> Option<c_int> {
    maps.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (first, last) = words.next()?.split_once('-')?;
        let rights = words.next()?.as_bytes();
        let first = usize::from_str_radix(first, 16).ok()?;
        let last = usize::from_str_radix(last, 16).ok()?;
        let names = [
            (b'r', libc::PROT_READ),
            (b'w', libc::PROT_WRITE),
            (b'x', libc::PROT_EXEC),
        ];
        let granted = names.iter().filter(|(letter, _)| rights.contains(letter));
        (first..last)
            .contains(&address)
            .then(|| granted.fold(libc::PROT_NONE, |sum, (_, right)| sum | right))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_those_of_the_line() {
        let maps = "1000-3000 r--p 00000000 fd:01 7 /lib/a.so\n3000-4000 rw-p 0 0:0 0\n";
        assert_eq!(parse_protection(maps, 0x1fff), Some(libc::PROT_READ));
        assert_eq!(
            parse_protection(maps, 0x3000),
            Some(libc::PROT_READ | libc::PROT_WRITE)
        );
        assert_eq!(parse_protection(maps, 0x4000), None);
        assert_eq!(parse_protection("nonsense", 1), None);
    }

    #[test]
    fn own_pages_are_found() {
        static HERE: u8 = 0;
        let here = protection(&raw const HERE as usize).unwrap();
        assert_ne!(here & libc::PROT_READ, 0);
    }

    #[test]
    fn without_torch_there_is_nothing_to_patch() {
        assert!(matches!(patch(false), Err(InstallError::NotLoaded)));
    }
}

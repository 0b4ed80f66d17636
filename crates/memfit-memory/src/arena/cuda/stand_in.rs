//! A driver that stands in for CUDA's: `stand-in/driver.c`, built for each test.
//!
//! Responsible for building it, for a copy of its own for each test (its state is that of the library), and
//! for asking it. Only in builds with the feature `stand-in`.

#![expect(unsafe_code, reason = "calls a library of C functions")]

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use libloading::Library;
use tempfile::TempDir;

use super::{Device, VmmError};

/// What the stand-in holds; all zero when nothing is held.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls since [`StandIn::fail`].
    pub calls: u64,
    /// Pieces of physical memory.
    pub handles: u64,
    /// Of them mapped.
    pub mappings: u64,
    /// Reserved ranges of addresses.
    pub reservations: u64,
    /// Bytes taken of the device.
    pub used_bytes: u64,
    /// Bytes pinned of the host.
    pub pinned_bytes: u64,
    /// Contexts retained.
    pub contexts: u64,
    /// Calls that broke a rule of the driver's.
    pub misuses: u64,
}

impl Counts {
    /// The same without the number of calls.
    #[must_use]
    pub const fn held(self) -> Self {
        Self { calls: 0, ..self }
    }
}

/// The driver's number for no memory left.
pub const OUT_OF_MEMORY: i32 = 2;

/// A stand-in with a state of its own.
pub struct StandIn {
    library: Library,
    path: String,
    _folder: TempDir,
}

impl StandIn {
    /// Builds it, once in a process, and opens a copy.
    ///
    /// # Panics
    ///
    /// If it cannot be built; this is for tests.
    #[must_use]
    pub fn new() -> Self {
        static BUILT: OnceLock<Vec<u8>> = OnceLock::new();
        let folder = tempfile::tempdir().expect("a folder for the library");
        let path = folder.path().join("libstandin.so");
        let built = BUILT.get_or_init(|| {
            build(&path);
            std::fs::read(&path).expect("the library was built")
        });
        std::fs::write(&path, built).expect("the library can be copied");
        let path = path.to_str().expect("a path of letters").to_owned();
        // SAFETY: the library has no initialisers.
        let library = unsafe { Library::new(&path) }.expect("the library can be opened");
        Self {
            library,
            path,
            _folder: folder,
        }
    }

    /// Its path, to be opened as a driver.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its device.
    ///
    /// # Errors
    ///
    /// As [`Device::open`], if that was asked for.
    pub fn device(&self) -> Result<Arc<Device>, VmmError> {
        Device::open_with(&self.path, 0).map(Arc::new)
    }

    /// Sets how many bytes the device has, and how many of the host can be pinned.
    ///
    /// # Panics
    ///
    /// Never: the function is there.
    pub fn set(&self, total_bytes: usize, pinnable_bytes: usize, lacks_management: bool) {
        type Set = unsafe extern "C" fn(usize, usize, i32);
        // SAFETY: the signature is that of the C file.
        unsafe {
            let set = self.library.get::<Set>(b"stand_in_set\0");
            set.expect("it is there")(total_bytes, pinnable_bytes, lacks_management.into());
        }
    }

    /// Lets a call fail: the one of that number, counted from now and from 1, or all from it on; 0 none.
    ///
    /// # Panics
    ///
    /// Never: the function is there.
    pub fn fail(&self, at: u64, lasts: bool, code: i32) {
        type Fail = unsafe extern "C" fn(u64, i32, i32);
        // SAFETY: the signature is that of the C file.
        unsafe {
            let fail = self.library.get::<Fail>(b"stand_in_fail\0");
            fail.expect("it is there")(at, lasts.into(), code);
        }
    }

    /// Pretends a kernel that runs until somebody waits for the device.
    ///
    /// # Panics
    ///
    /// Never: the function is there.
    pub fn launch(&self) {
        type Launch = unsafe extern "C" fn();
        // SAFETY: the signature is that of the C file.
        unsafe {
            let launch = self.library.get::<Launch>(b"stand_in_launch\0");
            launch.expect("it is there")();
        }
    }

    /// What it holds.
    ///
    /// # Panics
    ///
    /// Never: the function is there.
    #[must_use]
    pub fn counts(&self) -> Counts {
        type Count = unsafe extern "C" fn(*mut Counts);
        let mut counts = Counts::default();
        // SAFETY: the signature is that of the C file, and there is room for the answer.
        unsafe {
            let count = self.library.get::<Count>(b"stand_in_count\0");
            count.expect("it is there")(&raw mut counts);
        }
        counts
    }
}

impl Default for StandIn {
    fn default() -> Self {
        Self::new()
    }
}

fn build(path: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("stand-in/driver.c");
    let done = Command::new("cc")
        .args(["-O1", "-shared", "-fPIC", "-o"])
        .args([path, &source])
        .status();
    assert!(
        done.is_ok_and(|status| status.success()),
        "the C compiler builds the stand-in"
    );
}

//! The CUDA driver's library, opened at run time, as functions that return results.
//!
//! Responsible for the names, signatures and structures of the driver's interface, and for nothing else:
//! which call follows which is for [`super::Device`] and [`super::Arena`] to know.
//!
//! The structures are those of `cuda.h` on 64-bit systems, which has not changed them since CUDA 11; the
//! compiler compares the stand-in's with that header where it is at hand.

#![expect(unsafe_code, reason = "calls a library of C functions")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

use libloading::Library;

use super::error::VmmError;

/// What the driver calls itself, version by version the same.
pub(crate) const LIBRARY: &str = "libcuda.so.1";

/// No memory left.
const OUT_OF_MEMORY: c_int = 2;
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
const HAS_VIRTUAL_MEMORY_MANAGEMENT: c_int = 102;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`: memory of the device itself, which is the only type there is.
const ON_DEVICE: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_AND_WRITE: c_int = 3;

/// Physical memory of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle(c_ulonglong);

/// A device's primary context, the one that PyTorch uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context(*mut c_void);

// SAFETY: a context is a name that any thread may give to the driver.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

#[repr(C)]
struct Location {
    kind: c_int,
    id: c_int,
}

#[repr(C)]
struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    windows_metadata: *mut c_void,
    flags: [u8; 8],
}

#[repr(C)]
struct AccessDescription {
    location: Location,
    flags: c_int,
}

impl AllocationProperties {
    const fn on(device: c_int) -> Self {
        Self {
            kind: ON_DEVICE,
            handle_types: 0,
            location: Location {
                kind: DEVICE,
                id: device,
            },
            windows_metadata: ptr::null_mut(),
            flags: [0; 8],
        }
    }
}

/// Makes the table of functions: their place in it, their name in the library, their arguments.
macro_rules! functions {
    ($($field:ident = $name:literal ($($argument:ty),*);)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// # Safety
            ///
            /// The library's functions of these names have these signatures.
            unsafe fn of(library: &Library, path: &str) -> Result<Self, VmmError> {
                Ok(Self {
                    $(
                        // SAFETY: by the caller's word.
                        $field: *unsafe { library.get(concat!($name, "\0").as_bytes()) }.map_err(|_| {
                            VmmError::OldDriver { library: path.to_owned(), function: $name.to_owned() }
                        })?,
                    )*
                })
            }
        }
    };
}

functions! {
    init = "cuInit" (c_uint);
    device_get = "cuDeviceGet" (*mut c_int, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2" (c_int);
    context_push = "cuCtxPushCurrent_v2" (*mut c_void);
    context_pop = "cuCtxPopCurrent_v2" (*mut *mut c_void);
    synchronize = "cuCtxSynchronize" ();
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    granularity = "cuMemGetAllocationGranularity" (*mut usize, *const AllocationProperties, c_int);
    reserve = "cuMemAddressReserve" (*mut c_ulonglong, usize, usize, c_ulonglong, c_ulonglong);
    unreserve = "cuMemAddressFree" (c_ulonglong, usize);
    create = "cuMemCreate" (*mut c_ulonglong, usize, *const AllocationProperties, c_ulonglong);
    release = "cuMemRelease" (c_ulonglong);
    map = "cuMemMap" (c_ulonglong, usize, usize, c_ulonglong, c_ulonglong);
    unmap = "cuMemUnmap" (c_ulonglong, usize);
    allow = "cuMemSetAccess" (c_ulonglong, usize, *const AccessDescription, usize);
    copy_out = "cuMemcpyDtoH_v2" (*mut c_void, c_ulonglong, usize);
    copy_in = "cuMemcpyHtoD_v2" (c_ulonglong, *const c_void, usize);
    pin = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    unpin = "cuMemHostUnregister" (*mut c_void);
    error_name = "cuGetErrorName" (c_int, *mut *const c_char);
}

/// The driver.
pub(crate) struct Driver {
    functions: Functions,
    /// Keeps the functions where they are.
    _library: Library,
}

impl Driver {
    /// Opens the driver, or a library that stands in for it, and initialises it.
    pub(crate) fn open(library: &str) -> Result<Self, VmmError> {
        // SAFETY: the driver's initialisers are meant to run in any process that asks for it; another
        // library is named by tests only.
        let opened = unsafe { Library::new(library) }.map_err(|error| VmmError::NoDriver {
            library: library.to_owned(),
            reason: error.to_string(),
        })?;
        // SAFETY: these are the signatures of the driver's own header.
        let functions = unsafe { Functions::of(&opened, library)? };
        let driver = Self {
            functions,
            _library: opened,
        };
        // SAFETY: may be called at any time, and again.
        driver.check("cuInit", unsafe { (driver.functions.init)(0) })?;
        Ok(driver)
    }

    pub(crate) fn device(&self, ordinal: c_int) -> Result<c_int, VmmError> {
        let mut device = 0;
        // SAFETY: there is room for the answer.
        let code = unsafe { (self.functions.device_get)(&raw mut device, ordinal) };
        self.check("cuDeviceGet", code).map(|()| device)
    }

    pub(crate) fn manages_virtual_memory(&self, device: c_int) -> Result<bool, VmmError> {
        let (mut has, what) = (0, HAS_VIRTUAL_MEMORY_MANAGEMENT);
        // SAFETY: there is room for the answer.
        let code = unsafe { (self.functions.device_attribute)(&raw mut has, what, device) };
        self.check("cuDeviceGetAttribute", code).map(|()| has != 0)
    }

    pub(crate) fn retain_context(&self, device: c_int) -> Result<Context, VmmError> {
        let mut context = ptr::null_mut();
        // SAFETY: there is room for the answer.
        let code = unsafe { (self.functions.context_retain)(&raw mut context, device) };
        self.check("cuDevicePrimaryCtxRetain", code)
            .map(|()| Context(context))
    }

    pub(crate) fn release_context(&self, device: c_int) -> Result<(), VmmError> {
        // SAFETY: the caller has retained it once more than it has released it.
        let code = unsafe { (self.functions.context_release)(device) };
        self.check("cuDevicePrimaryCtxRelease", code)
    }

    /// Makes a context this thread's current one, above whichever was.
    pub(crate) fn push(&self, context: Context) -> Result<(), VmmError> {
        // SAFETY: the context is retained.
        let code = unsafe { (self.functions.context_push)(context.0) };
        self.check("cuCtxPushCurrent", code)
    }

    pub(crate) fn pop(&self) -> Result<(), VmmError> {
        let mut popped = ptr::null_mut();
        // SAFETY: there is room for the answer.
        let code = unsafe { (self.functions.context_pop)(&raw mut popped) };
        self.check("cuCtxPopCurrent", code)
    }

    /// Waits for all that the current context was told to do.
    pub(crate) fn synchronize(&self) -> Result<(), VmmError> {
        // SAFETY: takes nothing.
        let code = unsafe { (self.functions.synchronize)() };
        self.check("cuCtxSynchronize", code)
    }

    /// Bytes free on the current context's device.
    pub(crate) fn free_bytes(&self) -> Result<u64, VmmError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: there is room for the answers.
        let code = unsafe { (self.functions.memory_info)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", code).map(|()| free as u64)
    }

    /// Of what physical memory and addresses must be a multiple.
    pub(crate) fn granularity(&self, device: c_int) -> Result<u64, VmmError> {
        let (mut bytes, properties) = (0, AllocationProperties::on(device));
        // SAFETY: there is room for the answer, and the properties live as long as the call.
        let code =
            unsafe { (self.functions.granularity)(&raw mut bytes, &raw const properties, 0) };
        self.check("cuMemGetAllocationGranularity", code)
            .map(|()| bytes as u64)
    }

    pub(crate) fn reserve(&self, length: u64) -> Result<u64, VmmError> {
        let mut start = 0;
        // SAFETY: there is room for the answer; the driver chooses addresses that are free.
        let code = unsafe { (self.functions.reserve)(&raw mut start, size(length), 0, 0, 0) };
        self.check("cuMemAddressReserve", code).map(|()| start)
    }

    pub(crate) fn unreserve(&self, start: u64, length: u64) -> Result<(), VmmError> {
        // SAFETY: the driver checks that the range was reserved and that nothing is mapped there.
        let code = unsafe { (self.functions.unreserve)(start, size(length)) };
        self.check("cuMemAddressFree", code)
    }

    /// Takes physical memory; `None` if the device has no room.
    pub(crate) fn create(&self, device: c_int, length: u64) -> Result<Option<Handle>, VmmError> {
        let (mut handle, properties) = (0, AllocationProperties::on(device));
        let (answer, wanted) = (&raw mut handle, &raw const properties);
        // SAFETY: there is room for the answer, and the properties live as long as the call.
        match unsafe { (self.functions.create)(answer, size(length), wanted, 0) } {
            OUT_OF_MEMORY => Ok(None),
            code => self
                .check("cuMemCreate", code)
                .map(|()| Some(Handle(handle))),
        }
    }

    pub(crate) fn release(&self, handle: Handle) -> Result<(), VmmError> {
        // SAFETY: the driver checks handles.
        let code = unsafe { (self.functions.release)(handle.0) };
        self.check("cuMemRelease", code)
    }

    pub(crate) fn map(&self, start: u64, length: u64, handle: Handle) -> Result<(), VmmError> {
        // SAFETY: the driver checks that the addresses are reserved and nothing is mapped there.
        let code = unsafe { (self.functions.map)(start, size(length), 0, handle.0, 0) };
        self.check("cuMemMap", code)
    }

    pub(crate) fn unmap(&self, start: u64, length: u64) -> Result<(), VmmError> {
        // SAFETY: the driver checks that something is mapped there; kernels that use it afterwards get an
        // error of the device.
        let code = unsafe { (self.functions.unmap)(start, size(length)) };
        self.check("cuMemUnmap", code)
    }

    /// Lets a device read and write what is mapped at a range.
    pub(crate) fn allow(&self, device: c_int, start: u64, length: u64) -> Result<(), VmmError> {
        let AllocationProperties { location, .. } = AllocationProperties::on(device);
        let access = AccessDescription {
            location,
            flags: READ_AND_WRITE,
        };
        // SAFETY: there is one description, and it lives as long as the call.
        let code = unsafe { (self.functions.allow)(start, size(length), &raw const access, 1) };
        self.check("cuMemSetAccess", code)
    }

    /// Copies from the device, whose memory the caller has found to be there, and waits for it.
    pub(crate) fn copy_out(&self, start: u64, bytes: &mut [u8]) -> Result<(), VmmError> {
        // SAFETY: the slice is writable for its length.
        let code =
            unsafe { (self.functions.copy_out)(bytes.as_mut_ptr().cast(), start, bytes.len()) };
        self.check("cuMemcpyDtoH", code)
    }

    /// Copies to the device and waits for it.
    pub(crate) fn copy_in(&self, start: u64, bytes: &[u8]) -> Result<(), VmmError> {
        // SAFETY: the slice is readable for its length; the caller has found the memory to be its own.
        let code = unsafe { (self.functions.copy_in)(start, bytes.as_ptr().cast(), bytes.len()) };
        self.check("cuMemcpyHtoD", code)
    }

    /// Locks a mapping of the host in memory for fast copies.
    pub(crate) fn pin(&self, start: *mut c_void, length: usize) -> Result<(), VmmError> {
        // SAFETY: the caller owns the mapping and unpins it before it goes.
        let code = unsafe { (self.functions.pin)(start, length, 0) };
        self.check("cuMemHostRegister", code)
    }

    pub(crate) fn unpin(&self, start: *mut c_void) -> Result<(), VmmError> {
        // SAFETY: the driver checks that it was pinned.
        let code = unsafe { (self.functions.unpin)(start) };
        self.check("cuMemHostUnregister", code)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), VmmError> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: there is room for the answer.
        let told = unsafe { (self.functions.error_name)(code, &raw mut name) };
        let name = if told == 0 && !name.is_null() {
            // SAFETY: the driver gives a constant string.
            let name = unsafe { CStr::from_ptr(name) };
            name.to_string_lossy().into_owned()
        } else {
            "an unknown error".to_owned()
        };
        Err(VmmError::Refused { call, name, code })
    }
}

/// A length as the driver takes it; on 64-bit systems, where alone it runs, they are one type.
fn size(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

//! Memory lent as a tensor of bytes, in the form that all frameworks take: `DLPack`.
//!
//! Responsible for the structure and for its owner, which lives until the last tensor is gone. Not
//! responsible for the Python object around it (the binding's).

#![expect(unsafe_code, reason = "a C structure with a destructor")]

use std::any::Any;
use std::ffi::c_void;
use std::ptr::{self, NonNull};

/// Where a tensor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorPlace {
    /// In memory that the processor can use: that of a stand-in for a driver.
    Host,
    /// On a CUDA device.
    Cuda,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor` of `DLPack`: a tensor that knows how to be let go.
#[repr(C)]
pub struct ManagedTensor {
    tensor: Tensor,
    owner: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// What the structure points to.
struct Lent {
    shape: [i64; 1],
    stride: [i64; 1],
    _owner: Box<dyn Any + Send>,
}

/// Describes `length` bytes at `address` as a tensor, which keeps `owner` until it is let go.
///
/// The structure is freed by [`ManagedTensor::let_go`], which its taker calls once.
#[must_use]
pub fn lend(
    address: u64,
    length: u64,
    place: TensorPlace,
    device: u32,
    owner: Box<dyn Any + Send>,
) -> NonNull<ManagedTensor> {
    let mut lent = Box::new(Lent {
        shape: [i64::try_from(length).unwrap_or(i64::MAX)],
        stride: [1],
        _owner: owner,
    });
    let (shape, strides) = (lent.shape.as_mut_ptr(), lent.stride.as_mut_ptr());
    let tensor = Tensor {
        data: ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0)),
        device_type: match place {
            TensorPlace::Host => 1,
            TensorPlace::Cuda => 2,
        },
        device: match place {
            TensorPlace::Host => 0,
            TensorPlace::Cuda => i32::try_from(device).unwrap_or(i32::MAX),
        },
        dimensions: 1,
        code: 1, // unsigned integers
        bits: 8,
        lanes: 1,
        shape,
        strides,
        byte_offset: 0,
    };
    let managed = ManagedTensor {
        tensor,
        owner: Box::into_raw(lent).cast(),
        deleter: Some(delete),
    };
    NonNull::from(Box::leak(Box::new(managed)))
}

impl ManagedTensor {
    /// Frees what [`lend`] made and lets its owner go.
    ///
    /// # Safety
    ///
    /// `tensor` is from [`lend`], and neither this nor its deleter was called for it.
    pub unsafe fn let_go(tensor: NonNull<Self>) {
        // SAFETY: by the caller's word it is what `delete` takes.
        unsafe { delete(tensor.as_ptr()) }
    }
}

/// # Safety
///
/// `managed` is from [`lend`] and was not deleted.
unsafe extern "C" fn delete(managed: *mut ManagedTensor) {
    // SAFETY: both boxes were made by `lend`, and are freed only here.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(managed.owner.cast::<Lent>()) });
}

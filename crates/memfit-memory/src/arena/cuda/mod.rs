//! Memory of a CUDA device whose address stays while its physical memory goes and comes back.
//!
//! CUDA's virtual memory management reserves addresses apart from the memory behind them. So a model's
//! weights can leave the device and return without any tensor, graph or pointer having to change.
//! The driver's library is opened at run time: memfit needs no CUDA to be built or to run.
//!
//! Tensors get the memory through `DLPack` and not through a pool of torch's caching allocator: that one lets
//! tensors of a model share a segment with any other, which then could not step aside alone, and would go on
//! counting as reserved what the device no longer holds, on which budgets rely.
//!
//! Responsible for that memory ([`Arena`]), for host memory that the device copies to and from quickly
//! ([`HostMemory`]), and for every call of the driver. Not responsible for what lies in the memory nor for where it is
//! kept meanwhile ([`crate::park::cuda`]).
//!
//! Invariants: an operation that fails has undone what it did, in reverse order; what the driver refuses to
//! undo is remembered and tried again; dropping gives everything back, at the second try if need be; no call
//! of the driver outlives the process's own use of the device, whose primary context is retained.
//!
//! `stand-in/driver.c` is a driver for machines without one, which the tests build and break.

mod arena;
mod device;
mod dlpack;
mod driver;
mod error;
mod held;
mod host;
#[cfg(feature = "stand-in")]
pub mod stand_in;
#[cfg(test)]
mod tests;

pub use arena::Arena;
pub use device::Device;
pub use dlpack::{ManagedTensor, TensorPlace, lend};
pub use error::VmmError;
pub use held::held_bytes;
pub use host::HostMemory;

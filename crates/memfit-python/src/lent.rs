//! Memory of Python's tensors, lent by address and length.
//!
//! Responsible for the promise that comes with an address. Not responsible for what is done there.

use std::ops::Deref;

use memfit_memory::arena::host::{LentBytes, LentBytesMut};
use pyo3::prelude::*;

use crate::errors::Failure;

/// Memory to read: the argument `(address, bytes)`.
pub(crate) struct Read(pub(crate) LentBytes);

/// Memory to write to, likewise.
pub(crate) struct Written(pub(crate) LentBytesMut);

impl Read {
    /// So many bytes at an address.
    #[expect(unsafe_code, reason = "an address is the caller's word")]
    pub(crate) fn at(address: usize, length: usize) -> Result<Self, Failure> {
        // SAFETY: the executor passes the memory of a tensor that it holds during the call, or whose storage it passes to
        // be held until the transfer has ended. It writes nothing there meanwhile without settling first; writes that it
        // cannot see it refuses afterwards, as autograd would.
        let lent = unsafe { LentBytes::new(address, length) };
        lent.map(Self).ok_or_else(missing)
    }
}

impl Written {
    /// So many bytes at an address.
    #[expect(unsafe_code, reason = "an address is the caller's word")]
    pub(crate) fn at(address: usize, length: usize) -> Result<Self, Failure> {
        // SAFETY: as for `Read`, and nobody else uses that memory before the call, or the transfer, has ended: it is of a
        // tensor that nobody has yet, of a parameter while its optimizer updates it, or the executor's own. No two
        // arguments of a call share memory.
        let lent = unsafe { LentBytesMut::new(address, length) };
        lent.map(Self).ok_or_else(missing)
    }
}

fn missing() -> Failure {
    "there is no memory at that address".into()
}

impl FromPyObject<'_, '_> for Read {
    type Error = Failure;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> Result<Self, Failure> {
        let (address, length) = object.extract()?;
        Self::at(address, length)
    }
}

impl FromPyObject<'_, '_> for Written {
    type Error = Failure;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> Result<Self, Failure> {
        let (address, length) = object.extract()?;
        Self::at(address, length)
    }
}

impl Deref for Read {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

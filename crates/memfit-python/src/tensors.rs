//! Memory of Python's tensors, lent by address and length: numbers in fewer bits, updates of an optimizer whose state is
//! in 8, and blocks of bytes in a file.
//!
//! Responsible for conversion, for the promise that comes with an address, and for holding a tensor's owner until a
//! transfer has ended. Not responsible for what is done there.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use memfit_memory::arena::host::{LentBytes, LentBytesMut};
use memfit_memory::forms::Form;
use memfit_memory::moments::{self, Adam, Moment, Momentum};
use memfit_memory::narrow;
use memfit_memory::store::{self, Statistics, StoreOptions};
use pyo3::prelude::*;
use serde::Deserialize;

use crate::errors::Failure;
use crate::functions::{functions, methods};
use crate::signals::waiting;
use crate::value::Value;

/// Memory to read: the argument `(address, bytes)`.
pub(crate) struct Read(LentBytes);

impl FromPyObject<'_, '_> for Read {
    type Error = Failure;

    #[expect(unsafe_code, reason = "an address is the caller's word")]
    fn extract(object: Borrowed<'_, '_, PyAny>) -> Result<Self, Failure> {
        let (address, length) = object.extract()?;
        // SAFETY: the executor passes the memory of a tensor that it holds during the call, or whose storage it passes to
        // be held until the transfer has ended. It writes nothing there meanwhile without settling first; writes that it
        // cannot see it refuses afterwards, as autograd would.
        Ok(Self(unsafe { LentBytes::new(address, length) }?))
    }
}

/// Memory to write to, likewise.
pub(crate) struct Written(LentBytesMut);

impl FromPyObject<'_, '_> for Written {
    type Error = Failure;

    #[expect(unsafe_code, reason = "an address is the caller's word")]
    fn extract(object: Borrowed<'_, '_, PyAny>) -> Result<Self, Failure> {
        let (address, length) = object.extract()?;
        // SAFETY: as for `Read`, and nothing else uses that memory before the call, or the transfer, has ended: it is
        // of a tensor that was not handed out yet, of a parameter while its optimizer updates it, or the executor's
        // own. No two arguments of a call share memory.
        Ok(Self(unsafe { LentBytesMut::new(address, length) }?))
    }
}

/// What an update is made of, with the seed of what rounds numbers where they are narrow.
#[derive(Deserialize)]
struct Seeded<R> {
    #[serde(flatten)]
    rule: R,
    seed: Option<u32>,
}

impl<R> Seeded<R> {
    fn form(&self) -> Form {
        self.seed.map_or(Form::Wide, Form::Half)
    }
}

functions! {
    free fn shrink_numbers(wide: Read, mut narrow: Written, threads: NonZeroUsize) -> () =
        narrow::shrink(wide.0.as_ref(), narrow.0.as_mut(), threads)?;
    free fn expand_numbers(narrow: Read, mut wide: Written, threads: NonZeroUsize) -> () =
        narrow::expand(narrow.0.as_ref(), wide.0.as_mut(), threads)?;
    free fn shrink_moment(is_second: bool, wide: Read, mut held: Written) -> () =
        moments::shrink(Moment::of(is_second), wide.0.as_ref(), held.0.as_mut())?;
    free fn expand_moment(is_second: bool, held: Read, mut wide: Written) -> () =
        moments::expand(Moment::of(is_second), held.0.as_ref(), wide.0.as_mut())?;

    #[pyo3(signature = (rule, parameter, gradient, first, second, threads, lower=None))]
    free fn update_by_adam(
        rule: Value<Seeded<Adam>>, mut parameter: Written, gradient: Read, mut first: Written,
        mut second: Written, threads: NonZeroUsize, mut lower: Option<Written>
    ) -> () = {
        let (rule, form) = (rule.0.rule, rule.0.form());
        let (parameter, lower) = (parameter.0.as_mut(), lower.as_mut().map(|lower| lower.0.as_mut()));
        let moments = [first.0.as_mut(), second.0.as_mut()];
        moments::update_by_adam(rule, form, parameter, lower, gradient.0.as_ref(), moments, threads)?;
    };

    #[pyo3(signature = (rule, parameter, gradient, held, threads, lower=None))]
    free fn update_by_momentum(
        rule: Value<Seeded<Momentum>>, mut parameter: Written, gradient: Read, mut held: Written,
        threads: NonZeroUsize, mut lower: Option<Written>
    ) -> () = {
        let (rule, form) = (rule.0.rule, rule.0.form());
        let (parameter, lower) = (parameter.0.as_mut(), lower.as_mut().map(|lower| lower.0.as_mut()));
        let (gradient, held) = (gradient.0.as_ref(), held.0.as_mut());
        moments::update_by_momentum(rule, form, parameter, lower, gradient, held, threads)?;
    };
}

/// Writes blocks of memory to a file without a name in a folder, and reads them back.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct Store(store::Store);

methods! { impl Store {
    #[pyo3(signature = (folder, window_bytes, *, drop_cache=false, allow_memory=false))]
    #[new]
    object fn new(folder: PathBuf, window_bytes: u64, drop_cache: bool, allow_memory: bool) -> Self = {
        let options = StoreOptions { window_bytes, drop_cache, allow_memory };
        Self(store::Store::create(&folder, options)?)
    };
    object fn write(&self, source: Read, owner: Py<PyAny>) -> StoredBlock = {
        let block = waiting(|stop| self.0.write(Box::new(source.0), stop))?;
        StoredBlock { block, owner: Mutex::new(Some(owner)) }
    };
    free fn statistics(&self) -> Statistics = self.0.statistics();
}}

/// A block of a store; dropping it forgets it, after the transfer under way.
// The block comes first: it is dropped first, and waits.
#[pyclass(frozen, module = "memfit._native")]
pub(crate) struct StoredBlock {
    block: store::StoredBlock,
    /// What keeps the memory of the transfer under way alive.
    owner: Mutex<Option<Py<PyAny>>>,
}

methods! { impl StoredBlock {
    free fn settle(&self) -> () = {
        waiting(|stop| self.block.settle(stop))?;
        self.hold(None);
    };
    free fn fetch(&self, mut target: Written) -> () = waiting(|stop| self.block.fetch(target.0.as_mut(), stop))?;
    free fn prefetch(&self, target: Written, owner: Py<PyAny>) -> () = {
        waiting(|stop| self.block.prefetch(Box::new(target.0), stop))?;
        self.hold(Some(owner));
    };
    free fn wait(&self) -> () = {
        waiting(|stop| self.block.wait(stop).map(drop))?;
        self.hold(None);
    };
    free fn forget(&self) -> () = {
        self.block.forget();
        self.hold(None);
    };
}}

impl StoredBlock {
    /// Holds an owner, and lets go of the one before when nothing is locked.
    fn hold(&self, mut owner: Option<Py<PyAny>>) {
        let mut held = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *held, &mut owner);
    }
}

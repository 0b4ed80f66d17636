//! Memory lent, stored and parked.
//!
//! Responsible for memory whose address stays while what is behind it goes and comes back ([`arena`]), for bytes that are
//! written to a file and read back ([`store`]), for numbers held in fewer bits ([`narrow`]), for an optimizer's state in
//! them and its updates ([`moments`]), for models that step aside ([`park`]) and for how short the host is of memory
//! ([`pressure`]). All unsafe code of memfit is here and in `memfit-guard`, but for the lines of the binding that lend
//! memory and take it from an arena.
//!
//! Not responsible for when any of it is done, nor for which tensors lie in the memory: the Python package and the
//! engine's pool decide. There is no command line here, and no torch.

pub mod arena;
mod blocks;
mod fastest;
pub mod forms;
pub mod moments;
pub mod narrow;
pub mod park;
pub mod pressure;
pub mod store;

//! Parking: a model's memory given back, and had back at the same address.
//!
//! Responsible for a model in the host's memory (`host/`) and for one on a CUDA device (`cuda/`). Not responsible for the
//! memory itself (`arena/`), nor for when to park (`python/memfit/pool`).

pub mod cuda;
pub mod host;

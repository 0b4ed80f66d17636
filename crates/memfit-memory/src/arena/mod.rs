//! Memory whose address stays while what is behind it goes and comes back.
//!
//! Responsible for it in the host's memory (`host/`) and on CUDA devices (`cuda/`). Not responsible for what lies in it,
//! nor for where that is kept meanwhile (`park/`).

pub mod cuda;
pub mod host;

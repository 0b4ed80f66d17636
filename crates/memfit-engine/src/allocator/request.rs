//! A request as it goes through the attempts to serve it.
//!
//! Responsible for the type. Not responsible for the attempts (`simulator.rs`, `private.rs`, `release.rs`).

/// A request on its way through the attempts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) block_bytes: u64,
    pub(super) segment_bytes: u64,
    pub(super) pool: u32,
    pub(super) stream: u32,
    pub(super) is_expandable: bool,
}

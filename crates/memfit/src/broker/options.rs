//! What a broker is started with.

use std::net::SocketAddr;
use std::path::PathBuf;

use memfit_engine::bytes::Bytes;

/// What a broker is started with.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Where to listen.
    pub(crate) socket: PathBuf,
    /// What to grant.
    pub(crate) devices: Vec<(String, Bytes)>,
    /// Where to answer Prometheus.
    pub(crate) metrics: Option<SocketAddr>,
    /// Whether to grant no more than is free, whichever process took the rest.
    pub(crate) only_free: bool,
    /// How long grants are held back after a restart for clients to come back.
    pub(crate) grace_ms: u64,
}

//! Leases as a process sees them: the way to the broker and what is said there.
//!
//! Responsible for the protocol, the socket and the client. Not responsible for granting (`broker/`).

pub mod amounts;
mod client;
mod error;
pub(crate) mod frame;
mod line;
pub mod protocol;
pub(crate) mod socket;
pub mod status;

pub use client::{Client, GoesOn, LeaseRequest, seconds};
pub use error::LeaseError;
pub use socket::{SocketError, VARIABLE, usual_path};

//! Leases as a process sees them: the way to the broker and what is said there.
//!
//! Responsible for the protocol, the socket and the client. Not responsible for granting (`broker/`).

pub mod amounts;
mod client;
pub(crate) mod frame;
mod line;
pub mod protocol;
pub(crate) mod socket;
pub mod status;

pub use client::{Client, GoesOn, LeaseError, LeaseRequest, seconds};
pub use socket::{SocketError, VARIABLE, usual_path};

use client::LOOK_UP;

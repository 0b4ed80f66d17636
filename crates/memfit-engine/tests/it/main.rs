//! The engine from the outside.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod explain;
mod hostile;
mod replay;
mod snapshot;

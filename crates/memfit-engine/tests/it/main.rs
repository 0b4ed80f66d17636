//! The engine from the outside.

mod explain;
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod hostile;
mod replay;
mod snapshot;

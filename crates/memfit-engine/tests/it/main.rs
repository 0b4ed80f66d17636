//! The engine from the outside.

mod hostile;
mod snapshot;

//! One memory, several users: leases among processes, and models that take turns within one.
//!
//! Responsible for nothing but holding the two machines together; neither knows the other.

pub mod lease;
pub mod pool;

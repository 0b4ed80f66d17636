//! Common GPUs and how much memory each has.
//!
//! Responsible for the table behind "what fits where". Memory as the vendors' datasheets state it, read
//! as GiB, which is what the cards report within one per cent. Not responsible for devices that are
//! present: the program asks those themselves.

use crate::bytes::Bytes;

/// A device model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub name: &'static str,
    /// Its memory.
    pub memory_bytes: Bytes,
}

/// What a process takes on a GPU besides tensors: the CUDA context and loaded kernels, 0.2 to 1 GB
/// (pytorch issues 28113 and 28394). The middle is charged.
pub const CONTEXT_BYTES: Bytes = Bytes(600 << 20);

const fn device(name: &'static str, gib: u64) -> Device {
    Device {
        name,
        memory_bytes: Bytes(gib << 30),
    }
}

/// Ascending by memory.
pub const TABLE: [Device; 13] = [
    device("RTX 4060", 8),
    device("RTX 3060", 12),
    device("T4", 16),
    device("V100", 16),
    device("A10", 24),
    device("L4", 24),
    device("RTX 4090", 24),
    device("RTX 5090", 32),
    device("A100 40 GB", 40),
    device("L40S", 48),
    device("A100 80 GB", 80),
    device("H100", 80),
    device("H200", 141),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_ascends() {
        assert!(TABLE.is_sorted_by_key(|device| device.memory_bytes));
    }
}

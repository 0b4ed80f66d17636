//! What this process holds of each device's memory by all of its arenas, open or not.
//!
//! Responsible for one sum a device, which PyTorch's statistics lack. Invariant: it is raised when the driver
//! has given memory and lowered when it has taken it back, so what it refuses to take back stays counted.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

static HELD: Mutex<BTreeMap<u32, u64>> = Mutex::new(BTreeMap::new());

/// Bytes of the device of that number.
#[must_use]
pub fn held_bytes(device: u32) -> u64 {
    let held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    held.get(&device).copied().unwrap_or(0)
}

pub(crate) fn taken(device: u32, bytes: u64) {
    change(device, |held| held.saturating_add(bytes));
}

pub(crate) fn given_back(device: u32, bytes: u64) {
    change(device, |held| held.saturating_sub(bytes));
}

fn change(device: u32, to: impl FnOnce(u64) -> u64) {
    // One addition: a panic with the lock held left a whole number.
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes = held.entry(device).or_default();
    *bytes = to(*bytes);
}

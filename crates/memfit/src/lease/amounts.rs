//! Bytes by device, as client and broker name them.

use std::collections::BTreeMap;

/// Bytes by device.
pub type Amounts = BTreeMap<String, u64>;

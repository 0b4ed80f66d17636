//! Bytes by device for the machine's slow twin: plain maps of wide integers, so that nothing can wrap.
//!
//! Responsible for the few sums and comparisons that the twin makes. The machine itself has [`Claims`].

use std::collections::BTreeMap;

use crate::bytes::Bytes;

use super::{Claims, Device};

pub(super) type Amounts = BTreeMap<usize, u128>;

pub(super) fn amounts(claims: &Claims) -> Amounts {
    claims
        .iter()
        .map(|(device, bytes)| (device.0, u128::from(bytes.0)))
        .collect()
}

pub(super) fn claims(amounts: &Amounts) -> Claims {
    let pairs = amounts.iter().map(|(&device, &bytes)| {
        (
            Device(device),
            Bytes(u64::try_from(bytes).expect("amounts in tests are small")),
        )
    });
    Claims::new(pairs).expect("a map names each device once")
}

pub(super) fn meet(one: &Amounts, other: &Amounts) -> bool {
    one.keys().any(|device| other.contains_key(device))
}

/// What `one` has above `other`.
pub(super) fn above(one: &Amounts, other: &Amounts) -> Amounts {
    let mut above = Amounts::new();
    for (&device, &bytes) in one {
        let below = other.get(&device).copied().unwrap_or(0);
        if bytes > below {
            above.insert(device, bytes - below);
        }
    }
    above
}

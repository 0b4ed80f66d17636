//! Any bytes as what a client and a broker say to each other: read or refused, never a panic, and what is read can
//! be said again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memfit::lease::protocol::{Reply, Request};

fuzz_target!(|data: &[u8]| {
    for line in data.split(|byte| *byte == b'\n') {
        if let Ok(request) = serde_json::from_slice::<Request>(line) {
            let said = serde_json::to_vec(&request).expect("what was read can be written");
            assert_eq!(serde_json::from_slice::<Request>(&said).ok(), Some(request));
        }
        if let Ok(reply) = serde_json::from_slice::<Reply>(line) {
            let _said = serde_json::to_vec(&reply).expect("what was read can be written");
        }
    }
});

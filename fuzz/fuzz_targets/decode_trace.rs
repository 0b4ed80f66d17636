//! Any bytes as a `.memfit` file: an error or a trace, never a panic.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memfit_engine::file::{decode, decode_plan, encode, peek_kind};

fuzz_target!(|data: &[u8]| {
    let _kind = peek_kind(data);
    let _plan = decode_plan(data);
    if let Ok(trace) = decode(data) {
        let again = decode(&encode(&trace)).expect("what was read can be written and read");
        assert_eq!(again, trace);
    }
});

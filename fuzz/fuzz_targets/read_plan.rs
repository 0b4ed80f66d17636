//! Any JSON as a plan: what is read is told in words and comes back as it was.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memfit_engine::plan::Plan;

fuzz_target!(|data: &[u8]| {
    let Ok(plan) = serde_json::from_slice::<Plan>(data) else {
        return;
    };
    let _text = memfit::of_plan(&plan);
    let written = serde_json::to_vec(&plan).expect("what was read can be written");
    let again: Plan = serde_json::from_slice(&written).expect("and read");
    assert_eq!(again, plan);
});

//! Any JSON as a trace: what passes the check can be predicted and planned without a panic.
//!
//! Without the compression of a file in the way, mutations reach the rules.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use memfit_engine::bytes::Budget;
use memfit_engine::cost::{CostSource, DeviceProfile};
use memfit_engine::plan::{PlanRequest, plan};
use memfit_engine::predict::{PredictRequest, predict};
use memfit_engine::trace::Trace;

fuzz_target!(|data: &[u8]| {
    let Ok(trace) = serde_json::from_slice::<Trace>(data) else {
        return;
    };
    if trace.check().is_err() {
        return;
    }
    let _prediction = predict(&trace, &PredictRequest::default());
    let profile = DeviceProfile {
        name: "fuzz".to_owned(),
        flops_per_second: BTreeMap::from([("float32".to_owned(), 1e11)]),
        bytes_per_second: 1e10,
        op_overhead_seconds: 1e-6,
        ..DeviceProfile::default()
    };
    let request = PlanRequest { budget: Budget::Percent(60.0), ..PlanRequest::default() };
    let _plan = plan(&trace, &CostSource::Roofline { profile }, &request);
});

//! Any JSON as costs: a step is planned by what is read, or the costs are refused.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use memfit_engine::bytes::Budget;
use memfit_engine::cost::CostSource;
use memfit_engine::plan::{PlanRequest, plan};
use memfit_engine::trace::Trace;

static STEP: LazyLock<Trace> = LazyLock::new(|| {
    let step = include_bytes!("../seeds/step.json");
    serde_json::from_slice(step).expect("a trace of this memfit")
});

fuzz_target!(|data: &[u8]| {
    let Ok(costs) = serde_json::from_slice::<CostSource>(data) else {
        return;
    };
    let request = PlanRequest { budget: Budget::Percent(60.0), ..PlanRequest::default() };
    let _plan = plan(&STEP, &costs, &request);
});

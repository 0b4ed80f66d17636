//! What the engine answers, and how the program says it.
//!
//! Responsible for conversion, as the rest of the binding.

use memfit_engine::bytes::{Budget, Bytes};
use memfit_engine::cost::{CostSource, DeviceProfile, devices};
use memfit_engine::explain::Explanation;
use memfit_engine::file::{self, FileKind};
use memfit_engine::plan::{self, Action, Front, Limit, Plan, PlanRequest};
use memfit_engine::predict::{PredictRequest, Prediction};
use memfit_engine::step::{self, EvaluationByHand, EvaluationRequest};
use memfit_engine::{placement, predict as prediction};
use serde_json::Value as Json;

use crate::functions::functions;
use crate::recordings::Trace;
use crate::value::Value;

functions! {
    free fn predict(trace: &Trace, request: Value<PredictRequest>) -> Prediction =
        prediction::predict(&trace.0, &request.0)?;
    free fn reserved_beside_model(trace: &Trace) -> Option<Bytes> =
        prediction::reserved_beside_model(&trace.0);
    #[pyo3(name = "plan", signature = (trace, costs, request, time_limit=None, work_limit=None))]
    free fn plan_step(
        trace: &Trace, costs: Value<CostSource>, request: Value<PlanRequest>, time_limit: Option<f64>,
        work_limit: Option<f64>
    ) -> Plan = memfit::within(time_limit, |limit| {
        plan::plan_within(&trace.0, &costs.0, &request.0, work_limit.map_or(limit, Limit::Work))
    })?;
    free fn evaluate(trace: &Trace, request: Value<EvaluationRequest>) -> EvaluationByHand =
        step::evaluate_by_hand(&trace.0, &request.0)?;
    free fn place(
        csv: &[u8], capacity: Option<u64>, alignment: u64, threads: usize, time_limit: Option<f64>
    ) -> (Vec<String>, placement::Answer) =
        memfit::place(csv, capacity, alignment, threads, time_limit)?;
    free fn prediction_text(prediction: Value<Prediction>) -> String = memfit::of_prediction(&prediction.0);
    free fn plan_text(plan: Value<Plan>) -> String = memfit::of_plan(&plan.0);
    free fn front_text(front: Value<Front>) -> String = memfit::of_front(&front.0);
    #[pyo3(signature = (front, svg=false))]
    free fn front_page(front: Value<Front>, svg: bool) -> String = memfit::page_of_front(&front.0, svg);
    free fn explanation_text(explanation: Value<Explanation>) -> String =
        memfit::of_explanation(&explanation.0);
    free fn track_text(json: &str) -> String = memfit::of_track(json)?;
    free fn oom_messages(text: &[u8], source: &str) -> Option<memfit::Answer> =
        memfit::oom_messages(text, source)?;
    free fn verification(
        plan: Value<Plan>, measured: Option<Value<Json>>, compiled: bool, capture_seconds: f64, plan_seconds: f64
    ) -> memfit::Answer = {
        let measured = measured.map(|it| it.0);
        memfit::verification(&plan.0, measured, compiled, capture_seconds, plan_seconds)?
    };
    free fn calibration(profile: Value<Json>, path: String) -> memfit::Answer =
        memfit::calibration(profile.0, path)?;
    free fn pruning(facts: Value<Json>) -> memfit::Answer = memfit::pruning(facts.0)?;
    free fn schema() -> Json = memfit::schema();
    free fn decode_plan(data: &[u8]) -> Plan = file::decode_plan(data)?;
    object fn encode_plan(plan: Value<Plan>) -> Vec<u8> = file::encode_plan(&plan.0);
    quick fn file_kind(data: &[u8]) -> FileKind = file::peek_kind(data)?;
    quick fn bytes_text(count: u64) -> String = Bytes(count).to_string();
    quick fn techniques() -> Vec<&'static str> =
        plan::TECHNIQUES.iter().map(|it| it.name).collect();
    quick fn effect(action: Value<Action>) -> String = action.0.summary().effect();
    quick fn gpu_profile(name: Option<&str>) -> DeviceProfile = devices::profile_of(name)?;
    quick fn context_bytes() -> Bytes = devices::CONTEXT_BYTES;
    quick fn check_profile(profile: Value<DeviceProfile>) -> () = profile.0.check()?;
    quick fn parse_budget(text: &str, unplanned_peak_bytes: u64) -> Bytes =
        Budget::parse(text)?.resolve(Bytes(unplanned_peak_bytes));
    quick fn check_step_budget(text: &str) -> () = Budget::of_step(text).map(drop)?;
}

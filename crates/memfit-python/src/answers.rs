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
use crate::trace::Trace;
use crate::value::{ByteString, Value};

functions! {
    /// Predicts a step.
    fn predict(trace: &Trace, request: Value<PredictRequest>) -> Prediction =
        prediction::predict(trace, &request)?;

    /// What the caching allocator takes for a step beside the model; none where there is no such allocator.
    fn reserved_beside_model(trace: &Trace) -> Option<Bytes> =
        prediction::reserved_beside_model(trace);

    /// Plans a step: in about so many seconds, or with the work of so many, if they are given.
    #[pyo3(name = "plan", signature = (trace, costs, request, time_limit=None, work_limit=None))]
    fn plan_step(
        trace: &Trace,
        costs: Value<CostSource>,
        request: Value<PlanRequest>,
        time_limit: Option<f64>,
        work_limit: Option<f64>
    ) -> Plan = memfit::within(time_limit, |limit| {
        plan::plan_within(trace, &costs, &request, work_limit.map_or(limit, Limit::Work))
    })?;

    /// Evaluates a step under treatments chosen by hand.
    fn evaluate(trace: &Trace, request: Value<EvaluationRequest>) -> EvaluationByHand =
        step::evaluate_by_hand(trace, &request)?;

    /// Places the allocations of a CSV: their names, and the placement.
    fn place(
        csv: &[u8], capacity: Option<u64>, alignment: u64, threads: usize, time_limit: Option<f64>
    ) -> (Vec<String>, placement::Answer) =
        memfit::place(csv, capacity, alignment, threads, time_limit)?;

    /// The text of a prediction.
    fn prediction_text(prediction: Value<Prediction>) -> String = memfit::of_prediction(&prediction);

    /// The text of a plan.
    fn plan_text(plan: Value<Plan>) -> String = memfit::of_plan(&plan);

    /// The text of a front.
    fn front_text(front: Value<Front>) -> String = memfit::of_front(&front);

    /// The page of a front, or with `svg` the plot alone.
    #[pyo3(signature = (front, svg=false))]
    fn front_page(front: Value<Front>, svg: bool) -> String = memfit::page_of_front(&front, svg);

    /// The text of an explanation.
    fn explanation_text(explanation: Value<Explanation>) -> String =
        memfit::of_explanation(&explanation);

    /// The text of a track's record, from its JSON.
    fn track_text(json: &str) -> String = memfit::of_track(json)?;

    /// What the OOM messages in a text decide: the document and the text; none where it holds none.
    fn oom_messages(text: &[u8], source: &str) -> Option<memfit::Answer> =
        memfit::oom_messages(text, source)?;

    /// The document and the text of a verification; `measured` is what real steps gave, none where nothing ran.
    fn verification(
        plan: Value<Plan>,
        measured: Option<Value<Json>>,
        compiled: bool,
        capture_seconds: f64,
        plan_seconds: f64
    ) -> memfit::Answer = {
        let measured = measured.map(|it| it.0);
        memfit::verification(&plan, measured, compiled, capture_seconds, plan_seconds)?
    };

    /// The document and the text of a calibration whose profile was written to `path`.
    fn calibration(profile: Value<Json>, path: String) -> memfit::Answer =
        memfit::calibration(profile.0, path)?;

    /// The document and the text of a pruned model.
    fn pruning(facts: Value<Json>) -> memfit::Answer = memfit::pruning(facts.0)?;

    /// The JSON Schema of every answer.
    fn schema() -> Json = memfit::schema();

    /// The plan that the bytes of a `.memfit` file hold.
    fn decode_plan(data: &[u8]) -> Plan = file::decode_plan(data)?;

    /// A plan as the bytes of a `.memfit` file.
    fn encode_plan(plan: Value<Plan>) -> ByteString = ByteString(file::encode_plan(&plan));

    /// What the bytes of a `.memfit` file hold: `trace` or `plan`.
    quick fn file_kind(data: &[u8]) -> FileKind = file::peek_kind(data)?;

    /// Bytes as the reports write them, `1.5 GiB`.
    quick fn bytes_text(count: u64) -> String = Bytes(count).to_string();

    /// The names of all techniques.
    quick fn techniques() -> Vec<&'static str> =
        plan::TECHNIQUES.iter().map(|it| it.name).collect();

    /// What an action of a plan does, in the words of the reports.
    quick fn effect(action: Value<Action>) -> String = action.summary().effect();

    /// The datasheet of a GPU as a device profile; without a name, of the one that stands in.
    quick fn gpu_profile(name: Option<&str>) -> DeviceProfile = devices::profile_of(name)?;

    /// What a process takes on a GPU besides tensors, as predictions have it.
    quick fn context_bytes() -> Bytes = devices::CONTEXT_BYTES;

    /// Checks that a device profile can be used.
    quick fn check_profile(profile: Value<DeviceProfile>) -> () = profile.check()?;

    /// A budget as written, in bytes.
    quick fn parse_budget(text: &str, unplanned_peak_bytes: u64) -> Bytes =
        Budget::parse(text)?.resolve(Bytes(unplanned_peak_bytes));

    /// Checks that a text is the budget of a step.
    quick fn check_step_budget(text: &str) -> () = Budget::of_step(text).map(drop)?;
}

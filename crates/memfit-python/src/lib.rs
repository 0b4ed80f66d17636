//! The binding: module `memfit._native`.
//!
//! Responsible for conversion and error mapping, nothing else: no decision about memory is made here.
//! Answers and requests cross as values (`value.rs`), traces as JSON text or encoded files, so that neither side holds
//! the other's objects. The interpreter is released around every call into the engine.

#![expect(
    clippy::needless_pass_by_value,
    reason = "what Python passes is made anew for the call"
)]

mod budget;
mod counting;
mod host;
mod leases;
mod looking;
mod moments;
mod narrow;
mod offload;
mod parameters;
mod parking;
mod parking_cuda;
mod planning;
mod pool;
mod signals;
mod value;

use pyo3::import_exception;
use pyo3::prelude::*;

import_exception!(memfit.errors, BudgetError);
import_exception!(memfit.errors, CaptureError);
import_exception!(memfit.errors, LeaseError);
import_exception!(memfit.errors, OffloadError);
import_exception!(memfit.errors, ParkError);
import_exception!(memfit.errors, SnapshotError);
import_exception!(memfit.errors, TraceFileError);
import_exception!(memfit.errors, UsageError);

fn usage(error: impl std::fmt::Display) -> PyErr {
    UsageError::new_err(error.to_string())
}

fn no_budget(error: impl std::fmt::Display) -> PyErr {
    BudgetError::new_err(error.to_string())
}

/// The native half of memfit; private to the `memfit` package.
#[pymodule]
mod _native {
    use std::ffi::OsString;
    use std::fmt::Display;
    use std::fs::File;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use memfit_engine::bytes::{Budget, Bytes};
    use memfit_engine::cost::devices;
    use memfit_engine::cost::{CostSource, DeviceProfile};
    use memfit_engine::explain::{self, Explanation};
    use memfit_engine::file;
    use memfit_engine::placement::{self, Goal};
    use memfit_engine::plan::{self, Class, Front, Limit, Plan, PlanRequest};
    use memfit_engine::predict::{self, PredictRequest, Prediction};
    use memfit_engine::prune;
    use memfit_engine::snapshot;
    use memfit_engine::step::{self, EvaluationByHand, EvaluationRequest};
    use memfit_engine::trace;
    use pyo3::prelude::*;
    use pyo3::types::PyBytes;
    use serde::Serialize;

    #[pymodule_export]
    use super::budget::{
        AllocationBudget, forget_refusal, last_refusal, refusals, release_kept, resident_bytes,
        taken_bytes,
    };
    #[pymodule_export]
    use super::counting::{
        AllocationWindow, block_event, count_allocations, counted_bytes, is_counted, label_blocks,
        label_gone_blocks, last_event, mark_allocations, refused_bytes, seed_blocks, survivors,
        uncounted_blocks,
    };
    use super::host::PythonHost;
    #[pymodule_export]
    use super::leases::{LeaseClient, broker_path, context_bytes, gpu_memory, rooms};
    #[pymodule_export]
    use super::looking::{alarm_event, on_alarm, set_alarm, switch_alarm_off};
    #[pymodule_export]
    use super::moments::{expand_moment, shrink_moment, update_by_adam, update_by_momentum};
    #[pymodule_export]
    use super::narrow::{expand_numbers, shrink_numbers};
    #[pymodule_export]
    use super::offload::{Store, StoredBlock};
    #[pymodule_export]
    use super::parameters::Room;
    #[pymodule_export]
    use super::parking::ParkedMemory;
    #[pymodule_export]
    use super::parking_cuda::{ParkedCudaMemory, half_of_free_host_bytes, held_cuda_bytes};
    #[pymodule_export]
    use super::planning::PlanSession;
    use super::planning::within;
    #[pymodule_export]
    use super::pool::PoolMachine;
    use super::value::Value;
    use super::{CaptureError, SnapshotError, TraceFileError, no_budget, usage};

    /// A step in another way: which, its trace as JSON, and the trace at another batch size if there is one.
    type InWay = (Value<trace::Way>, Vec<u8>, Option<Vec<u8>>);

    /// One recorded step, checked.
    #[pyclass(frozen, module = "memfit._native")]
    pub(crate) struct Trace(pub(crate) Arc<trace::Trace>);

    impl From<trace::Trace> for Trace {
        fn from(trace: trace::Trace) -> Self {
            Self(Arc::new(trace))
        }
    }

    #[pymethods]
    impl Trace {
        /// Makes a trace from its JSON; `second` is the same step at another batch size, `batch` the
        /// batch size wanted if it is neither.
        #[staticmethod]
        #[pyo3(signature = (json, second=None, batch=0))]
        fn from_json(
            py: Python<'_>,
            json: &[u8],
            second: Option<&[u8]>,
            batch: u64,
        ) -> PyResult<Self> {
            let trace = py.detach(|| captured(json, second, batch));
            trace.map(Self::from)
        }

        /// Reads an encoded trace.
        #[staticmethod]
        fn decode(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
            let trace = py.detach(|| file::decode(data));
            trace.map(Self::from).map_err(no_file)
        }

        /// The trace as the bytes of a `.memfit` file.
        fn encode<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
            PyBytes::new(py, &py.detach(|| file::encode(&self.0)))
        }

        /// The trace as JSON.
        fn json(&self, py: Python<'_>) -> PyResult<String> {
            py.detach(|| to_json(&*self.0))
        }

        /// The step at other sizes of its input, learnt from other recordings: `sizes` are those of each of them and,
        /// last, of this.
        fn at_sizes(
            &self,
            py: Python<'_>,
            others: Vec<PyRef<'_, Self>>,
            sizes: Vec<Vec<u64>>,
            wanted: Vec<u64>,
        ) -> PyResult<Self> {
            let others: Vec<&trace::Trace> = others.iter().map(|other| &*other.0).collect();
            let sizes: Vec<&[u64]> = sizes.iter().map(Vec::as_slice).collect();
            let found = py.detach(|| self.0.at_sizes(&others, &sizes, &wanted));
            found.map(Self::from).map_err(usage)
        }

        /// Why a forward does not treat the items of its batch apart; nothing where it does.
        fn mixed_items(&self, py: Python<'_>) -> Option<String> {
            py.detach(|| plan::mixed_items(&self.0))
        }

        /// The ways that are worth a capture where all is allowed that needs no leave: in slices.
        fn ways(&self, py: Python<'_>) -> Value<Vec<trace::Way>> {
            let widest = PlanRequest {
                allow: Class::Equivalent,
                ..PlanRequest::default()
            };
            Value(py.detach(|| plan::ways(&self.0, &widest, None)))
        }

        /// The trace with the step in other ways, and why there are no more.
        fn with_alternatives(
            &self,
            py: Python<'_>,
            steps: Vec<InWay>,
            refusals: Value<trace::Refusals>,
        ) -> PyResult<Self> {
            let whole = py.detach(|| {
                let steps = steps.into_iter().map(|(way, first, second)| {
                    let trace = captured(&first, second.as_deref(), self.0.meta.batch)?;
                    Ok(trace::Alternative { way: way.0, trace })
                });
                let alternatives = trace::Alternatives {
                    steps: steps.collect::<PyResult<_>>()?,
                    refusals: refusals.0,
                };
                let whole = self.0.with_alternatives(alternatives);
                whole.map_err(|error| {
                    CaptureError::new_err(format!("the step in another way is not valid: {error}"))
                })
            });
            whole.map(Self::from)
        }

        /// The trace with what ops take on a piece of the batch, in the way that was asked for; as it is where the step
        /// runs other ops there.
        fn with_piece(
            &self,
            py: Python<'_>,
            way: Value<trace::Way>,
            piece: &[u8],
        ) -> PyResult<Self> {
            let made = py.detach(|| {
                let recorded = checked_trace(piece)?;
                Ok::<_, PyErr>(self.0.with_piece(&way.0, &recorded))
            });
            Ok(made?.unwrap_or_else(|_| (*self.0).clone()).into())
        }

        /// The trace as `memfit show` prints it.
        fn text(&self, py: Python<'_>) -> String {
            py.detach(|| memfit::of_trace(&self.0))
        }
    }

    /// What of a step's model can be pruned.
    #[pyclass(frozen, module = "memfit._native")]
    struct Separation {
        trace: Arc<trace::Trace>,
        found: prune::Separation,
    }

    #[pymethods]
    impl Separation {
        /// Finds the groups of channels in a step.
        #[staticmethod]
        fn of(py: Python<'_>, trace: &Trace, request: Value<prune::Request>) -> Self {
            let trace = Arc::clone(&trace.0);
            let found = py.detach(|| prune::separate(&trace, &request.0));
            Self { trace, found }
        }

        /// The groups.
        fn groups(&self) -> Value<Vec<prune::Group>> {
            Value(self.found.groups.clone())
        }

        /// What stays, and why.
        fn stays(&self) -> Value<Vec<prune::Stay>> {
            Value(self.found.stays.clone())
        }

        /// The first op of the forward that is not as meant in the step of the pruned model; `removed` has for each
        /// group the channels that are gone.
        fn deviation(
            &self,
            py: Python<'_>,
            removed: Vec<Vec<usize>>,
            again: &Trace,
        ) -> Option<usize> {
            py.detach(|| self.found.deviation(&self.trace, &removed, &again.0))
        }
    }

    /// A CUDA memory snapshot, as columns.
    #[pyclass(frozen, module = "memfit._native")]
    struct Snapshot(snapshot::Snapshot);

    #[pymethods]
    impl Snapshot {
        /// Reads a snapshot from the bytes of its pickle, gzip'ed or not.
        #[staticmethod]
        fn decode(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
            let snapshot = py.detach(|| snapshot::read_bytes(data));
            snapshot.map(Self).map_err(no_snapshot)
        }

        /// Reads a snapshot from a file, without holding the file.
        #[staticmethod]
        fn read(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
            py.detach(|| {
                let snapshot = snapshot::read(File::open(path)?, snapshot::ReadOptions::default());
                snapshot.map(Self).map_err(no_snapshot)
            })
        }

        /// The snapshot as JSON, column by column.
        fn json(&self, py: Python<'_>) -> PyResult<String> {
            py.detach(|| to_json(&self.0))
        }

        /// Explains the snapshot; `before` is an earlier one with its name.
        #[pyo3(signature = (source, before=None, steps=None, device_memory_bytes=None))]
        fn explain(
            &self,
            py: Python<'_>,
            source: &str,
            before: Option<(String, PyRef<'_, Snapshot>)>,
            steps: Option<u64>,
            device_memory_bytes: Option<u64>,
        ) -> Value<Explanation> {
            let before = before.as_ref();
            let request = explain::Request {
                source,
                before: before.map(|(name, before)| (name.as_str(), &before.0)),
                steps,
                device_memory: device_memory_bytes.map(Bytes),
            };
            Value(py.detach(|| explain::explain(&self.0, &request)))
        }

        /// Runs the requests again under other allocator settings: the document and the text.
        fn replay(
            &self,
            py: Python<'_>,
            source: String,
            settings: &str,
            device_memory_bytes: Option<u64>,
        ) -> PyResult<Value<memfit::Answer>> {
            let memory = device_memory_bytes.map(Bytes);
            let answer = py.detach(|| memfit::replay(&self.0, source, settings, memory));
            answer.map(Value).map_err(usage)
        }
    }

    /// Predicts a step.
    #[pyfunction]
    #[pyo3(name = "predict")]
    fn predict_step(
        py: Python<'_>,
        trace: &Trace,
        request: Value<PredictRequest>,
    ) -> PyResult<Value<Prediction>> {
        let prediction = py.detach(|| predict::predict(&trace.0, &request.0));
        prediction.map(Value).map_err(usage)
    }

    /// What the caching allocator takes for a step beside the model; none where there is no such allocator.
    #[pyfunction]
    fn reserved_beside_model(py: Python<'_>, trace: &Trace) -> Option<u64> {
        py.detach(|| predict::reserved_beside_model(&trace.0))
            .map(|bytes| bytes.0)
    }

    /// Plans a step: in about so many seconds, or with the work of so many, if they are given.
    #[pyfunction]
    #[pyo3(name = "plan", signature = (trace, costs, request, time_limit=None, work_limit=None))]
    fn plan_step(
        py: Python<'_>,
        trace: &Trace,
        costs: Value<CostSource>,
        request: Value<PlanRequest>,
        time_limit: Option<f64>,
        work_limit: Option<f64>,
    ) -> PyResult<Value<Plan>> {
        let plan = py.detach(|| {
            within(time_limit, |limit| {
                let limit = work_limit.map_or(limit, Limit::Work);
                plan::plan_within(&trace.0, &costs.0, &request.0, limit)
            })
        });
        plan.map(Value).map_err(usage)
    }

    /// Places the allocations of a CSV: their names, and the placement.
    #[pyfunction]
    fn place(
        py: Python<'_>,
        csv: &[u8],
        capacity: Option<u64>,
        alignment: u64,
        threads: usize,
        time_limit: Option<f64>,
    ) -> PyResult<Value<(Vec<String>, placement::Answer)>> {
        let limit = time_limit.map(Duration::try_from_secs_f64);
        let limit = limit.transpose().map_err(usage)?;
        py.detach(|| {
            let table = placement::csv::parse(csv, alignment).map_err(usage)?;
            let request = placement::Request {
                threads,
                ..placement::Request::new(capacity.map_or(Goal::Lowest, Goal::Within))
            };
            let start = Instant::now();
            let stop = || limit.is_some_and(|limit| start.elapsed() >= limit);
            let answer = placement::place(&table.problem, &request, &stop);
            let answer = answer.map_err(usage)?;
            Ok(Value((table.ids, answer)))
        })
    }

    /// Evaluates a step under treatments chosen by hand.
    #[pyfunction]
    fn evaluate(
        py: Python<'_>,
        trace: &Trace,
        request: Value<EvaluationRequest>,
    ) -> PyResult<Value<EvaluationByHand>> {
        let evaluation = py.detach(|| step::evaluate_by_hand(&trace.0, &request.0));
        evaluation.map(Value).map_err(usage)
    }

    /// The text of a prediction.
    #[pyfunction]
    fn prediction_text(py: Python<'_>, prediction: Value<Prediction>) -> String {
        py.detach(|| memfit::of_prediction(&prediction.0))
    }

    /// What the OOM messages in a text decide: the document and the text; none where it holds none.
    #[pyfunction]
    fn oom_messages(
        py: Python<'_>,
        text: &[u8],
        source: &str,
    ) -> PyResult<Option<Value<memfit::Answer>>> {
        let answer = py.detach(|| memfit::oom_messages(text, source));
        answer.map(|it| it.map(Value)).map_err(usage)
    }

    /// The text of an explanation.
    #[pyfunction]
    fn explanation_text(py: Python<'_>, explanation: Value<Explanation>) -> String {
        py.detach(|| memfit::of_explanation(&explanation.0))
    }

    /// The text of a track's record, from its JSON.
    #[pyfunction]
    fn track_text(py: Python<'_>, json: &str) -> PyResult<String> {
        py.detach(|| memfit::of_track(json))
            .map_err(|error| usage(format!("the record is not valid: {error}")))
    }

    /// The document and the text of a verification; `measured` is what real steps gave, none where nothing ran.
    #[pyfunction]
    fn verification(
        plan: Value<Plan>,
        measured: Option<Value<serde_json::Value>>,
        compiled: bool,
        capture_seconds: f64,
        plan_seconds: f64,
    ) -> PyResult<Value<memfit::Answer>> {
        let measured = measured.map(|measured| measured.0);
        let answer =
            memfit::verification(&plan.0, measured, compiled, capture_seconds, plan_seconds);
        answer.map(Value).map_err(usage)
    }

    /// The document and the text of a calibration whose profile was written to `path`.
    #[pyfunction]
    fn calibration(
        profile: Value<serde_json::Value>,
        path: String,
    ) -> PyResult<Value<memfit::Answer>> {
        memfit::calibration(profile.0, path)
            .map(Value)
            .map_err(usage)
    }

    /// The document and the text of a pruned model.
    #[pyfunction]
    fn pruning(facts: Value<serde_json::Value>) -> PyResult<Value<memfit::Answer>> {
        memfit::pruning(facts.0).map(Value).map_err(usage)
    }

    /// The JSON Schema of every answer.
    #[pyfunction]
    fn schema() -> Value<serde_json::Value> {
        Value(memfit::schema())
    }

    /// Bytes as the reports write them, `1.5 GiB`.
    #[pyfunction]
    fn bytes_text(count: u64) -> String {
        Bytes(count).to_string()
    }

    /// The names of all techniques.
    #[pyfunction]
    fn techniques() -> Vec<&'static str> {
        plan::TECHNIQUES.iter().map(|it| it.name).collect()
    }

    /// What an action of a plan does, in the words of the reports.
    #[pyfunction]
    fn effect(action: Value<plan::Action>) -> String {
        action.0.summary().effect()
    }

    /// The text of a plan.
    #[pyfunction]
    fn plan_text(py: Python<'_>, plan: Value<Plan>) -> String {
        py.detach(|| memfit::of_plan(&plan.0))
    }

    /// The text of a front.
    #[pyfunction]
    fn front_text(py: Python<'_>, front: Value<Front>) -> String {
        py.detach(|| memfit::of_front(&front.0))
    }

    /// The page of a front, or with `svg` the plot alone.
    #[pyfunction]
    #[pyo3(signature = (front, svg=false))]
    fn front_page(py: Python<'_>, front: Value<Front>, svg: bool) -> String {
        py.detach(|| memfit::page_of_front(&front.0, svg))
    }

    /// The plan that the bytes of a `.memfit` file hold.
    #[pyfunction]
    fn decode_plan(py: Python<'_>, data: &[u8]) -> PyResult<Value<Plan>> {
        let plan = py.detach(|| file::decode_plan(data));
        plan.map(Value).map_err(no_file)
    }

    /// A plan as the bytes of a `.memfit` file.
    #[pyfunction]
    fn encode_plan(py: Python<'_>, plan: Value<Plan>) -> Bound<'_, PyBytes> {
        PyBytes::new(py, &py.detach(|| file::encode_plan(&plan.0)))
    }

    /// What the bytes of a `.memfit` file hold: `trace` or `plan`.
    #[pyfunction]
    fn file_kind(data: &[u8]) -> PyResult<&'static str> {
        match file::peek_kind(data).map_err(no_file)? {
            file::FileKind::Trace => Ok("trace"),
            file::FileKind::Plan => Ok("plan"),
        }
    }

    /// The datasheet of a GPU as a device profile; without a name, of the one that stands in.
    #[pyfunction]
    fn gpu_profile(name: Option<&str>) -> PyResult<Value<DeviceProfile>> {
        let Some(name) = name else {
            return Ok(Value(devices::stand_in()));
        };
        let device = devices::find(name).map_err(usage)?;
        Ok(Value(device.profile()))
    }

    /// Checks that a device profile can be used.
    #[pyfunction]
    fn check_profile(profile: Value<DeviceProfile>) -> PyResult<()> {
        profile.0.check().map_err(usage)
    }

    /// A budget as written, in bytes.
    #[pyfunction]
    fn parse_budget(text: &str, unplanned_peak_bytes: u64) -> PyResult<u64> {
        let budget = Budget::parse(text).map_err(no_budget)?;
        Ok(budget.resolve(Bytes(unplanned_peak_bytes)).0)
    }

    /// Checks that a text is the budget of a step.
    #[pyfunction]
    fn check_step_budget(text: &str) -> PyResult<()> {
        Budget::of_step(text).map(drop).map_err(no_budget)
    }

    /// Runs the program with `argv` and returns its exit code.
    #[pyfunction]
    fn run(py: Python<'_>, argv: Vec<OsString>, host: Py<PyAny>) -> u8 {
        py.detach(|| {
            let mut host = PythonHost::new(host);
            let (mut stdout, mut stderr) = (std::io::stdout(), std::io::stderr());
            let streams = memfit::Streams::process(&mut stdout, &mut stderr);
            memfit::run(argv, &mut host, streams)
        })
    }

    fn captured(first: &[u8], second: Option<&[u8]>, batch: u64) -> PyResult<trace::Trace> {
        let first = checked_trace(first)?;
        let second = second.map(checked_trace).transpose()?;
        Ok(trace::Trace::from_captures(first, second.as_ref(), batch))
    }

    fn checked_trace(json: &[u8]) -> PyResult<trace::Trace> {
        let trace: trace::Trace = serde_json::from_slice(json).map_err(no_trace)?;
        trace.check().map_err(no_trace)?;
        Ok(trace)
    }

    fn no_trace(error: impl Display) -> PyErr {
        CaptureError::new_err(format!("the trace is not valid: {error}"))
    }

    fn no_file(error: file::FileError) -> PyErr {
        TraceFileError::new_err(error.to_string())
    }

    fn no_snapshot(error: impl Display) -> PyErr {
        SnapshotError::new_err(error.to_string())
    }

    fn to_json<T: Serialize>(value: &T) -> PyResult<String> {
        serde_json::to_string(value).map_err(|error| usage(format!("cannot write JSON: {error}")))
    }
}

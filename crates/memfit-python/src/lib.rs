//! The binding: module `memfit._native`.
//!
//! Responsible for conversion and error mapping, nothing else: no decision about memory is made here.
//! Values cross as JSON text or encoded files, so that neither side holds the other's objects. The
//! interpreter is released around every call into the engine.

mod budget;
mod counting;
mod evaluation;
mod host;
mod leases;
mod offload;
mod parameters;
mod parking;
mod parking_cuda;
mod planning;
mod pool;

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

/// The native half of memfit; private to the `memfit` package.
#[pymodule]
mod _native {
    use std::ffi::OsString;
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
    use memfit_engine::plan::{self, Front, Plan, PlanError, PlanRequest, TimeLimit};
    use memfit_engine::predict::{self, PredictRequest, Prediction};
    use memfit_engine::snapshot;
    use memfit_engine::trace;
    use pyo3::prelude::*;
    use pyo3::types::PyBytes;
    use serde::de::DeserializeOwned;
    use serde::{Deserialize, Serialize};

    #[pymodule_export]
    use super::budget::{
        AllocationBudget, forget_refusal, last_refusal, refusals, release_kept, resident_bytes,
        taken_bytes,
    };
    #[pymodule_export]
    use super::counting::{
        AllocationWindow, count_allocations, counted_bytes, label_blocks, mark_allocations,
        refused_bytes, seed_blocks, uncounted_blocks,
    };
    #[pymodule_export]
    use super::evaluation::evaluate_json;
    use super::host::PythonHost;
    #[pymodule_export]
    use super::leases::{LeaseClient, broker_path, context_bytes, gpu_memory, rooms};
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
    #[pymodule_export]
    use super::pool::PoolMachine;
    use super::{BudgetError, CaptureError, SnapshotError, TraceFileError, UsageError};

    /// One recorded step, checked.
    #[pyclass(frozen, module = "memfit._native")]
    pub(crate) struct Trace {
        trace: Arc<trace::Trace>,
    }

    impl Trace {
        /// The trace, for other files of the binding.
        pub(crate) fn shared(&self) -> Arc<trace::Trace> {
            Arc::clone(&self.trace)
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
            let trace = py.detach(|| {
                let first = checked_trace(json)?;
                let second = second.map(checked_trace).transpose()?;
                PyResult::Ok(trace::Trace::from_captures(first, second.as_ref(), batch))
            })?;
            Ok(Self {
                trace: Arc::new(trace),
            })
        }

        /// Reads an encoded trace.
        #[staticmethod]
        fn decode(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
            let trace = py
                .detach(|| file::decode(data))
                .map_err(|error| file_error(&error))?;
            Ok(Self {
                trace: Arc::new(trace),
            })
        }

        /// The trace as the bytes of a `.memfit` file.
        fn encode<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
            PyBytes::new(py, &py.detach(|| file::encode(&self.trace)))
        }

        /// The trace as JSON.
        fn json(&self, py: Python<'_>) -> PyResult<String> {
            py.detach(|| to_json(&*self.trace))
        }

        /// What of the step is worth a capture in slices, as a JSON list.
        fn chunks(&self, py: Python<'_>) -> PyResult<String> {
            py.detach(|| to_json(&plan::chunks(&self.trace).unwrap_or_default()))
        }

        /// The trace with the step in slices: each a chunk as JSON, its trace as JSON, and the trace at
        /// another batch size if there is one. `refusal` says why there are no more.
        fn with_alternatives(
            &self,
            py: Python<'_>,
            steps: Vec<(String, Vec<u8>, Option<Vec<u8>>)>,
            refusal: String,
        ) -> PyResult<Self> {
            let trace = py.detach(|| {
                let steps = steps.into_iter().map(|(chunk, first, second)| {
                    let first = checked_trace(&first)?;
                    let second = second.as_deref().map(checked_trace).transpose()?;
                    let batch = self.trace.meta.batch;
                    Ok(trace::Alternative {
                        chunk: from_json("chunk", &chunk)?,
                        trace: trace::Trace::from_captures(first, second.as_ref(), batch),
                    })
                });
                let steps = steps.collect::<PyResult<Vec<_>>>()?;
                let alternatives = Some(trace::Alternatives { steps, refusal });
                let whole = trace::Trace {
                    alternatives,
                    ..self.trace.alone()
                };
                whole.check().map_err(|error| {
                    CaptureError::new_err(format!("the step in slices is not valid: {error}"))
                })?;
                PyResult::Ok(whole)
            })?;
            Ok(Self {
                trace: Arc::new(trace),
            })
        }

        /// The trace as `memfit show` prints it.
        fn text(&self, py: Python<'_>) -> String {
            py.detach(|| memfit::of_trace(&self.trace))
        }
    }

    /// A CUDA memory snapshot, as columns.
    #[pyclass(frozen, module = "memfit._native")]
    struct Snapshot {
        snapshot: Arc<snapshot::Snapshot>,
    }

    #[pymethods]
    impl Snapshot {
        /// Reads a snapshot from the bytes of its pickle, gzip'ed or not.
        #[staticmethod]
        fn decode(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
            let snapshot = py
                .detach(|| snapshot::read_bytes(data))
                .map_err(|error| SnapshotError::new_err(error.to_string()))?;
            Ok(Self {
                snapshot: Arc::new(snapshot),
            })
        }

        /// Reads a snapshot from a file, without holding the file.
        #[staticmethod]
        fn read(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
            let snapshot = py.detach(|| {
                let options = snapshot::ReadOptions::default();
                let read = snapshot::read(File::open(path)?, options);
                read.map_err(|error| SnapshotError::new_err(error.to_string()))
            })?;
            Ok(Self {
                snapshot: Arc::new(snapshot),
            })
        }

        /// The snapshot as JSON, column by column.
        fn json(&self, py: Python<'_>) -> PyResult<String> {
            py.detach(|| to_json(&*self.snapshot))
        }

        /// Explains the snapshot, as JSON; `before` is an earlier one with its name.
        #[pyo3(signature = (source, before=None, steps=None, device_memory_bytes=None))]
        fn explain(
            &self,
            py: Python<'_>,
            source: &str,
            before: Option<(String, PyRef<'_, Snapshot>)>,
            steps: Option<u64>,
            device_memory_bytes: Option<u64>,
        ) -> PyResult<String> {
            let before = before.map(|(name, before)| (name, Arc::clone(&before.snapshot)));
            py.detach(|| {
                let before = before.as_ref();
                let request = explain::Request {
                    source,
                    before: before.map(|(name, before)| (name.as_str(), &**before)),
                    steps,
                    device_memory: device_memory_bytes.map(Bytes),
                };
                to_json(&explain::explain(&self.snapshot, &request))
            })
        }
    }

    /// Predicts a step; takes and returns JSON.
    #[pyfunction]
    #[pyo3(name = "predict")]
    fn predict_json(py: Python<'_>, trace: &Trace, request_json: &str) -> PyResult<String> {
        let request: PredictRequest = request_from_json(request_json)?;
        let trace = Arc::clone(&trace.trace);
        py.detach(|| {
            let prediction = predict::predict(&trace, &request)
                .map_err(|error| UsageError::new_err(error.to_string()))?;
            to_json(&prediction)
        })
    }

    /// What the caching allocator takes for a step beside the model; none where there is no such allocator.
    #[pyfunction]
    fn reserved_beside_model(py: Python<'_>, trace: &Trace) -> Option<u64> {
        let trace = Arc::clone(&trace.trace);
        py.detach(|| predict::reserved_beside_model(&trace))
            .map(|bytes| bytes.0)
    }

    /// Plans a step, in about so many seconds if they are given; takes and returns JSON.
    #[pyfunction]
    #[pyo3(name = "plan", signature = (trace, costs_json, request_json, time_limit=None))]
    fn plan_json(
        py: Python<'_>,
        trace: &Trace,
        costs_json: &str,
        request_json: &str,
        time_limit: Option<f64>,
    ) -> PyResult<String> {
        let costs: CostSource = from_json("costs", costs_json)?;
        let request: PlanRequest = request_from_json(request_json)?;
        let trace = Arc::clone(&trace.trace);
        py.detach(|| {
            let began = Instant::now();
            let elapsed = || began.elapsed().as_secs_f64();
            let limit = time_limit.map(|seconds| TimeLimit {
                seconds,
                elapsed: &elapsed,
            });
            let plan = plan::plan_within(&trace, &costs, &request, limit);
            to_json(&plan.map_err(|error| plan_error(&error))?)
        })
    }

    /// Places the allocations of a CSV; returns JSON.
    #[pyfunction]
    #[pyo3(name = "place", signature = (csv, capacity, alignment, threads, time_limit))]
    fn place_json(
        py: Python<'_>,
        csv: &[u8],
        capacity: Option<u64>,
        alignment: u64,
        threads: usize,
        time_limit: Option<f64>,
    ) -> PyResult<String> {
        let usage = |error: &dyn std::fmt::Display| UsageError::new_err(error.to_string());
        let limit = time_limit.map(Duration::try_from_secs_f64);
        let limit = limit.transpose().map_err(|error| usage(&error))?;
        py.detach(|| {
            let table = placement::csv::parse(csv, alignment).map_err(|error| usage(&error))?;
            let request = placement::Request {
                threads,
                ..placement::Request::new(capacity.map_or(Goal::Lowest, Goal::Within))
            };
            let start = Instant::now();
            let stop = || limit.is_some_and(|limit| start.elapsed() >= limit);
            let answer = placement::place(&table.problem, &request, &stop);
            let answer = answer.map_err(|error| usage(&error))?;
            to_json(&(table.ids, answer))
        })
    }

    /// The text of a prediction, from its JSON.
    #[pyfunction]
    fn prediction_text(py: Python<'_>, json: &str) -> PyResult<String> {
        let prediction: Prediction = from_json("prediction", json)?;
        Ok(py.detach(|| memfit::of_prediction(&prediction)))
    }

    /// The text of an explanation, from its JSON.
    #[pyfunction]
    fn explanation_text(py: Python<'_>, json: &str) -> PyResult<String> {
        let explanation: Explanation = from_json("explanation", json)?;
        Ok(py.detach(|| memfit::of_explanation(&explanation)))
    }

    /// The text of a track's record, from its JSON.
    #[pyfunction]
    fn track_text(py: Python<'_>, json: &str) -> PyResult<String> {
        py.detach(|| memfit::of_track(json))
            .map_err(|error| UsageError::new_err(format!("the record is not valid: {error}")))
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

    /// What an action of a plan does, in the words of the reports, from its JSON.
    #[pyfunction]
    fn effect(json: &str) -> PyResult<String> {
        let action: plan::Action = from_json("action", json)?;
        Ok(action.summary().effect())
    }

    /// The text of a plan, from its JSON.
    #[pyfunction]
    fn plan_text(py: Python<'_>, json: &str) -> PyResult<String> {
        let plan: Plan = from_json("plan", json)?;
        Ok(py.detach(|| memfit::of_plan(&plan)))
    }

    /// The text of a front, from its JSON.
    #[pyfunction]
    fn front_text(py: Python<'_>, json: &str) -> PyResult<String> {
        let front: Front = from_json("front", json)?;
        Ok(py.detach(|| memfit::of_front(&front)))
    }

    /// The page of a front, or with `svg` the plot alone, from its JSON.
    #[pyfunction]
    #[pyo3(signature = (json, svg=false))]
    fn front_page(py: Python<'_>, json: &str, svg: bool) -> PyResult<String> {
        let front: Front = from_json("front", json)?;
        Ok(py.detach(|| memfit::page_of_front(&front, svg)))
    }

    /// The bytes of a `.memfit` file as plan JSON.
    #[pyfunction]
    fn decode_plan(py: Python<'_>, data: &[u8]) -> PyResult<String> {
        py.detach(|| {
            let plan = file::decode_plan(data).map_err(|error| file_error(&error))?;
            to_json(&plan)
        })
    }

    /// Plan JSON as the bytes of a `.memfit` file.
    #[pyfunction]
    fn encode_plan<'py>(py: Python<'py>, json: &str) -> PyResult<Bound<'py, PyBytes>> {
        let plan: Plan = from_json("plan", json)?;
        Ok(PyBytes::new(py, &py.detach(|| file::encode_plan(&plan))))
    }

    /// What the bytes of a `.memfit` file hold: `trace` or `plan`.
    #[pyfunction]
    fn file_kind(data: &[u8]) -> PyResult<&'static str> {
        match file::peek_kind(data).map_err(|error| file_error(&error))? {
            file::FileKind::Trace => Ok("trace"),
            file::FileKind::Plan => Ok("plan"),
        }
    }

    /// The datasheet of a GPU as a device profile; without a name, of the one that stands in.
    #[pyfunction]
    #[pyo3(signature = (name))]
    fn gpu_profile(name: Option<&str>) -> PyResult<String> {
        let Some(name) = name else {
            return to_json(&devices::stand_in());
        };
        let device = devices::find(name).map_err(|error| UsageError::new_err(error.to_string()))?;
        to_json(&device.profile())
    }

    /// Checks that a device profile can be used.
    #[pyfunction]
    fn check_profile(json: &str) -> PyResult<()> {
        let profile: DeviceProfile =
            serde_json::from_str(json).map_err(|error| UsageError::new_err(error.to_string()))?;
        profile
            .check()
            .map_err(|error| UsageError::new_err(error.to_string()))
    }

    /// A budget as written, in bytes.
    #[pyfunction]
    fn parse_budget(text: &str, unplanned_peak_bytes: u64) -> PyResult<u64> {
        let budget =
            Budget::parse(text).map_err(|error| BudgetError::new_err(error.to_string()))?;
        Ok(budget.resolve(Bytes(unplanned_peak_bytes)).0)
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

    pub(crate) fn plan_error(error: &PlanError) -> PyErr {
        UsageError::new_err(error.to_string())
    }

    fn checked_trace(json: &[u8]) -> PyResult<trace::Trace> {
        let trace: trace::Trace = serde_json::from_slice(json)
            .map_err(|error| CaptureError::new_err(format!("the trace is not valid: {error}")))?;
        trace
            .check()
            .map_err(|error| CaptureError::new_err(format!("the trace is not valid: {error}")))?;
        Ok(trace)
    }

    /// A request; a budget that cannot be read is an error of its own.
    pub(crate) fn request_from_json<T: DeserializeOwned>(json: &str) -> PyResult<T> {
        #[derive(Deserialize)]
        struct Written {
            budget: String,
        }
        from_json("request", json).map_err(|error| {
            let written = serde_json::from_str::<Written>(json).ok();
            let refused = written.and_then(|written| Budget::parse(&written.budget).err());
            refused.map_or(error, |error| BudgetError::new_err(error.to_string()))
        })
    }

    pub(crate) fn from_json<T: DeserializeOwned>(what: &str, json: &str) -> PyResult<T> {
        serde_json::from_str(json)
            .map_err(|error| UsageError::new_err(format!("the {what} is not valid: {error}")))
    }

    pub(crate) fn to_json<T: Serialize>(value: &T) -> PyResult<String> {
        serde_json::to_string(value)
            .map_err(|error| UsageError::new_err(format!("cannot write JSON: {error}")))
    }

    fn file_error(error: &file::FileError) -> PyErr {
        TraceFileError::new_err(error.to_string())
    }
}

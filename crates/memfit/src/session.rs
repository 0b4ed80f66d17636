//! One run of the program: the host, the output, and the steps that several commands share.
//!
//! Responsible for getting a trace (captured or read), a prediction, costs and a plan, with progress
//! and interruption. Not responsible for what a command does with them.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use memfit_engine::cost::CostSource;
use memfit_engine::file;
use memfit_engine::plan::{self, Class, Front, FrontRequest, Offer, Plan, PlanRequest, TimeLimit};
use memfit_engine::predict::{self, PredictRequest, Prediction};
use memfit_engine::trace::Trace;

use crate::args::Format;
use crate::error::Failure;
use crate::host::Host;
use crate::interrupt::interruptible;
use crate::printer::Printer;
use crate::progress::Progress;
use crate::report::compiled::CompiledAnswer;
use crate::report::measured::Measurement;
use crate::report::words;
use crate::request::{LiveTarget, PlanChoice, Target};

/// What a command needs to do its work.
pub(crate) struct Session<'a> {
    pub(crate) host: &'a mut dyn Host,
    pub(crate) printer: Printer<'a>,
    pub(crate) format: Format,
}

/// A trace and where it came from.
pub(crate) struct Recorded {
    pub(crate) trace: Arc<Trace>,
    /// The trace as encoded.
    pub(crate) file: Vec<u8>,
    /// Absent for a saved trace.
    pub(crate) capture_seconds: Option<f64>,
    /// Kind of device asked for.
    device: Option<String>,
}

/// A plan and how long it took.
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    /// What was asked for, with the place for what is offloaded.
    pub(crate) request: PlanRequest,
    /// The plan's search and the measurement of this machine, without the capture.
    pub(crate) plan_seconds: f64,
}

impl Session<'_> {
    /// Does something slow, with a line on the terminal while it lasts.
    pub(crate) fn slow<T>(
        &mut self,
        what: &str,
        work: impl FnOnce(&mut dyn Host) -> Result<T, Failure>,
    ) -> Result<(T, f64), Failure> {
        let start = Instant::now();
        let progress = Progress::start(what, self.printer.shows_progress());
        let result = work(self.host);
        drop(progress);
        let seconds = start.elapsed().as_secs_f64();
        let value = result?;
        self.printer
            .detail(&format!("{what}: {}", words::seconds(seconds)))?;
        Ok((value, seconds))
    }

    /// Captures a live target or reads a saved trace.
    pub(crate) fn record(
        &mut self,
        target: &Target,
        device: Option<&str>,
    ) -> Result<Recorded, Failure> {
        match target {
            Target::Saved(path) => {
                if let Some(device) = device {
                    return Err(Failure::usage(format!(
                        "`--device {device}` has no meaning for a saved trace: capture it again"
                    )));
                }
                let file = read(path)?;
                let trace = file::decode(&file).map_err(|error| Failure::file(path, &error))?;
                Ok(Recorded {
                    trace: Arc::new(trace),
                    file,
                    capture_seconds: None,
                    device: None,
                })
            }
            Target::Live(live) => {
                let what = format!("building {}", live.name);
                self.slow(&what, |host| Ok(host.build(&live.name, &live.settings)?))?;
                let what = format!("capturing {}", live.name);
                let (file, seconds) = self.slow(&what, |host| {
                    Ok(host.capture(&live.name, &live.settings, device)?)
                })?;
                let trace =
                    file::decode(&file).map_err(|error| Failure::bad_answer("capture", error))?;
                Ok(Recorded {
                    trace: Arc::new(trace),
                    file,
                    capture_seconds: Some(seconds),
                    device: device.map(str::to_owned),
                })
            }
        }
    }

    /// Passes on what the capture had to say, where the report does not.
    pub(crate) fn tell_notes(&mut self, notes: &[String]) -> Result<(), Failure> {
        for note in notes {
            self.printer.note(&format!("note: {note}"))?;
        }
        Ok(())
    }

    /// Predicts the step.
    pub(crate) fn predict(
        &mut self,
        trace: &Arc<Trace>,
        request: PredictRequest,
    ) -> Result<Prediction, Failure> {
        let trace = Arc::clone(trace);
        let (prediction, _) = self.slow("predicting", |host| {
            interruptible(host, move || predict::predict(&trace, &request))
        })?;
        Ok(prediction?)
    }

    /// Captures a live target in slices too, where that may make for a better plan.
    pub(crate) fn in_slices(
        &mut self,
        target: &Target,
        recorded: &mut Recorded,
        request: &PlanRequest,
        made: Option<&Plan>,
    ) -> Result<bool, Failure> {
        let Target::Live(live) = target else {
            return Ok(false);
        };
        if !plan::wants_alternatives(&recorded.trace, request, made) {
            return Ok(false);
        }
        let what = format!("capturing {} in slices", live.name);
        let device = recorded.device.clone();
        let (file, seconds) = self.slow(&what, |host| {
            let (name, settings) = (&live.name, &live.settings);
            Ok(host.alternatives(name, settings, device.as_deref(), &recorded.file)?)
        })?;
        let trace =
            file::decode(&file).map_err(|error| Failure::bad_answer("alternatives", error))?;
        recorded.trace = Arc::new(trace);
        recorded.file = file;
        recorded.capture_seconds = recorded.capture_seconds.map(|before| before + seconds);
        Ok(true)
    }

    /// Plans the step; `recorded` gets the step in slices where the plan needs that.
    pub(crate) fn plan(
        &mut self,
        target: &Target,
        recorded: &mut Recorded,
        choice: &PlanChoice,
    ) -> Result<Planned, Failure> {
        for note in &choice.notes {
            self.printer.note(&format!("note: {note}"))?;
        }
        let (costs, cost_seconds) = self.costs(target, recorded, choice)?;
        let mut request = choice.request.clone();
        request.offload = self.offer(recorded, choice, &costs)?;
        let limit = choice.time_limit;
        self.in_slices(target, recorded, &request, None)?;
        let (mut plan, mut seconds) = self.search(recorded, &request, &costs, limit)?;
        if self.in_slices(target, recorded, &request, Some(&plan))? {
            let (again, more) = self.search(recorded, &request, &costs, limit)?;
            plan = again;
            seconds += more;
        }
        // A profiled step is a run of the model, not part of planning.
        let cost_seconds = if choice.profile { 0.0 } else { cost_seconds };
        Ok(Planned {
            plan,
            request,
            plan_seconds: seconds + cost_seconds,
        })
    }

    fn search(
        &mut self,
        recorded: &Recorded,
        request: &PlanRequest,
        costs: &CostSource,
        time_limit: Option<f64>,
    ) -> Result<(Plan, f64), Failure> {
        let trace = Arc::clone(&recorded.trace);
        let (costs, request) = (costs.clone(), request.clone());
        let (plan, seconds) = self.slow("planning", |host| {
            interruptible(host, move || {
                let began = Instant::now();
                let elapsed = || began.elapsed().as_secs_f64();
                let limit = time_limit.map(|seconds| TimeLimit {
                    seconds,
                    elapsed: &elapsed,
                });
                plan::plan_within(&trace, &costs, &request, limit)
            })
        })?;
        Ok((plan?, seconds))
    }

    /// Plans the step for many budgets.
    pub(crate) fn front(
        &mut self,
        target: &Target,
        recorded: &mut Recorded,
        choice: &PlanChoice,
        mut request: FrontRequest,
    ) -> Result<(Front, f64), Failure> {
        let widest = PlanRequest {
            allow: Class::Equivalent,
            ..choice.request.clone()
        };
        self.in_slices(target, recorded, &widest, None)?;
        let (costs, cost_seconds) = self.costs(target, recorded, choice)?;
        request.offload = self.offer(recorded, choice, &costs)?;
        let trace = Arc::clone(&recorded.trace);
        let (front, seconds) = self.slow("planning for many budgets", |host| {
            interruptible(host, move || plan::front(&trace, &costs, &request))
        })?;
        let cost_seconds = if choice.profile { 0.0 } else { cost_seconds };
        Ok((front?, seconds + cost_seconds))
    }

    /// The place for what is offloaded, if one was named, and how fast it is.
    fn offer(
        &mut self,
        recorded: &Recorded,
        choice: &PlanChoice,
        costs: &CostSource,
    ) -> Result<Option<Offer>, Failure> {
        let Some(place) = &choice.offload else {
            return Ok(None);
        };
        let device_kind = &recorded.trace.meta.device_kind;
        let profile = match costs {
            CostSource::Roofline { profile } => serde_json::to_string(profile).ok(),
            CostSource::Profile { .. } => None,
        };
        let what = format!("measuring how fast `{place}` is");
        let (json, _) = self.slow(&what, |host| {
            Ok(host.offer(device_kind, place, profile.as_deref())?)
        })?;
        let offer =
            serde_json::from_str(&json).map_err(|error| Failure::bad_answer("offer", error))?;
        Ok(Some(offer))
    }

    fn costs(
        &mut self,
        target: &Target,
        recorded: &Recorded,
        choice: &PlanChoice,
    ) -> Result<(CostSource, f64), Failure> {
        if !choice.profile {
            let device_kind = &recorded.trace.meta.device_kind;
            if let Some(gpu) = choice.gpu {
                if device_kind != "cuda" {
                    return Err(Failure::usage(format!(
                        "`--gpu` names a GPU and the step runs on `{device_kind}`"
                    ))
                    .hint("capture it for a GPU, which need not be here: `--device cuda`"));
                }
                let profile = gpu.profile();
                return Ok((CostSource::Roofline { profile }, 0.0));
            }
            let (json, seconds) = self.slow("measuring this machine", |host| {
                Ok(host.device_profile(device_kind, choice.costs.as_deref())?)
            })?;
            let profile = serde_json::from_str(&json)
                .map_err(|error| Failure::bad_answer("device_profile", error))?;
            return Ok((CostSource::Roofline { profile }, seconds));
        }
        let Target::Live(live) = target else {
            return Err(
                Failure::usage("`--profile` runs the model, and a saved trace has none")
                    .hint("give the function that builds the workload: FILE.py:FUNCTION"),
            );
        };
        let (json, seconds) = self.slow("profiling one step", |host| {
            Ok(host.op_seconds(&live.name, &live.settings, &recorded.file)?)
        })?;
        let costs = serde_json::from_str(&json)
            .map_err(|error| Failure::bad_answer("op_seconds", error))?;
        Ok((costs, seconds))
    }

    /// Runs the step with and without the plan.
    pub(crate) fn measure(
        &mut self,
        target: &LiveTarget,
        plan: &Plan,
    ) -> Result<Measurement, Failure> {
        let plan_json = serde_json::to_string(plan).map_err(|error| {
            Failure::Internal(format!("cannot write the plan as JSON: {error}"))
        })?;
        let (json, _) = self.slow("running real steps, unplanned and planned", |host| {
            Ok(host.verify(&target.name, &target.settings, &plan_json)?)
        })?;
        serde_json::from_str(&json).map_err(|error| Failure::bad_answer("verify", error))
    }

    /// Runs the step eager, compiled by torch alone, and compiled for a budget.
    pub(crate) fn measure_compiled(
        &mut self,
        target: &LiveTarget,
        recorded: &Recorded,
        planned: &Planned,
    ) -> Result<CompiledAnswer, Failure> {
        let request_json = serde_json::to_string(&planned.request).map_err(|error| {
            Failure::Internal(format!("cannot write the request as JSON: {error}"))
        })?;
        let budget = planned.plan.budget_bytes.0;
        let (json, _) = self.slow("compiling, and running real steps", |host| {
            let (name, settings) = (&target.name, &target.settings);
            Ok(host.verify_compiled(name, settings, &recorded.file, budget, &request_json)?)
        })?;
        serde_json::from_str(&json).map_err(|error| Failure::bad_answer("verify_compiled", error))
    }
}

/// Reads a file whole.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path)
        .map_err(|error| Failure::usage(format!("cannot read `{}`: {error}", path.display())))
}

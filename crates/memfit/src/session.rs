//! One run of the program: the host, the output, and the steps that several commands share.
//!
//! Responsible for getting a trace (captured or read), a prediction and a measurement, with progress and interruption.
//! Not responsible for a plan (`planning.rs`), nor for what a command does with them.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use memfit_engine::file;
use memfit_engine::plan::{self, Asked, Plan, PlanRequest};
use memfit_engine::predict::{self, PredictRequest, Prediction};
use memfit_engine::trace::{Trace, Way};

use crate::args::{Format, TargetArguments};
use crate::error::Failure;
use crate::host::Host;
use crate::interrupt::interruptible;
use crate::printer::Printer;
use crate::progress::Progress;
use crate::report::compiled::CompiledAnswer;
use crate::report::measured::Measurement;
use crate::report::words;
use crate::request::{LiveTarget, Target};

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

    /// Has the target built with its weights, where the command line asks for that.
    pub(crate) fn insist_on_weights(&mut self, arguments: &TargetArguments) -> Result<(), Failure> {
        if let Target::Saved(_) = Target::parse(arguments)? {
            let message = "`--real-weights` builds the model, and a saved trace has none";
            return Err(Failure::usage(message).hint("leave it out"));
        }
        Ok(self.host.insist_on_weights()?)
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
                self.slow(&what, |host| {
                    Ok(host.build(&live.name, &live.settings, device)?)
                })?;
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

    /// Captures a live target in slices too, where any plan may want that.
    pub(crate) fn slices_for_any_plan(
        &mut self,
        target: &Target,
        recorded: &mut Recorded,
    ) -> Result<(), Failure> {
        // A reader of the trace may cut the batch in any of them.
        let ways = plan::ways_without_leave(&recorded.trace).into_iter();
        let asked: Vec<_> = ways.map(Asked::from).collect();
        match target {
            Target::Live(live) if !asked.is_empty() => self.in_ways(live, recorded, &asked),
            _ => Ok(()),
        }
    }

    /// Captures a live target in other ways too.
    pub(crate) fn in_ways(
        &mut self,
        live: &LiveTarget,
        recorded: &mut Recorded,
        asked: &[Asked],
    ) -> Result<(), Failure> {
        let has = |is_so: fn(&Way) -> bool| asked.iter().any(|it| is_so(&it.way));
        let how = if has(|way| way.items.is_some()) {
            "on a piece of the batch"
        } else if has(|way| way.half_parameters.is_some() || way.int8_weights.is_some()) {
            "in fewer bits"
        } else if has(|way| way.autocast.is_some()) {
            "under autocast"
        } else if has(|way| way.chunk.is_some()) {
            "in slices"
        } else {
            "without a graph"
        };
        let what = format!("capturing {} {how}", live.name);
        let device = recorded.device.clone();
        let (file, seconds) = self.slow(&what, |host| {
            let (name, settings) = (&live.name, &live.settings);
            let device = device.as_deref();
            Ok(host.alternatives(name, settings, device, &recorded.file, asked)?)
        })?;
        let trace =
            file::decode(&file).map_err(|error| Failure::bad_answer("alternatives", error))?;
        recorded.trace = Arc::new(trace);
        recorded.file = file;
        recorded.capture_seconds = recorded.capture_seconds.map(|before| before + seconds);
        Ok(())
    }

    /// Runs the step with and without the plan.
    pub(crate) fn measure(
        &mut self,
        target: &LiveTarget,
        plan: &Plan,
    ) -> Result<Measurement, Failure> {
        let (found, _) = self.slow("running real steps, unplanned and planned", |host| {
            Ok(host.verify(&target.name, &target.settings, plan)?)
        })?;
        serde_json::from_value(found).map_err(|error| Failure::bad_answer("verify", error))
    }

    /// Runs the step eager, compiled by torch alone, and compiled for a budget.
    pub(crate) fn measure_compiled(
        &mut self,
        target: &LiveTarget,
        recorded: &Recorded,
        planned: &Planned,
    ) -> Result<CompiledAnswer, Failure> {
        let budget = planned.plan.budget_bytes.0;
        let (found, _) = self.slow("compiling, and running real steps", |host| {
            let (name, settings) = (&target.name, &target.settings);
            Ok(host.verify_compiled(name, settings, &recorded.file, budget, &planned.request)?)
        })?;
        serde_json::from_value(found).map_err(|error| Failure::bad_answer("verify_compiled", error))
    }
}

/// Reads a file whole.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path)
        .map_err(|error| Failure::usage(format!("cannot read `{}`: {error}", path.display())))
}

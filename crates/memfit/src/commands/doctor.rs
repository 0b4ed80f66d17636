//! `memfit doctor`: what is installed, what works here, and why the rest does not.
//!
//! Responsible for trying the main job, on a step of its own by the same way as `memfit verify`, and for
//! what only the program can know: rooms and the broker. Not responsible for what Python knows (the host's
//! `examine`). What is wrong with the machine is an answer here, never a failure.

use std::path::Path;
use std::time::Instant;

use memfit_engine::bytes::Budget;
use memfit_engine::plan::{Class, PlanRequest, Verdict};
use memfit_engine::predict::PredictRequest;

use crate::args::{DoctorArguments, Format};
use crate::device::rooms_beside;
use crate::error::Failure;
use crate::exit::Exit;
use crate::lease::socket::check_place;
use crate::lease::status::Status;
use crate::lease::{Client, LeaseError, SocketError, usual_path};
use crate::report::comparison::Agreement;
use crate::report::doctor::{
    BrokerFacts, DoctorDocument, Examined, MainJob, SCHEMA_VERSION, Stage, features,
};
use crate::report::document::StepFacts;
use crate::report::measured::MeasuredStep;
use crate::report::{json, text};
use crate::request::{LiveTarget, PlanChoice, Target};
use crate::session::Session;

/// The step that is tried.
const STEP: &str = "memfit.doctor.step:build";
/// Of the unplanned peak: it takes a plan, and an exact one does.
const BUDGET: Budget = Budget::Percent(90.0);
/// For a failure that nothing else explains.
const REPORT: &str = "report this output as a bug of memfit";

pub(crate) fn run(arguments: &DoctorArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let examined = examine(arguments, session)?;
    let mut main_jobs = vec![main_job("cpu", &examined, session)?];
    if let Some(first) = examined.cuda.devices.first() {
        main_jobs.push(main_job(&first.device, &examined, session)?);
    }
    let cuda_prediction = cuda_prediction(&examined, session)?;
    let socket = arguments.socket.clone().unwrap_or_else(usual_path);
    let (broker, status) = broker(&socket);
    let is_ready = main_jobs[0].why_not.is_none();
    let next_step = (!is_ready).then(|| {
        let told = examined.torch_next_step.clone();
        told.unwrap_or_else(|| REPORT.to_owned())
    });
    let document = DoctorDocument {
        schema_version: SCHEMA_VERSION,
        is_ready,
        next_step,
        memfit_version: env!("CARGO_PKG_VERSION"),
        features: features(&examined, &main_jobs, cuda_prediction, &broker),
        examined,
        main_jobs,
        devices: rooms_beside(status.as_ref()),
        broker,
    };
    let report = match session.format {
        Format::Text => text::doctor(&document, session.printer.report_palette()),
        Format::Json => json(&document)?,
    };
    session.printer.data(&report)?;
    Ok(if is_ready { Exit::Done } else { Exit::No })
}

fn examine(arguments: &DoctorArguments, session: &mut Session<'_>) -> Result<Examined, Failure> {
    let offload = arguments.offload.as_deref();
    let (found, _) = session.slow("looking at torch and this machine", |host| {
        Ok(host.examine(offload)?)
    })?;
    serde_json::from_value(found).map_err(|error| Failure::bad_answer("examine", error))
}

/// Predicts, plans and runs the step on a device.
fn main_job(
    device: &str,
    examined: &Examined,
    session: &mut Session<'_>,
) -> Result<MainJob, Failure> {
    let mut job = MainJob::new(device);
    if let Some(refusal) = &examined.torch_refusal {
        job.why_not = Some(refusal.clone());
        return Ok(job);
    }
    let began = Instant::now();
    let done = carry_out(&mut job, session);
    job.why_not = answered(done, session)?.unwrap_or_else(Some);
    job.seconds = began.elapsed().as_secs_f64();
    Ok(job)
}

/// Does the job as far as it goes, and returns what is wrong with what came of it.
fn carry_out(job: &mut MainJob, session: &mut Session<'_>) -> Result<Option<String>, Failure> {
    let live = step(&job.device);
    let target = Target::Live(live.clone());
    let mut recorded = session.record(&target, None)?;
    session.predict(&recorded.trace, PredictRequest::default())?;
    job.reached = Some(Stage::Predicted);

    let planned = session.plan(&target, &mut recorded, &choice())?;
    let plan = &planned.plan;
    let mut unplanned = predicted(plan.unplanned.predicted_peak_bytes);
    let mut within = predicted(plan.planned.predicted_peak_bytes);
    job.budget_bytes = Some(plan.budget_bytes);
    (job.unplanned, job.planned) = (Some(unplanned), Some(within));
    if plan.verdict == Verdict::DoesNotFit {
        return Ok(Some(format!(
            "no plan for {BUDGET} of the unplanned peak was found"
        )));
    }
    job.reached = Some(Stage::Planned);

    let measured = session.measure(&live, plan)?;
    take_in(&mut unplanned, measured.unplanned);
    take_in(&mut within, measured.planned);
    (job.unplanned, job.planned) = (Some(unplanned), Some(within));
    let agreement = measured.loss.agreement.max(measured.gradients.agreement);
    job.agreement = Some(agreement);
    let peak = measured.planned.measured_peak_bytes;
    if peak > plan.budget_bytes {
        let budget = plan.budget_bytes;
        return Ok(Some(format!(
            "the planned step took {peak}, which is above its budget of {budget}"
        )));
    }
    let is_exact = agreement == Agreement::Bitwise && measured.keeps_buffers(Class::Exact);
    if !is_exact || !measured.divergence.is_empty() {
        let notes = measured.notes(Class::Exact).into_iter();
        let differs = "loss or gradients of the planned step have other bits".to_owned();
        let said: Vec<String> = std::iter::once(differs)
            .filter(|_| !is_exact)
            .chain(notes)
            .collect();
        return Ok(Some(said.join("; ")));
    }
    job.reached = Some(Stage::Verified);
    Ok(None)
}

fn step(device: &str) -> LiveTarget {
    LiveTarget {
        name: STEP.to_owned(),
        settings: vec![("device".to_owned(), device.to_owned())],
    }
}

fn choice() -> PlanChoice {
    PlanChoice {
        request: PlanRequest {
            budget: BUDGET,
            allow: Class::Exact,
            allow_kinds: Vec::new(),
            own_loop: false,
            own_backward: false,
            forbid: Vec::new(),
            keep: Vec::new(),
            offload: None,
        },
        profile: false,
        costs: None,
        time_limit: None,
        offload: None,
        gpu: None,
    }
}

const fn predicted(predicted_peak_bytes: memfit_engine::bytes::Bytes) -> StepFacts {
    StepFacts {
        predicted_peak_bytes,
        measured_peak_bytes: None,
        step_cpu_seconds: None,
    }
}

const fn take_in(facts: &mut StepFacts, measured: MeasuredStep) {
    facts.measured_peak_bytes = Some(measured.measured_peak_bytes);
    facts.step_cpu_seconds = Some(measured.step_cpu_seconds);
}

/// Why the step cannot be predicted for a GPU, whether one is here or not.
fn cuda_prediction(
    examined: &Examined,
    session: &mut Session<'_>,
) -> Result<Option<String>, Failure> {
    if let Some(refusal) = &examined.torch_refusal {
        return Ok(Some(refusal.clone()));
    }
    let target = Target::Live(step("cpu"));
    let done = session
        .record(&target, Some("cuda"))
        .and_then(|recorded| session.predict(&recorded.trace, PredictRequest::default()));
    Ok(answered(done, session)?.err())
}

/// What was done, or why it could not be; an interruption or a broken stream ends the command.
fn answered<T>(
    done: Result<T, Failure>,
    session: &mut Session<'_>,
) -> Result<Result<T, String>, Failure> {
    let failure = match done {
        Ok(done) => return Ok(Ok(done)),
        Err(failure) => failure,
    };
    if matches!(failure, Failure::Output(_)) || failure.exit() == Exit::Interrupted {
        return Err(failure);
    }
    if let Some(traceback) = failure.traceback() {
        session.printer.detail(traceback.trim_end())?;
    }
    let message = failure.message().unwrap_or_default();
    let first = message.lines().next().unwrap_or_default();
    Ok(Err(first.to_owned()))
}

/// The broker at a socket, and what it grants.
fn broker(socket: &Path) -> (BrokerFacts, Option<Status>) {
    let mut facts = BrokerFacts {
        socket: socket.display().to_string(),
        pid: None,
        version: None,
        lease_count: None,
        why_not: None,
    };
    match Client::connect(socket, "memfit doctor").and_then(|client| client.status()) {
        Ok(status) => {
            facts.pid = Some(status.pid);
            facts.version = Some(status.version.clone());
            facts.lease_count = Some(status.leases.len() as u64);
            (facts, Some(status))
        }
        Err(LeaseError::Socket(SocketError::NoBroker(_) | SocketError::Away(_))) => {
            facts.why_not = check_place(socket).err().map(|error| error.to_string());
            (facts, None)
        }
        Err(error) => {
            facts.why_not = Some(error.to_string());
            (facts, None)
        }
    }
}

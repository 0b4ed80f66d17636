//! `memfit verify`: the plan against the truth.

use memfit_engine::bytes::Budget;
use memfit_engine::plan::{Plan, Verdict};

use crate::args::{Format, VerifyArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::report::compiled::{CompiledAnswer, CompiledMeasurement};
use crate::report::document::{
    PlanDocument, PlanSummary, SCHEMA_VERSION, StepFacts, VerifyDocument,
};
use crate::report::measured::{MeasuredStep, Measurement};
use crate::report::{json, text};
use crate::request::{PlanChoice, Target};
use crate::session::Session;

pub(crate) fn run(arguments: &VerifyArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let live = Target::parse(&arguments.target)?.live("verify")?;
    let choice = PlanChoice::parse(&arguments.choice, Budget::of_step(&arguments.budget)?)?;
    let target = Target::Live(live.clone());

    let mut recorded = session.record(&target, None)?;
    session.tell_notes(&recorded.trace.meta.notes)?;
    let planned = session.plan(&target, &mut recorded, &choice)?;
    let capture_seconds = recorded.capture_seconds.unwrap_or_default();
    let mut document = document(&planned.plan, capture_seconds, planned.plan_seconds);
    document.infers = !recorded.trace.meta.training;
    if arguments.compile {
        match session.measure_compiled(&live, &recorded, &planned)? {
            CompiledAnswer::Ran(ran) => return compiled(document, *ran, session),
            CompiledAnswer::NotCompiled { not_compiled } => {
                let note = format!("note: the step runs eager: {not_compiled}");
                session.printer.note(&note)?;
                document.not_compiled = Some(not_compiled);
            }
        }
    }
    let palette = session.printer.report_palette();

    if planned.plan.verdict == Verdict::DoesNotFit {
        // Running the step would show nothing: no plan holds it under the budget.
        let report = match session.format {
            Format::Text => text::plan(&PlanDocument::of(&planned.plan), palette),
            Format::Json => json(&document)?,
        };
        session.printer.data(&report)?;
        return Ok(Exit::No);
    }

    let mut measured = session.measure(&live, &planned.plan)?;
    if let Some(most) = arguments.max_error {
        if let Some(found) = &mut measured.approximation {
            found.max_error = most.0;
        }
        if let Some(found) = &mut measured.outputs {
            found.max_error = most.0;
        }
    }
    take_in(&mut document, &measured);
    print(&document, session)?;
    session.tell_notes(&planned.plan.notes)?;
    judge(&document, &measured, session)
}

/// The rest of a verification whose step ran compiled.
fn compiled(
    mut document: VerifyDocument,
    ran: CompiledMeasurement,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let measured = take_in_compiled(&mut document, ran);
    print(&document, session)?;
    judge(&document, &measured, session)
}

/// Takes a step that ran compiled into the document.
pub(crate) fn take_in_compiled(
    document: &mut VerifyDocument,
    ran: CompiledMeasurement,
) -> Measurement {
    document.planned.predicted_peak_bytes = ran.predicted_peak_bytes;
    document.verdict = Verdict::Fits;
    document.plan = None;
    document.compiled = Some(ran.compiled);
    take_in(document, &ran.measurement);
    ran.measurement
}

/// Takes what was measured into the document.
pub(crate) fn take_in(document: &mut VerifyDocument, measured: &Measurement) {
    document.unplanned = with_measurement(document.unplanned, measured.unplanned);
    document.planned = with_measurement(document.planned, measured.planned);
    document.gradients = Some(measured.gradients);
    document.loss = Some(measured.loss);
    document.approximation.clone_from(&measured.approximation);
    document.outputs.clone_from(&measured.outputs);
    if measured.planned.measured_peak_bytes > document.budget_bytes {
        document.verdict = Verdict::DoesNotFit;
    }
    document.holds = Some(document.keeps_its_word() && measured.keeps_buffers(document.class()));
}

fn print(document: &VerifyDocument, session: &mut Session<'_>) -> Result<(), Failure> {
    let report = match session.format {
        Format::Text => text::verify(document, session.printer.report_palette()),
        Format::Json => json(document)?,
    };
    session.printer.data(&report)
}

/// Says what a person should know beyond the numbers, and whether the plan kept its word.
fn judge(
    document: &VerifyDocument,
    measured: &Measurement,
    session: &mut Session<'_>,
) -> Result<Exit, Failure> {
    let class = document.class();
    session.tell_notes(&measured.notes(class))?;
    Ok(if document.holds == Some(true) {
        Exit::Done
    } else {
        Exit::No
    })
}

/// The document before anything ran.
pub(crate) fn document(plan: &Plan, capture_seconds: f64, plan_seconds: f64) -> VerifyDocument {
    let facts = |predicted_peak_bytes| StepFacts {
        predicted_peak_bytes,
        measured_peak_bytes: None,
        step_cpu_seconds: None,
    };
    VerifyDocument {
        schema_version: SCHEMA_VERSION,
        target: plan.target.clone(),
        budget_bytes: plan.budget_bytes,
        verdict: plan.verdict,
        holds: None,
        unplanned: facts(plan.unplanned.predicted_peak_bytes),
        planned: facts(plan.planned.predicted_peak_bytes),
        minimum_peak_bytes: plan.minimum_peak_bytes,
        gradients: None,
        loss: None,
        approximation: None,
        outputs: None,
        plan: Some(PlanSummary::of(plan)),
        compiled: None,
        not_compiled: None,
        capture_seconds,
        plan_seconds,
        infers: false,
    }
}

fn with_measurement(facts: StepFacts, measured: MeasuredStep) -> StepFacts {
    StepFacts {
        measured_peak_bytes: Some(measured.measured_peak_bytes),
        step_cpu_seconds: Some(measured.step_cpu_seconds),
        ..facts
    }
}

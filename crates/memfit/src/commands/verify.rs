//! `memfit verify`: the plan against the truth.

use memfit_engine::plan::Verdict;

use crate::args::{Format, VerifyArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::report::document::{
    MeasuredStep, PlanDocument, PlanSummary, SCHEMA_VERSION, StepFacts, VerifyDocument,
};
use crate::report::{json, text};
use crate::request::{PlanChoice, Target};
use crate::session::{Planned, Session};

pub(crate) fn run(arguments: &VerifyArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let live = Target::parse(&arguments.target)?.live("verify")?;
    let choice = PlanChoice::parse(&arguments.choice, &arguments.budget)?;
    let target = Target::Live(live.clone());

    let mut recorded = session.record(&target, None)?;
    session.tell_notes(&recorded.trace.meta.notes)?;
    let planned = session.plan(&target, &mut recorded, &choice)?;
    let mut document = document(&planned, recorded.capture_seconds.unwrap_or_default());
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

    let measured = session.measure(&live, &planned.plan)?;
    document.unplanned = with_measurement(document.unplanned, measured.unplanned);
    document.planned = with_measurement(document.planned, measured.planned);
    document.gradients = Some(measured.gradients);
    document.loss = Some(measured.loss);
    if measured.planned.measured_peak_bytes > document.budget_bytes {
        document.verdict = Verdict::DoesNotFit;
    }
    let report = match session.format {
        Format::Text => text::verify(&document, palette),
        Format::Json => json(&document)?,
    };
    session.printer.data(&report)?;
    let class = planned.plan.class;
    session.tell_notes(&planned.plan.notes)?;
    session.tell_notes(&measured.notes(class))?;
    Ok(if document.holds() && measured.keeps_buffers(class) {
        Exit::Done
    } else {
        Exit::No
    })
}

/// The document before anything ran.
fn document(planned: &Planned, capture_seconds: f64) -> VerifyDocument {
    let plan = &planned.plan;
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
        unplanned: facts(plan.unplanned.predicted_peak_bytes),
        planned: facts(plan.planned.predicted_peak_bytes),
        minimum_peak_bytes: plan.minimum_peak_bytes,
        gradients: None,
        loss: None,
        plan: PlanSummary::of(plan),
        capture_seconds,
        plan_seconds: planned.plan_seconds,
    }
}

fn with_measurement(facts: StepFacts, measured: MeasuredStep) -> StepFacts {
    StepFacts {
        measured_peak_bytes: Some(measured.measured_peak_bytes),
        step_cpu_seconds: Some(measured.step_cpu_seconds),
        ..facts
    }
}

//! `memfit verify`: predicted against measured, unplanned against planned.

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::Verdict;

use super::plan::actions;
use super::section;
use crate::printer::Palette;
use crate::report::document::{Agreement, Comparison, StepFacts, VerifyDocument};
use crate::report::table::{Align, Table};
use crate::report::words;

/// The whole report of a verification that ran.
pub(crate) fn verify(document: &VerifyDocument, palette: Palette) -> String {
    let share = words::share(
        document.budget_bytes,
        document.unplanned.predicted_peak_bytes,
    );
    let mut text = format!(
        "{}  budget {} ({share} of the unplanned peak)\n\n",
        palette.strong(&document.target),
        document.budget_bytes
    );
    text.push_str(&facts(document).render(0, palette));
    section(
        &mut text,
        "Actions",
        &actions(&document.plan.actions, palette),
        palette,
    );
    let mut agreement = Table::new(&[Align::Left, Align::Left]);
    for (name, comparison) in [("loss", &document.loss), ("gradients", &document.gradients)] {
        if let Some(comparison) = comparison {
            agreement.row([name.to_owned(), agreement_words(*comparison)]);
        }
    }
    section(
        &mut text,
        "Planned against unplanned",
        &agreement.render(2, palette),
        palette,
    );
    text.push('\n');
    text.push_str(&answer(document, palette));
    text
}

fn facts(document: &VerifyDocument) -> Table {
    let (unplanned, planned) = (&document.unplanned, &document.planned);
    let bytes = |bytes: Option<Bytes>| bytes.map_or_else(|| "-".to_owned(), |b| b.to_string());
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Right]).header([
        "",
        "unplanned",
        "planned",
        "planned / unplanned",
    ]);
    table.row([
        "Peak, predicted".to_owned(),
        unplanned.predicted_peak_bytes.to_string(),
        planned.predicted_peak_bytes.to_string(),
        words::share(planned.predicted_peak_bytes, unplanned.predicted_peak_bytes),
    ]);
    let measured = unplanned
        .measured_peak_bytes
        .zip(planned.measured_peak_bytes);
    table.row([
        "Peak, measured".to_owned(),
        bytes(unplanned.measured_peak_bytes),
        bytes(planned.measured_peak_bytes),
        measured.map_or_else(
            || "-".to_owned(),
            |(before, after)| words::share(after, before),
        ),
    ]);
    let error = |facts: &StepFacts| {
        let measured = facts.measured_peak_bytes;
        measured.map_or_else(
            || "-".to_owned(),
            |m| words::deviation(facts.predicted_peak_bytes, m),
        )
    };
    table.row([
        "Prediction error".to_owned(),
        error(unplanned),
        error(planned),
        String::new(),
    ]);
    let time = |facts: &StepFacts| {
        facts
            .step_cpu_seconds
            .map_or_else(|| "-".to_owned(), words::seconds)
    };
    table.row([
        "Step, CPU time".to_owned(),
        time(unplanned),
        time(planned),
        step_ratio(document).map_or_else(|| "-".to_owned(), words::ratio),
    ]);
    table
}

fn step_ratio(document: &VerifyDocument) -> Option<f64> {
    let (before, after) = document
        .unplanned
        .step_cpu_seconds
        .zip(document.planned.step_cpu_seconds)?;
    (before > 0.0).then(|| after / before)
}

fn agreement_words(comparison: Comparison) -> String {
    let error = comparison
        .max_relative_error
        .map_or_else(|| "not a number".to_owned(), |error| format!("{error:.1e}"));
    match comparison.class {
        Agreement::Bitwise => "bitwise equal".to_owned(),
        Agreement::Equivalent => format!("equal up to rounding, largest relative error {error}"),
        Agreement::Different => format!("DIFFERENT, largest relative error {error}"),
    }
}

fn answer(document: &VerifyDocument, palette: Palette) -> String {
    let budget = document.budget_bytes;
    let Some(measured) = document.planned.measured_peak_bytes else {
        return String::new();
    };
    if document.verdict == Verdict::DoesNotFit {
        return format!(
            "{} {measured} measured, {} over the budget of {budget}\n",
            palette.bad("OVERSHOOT:"),
            measured - budget
        );
    }
    let fit = format!(
        "{measured} measured, {} under the budget of {budget}",
        budget - measured
    );
    if document.holds() {
        let time = step_ratio(document).map_or_else(String::new, |ratio| {
            format!(", {} the step time", words::ratio(ratio))
        });
        let numbers = match document.gradients.map(|comparison| comparison.class) {
            Some(Agreement::Bitwise) => "loss and gradients bitwise equal",
            _ => "loss and gradients equal up to rounding, as the plan said",
        };
        format!("{} {fit}{time}; {numbers}\n", palette.good("FITS:"))
    } else {
        format!(
            "{} {fit}, but loss or gradients are not what a plan of class {} promises\n",
            palette.bad("DIFFERENT:"),
            words::class(document.plan.class)
        )
    }
}

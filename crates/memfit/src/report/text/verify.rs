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
        let bitwise = [document.loss, document.gradients]
            .into_iter()
            .flatten()
            .all(|comparison| comparison.class == Agreement::Bitwise);
        let numbers = if bitwise {
            "loss and gradients bitwise equal"
        } else {
            "loss and gradients equal up to rounding, as the plan said"
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

#[cfg(test)]
mod tests {
    use memfit_engine::plan::{ActionKind, Class};

    use super::*;
    use crate::report::document::{ActionSummary, PlanSummary, SCHEMA_VERSION};

    fn step(predicted: u64, measured: u64, seconds: f64) -> StepFacts {
        StepFacts {
            predicted_peak_bytes: Bytes(predicted),
            measured_peak_bytes: Some(Bytes(measured)),
            step_cpu_seconds: Some(seconds),
        }
    }

    fn document() -> VerifyDocument {
        let bitwise = Comparison {
            class: Agreement::Bitwise,
            max_relative_error: Some(0.0),
        };
        VerifyDocument {
            schema_version: SCHEMA_VERSION,
            target: "gpt2.py:build".to_owned(),
            budget_bytes: Bytes(3 << 30),
            verdict: Verdict::Fits,
            unplanned: step(6 << 30, (6 << 30) + (1 << 20), 10.0),
            planned: step(2900 << 20, 2900 << 20, 11.7),
            minimum_peak_bytes: Bytes(2600 << 20),
            gradients: Some(bitwise),
            loss: Some(bitwise),
            plan: PlanSummary {
                class: Class::Exact,
                actions: vec![ActionSummary {
                    kind: ActionKind::Remat,
                    class: Class::Exact,
                    count: 96,
                    bytes: Bytes(3300 << 20),
                }],
                predicted_step_ratio: 1.15,
                lower_bound_ratio: 1.1,
            },
            capture_seconds: 1.0,
            plan_seconds: 0.5,
        }
    }

    #[test]
    fn a_plan_that_holds() {
        insta::assert_snapshot!(verify(&document(), Palette::PLAIN), @"
        gpt2.py:build  budget 3.00 GiB (50.0 % of the unplanned peak)

                          unplanned   planned  planned / unplanned
        Peak, predicted    6.00 GiB  2.83 GiB               47.2 %
        Peak, measured     6.00 GiB  2.83 GiB               47.2 %
        Prediction error    -0.02 %    0.00 %
        Step, CPU time       10.0 s    11.7 s               1.17 x

        Actions
          action                    class  what                                      saves
          activation checkpointing  exact  96 tensors computed again in backward  3.22 GiB

        Planned against unplanned
          loss       bitwise equal
          gradients  bitwise equal

        FITS: 2.83 GiB measured, 172.0 MiB under the budget of 3.00 GiB, 1.17 x the step time; loss and gradients bitwise equal
        ");
    }

    #[test]
    fn an_overshoot_is_said_in_bytes() {
        let mut document = document();
        document.verdict = Verdict::DoesNotFit;
        document.planned.measured_peak_bytes = Some(Bytes(3100 << 20));
        let text = verify(&document, Palette::PLAIN);
        insta::assert_snapshot!(text.lines().last().unwrap_or_default(), @"OVERSHOOT: 3.03 GiB measured, 28.0 MiB over the budget of 3.00 GiB");
    }

    #[test]
    fn numbers_that_differ_are_said_with_the_largest_error() {
        let mut document = document();
        let different = Comparison {
            class: Agreement::Different,
            max_relative_error: None,
        };
        document.gradients = Some(different);
        let text = verify(&document, Palette::PLAIN);
        let tail: Vec<&str> = text.lines().rev().take(4).collect();
        insta::assert_snapshot!(tail.into_iter().rev().collect::<Vec<_>>().join("\n"), @"
          loss       bitwise equal
          gradients  DIFFERENT, largest relative error not a number

        DIFFERENT: 2.83 GiB measured, 172.0 MiB under the budget of 3.00 GiB, but loss or gradients are not what a plan of class exact promises
        ");
    }

    #[test]
    fn rounding_is_what_an_equivalent_plan_promises() {
        let mut document = document();
        let rounded = Comparison {
            class: Agreement::Equivalent,
            max_relative_error: Some(2e-7),
        };
        document.gradients = Some(rounded);
        assert!(!document.holds());
        document.plan.class = Class::Equivalent;
        assert!(document.holds());
        let text = verify(&document, Palette::PLAIN);
        insta::assert_snapshot!(text.lines().last().unwrap_or_default(), @"FITS: 2.83 GiB measured, 172.0 MiB under the budget of 3.00 GiB, 1.17 x the step time; loss and gradients equal up to rounding, as the plan said");
    }
}

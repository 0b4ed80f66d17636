//! `memfit verify`: predicted against measured, unplanned against planned.

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::{ActionKind, ActionSummary, Verdict};

use super::plan::actions;
use super::sections::section;
use crate::printer::Palette;
use crate::report::approximation::Approximation;
use crate::report::comparison::{Agreement, Comparison};
use crate::report::compiled::{CompiledFacts, Reference};
use crate::report::document::{StepFacts, VerifyDocument};
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
    let did = match (&document.compiled, &document.plan) {
        (Some(compiled), _) => compiled_actions(compiled),
        (None, Some(plan)) => actions(&plan.actions, palette),
        (None, None) => String::new(),
    };
    section(&mut text, "Actions", &did, palette);
    if let Some(compiled) = &document.compiled {
        section(
            &mut text,
            "Graphs",
            &graphs(compiled).render(2, palette),
            palette,
        );
    }
    let mut agreement = Table::new(&[Align::Left, Align::Left]);
    for (name, comparison) in [("loss", &document.loss), ("gradients", &document.gradients)] {
        let Some(comparison) = comparison else {
            continue;
        };
        if let Some(outputs) = &document.outputs {
            if name == "loss" {
                agreement.row(["outputs".to_owned(), outputs.words()]);
                agreement.row([String::new(), outputs.choice_words().unwrap_or_default()]);
            }
            continue;
        }
        let changed = document.approximation.as_ref();
        let is_bitwise = comparison.agreement == Agreement::Bitwise;
        // Without gradients the second compares what a step leaves in the model.
        let name = match (document.infers, name) {
            (true, "gradients") if is_bitwise => continue,
            (true, "gradients") => "module state",
            (true, _) => "results",
            (false, name) => name,
        };
        let changed = changed.filter(|_| !is_bitwise);
        let words = match changed {
            Some(changed) if name == "gradients" => changed.words(),
            Some(_) => Approximation::loss_words(*comparison),
            None if name == "gradients" && is_no_number(document) => {
                format!("{}, and NOT A NUMBER", agreement_words(*comparison))
            }
            None => agreement_words(*comparison),
        };
        agreement.row([name.to_owned(), words]);
        if let Some(changed) = changed.filter(|_| name == "gradients") {
            agreement.row([String::new(), changed.yardstick()]);
        }
    }
    let updates = document.approximation.as_ref();
    if let Some(words) = updates.and_then(Approximation::update_words) {
        agreement.row(["updates".to_owned(), words]);
    }
    let later = document.approximation.as_ref();
    if let Some(words) = later.and_then(Approximation::later_words) {
        agreement.row(["later".to_owned(), words]);
    }
    let scaled = document.approximation.as_ref();
    if let Some(words) = scaled.and_then(Approximation::scale_words) {
        agreement.row(["loss scale".to_owned(), words]);
    }
    let reference = document
        .compiled
        .as_ref()
        .map(|compiled| compiled.reference);
    let heading = match reference {
        None => "Planned against unplanned",
        Some(Reference::Eager) => "Planned against eager",
        Some(Reference::TorchCompile) => {
            "Planned against torch.compile, which draws the same random numbers"
        }
    };
    section(&mut text, heading, &agreement.render(2, palette), palette);
    if let Some(compiled) = &document.compiled {
        text.push_str(&yardstick(compiled));
    }
    text.push('\n');
    text.push_str(&answer(document, palette));
    text
}

fn facts(document: &VerifyDocument) -> Table {
    let (unplanned, planned) = (&document.unplanned, &document.planned);
    if let Some(compiled) = &document.compiled {
        return compiled_facts(document, compiled);
    }
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
    table.row([
        "Prediction error".to_owned(),
        error(unplanned),
        error(planned),
        String::new(),
    ]);
    table.row([
        "Step, CPU time".to_owned(),
        time(unplanned),
        time(planned),
        step_ratio(document).map_or_else(|| "-".to_owned(), words::ratio),
    ]);
    table
}

/// The same with the step compiled by torch alone between the two.
fn compiled_facts(document: &VerifyDocument, compiled: &CompiledFacts) -> Table {
    let (unplanned, planned) = (&document.unplanned, &document.planned);
    let alone = compiled.torch_compile.step;
    let columns = [
        Align::Left,
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Right,
    ];
    let mut table =
        Table::new(&columns).header(["", "eager", "torch.compile", "planned", "planned / eager"]);
    table.row([
        "Peak, predicted".to_owned(),
        unplanned.predicted_peak_bytes.to_string(),
        "-".to_owned(),
        planned.predicted_peak_bytes.to_string(),
        words::share(planned.predicted_peak_bytes, unplanned.predicted_peak_bytes),
    ]);
    let measured = unplanned
        .measured_peak_bytes
        .zip(planned.measured_peak_bytes);
    table.row([
        "Peak, measured".to_owned(),
        bytes(unplanned.measured_peak_bytes),
        alone.measured_peak_bytes.to_string(),
        bytes(planned.measured_peak_bytes),
        measured.map_or_else(String::new, |(before, after)| words::share(after, before)),
    ]);
    table.row([
        "Prediction error".to_owned(),
        error(unplanned),
        String::new(),
        error(planned),
        String::new(),
    ]);
    table.row([
        "Step, CPU time".to_owned(),
        time(unplanned),
        words::seconds(alone.step_cpu_seconds),
        time(planned),
        step_ratio(document).map_or_else(String::new, words::ratio),
    ]);
    table
}

fn compiled_actions(compiled: &CompiledFacts) -> String {
    let actions = compiled.actions.iter().map(|action| match action.kind {
        ActionKind::Remat => {
            let what = words::counted(action.count, "op");
            format!("  {what} of the graphs recomputed in backward\n")
        }
        ActionKind::Offload => {
            let what = words::counted(action.count, "saved tensor");
            let bytes: Bytes = compiled
                .graphs
                .iter()
                .map(|graph| graph.offloaded_bytes)
                .sum();
            format!("  {what} of the graphs offloaded, {bytes}\n")
        }
        kind => {
            let what = ActionSummary::new(kind, action.count, Bytes::ZERO).effect();
            format!("  {what}\n")
        }
    });
    actions.collect()
}

fn graphs(compiled: &CompiledFacts) -> Table {
    let columns = [
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Left,
    ];
    let mut table = Table::new(&columns).header([
        "ops",
        "saved",
        "recomputed",
        "peak, predicted",
        "with all saved",
        "",
    ]);
    for graph in &compiled.graphs {
        let cut = match graph.reason.as_str() {
            "" => String::new(),
            reason => format!("cut by torch: {reason}"),
        };
        table.row([
            graph.ops.to_string(),
            graph.saved_bytes.to_string(),
            graph.recomputed_ops.to_string(),
            graph.predicted_peak_bytes.to_string(),
            graph.unplanned_peak_bytes.to_string(),
            cut,
        ]);
    }
    table
}

/// What the numbers may be off by, and why.
fn yardstick(compiled: &CompiledFacts) -> String {
    let alone = error_words(compiled.torch_compile.max_relative_error);
    let most = compiled.tolerance;
    format!("  rounding: up to {most:.1e}; torch.compile alone is {alone} from eager\n")
}

fn bytes(bytes: Option<Bytes>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string())
}

fn error(facts: &StepFacts) -> String {
    let measured = facts.measured_peak_bytes;
    measured.map_or_else(
        || "-".to_owned(),
        |measured| words::deviation(facts.predicted_peak_bytes, measured),
    )
}

fn time(facts: &StepFacts) -> String {
    let seconds = facts.step_cpu_seconds;
    seconds.map_or_else(|| "-".to_owned(), words::seconds)
}

fn step_ratio(document: &VerifyDocument) -> Option<f64> {
    let before = document.unplanned.step_cpu_seconds?;
    ratio(before, document.planned.step_cpu_seconds?)
}

fn ratio(before: f64, after: f64) -> Option<f64> {
    (before > 0.0).then(|| after / before)
}

fn error_words(error: Option<f64>) -> String {
    error.map_or_else(|| "not a number".to_owned(), |error| format!("{error:.1e}"))
}

fn agreement_words(comparison: Comparison) -> String {
    let error = error_words(comparison.max_relative_error);
    match comparison.agreement {
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
    if document.keeps_its_word() {
        let time = time_words(document);
        let bitwise = [document.loss, document.gradients]
            .into_iter()
            .flatten()
            .all(|comparison| comparison.agreement == Agreement::Bitwise);
        let is_exact =
            |it: Option<Comparison>| it.is_some_and(|it| it.agreement == Agreement::Bitwise);
        let changed = document.approximation.as_ref();
        let looked_at_updates = changed.is_some_and(|it| it.update_steps > 0);
        let numbers = if bitwise && looked_at_updates {
            "loss and gradients of the first step bitwise equal, updates as near as is allowed"
        } else if bitwise {
            "loss and gradients bitwise equal"
        } else if document.outputs.is_some() {
            "outputs as near as is allowed"
        } else if document.approximation.is_some() && is_exact(document.loss) {
            "loss bitwise equal, gradients as near as is allowed"
        } else if document.approximation.is_some() {
            "loss and gradients as near as is allowed"
        } else {
            "loss and gradients equal up to rounding, as the plan said"
        };
        let numbers = if document.infers {
            numbers.replace("loss and gradients", "results")
        } else {
            numbers.to_owned()
        };
        format!("{} {fit}{time}; {numbers}\n", palette.good("FITS:"))
    } else if is_no_number(document) {
        format!(
            "{} {fit}, but gradients are not numbers, with the plan and without it\n",
            palette.bad("DIFFERENT:")
        )
    } else {
        let changed = document.approximation.as_ref();
        let only_updates = |it: &Approximation| it.holds_but_for_updates() && !it.holds();
        let what = if document.outputs.is_some() {
            "outputs"
        } else if changed.is_some_and(only_updates) {
            "updates"
        } else if document.infers {
            "results"
        } else {
            "loss or gradients"
        };
        format!(
            "{} {fit}, but {what} are not what a plan of class {} promises\n",
            palette.bad("DIFFERENT:"),
            words::class(document.class())
        )
    }
}

/// Are gradients the same with an approximate plan and without it, and no numbers?
fn is_no_number(document: &VerifyDocument) -> bool {
    let changed = document.approximation.as_ref();
    let same = document.gradients;
    same.is_some_and(|it| it.agreement == Agreement::Bitwise)
        && changed.is_some_and(|it| it.gradient_error.is_none())
}

/// How the step time compares, as a clause with its comma; empty where it is not known.
fn time_words(document: &VerifyDocument) -> String {
    let Some(compiled) = &document.compiled else {
        return step_ratio(document).map_or_else(String::new, |ratio| {
            format!(", {} the step time", words::ratio(ratio))
        });
    };
    let alone = compiled.torch_compile.step.step_cpu_seconds;
    let planned = document.planned.step_cpu_seconds;
    let beside = planned.and_then(|planned| ratio(alone, planned));
    let clauses = [
        (beside, "torch.compile's"),
        (step_ratio(document), "eager's"),
    ];
    let known = clauses
        .into_iter()
        .filter_map(|(ratio, whose)| Some(format!(", {} {whose} time", words::ratio(ratio?))));
    known.collect()
}

#[cfg(test)]
mod tests {
    use memfit_engine::plan::Class;

    use super::*;
    use crate::report::compiled::{CompiledAction, CompiledGraph, TorchCompile};
    use crate::report::document::{PlanSummary, SCHEMA_VERSION};
    use crate::report::measured::MeasuredStep;

    fn step(predicted: u64, measured: u64, seconds: f64) -> StepFacts {
        StepFacts {
            predicted_peak_bytes: Bytes(predicted),
            measured_peak_bytes: Some(Bytes(measured)),
            step_cpu_seconds: Some(seconds),
        }
    }

    fn document() -> VerifyDocument {
        let bitwise = Comparison {
            agreement: Agreement::Bitwise,
            max_relative_error: Some(0.0),
        };
        VerifyDocument {
            schema_version: SCHEMA_VERSION,
            target: "gpt2.py:build".to_owned(),
            budget_bytes: Bytes(3 << 30),
            verdict: Verdict::Fits,
            holds: Some(true),
            unplanned: step(6 << 30, (6 << 30) + (1 << 20), 10.0),
            planned: step(2900 << 20, 2900 << 20, 11.7),
            minimum_peak_bytes: Bytes(2600 << 20),
            gradients: Some(bitwise),
            loss: Some(bitwise),
            approximation: None,
            outputs: None,
            plan: Some(PlanSummary {
                promise: Class::Exact,
                actions: vec![ActionSummary::new(ActionKind::Remat, 96, Bytes(3300 << 20))],
                predicted_step_ratio: 1.15,
                lower_bound_ratio: 1.1,
            }),
            compiled: None,
            not_compiled: None,
            capture_seconds: 1.0,
            plan_seconds: 0.5,
            infers: false,
        }
    }

    #[test]
    fn inference_is_spoken_of_by_its_results() {
        let mut document = document();
        document.infers = true;
        let text = verify(&document, Palette::PLAIN);
        assert!(text.contains("  results  bitwise equal"), "{text}");
        assert!(text.ends_with("; results bitwise equal\n"), "{text}");
        assert!(
            !text.contains("loss") && !text.contains("gradients"),
            "{text}"
        );
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
          action                    class  what                                  saves
          activation checkpointing  exact  96 tensors recomputed in backward  3.22 GiB

        Planned against unplanned
          loss       bitwise equal
          gradients  bitwise equal

        FITS: 2.83 GiB measured, 172.0 MiB under the budget of 3.00 GiB, 1.17 x the step time; loss and gradients bitwise equal
        ");
    }

    #[test]
    fn rounded_updates_are_told_beside_what_is_exact() {
        let mut document = document();
        let mut approximation = Approximation {
            gradient_error: Some(0.0),
            cosine: Some(1.0),
            worst_parameter: "head.weight".to_owned(),
            worst_error: Some(0.0),
            batch_noise: Some(0.5),
            not_finite: 0,
            update_error: Some(0.0097),
            idle_parameters: Vec::new(),
            rounding_spread: None,
            update_steps: 5,
            scaled_steps: 0,
            skipped_steps: 0,
            later_loss: None,
            max_error: 0.1,
        };
        document.approximation = Some(approximation.clone());
        if let Some(plan) = &mut document.plan {
            plan.promise = Class::Approximate;
        }
        let text = verify(&document, Palette::PLAIN);
        let last: Vec<_> = text.lines().rev().take(5).collect();
        insta::assert_snapshot!(last.into_iter().rev().collect::<Vec<_>>().join("\n"), @"
          loss       bitwise equal
          gradients  bitwise equal
          updates    after 5 steps parameters are off by 0.97 % of how far they moved; at most 10 % is allowed

        FITS: 2.83 GiB measured, 172.0 MiB under the budget of 3.00 GiB, 1.17 x the step time; loss and gradients of the first step bitwise equal, updates as near as is allowed
        ");
        approximation.rounding_spread = Some(0.0068);
        let said = approximation.update_words().expect("they were looked at");
        insta::assert_snapshot!(said, @"after 5 steps parameters are off by 0.97 % of how far they moved, and by 0.68 % by chance alone, as updates are rounded at random; at most 10 % is allowed");
        approximation.rounding_spread = None;
        approximation.idle_parameters = vec!["stem.conv.bias".to_owned()];
        let said = approximation.update_words().expect("they were looked at");
        insta::assert_snapshot!(said, @"after 5 steps parameters are off by 0.97 % of how far they moved; at most 10 % is allowed; `stem.conv.bias` is left out: the loss does not depend on it, and its gradient is rounding alone");
        approximation
            .idle_parameters
            .push("body.conv.bias".to_owned());
        let said = approximation.update_words().expect("they were looked at");
        insta::assert_snapshot!(said, @"after 5 steps parameters are off by 0.97 % of how far they moved; at most 10 % is allowed; 2 parameters, `stem.conv.bias` first, are left out: the loss does not depend on them, and their gradients are rounding alone");
        approximation.update_error = Some(0.2);
        document.approximation = Some(approximation.clone());
        assert!(!document.keeps_its_word());
        let text = verify(&document, Palette::PLAIN);
        let last = text.lines().last().unwrap_or_default();
        assert!(
            last.contains("but updates are not what a plan of class approximate promises"),
            "{last}"
        );
        approximation.gradient_error = None;
        document.approximation = Some(approximation);
        let text = verify(&document, Palette::PLAIN);
        assert!(
            text.contains("  gradients  bitwise equal, and NOT A NUMBER\n"),
            "{text}"
        );
        let last = text.lines().last().unwrap_or_default();
        assert!(
            last.ends_with("but gradients are not numbers, with the plan and without it"),
            "{last}"
        );
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
            agreement: Agreement::Different,
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
            agreement: Agreement::Equivalent,
            max_relative_error: Some(2e-7),
        };
        document.gradients = Some(rounded);
        assert!(!document.keeps_its_word());
        document.plan.as_mut().unwrap().promise = Class::Equivalent;
        assert!(document.keeps_its_word());
        let text = verify(&document, Palette::PLAIN);
        insta::assert_snapshot!(text.lines().last().unwrap_or_default(), @"FITS: 2.83 GiB measured, 172.0 MiB under the budget of 3.00 GiB, 1.17 x the step time; loss and gradients equal up to rounding, as the plan said");
    }

    #[test]
    fn a_compiled_step_stands_beside_eager_and_torch_alone() {
        let mut document = document();
        let rounded = Comparison {
            agreement: Agreement::Equivalent,
            max_relative_error: Some(2e-7),
        };
        (document.gradients, document.plan) = (Some(rounded), None);
        document.compiled = Some(CompiledFacts {
            reference: Reference::Eager,
            tolerance: 1e-5,
            torch_compile: TorchCompile {
                step: MeasuredStep {
                    measured_peak_bytes: Bytes(5 << 30),
                    step_cpu_seconds: 9.0,
                },
                max_relative_error: Some(3e-7),
            },
            corrections: 0,
            actions: vec![
                CompiledAction {
                    kind: ActionKind::Remat,
                    promise: Class::Equivalent,
                    count: 120,
                },
                CompiledAction {
                    kind: ActionKind::Offload,
                    promise: Class::Equivalent,
                    count: 12,
                },
            ],
            graphs: vec![CompiledGraph {
                ops: 900,
                saved_bytes: Bytes(800 << 20),
                offloaded_bytes: Bytes(288 << 20),
                recomputed_ops: 120,
                predicted_peak_bytes: Bytes(2900 << 20),
                unplanned_peak_bytes: Bytes(5 << 30),
                reason: String::new(),
            }],
        });
        assert!(document.keeps_its_word());
        insta::assert_snapshot!(verify(&document, Palette::PLAIN), @"
        gpt2.py:build  budget 3.00 GiB (50.0 % of the unplanned peak)

                             eager  torch.compile   planned  planned / eager
        Peak, predicted   6.00 GiB              -  2.83 GiB           47.2 %
        Peak, measured    6.00 GiB       5.00 GiB  2.83 GiB           47.2 %
        Prediction error   -0.02 %                   0.00 %
        Step, CPU time      10.0 s          9.0 s    11.7 s           1.17 x

        Actions
          120 ops of the graphs recomputed in backward
          12 saved tensors of the graphs offloaded, 288.0 MiB

        Graphs
          ops      saved  recomputed  peak, predicted  with all saved
          900  800.0 MiB         120         2.83 GiB        5.00 GiB

        Planned against eager
          loss       bitwise equal
          gradients  equal up to rounding, largest relative error 2.0e-7
          rounding: up to 1.0e-5; torch.compile alone is 3.0e-7 from eager

        FITS: 2.83 GiB measured, 172.0 MiB under the budget of 3.00 GiB, 1.30 x torch.compile's time, 1.17 x eager's time; loss and gradients equal up to rounding, as the plan said
        ");
    }
}

//! `memfit plan`: the verdict, what to do, what it costs, and what was not possible.

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::{ActionSummary, Class, Verdict};

use super::sections::{indented, section};
use crate::printer::Palette;
use crate::report::document::PlanDocument;
use crate::report::table::{Align, Table};
use crate::report::words;

/// The whole report.
pub(crate) fn plan(document: &PlanDocument, palette: Palette) -> String {
    let batch = match document.batch {
        0 => String::new(),
        batch => format!("  batch {batch}"),
    };
    let mut text = format!("{}{batch}\n\n", palette.strong(&document.target));
    text.push_str(&estimates(document).render(0, palette));
    let mut search = Table::new(&[Align::Left, Align::Left]);
    search.row([
        "Search".to_owned(),
        format!(
            "{}; {}",
            words::stop_reason(document.stop_reason),
            words::counted(document.evaluations, "candidate")
        ),
    ]);
    search.row(["Costs".to_owned(), document.cost_source.clone()]);
    text.push('\n');
    text.push_str(&search.render(0, palette));
    section(
        &mut text,
        "Actions",
        &actions(&document.plan.actions, palette),
        palette,
    );
    section(
        &mut text,
        "Not possible",
        &refusals(document, palette),
        palette,
    );
    section(
        &mut text,
        "What stops it going lower",
        &bottleneck(document, palette),
        palette,
    );
    let notes = indented(&document.notes);
    section(&mut text, "Notes", &notes, palette);
    text.push('\n');
    text.push_str(&answer(document, palette));
    text.push_str(&next_class(document));
    text
}

fn estimates(document: &PlanDocument) -> Table {
    let (unplanned, planned) = (
        document.unplanned.predicted_peak_bytes,
        document.planned.predicted_peak_bytes,
    );
    let plan = &document.plan;
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Left]).header([
        "",
        "unplanned",
        "planned",
        "",
    ]);
    table.row([
        "Predicted peak".to_owned(),
        unplanned.to_string(),
        planned.to_string(),
        format!("{} of unplanned", words::share(planned, unplanned)),
    ]);
    if let Some(reserved) = &document.reserved {
        table.row([
            "Peak reserved".to_owned(),
            String::new(),
            reserved.peak_reserved_bytes.to_string(),
            words::reserved(reserved),
        ]);
    }
    table.row([
        "Step time".to_owned(),
        words::ratio(1.0),
        words::ratio(plan.predicted_step_ratio),
        match document.verdict {
            Verdict::Fits => format!(
                "at least {} under this budget",
                words::ratio(plan.lower_bound_ratio)
            ),
            Verdict::DoesNotFit => "of the plan of lowest peak".to_owned(),
        },
    ]);
    table.row([
        "Lowest peak".to_owned(),
        String::new(),
        document.minimum_peak_bytes.to_string(),
        "of all allowed plans found".to_owned(),
    ]);
    if let Some(arena) = document.arena {
        table.row([
            "Arena".to_owned(),
            String::new(),
            arena.bytes.to_string(),
            format!(
                "holds all that the step allocates; at least {}",
                arena.lower_bound_bytes
            ),
        ]);
    }
    table.row([
        "Budget".to_owned(),
        String::new(),
        document.budget_bytes.to_string(),
        if document.margin_bytes == Bytes::ZERO {
            String::new()
        } else {
            format!("of which {} is kept free", document.margin_bytes)
        },
    ]);
    table
}

/// The actions as a table; `verify` shows the same one.
pub(crate) fn actions(actions: &[ActionSummary], palette: Palette) -> String {
    if actions.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&[Align::Left, Align::Left, Align::Left, Align::Right])
        .header(["action", "class", "what", "saves"]);
    for action in actions {
        table.row([
            action.kind.technique().title.to_owned(),
            words::class(action.promise).to_owned(),
            action.effect(),
            action.bytes.to_string(),
        ]);
    }
    table.render(2, palette)
}

fn refusals(document: &PlanDocument, palette: Palette) -> String {
    let mut table = Table::new(&[Align::Left, Align::Left]);
    for (title, reason) in words::refusals(&document.refusals) {
        table.row([title.to_owned(), reason]);
    }
    table.render(2, palette)
}

/// What is alive at the moment that stops the peak from going lower.
pub(crate) fn bottleneck(document: &PlanDocument, palette: Palette) -> String {
    let Some(bottleneck) = &document.bottleneck else {
        return String::new();
    };
    let place = [
        format!("{}, at {}", words::phase(bottleneck.phase), bottleneck.op),
        bottleneck.module.clone(),
        words::source(&bottleneck.source),
    ];
    let place: Vec<String> = place.into_iter().filter(|part| !part.is_empty()).collect();
    let mut table = Table::new(&[Align::Right, Align::Left]);
    for &(category, bytes) in &bottleneck.breakdown {
        table.row([bytes.to_string(), words::category(category)]);
    }
    format!("  {}\n{}", place.join("  "), table.render(2, palette))
}

fn answer(document: &PlanDocument, palette: Palette) -> String {
    let (planned, budget) = (document.planned.predicted_peak_bytes, document.budget_bytes);
    match document.verdict {
        Verdict::Fits if document.plan.actions.is_empty() => format!(
            "{} {planned} predicted without any action, {} under the budget\n",
            palette.good("FITS:"),
            budget - planned
        ),
        Verdict::Fits => format!(
            "{} {planned} predicted, {} under the budget, at {} the step time; class {}: {}\n",
            palette.good("FITS:"),
            budget - planned,
            words::ratio(document.plan.predicted_step_ratio),
            words::class(document.plan.promise),
            words::promise(document.plan.promise)
        ),
        Verdict::DoesNotFit => {
            let (peak, least) = (document.minimum_peak_bytes, document.minimum_budget_bytes);
            let verdict = palette.bad("DOES NOT FIT:");
            if least > budget {
                format!(
                    "{verdict} the smallest peak found is {peak}, {} over what the budget allows\n\
                     The smallest budget to ask for is {least}: `--budget {}`\n",
                    least - budget,
                    least.0
                )
            } else {
                format!(
                    "{verdict} the smallest peak found is {peak}, which the budget allows, \
                     but not the caching allocator: see the notes\n"
                )
            }
        }
    }
}

fn next_class(document: &PlanDocument) -> String {
    let Some(next) = &document.next_class else {
        return String::new();
    };
    let kinds = next.kinds.iter().map(|kind| kind.technique().title);
    let kinds: Vec<&str> = kinds.collect();
    let flag = match next.promise {
        Class::Exact => return String::new(),
        class => words::class(class),
    };
    format!(
        "With `--allow {flag}`: {} at {} the step time, by {}\n",
        next.predicted_peak_bytes,
        words::ratio(next.predicted_step_ratio),
        kinds.join(" and ")
    )
}

#[cfg(test)]
mod tests {
    use memfit_engine::plan::{
        ActionKind, Arena, Bottleneck, Estimate, NextClass, Refusal, StopReason,
    };
    use memfit_engine::trace::{Category, Phase};

    use super::*;
    use crate::report::document::{PlanSummary, SCHEMA_VERSION};

    fn document() -> PlanDocument {
        let estimate = |bytes, seconds| Estimate {
            predicted_peak_bytes: Bytes(bytes),
            predicted_step_seconds: seconds,
        };
        PlanDocument {
            schema_version: SCHEMA_VERSION,
            target: "gpt2.py:build".to_owned(),
            batch: 4,
            budget_bytes: Bytes(3 << 30),
            margin_bytes: Bytes(1 << 20),
            verdict: Verdict::Fits,
            unplanned: estimate(6 << 30, 10.0),
            planned: estimate(2900 << 20, 11.5),
            minimum_peak_bytes: Bytes(2600 << 20),
            minimum_budget_bytes: Bytes(2601 << 20),
            arena: Some(Arena {
                bytes: Bytes(1900 << 20),
                lower_bound_bytes: Bytes(1890 << 20),
            }),
            reserved: None,
            plan: PlanSummary {
                promise: Class::Exact,
                actions: vec![
                    ActionSummary::new(ActionKind::FuseOptimizer, 1, Bytes(400 << 20)),
                    ActionSummary::new(ActionKind::Remat, 96, Bytes(3300 << 20)),
                ],
                predicted_step_ratio: 1.15,
                lower_bound_ratio: 1.1,
            },
            cost_source: "roofline (a test machine)".to_owned(),
            stop_reason: StopReason::LocalOptimum,
            evaluations: 1234,
            refusals: vec![Refusal {
                kind: ActionKind::MicroBatch,
                reason: "the examples of the batch depend on each other".to_owned(),
            }],
            next_class: Some(NextClass {
                promise: Class::Equivalent,
                predicted_peak_bytes: Bytes(2800 << 20),
                predicted_step_ratio: 1.02,
                kinds: vec![ActionKind::MicroBatch],
            }),
            bottleneck: Some(Bottleneck {
                op: "aten.mm.default".to_owned(),
                module: "lm_head".to_owned(),
                source: "/usr/lib/transformers/models/gpt2.py:7".to_owned(),
                phase: Phase::Backward,
                breakdown: vec![
                    (Category::OptimizerState, Bytes(1 << 30)),
                    (Category::Activation, Bytes(300 << 20)),
                ],
            }),
            notes: vec!["a note".to_owned()],
            breakdown: None,
            capture_seconds: None,
            plan_seconds: None,
        }
    }

    #[test]
    fn a_plan_that_fits() {
        insta::assert_snapshot!(plan(&document(), Palette::PLAIN), @"
        gpt2.py:build  batch 4

                        unplanned   planned
        Predicted peak   6.00 GiB  2.83 GiB  47.2 % of unplanned
        Step time          1.00 x    1.15 x  at least 1.10 x under this budget
        Lowest peak                2.54 GiB  of all allowed plans found
        Arena                      1.86 GiB  holds all that the step allocates; at least 1.85 GiB
        Budget                     3.00 GiB  of which 1.0 MiB is kept free

        Search  no single change improves it; 1234 candidates
        Costs   roofline (a test machine)

        Actions
          action                      class  what                                                      saves
          optimizer step in backward  exact  1 parameter updated as soon as its gradient is ready  400.0 MiB
          activation checkpointing    exact  96 tensors recomputed in backward                      3.22 GiB

        Not possible
          micro-batches  the examples of the batch depend on each other

        What stops it going lower
          backward, at aten.mm.default  lm_head  transformers/models/gpt2.py:7
           1.00 GiB  optimizer state
          300.0 MiB  activation

        Notes
          a note

        FITS: 2.83 GiB predicted, 172.0 MiB under the budget, at 1.15 x the step time; class exact: loss and gradients stay bitwise equal
        With `--allow equivalent`: 2.73 GiB at 1.02 x the step time, by micro-batches
        ");
    }

    #[test]
    fn a_budget_that_no_plan_meets() {
        let mut document = document();
        document.verdict = Verdict::DoesNotFit;
        document.budget_bytes = Bytes(2 << 30);
        document.next_class = None;
        let text = plan(&document, Palette::PLAIN);
        // There is no plan to be at least as slow as anything.
        assert!(text.contains("1.15 x  of the plan of lowest peak\n"));
        assert!(!text.contains("under this budget"));
        let answer = text.split("\n\n").last().unwrap_or_default();
        insta::assert_snapshot!(answer, @r"
        DOES NOT FIT: the smallest peak found is 2.54 GiB, 553.0 MiB over what the budget allows
        The smallest budget to ask for is 2.54 GiB: `--budget 2727346176`
        ");
    }

    #[test]
    fn where_only_the_allocator_refuses_no_smaller_budget_is_named() {
        let mut document = document();
        document.verdict = Verdict::DoesNotFit;
        document.next_class = None;
        let text = plan(&document, Palette::PLAIN);
        insta::assert_snapshot!(text.lines().last().unwrap_or_default(), @"DOES NOT FIT: the smallest peak found is 2.54 GiB, which the budget allows, but not the caching allocator: see the notes");
    }

    #[test]
    fn nothing_to_do() {
        let mut document = document();
        document.plan.actions.clear();
        document.planned = document.unplanned;
        document.budget_bytes = Bytes(8 << 30);
        document.next_class = None;
        let text = plan(&document, Palette::PLAIN);
        insta::assert_snapshot!(text.lines().last().unwrap_or_default(), @"FITS: 6.00 GiB predicted without any action, 2.00 GiB under the budget");
    }
}

//! `memfit plan`: the verdict, what to do, what it costs, and what was not possible.

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::{Class, Verdict};

use super::{indented, section};
use crate::printer::Palette;
use crate::report::document::{ActionSummary, PlanDocument};
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
    table.row([
        "Step time".to_owned(),
        words::ratio(1.0),
        words::ratio(plan.predicted_step_ratio),
        format!(
            "at least {} under this budget",
            words::ratio(plan.lower_bound_ratio)
        ),
    ]);
    table.row([
        "Lowest peak".to_owned(),
        String::new(),
        document.minimum_peak_bytes.to_string(),
        "of all allowed plans found".to_owned(),
    ]);
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
            words::kind(action.kind).to_owned(),
            words::class(action.class).to_owned(),
            words::effect(action.kind, action.count),
            action.bytes.to_string(),
        ]);
    }
    table.render(2, palette)
}

fn refusals(document: &PlanDocument, palette: Palette) -> String {
    let mut table = Table::new(&[Align::Left, Align::Left]);
    for refusal in &document.refusals {
        table.row([words::kind(refusal.kind).to_owned(), refusal.reason.clone()]);
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
            words::class(document.plan.class),
            words::promise(document.plan.class)
        ),
        Verdict::DoesNotFit => format!(
            "{} the smallest peak found is {}, {} over what the budget allows\n",
            palette.bad("DOES NOT FIT:"),
            document.minimum_peak_bytes,
            (document.minimum_peak_bytes + document.margin_bytes) - budget
        ),
    }
}

fn next_class(document: &PlanDocument) -> String {
    let Some(next) = &document.next_class else {
        return String::new();
    };
    let kinds: Vec<&str> = next.kinds.iter().map(|&kind| words::kind(kind)).collect();
    let flag = match next.class {
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

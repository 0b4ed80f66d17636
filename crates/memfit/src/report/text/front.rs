//! `memfit plan --pareto`: the plans of the front, one a row, the largest peak first.

use memfit_engine::plan::{Front, FrontPoint};

use super::sections::{indented, section};
use crate::printer::Palette;
use crate::report::front::sentences;
use crate::report::table::{Align, Table, bar};
use crate::report::words;

const BAR: usize = 24;

/// The whole report.
pub(crate) fn front(front: &Front, palette: Palette) -> String {
    let batch = match front.batch {
        0 => String::new(),
        batch => format!("  batch {batch}"),
    };
    let mut text = format!("{}{batch}\n\n", palette.strong(&front.target));
    text.push_str(&points(front).render(0, palette));
    let mut search = Table::new(&[Align::Left, Align::Left]);
    search.row(["Search".to_owned(), sentences::search(front)]);
    search.row(["Costs".to_owned(), front.cost_source.clone()]);
    text.push('\n');
    text.push_str(&search.render(0, palette));
    let refusals: Vec<String> = words::refusals(&front.refusals)
        .into_iter()
        .map(|(title, reason)| format!("{title}: {reason}"))
        .collect();
    section(&mut text, "Not possible", &indented(&refusals), palette);
    section(&mut text, "Notes", &indented(&front.notes), palette);
    text.push('\n');
    text.push_str(&palette.strong(&sentences::headline(front)));
    text.push('\n');
    for sentence in sentences::sentences(front) {
        text.push_str(&sentence);
        text.push('\n');
    }
    text
}

fn points(front: &Front) -> Table {
    use Align::{Left, Right};
    let mut table = Table::new(&[Right, Right, Left, Right, Right, Left, Left]).header([
        "peak",
        "",
        "of the unplanned peak",
        "step time",
        "at least",
        "class",
        "actions",
    ]);
    let whole = front.unplanned.predicted_peak_bytes;
    let mut points: Vec<&FrontPoint> = front.points.iter().collect();
    points.sort_by_key(|point| (std::cmp::Reverse(point.predicted_peak_bytes), point.promise));
    let is_unplanned = |point: &&FrontPoint| point.actions.is_empty();
    if !points.iter().any(is_unplanned) {
        table.row([
            whole.to_string(),
            words::share(whole, whole),
            bar(whole, whole, BAR),
            sentences::ratio(1.0),
            String::new(),
            String::new(),
            "none: the unplanned step".to_owned(),
        ]);
    }
    for point in points {
        table.row([
            point.predicted_peak_bytes.to_string(),
            words::share(point.predicted_peak_bytes, whole),
            bar(point.predicted_peak_bytes, whole, BAR),
            sentences::ratio(point.predicted_step_ratio),
            sentences::ratio(point.lower_bound_ratio),
            words::class(point.promise).to_owned(),
            sentences::actions(point),
        ]);
    }
    table
}

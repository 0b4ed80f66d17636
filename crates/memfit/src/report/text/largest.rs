//! The text of `--largest`: a value for each class of plans.

use crate::printer::Palette;
use crate::report::document::{LargestDocument, LargestRow};
use crate::report::table::{Align, Table};
use crate::report::words;

/// The report.
pub(crate) fn largest(document: &LargestDocument, palette: Palette) -> String {
    let head = format!(
        "{}  the largest `{}` within {}",
        document.target, document.argument, document.budget_bytes
    );
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Right]).header([
        "Allowed",
        &document.argument,
        "predicted peak",
        "step time",
    ]);
    for row in &document.rows {
        table.row(cells(row));
    }
    let notes = document.rows.iter();
    let notes: Vec<String> = notes
        .filter_map(|row| note(row, &document.argument))
        .collect();
    let captures = words::counted(document.captures, "capture");
    let table = table.render(0, palette);
    let mut parts = vec![palette.strong(&head), table.trim_end().to_owned()];
    parts.extend(notes);
    parts.push(captures);
    parts.join("\n\n") + "\n"
}

fn cells(row: &LargestRow) -> [String; 4] {
    let allowed = match row.promise {
        None => "as it is".to_owned(),
        Some(class) => format!("{} plans", words::class(class)),
    };
    let value = if row.value == 0 {
        "none".to_owned()
    } else {
        row.value.to_string()
    };
    [
        allowed,
        value,
        row.predicted_peak_bytes
            .map_or_else(String::new, |bytes| bytes.to_string()),
        row.predicted_step_ratio
            .map_or_else(String::new, words::ratio),
    ]
}

/// What the value alone does not say.
fn note(row: &LargestRow, argument: &str) -> Option<String> {
    let next = row.value + 1;
    if let Some(failure) = &row.next_fails {
        return Some(format!(
            "with `{argument}={next}` the step fails by itself: {failure}"
        ));
    }
    (!row.is_largest).then(|| {
        format!(
            "larger values than {} may fit: the search was given up",
            row.value
        )
    })
}

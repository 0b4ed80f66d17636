//! `memfit prune`: what the model was and is, what went, and what stays and why.

use std::collections::BTreeMap;

use memfit_engine::bytes::Bytes;

use super::sections::section;
use crate::printer::Palette;
use crate::report::pruning::{ModelFacts, PruneDocument, PrunedGroup, StayingParameters};
use crate::report::table::{Align, Table};
use crate::report::words;

/// Rows of a table beyond these are counted.
const MOST_ROWS: usize = 12;

/// The whole report.
pub(crate) fn pruning(document: &PruneDocument, palette: Palette) -> String {
    let right = Align::Right;
    let mut facts =
        Table::new(&[Align::Left, right, right, right]).header(["", "before", "after", ""]);
    let (before, after) = (&document.before, &document.after);
    let bytes = |name: &str, of: fn(&ModelFacts) -> Bytes| {
        let share = words::share(of(after), of(before));
        [
            name.to_owned(),
            of(before).to_string(),
            of(after).to_string(),
            share,
        ]
    };
    facts.row(bytes("Predicted peak", |it| it.predicted_peak_bytes));
    facts.row([
        "Parameters".to_owned(),
        counted(before.parameters),
        counted(after.parameters),
        words::share(Bytes(after.parameters), Bytes(before.parameters)),
    ]);
    facts.row(bytes("Their bytes", |it| it.parameter_bytes));
    let mut text = facts.render(0, palette);
    section(
        &mut text,
        "Pruned",
        &groups(&document.groups, palette),
        palette,
    );
    section(
        &mut text,
        "Stays",
        &stays(&document.stays, palette),
        palette,
    );
    text
}

/// The groups, those of repeated layers in one row.
fn groups(groups: &[PrunedGroup], palette: Palette) -> String {
    let mut rows: Vec<(String, &PrunedGroup, usize)> = Vec::new();
    let mut known = BTreeMap::new();
    for group in groups.iter().filter(|group| group.kept < group.channels) {
        let name = group.parameters.first().map_or("", String::as_str);
        let folded = words::fold_module(name);
        let row = *known
            .entry((folded.clone(), group.channels, group.kept))
            .or_insert(rows.len());
        match rows.get_mut(row) {
            Some((_, _, count)) => *count += 1,
            None => rows.push((folded, group, 1)),
        }
    }
    let right = Align::Right;
    let mut table = Table::new(&[Align::Left, right, right, right]).header([
        "first of what goes together",
        "channels",
        "left",
        "groups",
    ]);
    for (name, group, count) in rows.iter().take(MOST_ROWS) {
        let (channels, kept) = (counted(group.channels), counted(group.kept));
        table.row([words::inert(name, 60), channels, kept, format!("{count}")]);
    }
    let mut text = if table.is_empty() {
        return "  nothing: the step fits as it is\n".to_owned();
    } else {
        table.render(2, palette)
    };
    if rows.len() > MOST_ROWS {
        let more = format!("  and {} more\n", rows.len() - MOST_ROWS);
        text.push_str(&more);
    }
    text
}

fn stays(stays: &[StayingParameters], palette: Palette) -> String {
    let mut table = Table::new(&[Align::Left, Align::Left]);
    for stay in stays {
        let first = stay.parameters.first().map_or("", String::as_str);
        let first = words::inert(&words::fold_module(first), 50);
        let more = match stay.parameters.len() {
            0 | 1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        table.row([format!("{first}{more}"), words::inert(&stay.why, 200)]);
    }
    if table.is_empty() {
        return String::new();
    }
    table.render(2, palette)
}

/// A number with separators.
fn counted(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

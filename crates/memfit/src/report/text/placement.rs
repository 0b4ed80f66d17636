//! `memfit place`: how high, how good, and why the search ended. The offsets go to a file or into JSON.

use memfit_engine::bytes::Bytes;
use memfit_engine::placement::{Status, StopReason};

use crate::printer::Palette;
use crate::report::document::{Asked, PlaceDocument};
use crate::report::table::{Align, Table};
use crate::report::words;

/// The whole report.
pub(crate) fn placement(document: &PlaceDocument, asked: &Asked, palette: Palette) -> String {
    let count = words::counted(document.offsets.len() as u64, "allocation");
    let mut text = format!("{}  {count}\n\n", palette.strong(&asked.file));
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Left]);
    let mut row = |name: &str, bytes: Bytes, note: String| {
        table.row([
            name.to_owned(),
            bytes.to_string(),
            bytes.0.to_string(),
            note,
        ]);
    };
    row("Height", document.height, above_bound(document));
    row(
        "Lower bound",
        document.lower_bound,
        "no placement is lower".to_owned(),
    );
    if let Some(capacity) = asked.capacity {
        row("Capacity", capacity, String::new());
    }
    text.push_str(&table.render(0, palette));
    let reason = stop_reason(document.stop_reason);
    let seconds = words::seconds(document.seconds);
    text.extend(["\nSearch  ", reason, "; ", &seconds, "\n\n"]);
    text.push_str(&answer(document, palette));
    text
}

/// How far the height is above the lower bound.
fn above_bound(document: &PlaceDocument) -> String {
    let (height, bound) = (document.height, document.lower_bound);
    if height <= bound || bound == Bytes::ZERO {
        return "as low as can be".to_owned();
    }
    let percent = 100.0 * (height - bound).as_f64() / bound.as_f64();
    format!("{percent:.2} % above the lower bound")
}

const fn stop_reason(reason: StopReason) -> &'static str {
    match reason {
        StopReason::ProvedOptimal => "proved optimal",
        StopReason::WithinCapacity => "a placement within the capacity was found",
        StopReason::ProvedInfeasible => "proved: no placement is within the capacity",
        StopReason::WorkLimit => "the limit on work was reached",
        StopReason::TimeLimit => "the time limit was reached",
    }
}

fn answer(document: &PlaceDocument, palette: Palette) -> String {
    let height = document.height;
    match document.status {
        Status::Optimal => format!("{} {height}\n", palette.good("OPTIMAL:")),
        Status::Feasible => format!("{} {height}\n", palette.good("FEASIBLE:")),
        Status::Infeasible => format!(
            "{} at least {} are needed; the lowest placement found takes {height}\n",
            palette.bad("INFEASIBLE:"),
            document.lower_bound
        ),
        Status::Unknown => format!(
            "{} no placement within the capacity was found, and none was ruled out; \
             the lowest found takes {height}\n",
            palette.bad("UNKNOWN:")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::document::SCHEMA_VERSION;

    fn document(status: Status, stop_reason: StopReason, height: u64) -> PlaceDocument {
        PlaceDocument {
            schema_version: SCHEMA_VERSION,
            status,
            height: Bytes(height),
            lower_bound: Bytes(1 << 20),
            seconds: 0.25,
            stop_reason,
            offsets: vec![("a".to_owned(), 0), ("b".to_owned(), 1 << 19)],
        }
    }

    fn asked(capacity: Option<u64>) -> Asked {
        Asked {
            file: "step.csv".to_owned(),
            capacity: capacity.map(Bytes),
        }
    }

    #[test]
    fn an_optimal_placement() {
        let document = document(Status::Optimal, StopReason::ProvedOptimal, 1 << 20);
        insta::assert_snapshot!(placement(&document, &asked(None), Palette::PLAIN), @"
        step.csv  2 allocations

        Height       1.0 MiB  1048576  as low as can be
        Lower bound  1.0 MiB  1048576  no placement is lower

        Search  proved optimal; 250 ms

        OPTIMAL: 1.0 MiB
        ");
    }

    #[test]
    fn a_capacity_that_was_not_met() {
        let document = document(Status::Unknown, StopReason::WorkLimit, 1_200_000);
        let asked = asked(Some(1_100_000));
        insta::assert_snapshot!(placement(&document, &asked, Palette::PLAIN), @"
        step.csv  2 allocations

        Height       1.1 MiB  1200000  14.44 % above the lower bound
        Lower bound  1.0 MiB  1048576  no placement is lower
        Capacity     1.0 MiB  1100000

        Search  the limit on work was reached; 250 ms

        UNKNOWN: no placement within the capacity was found, and none was ruled out; the lowest found takes 1.1 MiB
        ");
    }

    #[test]
    fn a_capacity_below_the_lower_bound() {
        let document = document(Status::Infeasible, StopReason::ProvedInfeasible, 1_200_000);
        let asked = asked(Some(1_000_000));
        let text = placement(&document, &asked, Palette::PLAIN);
        insta::assert_snapshot!(text.lines().last().unwrap_or_default(), @"INFEASIBLE: at least 1.0 MiB are needed; the lowest placement found takes 1.1 MiB");
    }
}

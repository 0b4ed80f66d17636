//! The front as a page and as an image: a plot that people look at, with all of it as a table below.
//!
//! Responsible for putting template, style, plot, table and script into one file. Not responsible for the plot
//! (`plot.rs`), for the sentences (`sentences.rs`) nor for any number (the engine).
//!
//! Invariants: as for the other page, no address on a network is named and the content policy forbids any, text
//! is escaped, and the same front gives the same bytes. Plot and table are there without JavaScript.

mod axis;
mod plot;
pub(crate) mod sentences;

use std::fmt::Write as _;

use memfit_engine::plan::Front;

use super::html::{checksum, escaped};
use super::words;
use plot::{NARROW, WIDE};

const TEMPLATE: &str = include_str!("template.html");
const STYLE: &str = include_str!("style.css");
const PLOT_STYLE: &str = include_str!("plot.css");
const SCRIPT: &str = include_str!("page.js");

/// Bytes of one text on the page.
const MAX_LINE: usize = 2_000;

/// The page of a front, or with `svg` the plot alone.
#[must_use]
pub fn page_of_front(front: &Front, svg: bool) -> String {
    if svg { image(front) } else { page(front) }
}

/// The plot alone, with its style.
#[must_use]
pub(crate) fn image(front: &Front) -> String {
    let plot = plot::plot(front, &WIDE, Some(PLOT_STYLE));
    format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{plot}\n")
}

/// The page.
#[must_use]
pub(crate) fn page(front: &Front) -> String {
    let sentences = sentences::sentences(front);
    let sentences = sentences.iter().fold(String::new(), |mut text, one| {
        // Writing into a string cannot fail.
        let _infallible = write!(text, "<p>{}</p>", escaped(one, MAX_LINE));
        text
    });
    let plots = [&WIDE, &NARROW].map(|size| plot::plot(front, size, None));
    let nonce = format!("{:016x}", checksum(plots[0].as_bytes()));
    let mut html = String::new();
    let mut pieces = TEMPLATE.split("{{");
    html.push_str(pieces.next().unwrap_or_default());
    for piece in pieces {
        let (name, rest) = piece.split_once("}}").unwrap_or((piece, ""));
        match name {
            "nonce" => html.push_str(&nonce),
            "version" => html.push_str(env!("CARGO_PKG_VERSION")),
            "target" => html.push_str(&escaped(&front.target, 300)),
            "headline" => html.push_str(&escaped(&sentences::headline(front), MAX_LINE)),
            "sentences" => html.push_str(&sentences),
            "style" => html.push_str(STYLE),
            "plot-style" => html.push_str(PLOT_STYLE),
            "plots" => html.extend(plots.iter().map(String::as_str)),
            "rows" => html.push_str(&rows(front)),
            "notes" => html.push_str(&notes(front)),
            _ => html.push_str(SCRIPT),
        }
        html.push_str(rest);
    }
    html
}

fn rows(front: &Front) -> String {
    let whole = front.unplanned.predicted_peak_bytes;
    let mut html = String::new();
    for (number, point) in front.points.iter().enumerate() {
        let told = escaped(&sentences::told(point), MAX_LINE);
        let class = words::class(point.promise);
        let budget = format!("--budget {}", point.budget_bytes.0);
        let budget = match point.allow {
            memfit_engine::plan::Class::Exact => budget,
            allow => format!("{budget} --allow {}", words::class(allow)),
        };
        let command = format!("memfit plan {} {budget}", front.target);
        let _infallible = writeln!(
            html,
            "<tr data-point=\"{number}\" data-class=\"{class}\" data-share=\"{:.1}\" data-told=\"{told}\" data-command=\"{}\"><td class=\"number\">{}</td>\
             <td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td>{class}</td>\
             <td>{}</td><td><code>{budget}</code></td></tr>",
            100.0 * point.predicted_peak_bytes.as_f64() / whole.as_f64().max(1.0),
            escaped(&command, MAX_LINE),
            point.predicted_peak_bytes,
            words::share(point.predicted_peak_bytes, whole),
            sentences::ratio(point.predicted_step_ratio),
            sentences::ratio(point.lower_bound_ratio),
            escaped(&sentences::techniques(point), MAX_LINE),
        );
    }
    html
}

fn notes(front: &Front) -> String {
    let mut lines = vec![
        format!("Costs: {}.", front.cost_source),
        format!("Search: {}.", sentences::search(front)),
    ];
    if front.margin_bytes.0 > 0 {
        lines.push(format!(
            "Every plan keeps {} free below its budget for what the prediction is not sure of.",
            front.margin_bytes
        ));
    }
    let refusals = words::refusals(&front.refusals).into_iter();
    lines.extend(refusals.map(|(title, reason)| format!("Not used: {title}: {reason}.")));
    lines.extend(front.notes.iter().cloned());
    lines.iter().fold(String::new(), |mut html, line| {
        let _infallible = write!(html, "<li>{}</li>", escaped(line, MAX_LINE));
        html
    })
}

#[cfg(test)]
mod tests {
    use memfit_engine::bytes::Bytes;
    use memfit_engine::plan::{
        ActionKind, ActionSummary, Class, Estimate, FrontBound, FrontPoint, FrontStop, StopReason,
    };

    use super::*;

    const GIB: u64 = 1 << 30;

    fn point(class: Class, gib: u64, ratio: f64) -> FrontPoint {
        let kind = match class {
            Class::Exact => ActionKind::Remat,
            _ => ActionKind::MicroBatch,
        };
        FrontPoint {
            budget_bytes: Bytes(gib * GIB + 1),
            allow: class,
            promise: class,
            predicted_peak_bytes: Bytes(gib * GIB),
            predicted_step_seconds: ratio,
            predicted_step_ratio: ratio,
            lower_bound_ratio: 1.0,
            stop_reason: StopReason::LocalOptimum,
            actions: vec![ActionSummary {
                kind,
                promise: class,
                count: 3,
                bytes: Bytes(GIB),
                resident_bytes: None,
            }],
            reserved: None,
        }
    }

    fn front(text: &str) -> Front {
        let bound = |gib: u64, ratio| FrontBound {
            peak_bytes: Bytes(gib * GIB),
            ratio,
        };
        Front {
            schema_version: 1,
            target: text.to_owned(),
            batch: 8,
            device_kind: "cpu".to_owned(),
            budget_bytes: Some(Bytes(20 * GIB)),
            margin_bytes: Bytes(1),
            unplanned: Estimate {
                predicted_peak_bytes: Bytes(40 * GIB),
                predicted_step_seconds: 1.0,
            },
            minimum_peak_bytes: Bytes(9 * GIB),
            points: vec![
                point(Class::Exact, 12, 1.4),
                point(Class::Exact, 25, 1.1),
                point(Class::Equivalent, 9, 1.2),
            ],
            bound: vec![bound(5, None), bound(12, Some(1.05)), bound(40, Some(1.0))],
            cost_source: text.to_owned(),
            stop_reason: FrontStop::Resolved,
            plans: 9,
            evaluations: 100,
            refusals: Vec::new(),
            notes: vec![text.to_owned()],
        }
    }

    #[test]
    fn text_never_becomes_markup_and_no_address_is_named() {
        let attack = "</script><img src=x onerror=alert(1)>\"'{{script}}\u{1b}[31m";
        let html = page(&front(attack));
        assert!(!html.contains("<img"));
        assert_eq!(html.matches("</script>").count(), 1);
        assert!(
            html.contains("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&quot;&#39;{{script}}")
        );
        for scheme in ["http:", "https:", "//cdn", "ws:"] {
            assert!(!html.contains(scheme), "{scheme}");
        }
        assert!(html.contains("default-src 'none'"));
    }

    #[test]
    fn every_plan_is_a_mark_in_both_plots_and_a_row() {
        let html = page(&front("model.py:build"));
        for number in 0..3 {
            let mark = format!("data-point=\"{number}\"");
            assert_eq!(html.matches(&mark).count(), 3, "{number}");
        }
        // What is in range: 12 GiB to 40 GiB less the context; 8 GiB and 48 GiB are not.
        for (device, times) in [("16 GiB GPU", 2), ("40 GiB GPU", 2), ("48 GiB GPU", 0)] {
            assert_eq!(html.matches(device).count(), times, "{device}");
        }
        assert_eq!(page(&front("model.py:build")), html);
    }

    #[test]
    fn an_image_stands_alone() {
        let svg = image(&front("a<b"));
        assert!(svg.starts_with("<?xml") && svg.contains("xmlns=") && svg.contains("<style>"));
        assert_eq!(svg.matches("class=\"point exact\" data-point").count(), 2);
    }

    #[test]
    fn the_story_is_that_of_the_numbers() {
        let front = front("m");
        assert_eq!(
            sentences::headline(&front),
            "From 40.00 GiB down to 12.00 GiB with exact plans, at up to 1.400 x the step time"
        );
        assert_eq!(
            sentences::sentences(&front),
            [
                "Half the unplanned peak: 1.400 x the step time.",
                "Where rounding may differ: down to 9.00 GiB at 1.200 x the step time."
            ]
        );
    }
}

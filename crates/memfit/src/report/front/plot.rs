//! The plot: what can be had, what cannot, and what lies between.
//!
//! Responsible for one SVG of a given size. Not responsible for colours (`plot.css`) nor for what happens when a
//! point is touched (`page.js`).
//!
//! A front is drawn as stairs, since between two of its plans the one with the smaller peak is what there is.

use std::fmt::Write as _;

use memfit_engine::bytes::Bytes;
use memfit_engine::cost::devices;
use memfit_engine::plan::{Class, Front, FrontPoint};

use super::axis::{Axis, unit};
use super::sentences;
use crate::report::html::escaped;
use crate::report::words;

/// A size of paper and what goes with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    name: &'static str,
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    ticks: (u32, u32),
    /// Legend entries beside each other.
    legend_columns: usize,
}

/// For screens and paper.
pub(super) const WIDE: Size = Size {
    name: "wide",
    width: 1080.0,
    height: 620.0,
    left: 66.0,
    right: 26.0,
    top: 88.0,
    bottom: 60.0,
    ticks: (10, 8),
    legend_columns: 4,
};

/// For phones.
pub(super) const NARROW: Size = Size {
    name: "narrow",
    width: 400.0,
    height: 470.0,
    left: 52.0,
    right: 12.0,
    top: 144.0,
    bottom: 52.0,
    ticks: (4, 6),
    legend_columns: 1,
};

struct Paper<'f> {
    front: &'f Front,
    size: &'f Size,
    x: Axis,
    y: Axis,
    unit: (&'static str, f64),
}

/// The plot as one `<svg>` element; with a style, one that stands alone.
pub(super) fn plot(front: &Front, size: &Size, style: Option<&str>) -> String {
    let paper = Paper::new(front, size);
    let mut svg = String::new();
    let label = escaped(
        &format!("Step time against peak. {}", sentences::headline(front)),
        600,
    );
    put(
        &mut svg,
        format_args!(
            "<svg{} class=\"front {}\" viewBox=\"0 0 {} {}\" role=\"group\" aria-label=\"{label}\">",
            if style.is_some() { NAMESPACE } else { "" },
            size.name,
            size.width,
            size.height
        ),
    );
    if let Some(style) = style {
        put(&mut svg, format_args!("<style>{style}</style>"));
    }
    paper.ground(&mut svg);
    paper.grid(&mut svg);
    paper.devices(&mut svg);
    paper.bound(&mut svg);
    paper.lines(&mut svg);
    paper.legend(&mut svg);
    paper.points(&mut svg);
    paper.labels(&mut svg);
    svg.push_str("</svg>");
    svg
}

/// The name of SVG itself, an identifier that nothing fetches. In a page the browser knows it.
const NAMESPACE: &str = " xmlns=\"http://www.w3.org/2000/svg\"";

/// The part of the width below the smallest peak.
const BEFORE: f64 = 0.09;
/// And above the largest.
const AFTER: f64 = 0.05;
/// Least range of step time shown, so that a flat front looks flat.
const LEAST_HEIGHT: f64 = 0.04;

/// Height of a line of text.
const LINE: f64 = 19.0;

impl<'f> Paper<'f> {
    fn new(front: &'f Front, size: &'f Size) -> Self {
        let unplanned = front.unplanned.predicted_peak_bytes;
        let unit = unit(unplanned);
        let peaks = front.points.iter().map(|point| point.predicted_peak_bytes);
        let lowest = peaks.fold(unplanned, Bytes::min).as_f64() / unit.1;
        let highest = unplanned.as_f64() / unit.1;
        let span = (highest - lowest).max(highest * 0.1);
        let from = if lowest < 0.25 * highest {
            0.0
        } else {
            (lowest - BEFORE * span).max(0.0)
        };
        let ratios = front.points.iter().map(|point| point.predicted_step_ratio);
        let slowest = ratios.fold(1.0 + LEAST_HEIGHT, f64::max);
        let height = slowest - 1.0;
        Self {
            front,
            size,
            x: Axis {
                from,
                to: highest + AFTER * span,
                start: size.left,
                end: size.width - size.right,
            },
            y: Axis {
                from: 1.0 - 0.1 * height,
                to: slowest + 0.12 * height,
                start: size.height - size.bottom,
                end: size.top,
            },
            unit,
        }
    }

    fn x_at(&self, bytes: Bytes) -> f64 {
        self.x.at(bytes.as_f64() / self.unit.1)
    }

    fn place(&self, point: &FrontPoint) -> (f64, f64) {
        (
            self.x_at(point.predicted_peak_bytes),
            self.y.at(point.predicted_step_ratio),
        )
    }

    fn ground(&self, svg: &mut String) {
        let name = self.size.name;
        put(
            svg,
            format_args!(
                "<defs><pattern id=\"hatch-{name}\" width=\"9\" height=\"9\" patternUnits=\"userSpaceOnUse\" \
                 patternTransform=\"rotate(45)\"><rect class=\"hatch-ground\" width=\"9\" height=\"9\"/>\
                 <line class=\"hatch-line\" x1=\"0\" y1=\"0\" x2=\"0\" y2=\"9\"/></pattern></defs>\
                 <rect class=\"paper\" width=\"{}\" height=\"{}\"/>",
                self.size.width, self.size.height
            ),
        );
    }

    fn grid(&self, svg: &mut String) {
        let (x, y) = (&self.x, &self.y);
        let (values, digits) = y.ticks(self.size.ticks.1);
        for value in values {
            let at = y.at(value);
            put(
                svg,
                format_args!(
                    "<line class=\"grid\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                     <text class=\"tick\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{value:.digits$}</text>",
                    x.start,
                    x.end,
                    x.start - 8.0,
                    at + 4.5
                ),
            );
        }
        let (values, digits) = x.ticks(self.size.ticks.0);
        for value in values {
            let at = x.at(value);
            put(
                svg,
                format_args!(
                    "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>\
                     <text class=\"tick\" text-anchor=\"middle\" x=\"{at:.1}\" y=\"{:.1}\">{value:.digits$}</text>",
                    y.start,
                    y.end,
                    y.start + 20.0
                ),
            );
        }
        let middle = f64::midpoint(x.start, x.end);
        put(
            svg,
            format_args!(
                "<text class=\"title\" text-anchor=\"middle\" x=\"{middle:.1}\" y=\"{:.1}\">Predicted peak, {}</text>\
                 <text class=\"title\" x=\"{:.1}\" y=\"{:.1}\">Step time, × unplanned</text>",
                y.start + 44.0,
                self.unit.0,
                if self.size.legend_columns > 1 {
                    14.0
                } else {
                    8.0
                },
                y.end - 18.0
            ),
        );
    }

    /// What common GPUs leave for tensors; of those with as much memory, the least.
    fn devices(&self, svg: &mut String) {
        let mut sizes: Vec<(Bytes, Vec<&str>, Bytes)> = Vec::new();
        for device in &devices::TABLE {
            match sizes.last_mut() {
                Some((bytes, names, least)) if *bytes == device.memory_bytes => {
                    names.push(device.name);
                    *least = device.room_bytes().min(*least);
                }
                _ => sizes.push((device.memory_bytes, vec![device.name], device.room_bytes())),
            }
        }
        for (memory, names, usable) in sizes {
            if !self.x.contains(usable.as_f64() / self.unit.1) {
                continue;
            }
            let at = self.x_at(usable);
            put(
                svg,
                format_args!(
                    "<g class=\"device\"><title>{}</title><line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>\
                     <text text-anchor=\"middle\" x=\"{at:.1}\" y=\"{:.1}\">{} GiB GPU</text></g>",
                    names.join(", "),
                    self.y.start,
                    self.y.end,
                    self.y.end - 4.0,
                    memory.0 >> 30
                ),
            );
        }
        if let Some(budget) = self.front.budget_bytes {
            let anchor = if self.x_at(budget) > f64::midpoint(self.x.start, self.x.end) {
                ("end", -7.0)
            } else {
                ("start", 7.0)
            };
            let at = self.x_at(budget);
            put(
                svg,
                format_args!(
                    "<g class=\"budget\"><line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>\
                     <text text-anchor=\"{}\" x=\"{:.1}\" y=\"{:.1}\">budget {budget}</text></g>",
                    self.y.start,
                    self.y.end,
                    anchor.0,
                    at + anchor.1,
                    self.y.end + 18.0
                ),
            );
        }
    }

    /// The region of which it is known that no plan is there.
    fn bound(&self, svg: &mut String) {
        let (x, y) = (&self.x, &self.y);
        let level = |ratio: Option<f64>| ratio.map_or(y.end, |ratio| y.at(ratio));
        let mut path = format!("M{:.1} {:.1}", x.start, y.start);
        let mut last = y.start;
        let mut corner = None;
        for (number, bound) in self.front.bound.iter().enumerate() {
            last = level(bound.ratio);
            if number == 0 {
                // What holds for a peak holds for every smaller one.
                let _infallible = write!(path, " V{last:.1}");
            }
            let _infallible = write!(path, " V{last:.1} H{:.1}", self.x_at(bound.peak_bytes));
            if self.x_at(bound.peak_bytes) < x.start + 0.25 * (x.end - x.start) || number == 0 {
                corner = Some(last);
            }
        }
        let _infallible = write!(path, " V{last:.1} H{:.1} V{:.1} Z", x.end, y.start);
        put(
            svg,
            format_args!(
                "<path class=\"never\" fill=\"url(#hatch-{})\" d=\"{path}\"/>",
                self.size.name
            ),
        );
        if corner.is_some_and(|corner| y.start - corner > 30.0) {
            put(
                svg,
                format_args!(
                    "<text class=\"zone\" x=\"{:.1}\" y=\"{:.1}\">no plan can be here</text>",
                    x.start + 10.0,
                    y.start - 10.0
                ),
            );
        }
    }

    fn of(&self, class: Class) -> Vec<&'f FrontPoint> {
        let points = self.front.points.iter();
        points.filter(|point| point.promise == class).collect()
    }

    fn lines(&self, svg: &mut String) {
        let exact = self.of(Class::Exact);
        if let (Some(first), Some(_)) = (exact.first(), exact.last()) {
            let stairs = self.stairs(&exact, self.x.end);
            let (from, _) = self.place(first);
            put(
                svg,
                format_args!(
                    "<path class=\"reach\" d=\"{stairs} V{:.1} H{from:.1} Z\"/><path class=\"line exact\" d=\"{stairs}\"/>",
                    self.y.end
                ),
            );
        }
        let equivalent = self.of(Class::Equivalent);
        if let Some(last) = equivalent.last() {
            // It ends where an exact plan is as fast.
            let overtakes = |point: &&&FrontPoint| {
                point.predicted_peak_bytes >= last.predicted_peak_bytes
                    && point.predicted_step_ratio <= last.predicted_step_ratio
            };
            let until = exact.iter().find(overtakes);
            let until = until.map_or(self.x.end, |point| self.place(point).0);
            let stairs = self.stairs(&equivalent, until);
            put(
                svg,
                format_args!("<path class=\"line equivalent\" d=\"{stairs}\"/>"),
            );
        }
    }

    fn stairs(&self, points: &[&FrontPoint], until: f64) -> String {
        let mut path = String::new();
        for (number, point) in points.iter().enumerate() {
            let (x, y) = self.place(point);
            let _infallible = if number == 0 {
                write!(path, "M{x:.1} {y:.1}")
            } else {
                write!(path, " H{x:.1} V{y:.1}")
            };
        }
        let _infallible = write!(path, " H{until:.1}");
        path
    }

    fn points(&self, svg: &mut String) {
        let (x, y) = (&self.x, &self.y);
        put(
            svg,
            format_args!(
                "<g class=\"cross\" visibility=\"hidden\"><line class=\"cross-x\" y1=\"{:.1}\" y2=\"{:.1}\"/>\
                 <line class=\"cross-y\" x1=\"{:.1}\" x2=\"{:.1}\"/></g>",
                y.start, y.end, x.start, x.end
            ),
        );
        let (ux, uy) = (
            self.x_at(self.front.unplanned.predicted_peak_bytes),
            y.at(1.0),
        );
        put(
            svg,
            format_args!("<circle class=\"unplanned\" cx=\"{ux:.1}\" cy=\"{uy:.1}\" r=\"10\"/>"),
        );
        for (number, point) in self.front.points.iter().enumerate() {
            let (at, height) = self.place(point);
            let class = words::class(point.promise);
            let told = escaped(&sentences::told(point), 600);
            put(
                svg,
                format_args!(
                    "<g class=\"point {class}\" data-point=\"{number}\" data-x=\"{at:.1}\" data-y=\"{height:.1}\" \
                     tabindex=\"0\" role=\"img\" aria-label=\"{told}\"><title>{told}</title>{}</g>",
                    mark(point.promise, at, height)
                ),
            );
        }
    }

    fn legend(&self, svg: &mut String) {
        let (columns, mut entries) = (self.size.legend_columns, Vec::new());
        entries.push((Some(Class::Exact), "line exact", "exact: bitwise equal"));
        if !self.of(Class::Equivalent).is_empty() {
            entries.push((
                Some(Class::Equivalent),
                "line equivalent",
                "equivalent: rounding may differ",
            ));
        }
        entries.push((None, "reach", "within reach of exact plans"));
        entries.push((None, "never", "no plan can be here"));
        let mut x = 14.0;
        let mut y = 26.0;
        for (number, (class, style, text)) in entries.into_iter().enumerate() {
            if number > 0 && number % columns == 0 {
                x = 14.0;
                y += 21.0;
            }
            let sample = match class {
                Some(class) => format!(
                    "<path class=\"{style}\" d=\"M{x:.1} {y:.1} h36\"/><g class=\"point {}\">{}</g>",
                    words::class(class),
                    mark(class, x + 18.0, y)
                ),
                None => format!(
                    "<rect class=\"{style} key\" fill=\"url(#hatch-{})\" x=\"{x:.1}\" y=\"{:.1}\" width=\"36\" height=\"16\"/>",
                    self.size.name,
                    y - 8.0
                ),
            };
            put(
                svg,
                format_args!(
                    "{sample}<text class=\"legend\" x=\"{:.1}\" y=\"{:.1}\">{text}</text>",
                    x + 44.0,
                    y + 4.5
                ),
            );
            // A character of the legend is about 7 pixels wide.
            let characters = u32::try_from(text.len()).unwrap_or(0);
            x += 44.0 + 7.1 * f64::from(characters) + 26.0;
        }
    }

    /// The ends of the fronts, in words.
    fn labels(&self, svg: &mut String) {
        let unplanned = self.front.unplanned.predicted_peak_bytes;
        let (ux, uy) = (self.x_at(unplanned), self.y.at(1.0));
        put(
            svg,
            format_args!(
                "<text class=\"label\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">unplanned: {unplanned}</text>",
                (ux + 10.0).min(self.x.end - 2.0),
                uy - 18.0
            ),
        );
        let ends: Vec<&FrontPoint> = [Class::Exact, Class::Equivalent]
            .into_iter()
            .filter_map(|class| sentences::least(self.front, class))
            .filter(|point| point.predicted_peak_bytes < unplanned)
            .collect();
        // Where two would stand on each other or on a mark, the one further left moves up.
        let mut heights: Vec<f64> = ends.iter().map(|end| self.place(end).1 - 9.0).collect();
        if let [exact, equivalent] = heights.as_mut_slice()
            && (*exact - *equivalent).abs() < 2.0 * LINE
        {
            let above = exact.min(*equivalent) - LINE;
            if ends[0].predicted_peak_bytes < ends[1].predicted_peak_bytes {
                *exact = above;
            } else {
                *equivalent = above;
            }
        }
        for (point, y) in ends.into_iter().zip(heights) {
            put(
                svg,
                format_args!(
                    "<text class=\"label\" x=\"{:.1}\" y=\"{y:.1}\">smallest {}: {}, {}</text>",
                    self.place(point).0 + 12.0,
                    words::class(point.promise),
                    point.predicted_peak_bytes,
                    sentences::ratio(point.predicted_step_ratio)
                ),
            );
        }
    }
}

/// One line of the image.
fn put(svg: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing into a string cannot fail.
    let _infallible = svg.write_fmt(what);
    svg.push('\n');
}

/// The mark of a class: its shape tells it apart without colour.
fn mark(class: Class, x: f64, y: f64) -> String {
    match class {
        Class::Exact => format!("<circle class=\"mark\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5.5\"/>"),
        Class::Equivalent => format!(
            "<path class=\"mark\" d=\"M{x:.1} {:.1} l7 7 l-7 7 l-7 -7 z\"/>",
            y - 7.0
        ),
        Class::Approximate => format!(
            "<path class=\"mark\" d=\"M{x:.1} {:.1} l7 12 h-14 z\"/>",
            y - 7.0
        ),
    }
}

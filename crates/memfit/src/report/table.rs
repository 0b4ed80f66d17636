//! Aligned columns, bars and sparklines.
//!
//! Responsible for layout in characters. Not responsible for what stands in the cells.

use memfit_engine::bytes::Bytes;

use crate::printer::Palette;

/// Which edge the cells of a column share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Rows under an optional header, two spaces between columns.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<Align>,
    header: Option<Vec<String>>,
    rows: Vec<Vec<String>>,
}

const GAP: &str = "  ";

impl Table {
    pub(crate) fn new(columns: &[Align]) -> Self {
        Self {
            columns: columns.to_vec(),
            header: None,
            rows: Vec::new(),
        }
    }

    pub(crate) fn header<const N: usize>(mut self, cells: [&str; N]) -> Self {
        self.header = Some(cells.map(str::to_owned).to_vec());
        self
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The lines, each indented by `indent` spaces, without trailing spaces.
    pub(crate) fn render(&self, indent: usize, palette: Palette) -> String {
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|column| {
                let cells = self
                    .header
                    .iter()
                    .chain(&self.rows)
                    .filter_map(|row| row.get(column));
                cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
            })
            .collect();
        let line = |cells: &[String]| {
            let mut text = " ".repeat(indent);
            for ((cell, &width), align) in cells.iter().zip(&widths).zip(&self.columns) {
                let padding = " ".repeat(width - cell.chars().count());
                match align {
                    Align::Left => text.extend([cell.as_str(), &padding, GAP]),
                    Align::Right => text.extend([&padding, cell.as_str(), GAP]),
                }
            }
            text.trim_end().to_owned()
        };
        let mut text = String::new();
        if let Some(header) = &self.header {
            text.push_str(&palette.faint(&line(header)));
            text.push('\n');
        }
        for row in &self.rows {
            text.push_str(&line(row));
            text.push('\n');
        }
        text
    }
}

/// A bar of at most `width` characters.
pub(crate) fn bar(part: Bytes, whole: Bytes, width: usize) -> String {
    if part == Bytes::ZERO || whole == Bytes::ZERO {
        return String::new();
    }
    let cells = scaled(part, whole, width).min(width);
    "█".repeat(cells)
}

const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// One character for each of `width` equal stretches of `length` ops: the highest bytes in it.
///
/// `points` are `(op index, bytes)` in ascending order; between two points the first one's bytes hold.
pub(crate) fn sparkline(points: &[(u32, Bytes)], length: u32, peak: Bytes, width: usize) -> String {
    if points.is_empty() || length == 0 || peak == Bytes::ZERO {
        return String::new();
    }
    let width = width.min(length as usize).max(1);
    let column_of = |op: u32| (op as usize * width / length as usize).min(width - 1);
    let mut highest = vec![Bytes::ZERO; width];
    for (i, &(op, bytes)) in points.iter().enumerate() {
        let next = points.get(i + 1).map_or(length, |&(next, _)| next);
        let last = next.saturating_sub(1).max(op);
        for cell in &mut highest[column_of(op)..=column_of(last)] {
            *cell = (*cell).max(bytes);
        }
    }
    levels(highest.into_iter(), peak)
}

/// One character for each value, by its share of `whole`.
pub(crate) fn levels(values: impl Iterator<Item = Bytes>, whole: Bytes) -> String {
    if whole == Bytes::ZERO {
        return String::new();
    }
    let level = |bytes| LEVELS[scaled(bytes, whole, 8).clamp(1, 8) - 1];
    values.map(level).collect()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a drawing of some dozen characters; a float-to-integer cast saturates"
)]
fn scaled(part: Bytes, whole: Bytes, width: usize) -> usize {
    (part.as_f64() / whole.as_f64() * width as f64).round() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_do_not_trail() {
        let mut table =
            Table::new(&[Align::Left, Align::Right, Align::Left]).header(["a", "b", "c"]);
        table.row(["wide one".into(), "7".into(), String::new()]);
        table.row(["ü".into(), "123".into(), "end".into()]);
        insta::assert_snapshot!(table.render(2, Palette::PLAIN), @"
        a           b  c
        wide one    7
        ü         123  end
        ");
    }

    #[test]
    fn bars_are_as_long_as_the_share() {
        assert_eq!(bar(Bytes(49), Bytes(1000), 10), "");
        assert_eq!(bar(Bytes(500), Bytes(1000), 10), "█████");
        assert_eq!(bar(Bytes(2000), Bytes(1000), 10), "██████████");
        assert_eq!(bar(Bytes(0), Bytes(1000), 10), "");
    }

    #[test]
    fn a_sparkline_keeps_the_highest_of_each_stretch() {
        let points = [
            (0, Bytes(10)),
            (5, Bytes(80)),
            (6, Bytes(20)),
            (9, Bytes(40)),
        ];
        assert_eq!(sparkline(&points, 10, Bytes(80), 5), "▁▁█▂▄");
        assert_eq!(sparkline(&points, 0, Bytes(80), 5), "");
        assert_eq!(sparkline(&[(0, Bytes(8))], 2, Bytes(8), 60), "██");
    }
}

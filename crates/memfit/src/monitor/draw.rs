//! The view on a screen of any size.
//!
//! Responsible for places, widths and colours. Not responsible for what is shown (`view.rs`).

use memfit_engine::bytes::Bytes;
use ratatui::Frame;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::view::{DeviceRow, ProcessRow, Sort, View};
use crate::report::table::{bar, levels};
use crate::report::words;

/// Columns of a sparkline.
const SPARK: usize = 20;
const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

/// Draws a view; the first `skipped` processes are above the screen.
pub(super) fn draw(frame: &mut Frame<'_>, view: &View, skipped: usize, is_paused: bool) {
    let devices = u16::try_from(view.devices.len()).unwrap_or(u16::MAX);
    let notes = u16::try_from(view.notes.len()).unwrap_or(u16::MAX);
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(notes),
        Constraint::Length(devices.saturating_add(2)),
        Constraint::Min(3),
        Constraint::Length(1),
    ]);
    let [head, told, upper, lower, keys] = areas.areas(frame.area());
    frame.render_widget(Paragraph::new(headline(view, is_paused)), head);
    let notes: Vec<Line<'_>> = view
        .notes
        .iter()
        .map(|note| Line::from(note.as_str()))
        .collect();
    frame.render_widget(Paragraph::new(notes), told);
    frame.render_widget(devices_table(&view.devices), upper);
    processes_table(frame, lower, &view.processes, skipped);
    frame.render_widget(Paragraph::new(keys_line(view.sort)), keys);
}

/// One frame as text, as high as it needs to be.
pub(crate) fn frame_text(view: &View, width: u16) -> String {
    let processes = view.processes.len().max(2) + 1;
    let rows = view.devices.len() + processes + view.notes.len() + 4;
    let height = u16::try_from(rows).unwrap_or(u16::MAX);
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width.clamp(40, 400), height));
    // Drawing to memory does not fail.
    let Ok(_drawn) = terminal.draw(|frame| draw(frame, view, 0, false));
    let buffer = terminal.backend().buffer();
    let lines = buffer
        .content()
        .chunks(usize::from(buffer.area().width))
        .map(|cells| {
            cells
                .iter()
                .map(ratatui::buffer::Cell::symbol)
                .collect::<String>()
        });
    // The last line explains keys, and none are pressed.
    let lines: Vec<String> = lines
        .take(usize::from(height) - 1)
        .map(|line| line.trim_end().to_owned())
        .collect();
    format!("{}\n", lines.join("\n").trim_end())
}

fn headline(view: &View, is_paused: bool) -> Line<'static> {
    let broker = if view.has_broker {
        let leases = words::counted(view.lease_count as u64, "lease");
        format!("broker: {leases}, {} waiting", view.waiting_count)
    } else {
        "no broker runs: devices and processes only (`memfit broker` starts one)".to_owned()
    };
    let mut spans = vec![
        Span::styled("memfit top", BOLD),
        Span::raw("  "),
        Span::raw(broker),
    ];
    if is_paused {
        spans.push(Span::styled("  paused", Style::new().fg(Color::Yellow)));
    }
    Line::from(spans)
}

fn devices_table(devices: &[DeviceRow]) -> Table<'static> {
    let header = ["device", "in use", "of", "", "granted", "of", "history", ""];
    let rows = devices.iter().map(|device| {
        let whole = device.total_bytes.unwrap_or(Bytes::ZERO);
        let used = device.used_bytes.unwrap_or(Bytes::ZERO);
        let is_full = used.0 > whole.0 / 10 * 9 && whole != Bytes::ZERO;
        let style = Style::new().fg(if is_full { Color::Red } else { Color::Green });
        Row::new([
            Cell::from(device.device.clone()).style(BOLD),
            right(told(device.used_bytes)),
            right(told(device.total_bytes)),
            Cell::from(bar(used, whole, 12)).style(style),
            right(told(device.granted_bytes)),
            right(told(device.grantable_bytes)),
            Cell::from(spark(&device.history, whole)).style(Style::new().fg(Color::Cyan)),
            Cell::from(device.name.clone()).style(DIM),
        ])
    });
    let widths = [
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(12),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(cells(SPARK)),
        Constraint::Min(0),
    ];
    let header = header
        .into_iter()
        .enumerate()
        .map(|(column, name)| match column {
            1 | 2 | 4 | 5 => right(name.to_owned()),
            _ => Cell::from(name),
        });
    Table::new(rows, widths).header(Row::new(header).style(DIM))
}

fn processes_table(frame: &mut Frame<'_>, area: Rect, processes: &[ProcessRow], skipped: usize) {
    let header = [
        "pid", "leased", "host", "gpu", "peak", "history", "name", "state",
    ];
    let rows = processes.iter().skip(skipped).map(|row| {
        let style = match (row.waits_for_bytes.is_some(), row.is_asked) {
            (true, _) => Style::new().fg(Color::Yellow),
            (false, true) => Style::new().fg(Color::Magenta),
            (false, false) => Style::new(),
        };
        Row::new([
            right(row.pid.to_string()),
            right(some(row.leased_bytes)),
            right(some(row.host_bytes)),
            right(some(row.gpu_bytes)),
            right(some(row.peak_bytes)),
            Cell::from(spark(&row.history, row.peak_bytes)).style(Style::new().fg(Color::Cyan)),
            Cell::from(row.name.clone()),
            Cell::from(row.state()).style(style),
        ])
    });
    let widths = [
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(cells(SPARK)),
        Constraint::Min(12),
        Constraint::Length(26),
    ];
    let header = header
        .into_iter()
        .enumerate()
        .map(|(column, name)| match column {
            0..=4 => right(name.to_owned()),
            _ => Cell::from(name),
        });
    let table = Table::new(rows, widths).header(Row::new(header).style(DIM));
    frame.render_widget(table, area);
}

fn keys_line(sort: Sort) -> Line<'static> {
    let mut spans = vec![Span::styled("order by", DIM)];
    for (key, order, name) in Sort::ALL {
        let style = if order == sort { BOLD } else { Style::new() };
        spans.push(Span::styled(format!("  {key} {name}"), style));
    }
    spans.push(Span::styled("   arrows", BOLD));
    spans.push(Span::raw(" scroll  "));
    spans.push(Span::styled("space", BOLD));
    spans.push(Span::raw(" pause  "));
    spans.push(Span::styled("q", BOLD));
    spans.push(Span::raw(" quit"));
    Line::from(spans)
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Line::from(text).right_aligned())
}

/// Bytes, or a dash where it is unknown.
fn told(bytes: Option<Bytes>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string())
}

/// Bytes, or a dash where there are none.
fn some(bytes: Bytes) -> String {
    told(Some(bytes).filter(|bytes| *bytes != Bytes::ZERO))
}

/// The latest values below `whole`.
fn spark(values: &[u64], whole: Bytes) -> String {
    let latest = &values[values.len().saturating_sub(SPARK)..];
    levels(latest.iter().map(|value| Bytes(*value)), whole)
}

fn cells(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::History;
    use crate::monitor::view::tests::busy;

    #[test]
    fn a_frame_shows_devices_and_processes_with_history() {
        let view = View::new(&busy(4), Sort::Need);
        insta::assert_snapshot!(frame_text(&view, 130), @"
        memfit top  broker: 1 lease, 1 waiting
        device       in use         of                 granted         of history
        host       4.00 GiB  24.00 GiB ██             6.00 GiB  16.00 GiB ▁▁▁▁
        cuda:0    20.00 GiB  80.00 GiB ███                   -          - ▂▂▂▂                 NVIDIA Made Up 80GB

             pid     leased       host        gpu       peak history              name                          state
             101          -          -          -          -                      elsewhere?[2J                 waits for 12.00 GiB, 61 s
             100   6.00 GiB   4.00 GiB          -   4.00 GiB ▂▄▆█                 python3 train.py              asked to shrink
             102          -   2.00 GiB  19.00 GiB  21.00 GiB ████                 python3?]0;owned??yp.evil
        ");
    }

    #[test]
    fn without_a_broker_a_frame_says_so() {
        let view = View::new(&History::default(), Sort::Need);
        let text = frame_text(&view, 80);
        assert!(
            text.starts_with("memfit top  no broker runs: devices and processes only"),
            "{text}"
        );
        assert!(text.contains("\nhost              -          -"), "{text}");
    }

    #[test]
    fn the_keys_stand_on_the_screen_and_scrolling_leaves_rows_out() {
        let view = View::new(&busy(1), Sort::Leased);
        let mut terminal = Terminal::new(TestBackend::new(100, 12)).unwrap();
        terminal.draw(|frame| draw(frame, &view, 2, true)).unwrap();
        let shown = terminal.backend().to_string();
        for words in [
            "n need",
            "l leased",
            "space pause",
            "q quit",
            "paused",
            "102",
        ] {
            assert!(shown.contains(words), "{words}: {shown}");
        }
        assert!(!shown.contains("train.py"), "{shown}");
    }

    #[test]
    fn any_size_of_screen_can_be_drawn_on() {
        let view = View::new(&busy(2), Sort::Need);
        for (width, height) in [(1, 1), (3, 2), (20, 5), (400, 3), (2, 60)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| draw(frame, &view, 1, false)).unwrap();
        }
    }
}

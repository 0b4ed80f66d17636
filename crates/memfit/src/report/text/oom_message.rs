//! `memfit explain` of a text: what the numbers of OOM messages decide.

use memfit_engine::oom_message::{Kind, OomMessage, OomMessages};

use super::sections::{indented, section};
use crate::printer::Palette;
use crate::report::table::{Align, Table};
use crate::report::words;

/// Processes of one message that are listed.
const PROCESS_ROWS: usize = 8;

/// The whole report.
pub(crate) fn oom_messages(messages: &OomMessages, palette: Palette) -> String {
    let mut text = String::new();
    let count = words::counted(messages.message_count, "OOM message");
    text.extend([&palette.strong(&messages.source), "  ", &count]);
    if messages.messages.len() > 1 {
        let different = messages.messages.len().to_string();
        text.extend([", ", &different, " different"]);
    }
    text.push('\n');
    for message in &messages.messages {
        text.push('\n');
        text.push_str(&one(message, palette));
    }
    if messages.further_count > 0 {
        let further = words::counted(messages.further_count, "more message");
        text.extend([
            "
",
            &further,
            " after the first hundred different ones
",
        ]);
    }
    text
}

fn one(message: &OomMessage, palette: Palette) -> String {
    let mut text = palette.strong(&heading(message));
    text.extend(["\n", &numbers(message)]);
    text.extend(["\nVerdict  ", &palette.bad(&message.summary), "\n"]);
    let shown: Vec<String> = message.causes.iter().map(|it| it.summary.clone()).collect();
    section(
        &mut text,
        "What the numbers show",
        &indented(&shown),
        palette,
    );
    let open: Vec<String> = message
        .undecided
        .iter()
        .map(|it| it.summary.clone())
        .collect();
    section(
        &mut text,
        "What they do not tell",
        &indented(&open),
        palette,
    );
    let next: Vec<String> = message
        .next
        .iter()
        .flat_map(|it| [it.command.clone(), format!("  {}", it.tells)])
        .collect();
    section(
        &mut text,
        "What would tell the rest",
        &indented(&next),
        palette,
    );
    text
}

/// `GPU 0: 20.0 MiB refused, 3 times`.
fn heading(message: &OomMessage) -> String {
    let place = match (message.kind, message.device) {
        (Kind::Host, _) => "Host".to_owned(),
        (_, Some(device)) => format!("GPU {device}"),
        (_, None) => "GPU".to_owned(),
    };
    let asked = message
        .requested
        .map_or_else(|| "a request".to_owned(), |it| it.to_string());
    let times = match message.count {
        1 => String::new(),
        count => format!(", {count} times"),
    };
    format!("{place}: {asked} refused{times}")
}

fn numbers(message: &OomMessage) -> String {
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Left]);
    let rows = [
        ("Device", message.total, ""),
        ("Free", message.free, "on the device"),
        ("Limit", message.allowed, "of this process"),
        ("This process", message.this_process, "PyTorch and the rest"),
        (
            "Outside PyTorch",
            message.non_pytorch,
            "of this process: context and libraries",
        ),
        ("Reserved", message.reserved, "by PyTorch, in all"),
        ("Allocated", message.allocated, "held by tensors"),
        (
            "Unallocated",
            message.unallocated,
            "reserved and in no tensor",
        ),
        (
            "Private pools",
            message.private_unallocated,
            "reserved and unused, for CUDA graphs alone",
        ),
    ];
    for (name, amount, what) in rows {
        if let Some(amount) = amount {
            table.row([name.to_owned(), amount.to_string(), what.to_owned()]);
        }
    }
    for process in message.other_processes.iter().take(PROCESS_ROWS) {
        let held = process
            .bytes
            .map_or_else(|| "unknown".to_owned(), |it| it.to_string());
        table.row([format!("Process {}", process.pid), held, String::new()]);
    }
    let further = message.other_processes.len().saturating_sub(PROCESS_ROWS);
    if further > 0 {
        table.row([
            format!("{further} more processes"),
            String::new(),
            String::new(),
        ]);
    }
    table.render(0, Palette::PLAIN)
}

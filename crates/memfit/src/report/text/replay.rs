//! `memfit replay`: what other allocator settings would have done.

use super::sections::section;
use crate::printer::Palette;
use crate::report::document::{ReplayDocument, ReplayedCount, ReplayedDevice, ReplayedSettings};
use crate::report::table::{Align, Table};
use crate::report::words;

/// The whole report.
pub(crate) fn replay(document: &ReplayDocument, palette: Palette) -> String {
    let mut text = format!("{}\n", palette.strong(&document.source));
    if document.devices.is_empty() {
        text.push_str("\nThe snapshot holds no memory and no events.\n");
    }
    for device in &document.devices {
        let several = document.devices.len() > 1;
        if several {
            let heading = format!("Device {}", device.index);
            text.extend(["\n", &palette.strong(&heading), "\n"]);
        }
        text.push('\n');
        text.push_str(&trust(device));
        let body = replays(&device.replays, palette);
        section(&mut text, "Under these settings", &body, palette);
        text.extend(["\n", &answer(&device.replays), "\n"]);
    }
    for note in &document.notes {
        text.extend(["\n", note, "\n"]);
    }
    text
}

/// How well the simulated allocator does what the recording says.
fn trust(device: &ReplayedDevice) -> String {
    let mut lines = Table::new(&[Align::Left, Align::Left]);
    lines.row([
        "Events".to_owned(),
        words::counted(device.events, "recorded event"),
    ]);
    let of = |count: ReplayedCount| format!("{} of {}", count.matched, count.total);
    lines.row([
        "Replayed".to_owned(),
        format!(
            "{} addresses, {} new segments, {} segments at the end as recorded",
            of(device.allocations),
            of(device.segments),
            of(device.final_segments)
        ),
    ]);
    lines.render(0, Palette::PLAIN)
}

fn replays(ranked: &[ReplayedSettings], palette: Palette) -> String {
    let mut table = Table::new(&[
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Left,
        Align::Left,
    ])
    .header(["reserved", "driver calls", "retries", "settings", ""]);
    for it in ranked {
        let recorded = if it.is_recorded { "as recorded" } else { "" };
        let refused = match (it.is_refused, it.oom_avoided) {
            (true, _) => "OOM",
            (false, Some(_)) => "no OOM",
            (false, None) => "",
        };
        let notes = [recorded, refused].into_iter().filter(|it| !it.is_empty());
        table.row([
            it.peak_reserved_bytes.to_string(),
            it.device_calls.to_string(),
            it.num_alloc_retries.to_string(),
            named(&it.settings).to_owned(),
            notes.collect::<Vec<_>>().join(", "),
        ]);
    }
    table.render(2, palette)
}

const fn named(settings: &str) -> &str {
    if settings.is_empty() {
        "PyTorch's defaults"
    } else {
        settings
    }
}

/// The best against the recording's own, in a sentence; a peak counts as lower from 2 % on.
fn answer(ranked: &[ReplayedSettings]) -> String {
    let own = ranked.iter().find(|it| it.is_recorded);
    let (Some(best), Some(own)) = (ranked.first(), own) else {
        return "Nothing to replay".to_owned();
    };
    let (least, as_recorded) = (best.peak_reserved_bytes, own.peak_reserved_bytes);
    if own.is_refused && !best.is_refused {
        // What would have come after a recorded refusal is not known.
        let reach = match best.oom_avoided {
            Some(_) => "every request up to the refused one",
            None => "every recorded request",
        };
        return format!(
            "With `{}` {reach} is served: that OOM would not have happened",
            best.settings
        );
    }
    if own.is_refused {
        return "No setting that was replayed avoids the OOM".to_owned();
    }
    if least.0 + as_recorded.0 / 50 < as_recorded.0 {
        return format!(
            "With `{}` at most {least} are reserved instead of {as_recorded}",
            best.settings
        );
    }
    "No setting that was replayed reserves 2 % less".to_owned()
}

//! A track's record and the summary of `memfit run`: what was counted while code ran.

use memfit_engine::bytes::Bytes;

use super::{indented, section};
use crate::printer::Palette;
use crate::report::table::{Align, Table};
use crate::report::tracked::{
    ByCategory, Ended, Moment, OutOfMemory, RunDevice, RunDocument, RunPhase, TrackDocument,
    TrackedDevice,
};
use crate::report::words;

/// The categories in the order they are shown.
const CATEGORIES: [&str; 5] = [
    "parameter",
    "module_buffer",
    "gradient",
    "optimizer_state",
    "other",
];

/// A track's record.
pub(crate) fn track(document: &TrackDocument, palette: Palette) -> String {
    let ended = match &document.exception {
        None => String::new(),
        Some(class) => format!(", ended by {class}"),
    };
    let seconds = words::seconds(document.seconds);
    let mut text = format!("{}  {seconds}{ended}\n", palette.strong(&document.name));
    for device in &document.devices {
        text.push_str(&tracked_device(device, palette));
    }
    text.push_str(&indented(&document.notes));
    text
}

fn tracked_device(device: &TrackedDevice, palette: Palette) -> String {
    let columns = [Align::Left, Align::Right, Align::Right, Align::Right];
    let mut table = Table::new(&columns).header([&device.device, "before", "peak", "after"]);
    for category in CATEGORIES {
        let of = |bytes: &ByCategory| bytes.get(category).copied().unwrap_or(Bytes::ZERO);
        let (before, after) = (
            of(&device.before_by_category),
            of(&device.after_by_category),
        );
        let peak = device.peak_by_category.as_ref().map(of);
        if [before, after, peak.unwrap_or(Bytes::ZERO)] != [Bytes::ZERO; 3] {
            table.row([
                words::spaced(category),
                before.to_string(),
                peak.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string()),
                after.to_string(),
            ]);
        }
    }
    table.row([
        "allocated".to_owned(),
        device.before_bytes.to_string(),
        device.peak_bytes.to_string(),
        device.after_bytes.to_string(),
    ]);
    let reserved = (
        device.reserved_before_bytes,
        device.reserved_peak_bytes,
        device.reserved_after_bytes,
    );
    if let (Some(before), Some(peak), Some(after)) = reserved {
        let cells = [before, peak, after].map(|bytes| bytes.to_string());
        let [before, peak, after] = cells;
        table.row(["reserved".to_owned(), before, peak, after]);
    }
    table.render(2, palette)
}

/// The summary of `memfit run`.
pub(crate) fn run(document: &RunDocument, palette: Palette) -> String {
    let seconds = words::seconds(document.elapsed_seconds);
    let ended = match document.ended {
        Ended::Finished => format!("finished after {seconds}"),
        Ended::Exited => format!("exited with {} after {seconds}", document.exit_code),
        Ended::Exception => format!("ended by an exception after {seconds}"),
        Ended::OutOfMemory => palette.bad(&format!("OUT OF MEMORY after {seconds}")),
        Ended::Interrupted => format!("interrupted after {seconds}"),
    };
    let mut text = format!("\n{}  {ended}\n", palette.strong(&document.script));
    if let Some(oom) = &document.oom {
        section(&mut text, "Refused", &refused(oom, palette), palette);
    }
    section(
        &mut text,
        "Peaks",
        &peaks(&document.devices, palette),
        palette,
    );
    for device in &document.devices {
        let heading = format!("At the peak on {}", device.device);
        let body = device.peak_by_category.as_ref();
        let body = body.map_or_else(String::new, |parts| {
            categories(parts, device.peak_bytes, palette)
        });
        section(&mut text, &heading, &body, palette);
    }
    section(
        &mut text,
        "Optimizer steps",
        &indented(&steps(document)),
        palette,
    );
    section(&mut text, "Notes", &indented(&document.notes), palette);
    section(&mut text, "Next", &indented(&next(document)), palette);
    text
}

fn refused(oom: &OutOfMemory, palette: Palette) -> String {
    let request = oom.requested_bytes.map_or_else(
        || "a request".to_owned(),
        |bytes| format!("a request of {bytes}"),
    );
    let mut text = format!(
        "  {request} on {}, {}, with {} live\n",
        oom.device,
        moment(&oom.at),
        oom.live_bytes
    );
    if let Some(parts) = &oom.live_by_category {
        text.push_str(&categories(parts, oom.live_bytes, palette));
    }
    text
}

fn peaks(devices: &[RunDevice], palette: Palette) -> String {
    let columns = [
        Align::Left,
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Left,
    ];
    let mut table = Table::new(&columns).header([
        "device",
        "allocated",
        "reserved",
        "at the end",
        "peak reached",
    ]);
    for device in devices {
        table.row([
            device.device.clone(),
            device.peak_bytes.to_string(),
            device
                .reserved_peak_bytes
                .map_or_else(|| "-".to_owned(), |bytes| bytes.to_string()),
            device.after_bytes.to_string(),
            device.peak.as_ref().map_or_else(String::new, moment),
        ]);
    }
    if table.is_empty() {
        String::new()
    } else {
        table.render(2, palette)
    }
}

/// `after 3.1 s, in backward of step 2`.
fn moment(moment: &Moment) -> String {
    let step = moment.steps_done + 1;
    let place = match moment.phase {
        RunPhase::Forward if moment.steps_done == 0 => "before the first optimizer step".to_owned(),
        RunPhase::Forward => format!("between optimizer steps {} and {step}", moment.steps_done),
        RunPhase::Backward => format!("in backward before optimizer step {step}"),
        RunPhase::Optimizer => format!("in optimizer step {step}"),
    };
    format!("after {}, {place}", words::seconds(moment.seconds))
}

fn categories(parts: &ByCategory, whole: Bytes, palette: Palette) -> String {
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right]);
    for category in CATEGORIES {
        let bytes = parts.get(category).copied().unwrap_or(Bytes::ZERO);
        if bytes != Bytes::ZERO {
            let share = words::share(bytes, whole);
            table.row([words::spaced(category), bytes.to_string(), share]);
        }
    }
    if table.is_empty() {
        String::new()
    } else {
        table.render(2, palette)
    }
}

fn steps(document: &RunDocument) -> Vec<String> {
    let steps = &document.steps;
    if steps.count == 0 {
        return Vec::new();
    }
    let what = if steps.growth_bytes_per_step != Bytes::ZERO {
        format!(
            "each keeps {} more than the one before ({} in a row)",
            steps.growth_bytes_per_step, steps.growing
        )
    } else if steps.growth_cause.is_some() {
        "each keeps a longer autograd graph than the one before".to_owned()
    } else {
        "what they keep does not grow".to_owned()
    };
    let mut lines = vec![format!("{}; {what}", steps.count)];
    lines.extend(steps.growth_cause.clone());
    lines.extend(steps.growth_advice.clone());
    lines
}

/// What a person can do now.
fn next(document: &RunDocument) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(snapshot) = &document.snapshot {
        lines.push(format!(
            "memfit explain {snapshot}    what was live, and what would have helped"
        ));
    } else if document.oom.as_ref().is_some_and(|oom| oom.device != "cpu") {
        lines.push(
            "run it with `--snapshot FILE` and give that file to `memfit explain`".to_owned(),
        );
    }
    if document.oom.is_some() {
        lines.push(
            "`memfit predict` says what a step takes before it runs, `memfit plan` how to make it fit"
                .to_owned(),
        );
    }
    let grows = document.steps.growth_cause.is_some();
    if document.oom.is_some() || grows {
        lines.push(
            "`with memfit.track(\"name\")` round a part of the script says what that part takes"
                .to_owned(),
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_track_is_a_table() {
        let document: TrackDocument = serde_json::from_value(json!({
            "schema_version": 1, "name": "validation", "seconds": 1.25, "exception": null,
            "notes": [],
            "devices": [
                { "device": "cpu", "before_bytes": 3_000_000, "after_bytes": 3_000_000,
                  "peak_bytes": 9_000_000, "before_by_category": { "parameter": 3_000_000 },
                  "after_by_category": { "parameter": 3_000_000 },
                  "peak_by_category": { "parameter": 3_000_000, "other": 6_000_000 } },
                { "device": "cuda:0", "before_bytes": 512, "after_bytes": 1024,
                  "peak_bytes": 4096, "before_by_category": { "other": 512 },
                  "after_by_category": { "other": 1024 }, "peak_by_category": null,
                  "reserved_before_bytes": 2_097_152, "reserved_after_bytes": 2_097_152,
                  "reserved_peak_bytes": 4_194_304 },
            ],
        }))
        .unwrap();
        insta::assert_snapshot!(track(&document, Palette::PLAIN), @"
        validation  1.2 s
          cpu         before     peak    after
          parameter  2.9 MiB  2.9 MiB  2.9 MiB
          other          0 B  5.7 MiB      0 B
          allocated  2.9 MiB  8.6 MiB  2.9 MiB
          cuda:0      before     peak    after
          other        512 B        -  1.0 KiB
          allocated    512 B  4.0 KiB  1.0 KiB
          reserved   2.0 MiB  4.0 MiB  2.0 MiB
        ");
    }

    #[test]
    fn a_run_says_what_was_refused_and_what_grows() {
        let document: RunDocument = serde_json::from_value(json!({
            "schema_version": 1, "script": "train.py", "ended": "out_of_memory", "exit_code": 1,
            "elapsed_seconds": 12.0, "torch_imported": true,
            "devices": [
                { "device": "cpu", "peak_bytes": 8_000_000, "after_bytes": 7_000_000,
                  "peak_by_category": { "parameter": 2_000_000, "other": 6_000_000 },
                  "reserved_peak_bytes": null,
                  "peak": { "seconds": 11.0, "phase": "backward", "steps_done": 7 } },
            ],
            "steps": { "count": 7, "growing": 6, "growth_bytes_per_step": 4096,
                       "growth_cause": "`total` (train.py:9) sums tensors",
                       "growth_advice": "add `loss.item()`" },
            "oom": { "device": "cpu", "requested_bytes": 1_000_000_000, "live_bytes": 7_000_000,
                     "live_by_category": { "other": 7_000_000 },
                     "at": { "seconds": 11.9, "phase": "forward", "steps_done": 7 } },
            "snapshot": null, "notes": ["one note"],
        }))
        .unwrap();
        insta::assert_snapshot!(run(&document, Palette::PLAIN), @r#"

        train.py  OUT OF MEMORY after 12.0 s

        Refused
          a request of 953.7 MiB on cpu, after 11.9 s, between optimizer steps 7 and 8, with 6.7 MiB live
          other  6.7 MiB  100.0 %

        Peaks
          device  allocated  reserved  at the end  peak reached
          cpu       7.6 MiB         -     6.7 MiB  after 11.0 s, in backward before optimizer step 8

        At the peak on cpu
          parameter  1.9 MiB  25.0 %
          other      5.7 MiB  75.0 %

        Optimizer steps
          7; each keeps 4.0 KiB more than the one before (6 in a row)
          `total` (train.py:9) sums tensors
          add `loss.item()`

        Notes
          one note

        Next
          `memfit predict` says what a step takes before it runs, `memfit plan` how to make it fit
          `with memfit.track("name")` round a part of the script says what that part takes
        "#);
    }
}

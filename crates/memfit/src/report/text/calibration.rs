//! `memfit calibrate`: what was measured, the smallest and the largest size of each op.

use super::sections::section;
use crate::printer::Palette;
use crate::report::calibration::{CalibrateDocument, MeasuredSize};
use crate::report::table::{Align, Table};
use crate::report::words;

/// The whole report.
pub(crate) fn calibration(document: &CalibrateDocument, palette: Palette) -> String {
    let mut text = format!("{}\n\n", palette.strong(&document.device_name));
    let mut facts = Table::new(&[Align::Left, Align::Left]);
    let runs = format!(
        "torch {}, threads {}",
        document.torch_version, document.threads
    );
    facts.row(["Run by".to_owned(), runs]);
    let overhead = document.profile.op_overhead_seconds * 1e6;
    facts.row([
        "Cost of an op".to_owned(),
        format!("at least {overhead:.1} µs"),
    ]);
    facts.row([
        "Spread".to_owned(),
        format!(
            "the median run took {:.0} % longer than the fastest",
            document.median_spread * 100.0
        ),
    ]);
    facts.row(["Measured in".to_owned(), words::seconds(document.seconds)]);
    facts.row(["Profile".to_owned(), document.path.clone()]);
    text.push_str(&facts.render(0, Palette::PLAIN));
    section(
        &mut text,
        "Rates by size",
        &rates(&document.samples, palette),
        palette,
    );
    let moved = transfers(document, palette);
    section(&mut text, "Other memory", &moved, palette);
    text
}

/// For each op its rate at the smallest size, at the fastest, and at the largest.
fn rates(samples: &[MeasuredSize], palette: Palette) -> String {
    let right = Align::Right;
    let mut table = Table::new(&[Align::Left, right, right, right, Align::Left])
        .header(["op", "small", "best", "large", ""]);
    for sizes in samples.chunk_by(|a, b| a.what == b.what) {
        let rate = |sample: Option<&MeasuredSize>| {
            sample.map_or_else(String::new, |s| format!("{:.1}", s.per_second / 1e9))
        };
        let best = sizes
            .iter()
            .max_by(|a, b| a.per_second.total_cmp(&b.per_second));
        let computes = sizes.iter().any(|sample| sample.flops.is_some());
        table.row([
            sizes.first().map_or_else(String::new, |s| s.what.clone()),
            rate(sizes.first()),
            rate(best),
            rate(sizes.last()),
            if computes { "GFLOP/s" } else { "GB/s" }.to_owned(),
        ]);
    }
    table.render(0, palette)
}

fn transfers(document: &CalibrateDocument, palette: Palette) -> String {
    let transfers = &document.profile.transfers;
    let disk = format!("{}, {}", document.disk.folder, document.disk.method);
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Left, Align::Left]);
    for (what, rate, note) in [
        (
            "host to device, pinned",
            transfers.host_to_device_pinned,
            "",
        ),
        (
            "device to host, pinned",
            transfers.device_to_host_pinned,
            "",
        ),
        (
            "host to device, pageable",
            transfers.host_to_device_pageable,
            "",
        ),
        (
            "device to host, pageable",
            transfers.device_to_host_pageable,
            "",
        ),
        ("disk write", transfers.disk_write, disk.as_str()),
        ("disk read", transfers.disk_read, ""),
    ] {
        if let Some(rate) = rate {
            table.row([
                what.to_owned(),
                format!("{:.2}", rate / 1e9),
                "GB/s".to_owned(),
                note.to_owned(),
            ]);
        }
    }
    table.render(0, palette)
}

//! `memfit explain`: what the peak was, who owned it, and what was wrong.

use std::collections::BTreeMap;

use memfit_engine::bytes::Bytes;
use memfit_engine::explain::{
    BEFORE_RECORDING, Category, Cause, DeviceExplanation, End, Explanation, Fragmentation, Growth,
    OutOfMemory, Owner, Pattern, PinnedSegment, StepSource,
};

use super::sections::{indented, section};
use crate::printer::Palette;
use crate::report::table::{Align, Table, bar};
use crate::report::words;

const BAR_WIDTH: usize = 24;
const MODULE_ROWS: usize = 10;
const STACK_ROWS: usize = 6;
const STACK_FRAMES: usize = 4;
const SEGMENT_ROWS: usize = 6;
const GROWTH_ROWS: usize = 6;
const OOM_ROWS: usize = 5;
const PROBLEM_ROWS: usize = 10;
const COUNTERFACTUAL_ROWS: usize = 10;
const NAME_WIDTH: usize = 56;

/// The whole report.
pub(crate) fn explanation(explanation: &Explanation, palette: Palette) -> String {
    let mut text = String::new();
    let events = words::counted(explanation.events, "event");
    text.extend([&palette.strong(&explanation.source), "  ", &events]);
    if let Some(before) = &explanation.before {
        text.extend([", compared with ", before]);
    }
    text.push('\n');
    if explanation.devices.is_empty() {
        text.push_str("\nThe snapshot holds no memory and no events.\n");
    }
    for device in &explanation.devices {
        text.push('\n');
        let several = explanation.devices.len() > 1;
        if several {
            let heading = format!("Device {}", device.index);
            text.extend([&palette.strong(&heading), "\n\n"]);
        }
        text.push_str(&one_device(device, palette));
    }
    let problems = problems(explanation);
    section(&mut text, "Contradictions in the file", &problems, palette);
    text
}

/// What the segments alone show.
fn without_history(device: &DeviceExplanation, palette: Palette) -> String {
    let mut text = format!("{}\n\n", capitalized(words::NO_HISTORY));
    let mut lines = Table::new(&[Align::Left, Align::Left]);
    lines.row(at_last(device));
    text.push_str(&lines.render(0, Palette::PLAIN));
    let mut part = |heading: &str, body: &str| section(&mut text, heading, body, palette);
    part("At the end", &end(&device.end, palette));
    let held = device.last.allocated_bytes;
    // Blocks have stacks where the history was switched on with a small ring; without any there is one owner.
    let is_told = |owner: &Owner| owner.stack != BEFORE_RECORDING;
    if device.owners.iter().any(is_told) {
        part(
            "At the end, by stack",
            &by_stack(&device.owners, held, palette),
        );
    }
    part("Out of memory", &refusals(&device.oom, palette));
    if device.growth_summary.is_some() {
        part("Growth", &growth(device, palette));
    }
    text
}

fn one_device(device: &DeviceExplanation, palette: Palette) -> String {
    if !device.has_history {
        return without_history(device, palette);
    }
    let mut text = head(device);
    let mut part = |heading: &str, body: &str| section(&mut text, heading, body, palette);
    let peak = device.peak.allocated_bytes;
    part(
        "At the peak, by category",
        &by_category(&device.owners, peak),
    );
    part(
        "At the peak, by module or autograd node",
        &by_module(&device.owners, peak),
    );
    part(
        "At the peak, by stack",
        &by_stack(&device.owners, peak, palette),
    );
    part(
        "Fragmentation",
        &fragmentation(&device.fragmentation, palette),
    );
    part("Out of memory", &refusals(&device.oom, palette));
    part("Growth", &growth(device, palette));
    part("At the end", &end(&device.end, palette));
    part("Held at the end", &holders(device));
    part("Under other settings", &counterfactuals(device, palette));
    text
}

fn head(device: &DeviceExplanation) -> String {
    let peak = &device.peak;
    let mut lines = Table::new(&[Align::Left, Align::Left]);
    lines.row([
        "Peak".to_owned(),
        format!("{} allocated", peak.allocated_bytes),
    ]);
    let reached = match (peak.event, peak.after_us) {
        (None, _) => "before the first recorded event".to_owned(),
        (Some(event), None) => format!("after event {event}"),
        (Some(event), Some(after)) => {
            format!(
                "after event {event}, {} into the recording",
                duration(after)
            )
        }
    };
    lines.row(["Reached".to_owned(), reached]);
    lines.row([
        "Reserved".to_owned(),
        format!("{} at most", peak.reserved_bytes),
    ]);
    if peak.active_bytes > peak.allocated_bytes {
        lines.row([
            "Active".to_owned(),
            format!(
                "{} at most, blocks waiting for other streams included",
                peak.active_bytes
            ),
        ]);
    }
    lines.row([
        "At first".to_owned(),
        format!(
            "{} alive when recording began",
            device.live_before_recording_bytes
        ),
    ]);
    lines.row(at_last(device));
    if device.uncertain_bytes > Bytes::ZERO {
        lines.row([
            "Not certain".to_owned(),
            format!(
                "up to {} more: blocks from before recording may be larger",
                device.uncertain_bytes
            ),
        ]);
    }
    lines.render(0, Palette::PLAIN)
}

fn at_last(device: &DeviceExplanation) -> [String; 2] {
    [
        "At last".to_owned(),
        format!(
            "{} allocated, {} reserved when the snapshot was taken",
            device.last.allocated_bytes, device.last.reserved_bytes
        ),
    ]
}

/// `15.6 ms`, `3.2 s`.
fn duration(microseconds: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    let seconds = microseconds as f64 / 1e6;
    words::seconds(seconds)
}

fn by_category(owners: &[Owner], peak: Bytes) -> String {
    let mut sums: BTreeMap<Category, (Bytes, u64)> = BTreeMap::new();
    for owner in owners {
        let sum = sums.entry(owner.category).or_default();
        sum.0 += owner.bytes;
        sum.1 += owner.count;
    }
    let rows = sums
        .into_iter()
        .map(|(category, (bytes, count))| (category_words(category), bytes, count));
    shares(rows.collect(), peak, usize::MAX)
}

fn by_module(owners: &[Owner], peak: Bytes) -> String {
    let mut sums: BTreeMap<String, (Bytes, u64)> = BTreeMap::new();
    for owner in owners {
        let sum = sums.entry(place(owner)).or_default();
        sum.0 += owner.bytes;
        sum.1 += owner.count;
    }
    let rows = sums
        .into_iter()
        .map(|(name, (bytes, count))| (name, bytes, count));
    shares(rows.collect(), peak, MODULE_ROWS)
}

/// A module, or what is known instead.
fn place(owner: &Owner) -> String {
    if owner.module.is_empty() {
        first_line(&owner.stack)
    } else {
        words::tail(&owner.module, NAME_WIDTH)
    }
}

/// Names with bytes and blocks, the largest first, and the others as one row.
fn shares(mut rows: Vec<(String, Bytes, u64)>, whole: Bytes, limit: usize) -> String {
    rows.sort_by_key(|(_, bytes, _)| std::cmp::Reverse(*bytes));
    let mut table = Table::new(&[
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Left,
        Align::Left,
    ]);
    let mut row = |name: String, bytes: Bytes, count: u64| {
        table.row([
            bytes.to_string(),
            words::share(bytes, whole),
            words::counted(count, "block"),
            name,
            bar(bytes, whole, BAR_WIDTH),
        ]);
    };
    let rest = rows.split_off(limit.min(rows.len()));
    for (name, bytes, count) in rows {
        row(name, bytes, count);
    }
    if !rest.is_empty() {
        let bytes = rest.iter().map(|(_, bytes, _)| *bytes).sum();
        let count = rest.iter().map(|(.., count)| count).sum();
        row(format!("({} more)", rest.len()), bytes, count);
    }
    table.render(2, Palette::PLAIN)
}

fn by_stack(owners: &[Owner], peak: Bytes, palette: Palette) -> String {
    let mut table = Table::new(&[Align::Right, Align::Right, Align::Right, Align::Left]);
    for owner in owners.iter().take(STACK_ROWS) {
        table.row([
            owner.bytes.to_string(),
            words::share(owner.bytes, peak),
            words::counted(owner.count, "block"),
            category_words(owner.category),
        ]);
    }
    let mut text = String::new();
    let heads = table.render(2, Palette::PLAIN);
    for (head, owner) in heads.lines().zip(owners) {
        text.extend([head, "\n", &frames(&owner.stack, palette)]);
    }
    text
}

/// The innermost frames of a stack, one a line.
fn frames(stack: &str, palette: Palette) -> String {
    let mut text = String::new();
    let mut lines = stack.lines();
    for line in lines.by_ref().take(STACK_FRAMES) {
        text.extend(["      ", &palette.faint(&words::source(line)), "\n"]);
    }
    let more = lines.count();
    if more > 0 {
        let more = palette.faint(&format!("({more} more)"));
        text.extend(["      ", &more, "\n"]);
    }
    text
}

/// The innermost frame outside installed packages, or the innermost of all.
fn nearest(stack: &str) -> String {
    let is_installed = |line: &str| {
        ["site-packages/", "dist-packages/", "/torch/"]
            .iter()
            .any(|part| line.contains(part))
    };
    match stack.lines().find(|line| !is_installed(line)) {
        Some(line) => words::source(line),
        None => first_line(stack),
    }
}

fn first_line(stack: &str) -> String {
    words::source(stack.lines().next().unwrap_or_default())
}

fn fragmentation(found: &Fragmentation, palette: Palette) -> String {
    let title = "Segments of which blocks keep more than half unused:";
    indented(&[capitalized(&found.summary)])
        + &pinned(
            title,
            (&found.pinned_segments, found.pinned_segment_count),
            palette,
        )
}

/// Segments that blocks keep, under a title; nothing where there are none.
fn pinned(title: &str, (segments, count): (&[PinnedSegment], u64), palette: Palette) -> String {
    let mut table = Table::new(&[
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Left,
    ])
    .header(["segment", "unused", "blocks", "largest", "asked for by"]);
    for segment in segments.iter().take(SEGMENT_ROWS) {
        let largest = segment.blocks.first();
        table.row([
            segment.bytes.to_string(),
            segment.inactive_bytes.to_string(),
            segment.block_count.to_string(),
            largest
                .map(|block| block.bytes.to_string())
                .unwrap_or_default(),
            largest
                .map(|block| nearest(&block.stack))
                .unwrap_or_default(),
        ]);
    }
    if table.is_empty() {
        return String::new();
    }
    let mut text = format!("\n  {title}\n{}", table.render(2, palette));
    let shown = segments.len().min(SEGMENT_ROWS) as u64;
    if count > shown {
        let more = format!("  ({} more)\n", count - shown);
        text.push_str(&more);
    }
    text
}

/// What becomes of the memory when the snapshot was taken.
fn end(end: &End, palette: Palette) -> String {
    let title = "Segments that blocks keep:";
    indented(&[capitalized(&end.summary)])
        + &pinned(
            title,
            (&end.pinned_segments, end.pinned_segment_count),
            palette,
        )
}

/// Who holds memory at the end, a line for each.
fn holders(device: &DeviceExplanation) -> String {
    let mut table = Table::new(&[
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Left,
        Align::Left,
    ]);
    let owners = &device.end.owners;
    for owner in owners.iter().take(STACK_ROWS) {
        table.row([
            owner.bytes.to_string(),
            words::share(owner.bytes, device.last.allocated_bytes),
            words::counted(owner.count, "block"),
            category_words(owner.category),
            nearest(&owner.stack),
        ]);
    }
    let mut text = table.render(2, Palette::PLAIN);
    if owners.len() > STACK_ROWS {
        text.push_str(&more(owners.len() - STACK_ROWS));
    }
    text
}

fn refusals(refused: &[OutOfMemory], palette: Palette) -> String {
    let mut text = String::new();
    for refusal in refused.iter().take(OOM_ROWS) {
        if !text.is_empty() {
            text.push('\n');
        }
        let head = format!(
            "{} refused at event {}: {}",
            refusal.requested_bytes,
            refusal.event,
            cause(refusal.cause)
        );
        text.extend(["  ", &palette.bad(&head), "\n"]);
        text.push_str(&indented(&[capitalized(&refusal.summary)]));
        text.push_str(&frames(&refusal.stack, palette));
        text.push_str(&parts(refusal));
    }
    if refused.len() > OOM_ROWS {
        text.extend(["\n", &more(refused.len() - OOM_ROWS)]);
    }
    text
}

/// How the device divides at a refusal.
fn parts(refusal: &OutOfMemory) -> String {
    let parts = &refusal.parts;
    let mut table = Table::new(&[Align::Right, Align::Left]);
    let mut row = |bytes: Bytes, what: &str| table.row([bytes.to_string(), what.to_owned()]);
    row(parts.live_set, "held by tensors");
    row(parts.pending, "let go, waiting for another stream");
    let gap = refusal.largest_gap_bytes;
    let unused = format!("reserved, in no block; the largest gap has {gap}");
    row(parts.fragmentation, &unused);
    if parts.private_pools > Bytes::ZERO {
        row(
            parts.private_pools,
            "in no block of private pools: not usable",
        );
    }
    row(refusal.device_free_bytes, "free on the device");
    match parts.non_torch {
        Some(bytes) => row(bytes, "other processes, contexts and libraries"),
        None => table.row([
            "?".to_owned(),
            "other processes, contexts and libraries: give --device-memory".to_owned(),
        ]),
    }
    table.render(4, Palette::PLAIN)
}

fn growth(device: &DeviceExplanation, palette: Palette) -> String {
    let Some(summary) = &device.growth_summary else {
        return match device.steps {
            Some(steps) => indented(&[format!(
                "No stack holds more after every step; {} looked at, {}",
                words::counted(steps.boundary_count.saturating_sub(1), "step"),
                step_source(steps.source)
            )]),
            None => String::new(),
        };
    };
    if device.growth.is_empty() {
        return indented(&[capitalized(summary)]);
    }
    let mut text = format!("  {}\n", palette.bad(&capitalized(summary)));
    let mut table = Table::new(&[Align::Right, Align::Right, Align::Left, Align::Left]).header([
        "each step",
        "in all",
        "what",
        "asked for by",
    ]);
    for it in device.growth.iter().take(GROWTH_ROWS) {
        table.row([
            each_step(it),
            it.bytes.to_string(),
            pattern(it).to_owned(),
            nearest(&it.stack),
        ]);
    }
    text.push_str(&table.render(2, palette));
    if device.growth.len() > GROWTH_ROWS {
        text.push_str(&more(device.growth.len() - GROWTH_ROWS));
    }
    text
}

fn each_step(growth: &Growth) -> String {
    if growth.steps.is_some() {
        growth.bytes_per_step.to_string()
    } else {
        "?".to_owned()
    }
}

fn counterfactuals(device: &DeviceExplanation, palette: Palette) -> String {
    let mut table =
        Table::new(&[Align::Right, Align::Left, Align::Left]).header(["reserved", "settings", ""]);
    for it in device.counterfactuals.iter().take(COUNTERFACTUAL_ROWS) {
        let outcome = match it.oom_avoided {
            Some(true) => "no OOM",
            Some(false) => "OOM all the same",
            None => "",
        };
        table.row([
            it.peak_reserved_bytes.to_string(),
            it.settings.clone(),
            outcome.to_owned(),
        ]);
    }
    let mut text = indented(
        &device
            .counterfactual_summary
            .iter()
            .map(|it| capitalized(it))
            .collect::<Vec<_>>(),
    );
    if !table.is_empty() {
        if let Some(bytes) = device.replayed_reserved_bytes {
            table.row([bytes.to_string(), "(as recorded)".to_owned(), String::new()]);
        }
        text.push_str(&table.render(2, palette));
    }
    text
}

fn problems(explanation: &Explanation) -> String {
    let mut lines: Vec<String> = explanation
        .problems
        .iter()
        .take(PROBLEM_ROWS)
        .map(|it| match it.event {
            Some(event) => format!("event {event}: {}", it.what),
            None => it.what.clone(),
        })
        .collect();
    let more = explanation.problems.len().saturating_sub(PROBLEM_ROWS);
    if more > 0 {
        lines.push(format!("({more} more)"));
    }
    indented(&lines)
}

fn category_words(category: Category) -> String {
    match category {
        Category::KvCache => "KV cache".to_owned(),
        category => category.name().replace('_', " "),
    }
}

const fn cause(cause: Cause) -> &'static str {
    match cause {
        Cause::LiveSet => "too much is alive",
        Cause::Fragmentation => "fragmentation",
        Cause::Cap => "a limit on this process",
        Cause::NonTorch => "others hold the device's memory",
        Cause::Pending => "blocks wait for another stream",
        Cause::PrivatePools => "private pools hold what was missing",
        Cause::LiveSetOrNonTorch => "too much is alive, or others hold the device's memory",
    }
}

const fn pattern(growth: &Growth) -> &'static str {
    match growth.pattern {
        Pattern::KeptGraph => "kept graph",
        Pattern::KeptScalar => "kept number",
        Pattern::Kept => "kept",
    }
}

const fn step_source(source: StepSource) -> &'static str {
    match source {
        StepSource::Annotations => "by their annotations",
        StepSource::OptimizerStacks => "by the optimizer's stacks",
        StepSource::BackwardStacks => "by autograd's stacks",
        StepSource::Rhythm => "by a stack that comes again and again",
    }
}

/// A line for what is not listed.
fn more(count: usize) -> String {
    format!("  ({count} more)\n")
}

/// A sentence with its first letter large.
fn capitalized(sentence: &str) -> String {
    let mut letters = sentence.chars();
    match letters.next() {
        Some(first) => first.to_uppercase().chain(letters).collect(),
        None => String::new(),
    }
}

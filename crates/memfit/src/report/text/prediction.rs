//! `memfit predict`: the peak, where it is, and what takes it.

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::Verdict;
use memfit_engine::predict::{GpuFit, Prediction, Share, WideReason, WideTensors};

use super::sections::{indented, section};
use crate::printer::Palette;
use crate::report::table::{Align, Table, bar, sparkline};
use crate::report::words;

const BAR_WIDTH: usize = 24;
const CHART_WIDTH: usize = 72;
const MODULE_ROWS: usize = 10;
const SOURCE_ROWS: usize = 5;
/// What is less than the peak by this factor needs no word.
const UNNEEDED_PART: u64 = 100;
const ALLOCATION_ROWS: usize = 8;
/// Longest name of a module or a source line that a table shows whole.
const NAME_WIDTH: usize = 48;

/// The whole report; `budget` is what the user asked about and whether the unplanned step fits it.
pub(crate) fn prediction(
    prediction: &Prediction,
    budget: Option<(Bytes, Verdict)>,
    palette: Palette,
) -> String {
    let mut text = String::new();
    text.push_str(&head(prediction, palette));
    let peak = prediction.predicted_peak_bytes;
    section(
        &mut text,
        "Over the step",
        &timeline(prediction, palette),
        palette,
    );
    let category = shares(
        &categories(&prediction.breakdown.category),
        peak,
        usize::MAX,
        palette,
    );
    section(&mut text, "At the peak, by category", &category, palette);
    let module = shares(
        &fold(&prediction.breakdown.module),
        peak,
        MODULE_ROWS,
        palette,
    );
    section(&mut text, "At the peak, by module", &module, palette);
    let source = shares(
        &short_sources(&prediction.breakdown.source),
        peak,
        SOURCE_ROWS,
        palette,
    );
    section(&mut text, "At the peak, by source line", &source, palette);
    section(
        &mut text,
        "Largest allocations at the peak",
        &allocations(prediction, palette),
        palette,
    );
    section(
        &mut text,
        "Saved, and never needed in backward",
        &unneeded(prediction, palette),
        palette,
    );
    section(
        &mut text,
        "Wide elements at the peak",
        &wide(prediction, palette),
        palette,
    );
    section(
        &mut text,
        "Fits unplanned on",
        &devices(prediction, palette),
        palette,
    );
    let sure = indented(&prediction.uncertainty);
    section(&mut text, "Not certain", &sure, palette);
    let notes = indented(&prediction.notes);
    section(&mut text, "Notes", &notes, palette);
    if let Some(gpu) = &prediction.gpu {
        text.push('\n');
        text.push_str(&on_gpu(prediction, gpu, palette));
    } else if let Some((budget, verdict)) = budget {
        text.push('\n');
        text.push_str(&answer(prediction, budget, verdict, palette));
    }
    text
}

/// Lines that save what backward never needs, where that is a part of the peak worth a word.
fn unneeded(prediction: &Prediction, palette: Palette) -> String {
    let least = Bytes(prediction.predicted_peak_bytes.0 / UNNEEDED_PART);
    let saves = prediction.unneeded_saves.iter();
    let large = saves.filter(|saves| saves.bytes >= least);
    let mut table = Table::new(&[Align::Right, Align::Left, Align::Left, Align::Left]);
    for saves in large.take(SOURCE_ROWS) {
        let advice = if saves.is_shape_needed {
            "backward reads the shapes alone: a plan lets go of them at no cost"
        } else {
            "backward never runs there: put it under `torch.no_grad()`"
        };
        table.row([
            saves.bytes.to_string(),
            words::counted(saves.count, "tensor"),
            [
                words::tail(&saves.module, NAME_WIDTH),
                words::source(&saves.source),
            ]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join("  "),
            advice.to_owned(),
        ]);
    }
    if table.is_empty() {
        String::new()
    } else {
        table.render(2, palette)
    }
}

/// What takes more bytes an element than its use asks for, and the peak without that.
fn wide(prediction: &Prediction, palette: Palette) -> String {
    let mut table = Table::new(&[Align::Right, Align::Left, Align::Left, Align::Left]);
    for tensors in prediction.wide_tensors.iter().take(SOURCE_ROWS) {
        let what = match tensors.reason {
            WideReason::Mask | WideReason::NamedMask => format!("{} mask", tensors.dtype),
            WideReason::Float64 | WideReason::Compared | WideReason::Index => {
                format!("{} {}", tensors.dtype, words::category(tensors.category))
            }
        };
        let owner = if tensors.name.is_empty() {
            words::tail(&tensors.module, NAME_WIDTH)
        } else {
            format!("`{}`", words::tail(&tensors.name, NAME_WIDTH))
        };
        let place = [owner, words::source(&tensors.source)];
        let place: Vec<String> = place.into_iter().filter(|it| !it.is_empty()).collect();
        table.row([
            tensors.bytes.to_string(),
            what,
            place.join("  "),
            narrower(tensors),
        ]);
    }
    match prediction.narrower_peak_bytes {
        Some(peak) if !table.is_empty() => {
            let more = match prediction.wide_tensors.len().saturating_sub(SOURCE_ROWS) {
                0 => String::new(),
                rest => format!("({rest} more) "),
            };
            let now = prediction.predicted_peak_bytes;
            let last =
                format!("{more}with narrower ones the peak would be {peak} instead of {now}");
            format!("{}  {}\n", table.render(2, palette), palette.faint(&last))
        }
        _ => String::new(),
    }
}

/// What a narrower type would save, and on what that rests.
fn narrower(tensors: &WideTensors) -> String {
    let (dtype, saved) = (&tensors.narrower_dtype, tensors.saved_bytes);
    let why = match tensors.reason {
        WideReason::Float64 => "",
        WideReason::Mask => ": made of comparisons and constants alone",
        WideReason::Compared => ": it is only compared with a number",
        WideReason::NamedMask => " with `masked_fill`, if it holds 0 and -inf alone",
        WideReason::Index => ": it only looks up rows of tables",
    };
    format!("{dtype} would save {saved}{why}")
}

fn head(prediction: &Prediction, palette: Palette) -> String {
    let peak = prediction.predicted_peak_bytes;
    let (low, high) = prediction.interval_bytes;
    let same = low.to_string() == high.to_string();
    let interval = if same {
        String::new()
    } else {
        format!("  ({low} to {high})")
    };
    let batch = match prediction.batch {
        0 => String::new(),
        batch => format!(", batch {batch}"),
    };
    let at = &prediction.peak;
    let place = [
        words::tail(&at.module, NAME_WIDTH),
        words::source(&at.source),
    ];
    let place: Vec<String> = place.into_iter().filter(|part| !part.is_empty()).collect();
    let mut lines = Table::new(&[Align::Left, Align::Left]);
    lines.row(["Predicted peak".to_owned(), format!("{peak}{interval}")]);
    if let Some(reserved) = &prediction.reserved {
        lines.row([
            "Peak reserved".to_owned(),
            format!(
                "{}, {}",
                reserved.peak_reserved_bytes,
                words::reserved(reserved)
            ),
        ]);
    }
    lines.row([
        "Reached in".to_owned(),
        format!("{}, at {}", words::phase(at.phase), at.op),
    ]);
    if !place.is_empty() {
        lines.row([String::new(), place.join("  ")]);
    }
    if let Some(batch) = prediction.largest_batch {
        lines.row([
            "Largest batch".to_owned(),
            format!("{batch} fits the budget unplanned"),
        ]);
    }
    format!(
        "{}  {}{batch}\n\n{}",
        palette.strong(&prediction.target),
        prediction.device_kind,
        lines.render(0, Palette::PLAIN)
    )
}

fn timeline(prediction: &Prediction, palette: Palette) -> String {
    let points: Vec<(u32, Bytes)> = prediction
        .timeline
        .iter()
        .map(|point| (point.op_index, point.bytes))
        .collect();
    let length = points.last().map_or(0, |&(op, _)| op + 1);
    let chart = sparkline(
        &points,
        length,
        prediction.predicted_peak_bytes,
        CHART_WIDTH,
    );
    if chart.is_empty() {
        return String::new();
    }
    let phases: Vec<String> = prediction
        .phases
        .iter()
        .map(|&(phase, bytes)| format!("{} {bytes}", words::phase(phase)))
        .collect();
    format!(
        "  {chart}\n  {}\n",
        palette.faint(&format!("peaks: {}", phases.join(", ")))
    )
}

/// Owners as rows, the smaller ones summed up in a last row.
fn shares(shares: &[Share], whole: Bytes, limit: usize, palette: Palette) -> String {
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Left]);
    let mut row = |name: &str, bytes: Bytes| {
        let name = words::tail(name, NAME_WIDTH);
        let percent = words::share(bytes, whole);
        table.row([
            name,
            bytes.to_string(),
            percent,
            bar(bytes, whole, BAR_WIDTH),
        ]);
    };
    // One row more than the limit is shown rather than summed up as "1 more".
    let shown = if shares.len() <= limit.saturating_add(1) {
        shares.len()
    } else {
        limit
    };
    for share in &shares[..shown] {
        row(&share.name, share.bytes);
    }
    let rest = &shares[shown..];
    if !rest.is_empty() {
        row(
            &format!("({} more)", rest.len()),
            rest.iter().map(|share| share.bytes).sum(),
        );
    }
    table.render(2, palette)
}

/// Adds up owners whose names become the same, largest first.
fn merge(shares: &[Share], rename: impl Fn(&str) -> String) -> Vec<Share> {
    let mut sums: std::collections::BTreeMap<String, (Bytes, u64)> =
        std::collections::BTreeMap::new();
    for share in shares {
        let sum = sums.entry(rename(&share.name)).or_default();
        *sum = (sum.0 + share.bytes, sum.1 + share.count);
    }
    let mut merged: Vec<Share> = sums
        .into_iter()
        .map(|(name, (bytes, count))| Share { name, bytes, count })
        .collect();
    // The map is sorted by name and the sort is stable: equal sizes stay in the order of their names.
    merged.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    merged
}

fn categories(shares: &[Share]) -> Vec<Share> {
    merge(shares, |name| name.replace('_', " "))
}

fn fold(shares: &[Share]) -> Vec<Share> {
    merge(shares, words::fold_module)
}

fn short_sources(shares: &[Share]) -> Vec<Share> {
    merge(shares, words::source)
}

fn allocations(prediction: &Prediction, palette: Palette) -> String {
    let mut table = Table::new(&[Align::Right, Align::Left, Align::Left, Align::Left]);
    for top in prediction.top.iter().take(ALLOCATION_ROWS) {
        let shape: Vec<String> = top.shape.iter().map(ToString::to_string).collect();
        let shape = format!("{} [{}]", top.dtype, shape.join(", "));
        // A parameter has a name; what an op produced is known by the op and its module.
        let owner = if top.name.is_empty() {
            [top.op.as_str(), top.module.as_str()].join(" ")
        } else {
            top.name.clone()
        };
        table.row([
            top.bytes.to_string(),
            words::category(top.category),
            shape,
            words::tail(owner.trim(), NAME_WIDTH),
        ]);
    }
    table.render(2, palette)
}

fn devices(prediction: &Prediction, palette: Palette) -> String {
    let names = |fits: bool| {
        let devices = prediction
            .devices
            .iter()
            .filter(|device| device.fits == fits);
        devices
            .map(|device| device.device.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut table = Table::new(&[Align::Left, Align::Left]);
    for (label, fits) in [("yes", true), ("no", false)] {
        let names = names(fits);
        if !names.is_empty() {
            table.row([label.to_owned(), names]);
        }
    }
    table.render(2, palette)
}

/// What is nearer to the limit than the prediction is sure of may come out otherwise.
fn or_else(prediction: &Prediction, needed: Bytes, limit: Bytes) -> String {
    let peak = prediction.predicted_peak_bytes;
    let (low, high) = prediction.interval_bytes;
    let (distance, uncertain, way) = if needed <= limit {
        (limit - needed, high - peak, "higher")
    } else {
        (needed - limit, peak - low, "lower")
    };
    if distance < uncertain {
        format!("; the peak may be {uncertain} {way}")
    } else {
        String::new()
    }
}

fn answer(prediction: &Prediction, budget: Bytes, verdict: Verdict, palette: Palette) -> String {
    let peak = prediction.needed_bytes();
    let unsure = or_else(prediction, peak, budget);
    match verdict {
        Verdict::Fits => format!(
            "{} {peak} predicted, {} under the budget of {budget}{unsure}\n",
            palette.good("FITS:"),
            budget - peak,
        ),
        Verdict::DoesNotFit => format!(
            "{} {peak} predicted, {} over the budget of {budget}{unsure}; `memfit plan` looks for a way\n",
            palette.bad("DOES NOT FIT:"),
            peak - budget,
        ),
    }
}

/// Whether the step fits on the GPU that was asked about, and what is counted.
fn on_gpu(prediction: &Prediction, gpu: &GpuFit, palette: Palette) -> String {
    let reserved = prediction.needed_bytes();
    let (room, name) = (gpu.room_bytes, &gpu.gpu);
    let takes = format!(
        "{reserved} reserved, {} of it allocated",
        prediction.predicted_peak_bytes
    );
    let unsure = or_else(prediction, reserved, room);
    let answer = if gpu.fits {
        let verdict = palette.good(&format!("FITS on {name}:"));
        format!(
            "{verdict} {takes}, {} under {room}{unsure}",
            room - reserved
        )
    } else {
        let verdict = palette.bad(&format!("DOES NOT FIT on {name}:"));
        let way = if gpu.allocated_fits {
            "the tensors alone would: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` leaves fewer pieces".to_owned()
        } else {
            let budget = room.0 >> 20;
            format!("`memfit plan --device cuda --budget {budget}MiB` looks for a way")
        };
        format!(
            "{verdict} {takes}, {} over {room}{unsure}; {way}",
            reserved - room
        )
    };
    format!(
        "{answer}\n  {name}: {}, of which PyTorch finds {}, less {} for the CUDA context\n",
        gpu.memory_bytes, gpu.capacity_bytes, gpu.context_bytes
    )
}

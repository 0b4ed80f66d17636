//! The text of `memfit doctor`: sections of names and what there is to say of each.

use memfit_engine::bytes::Bytes;

use super::devices::rooms;
use super::sections::{indented, section};
use crate::printer::Palette;
use crate::report::comparison::Agreement;
use crate::report::doctor::{
    BrokerFacts, DoctorDocument, Examined, Feature, FolderFacts, MainJob, OffloadFacts,
    ProfileFacts, ToolFacts,
};
use crate::report::document::StepFacts;
use crate::report::table::{Align, Table};
use crate::report::words;

/// Longest line, where no word of it is longer.
const WIDTH: usize = 100;
const INDENT: usize = 2;
/// Longest text of somebody else's.
const LONGEST: usize = 1000;

/// The whole report.
pub(crate) fn doctor(document: &DoctorDocument, palette: Palette) -> String {
    let examined = &document.examined;
    let mut text = format!("{}\n", palette.strong("memfit doctor"));
    let mut part = |heading: &str, body: String| section(&mut text, heading, &body, palette);
    part("Versions", rows(&versions(document)));
    let jobs: Vec<Row> = document.main_jobs.iter().map(job).collect();
    part("Main job: train a tiny model within a budget", rows(&jobs));
    part("What works", rows(&features(&document.features)));
    let memories = rooms(document.devices.iter());
    part("Memory", memories.render(INDENT, palette));
    part("Tools", rows(&tools(examined)));
    let profiles = examined.profiles.iter();
    let profiles: Vec<Row> = profiles.map(|kept| profile(kept, examined)).collect();
    part("What ops cost", rows(&profiles));
    part("Sharing", rows(&[broker(&document.broker)]));
    let folders = examined.folders.iter().map(folder);
    let folders: Vec<Row> = folders
        .chain(examined.offload.as_ref().map(offload))
        .collect();
    part("Folders", rows(&folders));
    let remarks = examined.remarks.iter();
    let remarks =
        remarks.flat_map(|remark| wrapped(&words::inert(remark, LONGEST), WIDTH - INDENT));
    part("Worth knowing", indented(&remarks.collect::<Vec<_>>()));
    text.push('\n');
    text.push_str(&verdict(document, palette));
    text
}

/// A name and what there is to say of it.
type Row = (String, String);

/// Two columns, the second wrapped.
fn rows(rows: &[Row]) -> String {
    let widest = rows.iter().map(|(name, _)| name.chars().count()).max();
    let room = WIDTH - INDENT - widest.unwrap_or(0) - 2;
    let mut table = Table::new(&[Align::Left, Align::Left]);
    for (name, said) in rows {
        let mut name = name.clone();
        for line in wrapped(&words::inert(said, LONGEST), room) {
            table.row([std::mem::take(&mut name), line]);
        }
    }
    table.render(INDENT, Palette::PLAIN)
}

/// Lines of at most `width` characters; words that are longer have lines of their own.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words_of(text) {
        let length = word.chars().count();
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + length <= width => {
                line.extend([" ", &word]);
            }
            _ => lines.push(word),
        }
    }
    lines
}

/// The words of a text; what stands between backticks is one, for it is to be copied.
fn words_of(text: &str) -> Vec<String> {
    let is_paired = text.matches('`').count().is_multiple_of(2);
    let mut words: Vec<String> = Vec::new();
    let mut is_quoted = false;
    for part in text.split(' ') {
        match words.last_mut() {
            Some(word) if is_quoted => word.extend([" ", part]),
            _ => words.push(part.to_owned()),
        }
        is_quoted ^= is_paired && !part.matches('`').count().is_multiple_of(2);
    }
    words
}

fn row(name: &str, said: impl Into<String>) -> Row {
    (name.to_owned(), said.into())
}

fn versions(document: &DoctorDocument) -> Vec<Row> {
    let examined = &document.examined;
    let glibc = examined.glibc_version.as_ref();
    let glibc = glibc.map_or_else(String::new, |version| format!(", glibc {version}"));
    let torch = examined.torch.as_ref().map_or_else(
        || "not installed".to_owned(),
        |torch| format!("{}, in `{}`", torch.version, torch.folder),
    );
    vec![
        row(
            "memfit",
            format!(
                "{}, in `{}`",
                document.memfit_version, examined.package_folder
            ),
        ),
        row("torch", torch),
        row("CUDA", cuda(examined)),
        row(
            "Python",
            format!("{}, `{}`", examined.python_version, examined.python_path),
        ),
        row("system", format!("{}{glibc}", examined.system)),
        row("processor", examined.processor.clone()),
    ]
}

fn cuda(examined: &Examined) -> String {
    if let Some(reason) = &examined.cuda.why_not {
        // Without a torch that can be asked, what it is built for is all there is to say.
        let built = examined.torch.as_ref();
        let built = built.and_then(|torch| torch.cuda_version.as_ref());
        return match (&examined.torch_refusal, built) {
            (None, _) => reason.clone(),
            (Some(_), Some(version)) => format!("torch is built for CUDA {version}"),
            (Some(_), None) => "-".to_owned(),
        };
    }
    let built = examined.torch.as_ref();
    let built = built.and_then(|torch| torch.cuda_version.clone());
    let devices: Vec<String> = examined
        .cuda
        .devices
        .iter()
        .map(|device| {
            let total = Bytes(device.total_bytes);
            format!("{} is {} with {total}", device.device, device.name)
        })
        .collect();
    format!("{}: {}", built.unwrap_or_default(), devices.join(", "))
}

fn job(job: &MainJob) -> Row {
    if let Some(reason) = &job.why_not {
        return row(&job.device, format!("fails: {reason}"));
    }
    let steps = job.unplanned.zip(job.planned).zip(job.budget_bytes);
    let said = steps.map_or_else(String::new, |((unplanned, planned), budget)| {
        let bits = match job.agreement {
            Some(Agreement::Bitwise) => "bitwise",
            _ => "not bitwise",
        };
        format!(
            "{}, {bits}: {} of {} unplanned, budget {budget}; {}",
            accuracy(planned),
            planned.predicted_peak_bytes,
            unplanned.predicted_peak_bytes,
            words::seconds(job.seconds)
        )
    });
    row(&job.device, said)
}

fn accuracy(step: StepFacts) -> String {
    let predicted = step.predicted_peak_bytes;
    match step.measured_peak_bytes {
        Some(measured) if measured == predicted => "predicted = measured".to_owned(),
        Some(measured) => {
            let off = words::deviation(predicted, measured);
            format!("measured {measured} (predicted {off})")
        }
        None => "not measured".to_owned(),
    }
}

fn features(features: &[Feature]) -> Vec<Row> {
    let mut before: Option<&str> = None;
    let mut told = Vec::new();
    for feature in features {
        let reason = feature.why_not.as_deref();
        let said = match reason {
            None => "works".to_owned(),
            Some(_) if reason == before => "does not, for the same reason".to_owned(),
            Some(reason) => format!("does not, because {reason}"),
        };
        before = reason;
        told.push(row(label(feature.name), said));
    }
    told
}

fn label(name: &'static str) -> &'static str {
    match name {
        "fit_cuda" => "fit on CUDA",
        "predict_cuda" => "predict for CUDA without a GPU",
        "offload_activations" => "offloaded activations",
        "offload_optimizer" => "offloaded optimizer state",
        "offload_parameters" => "offloaded parameters",
        "compile_cpu" => "compiled plans on the CPU",
        "compile_cuda" => "compiled plans on CUDA",
        "broker" => "broker and leases",
        other => other,
    }
}

fn tools(examined: &Examined) -> Vec<Row> {
    let mut found: Vec<Row> = examined.tools.iter().map(tool).collect();
    if let Some(torch) = &examined.torch {
        for (name, has) in [
            ("oneDNN", torch.has_onednn),
            ("distributed", torch.has_distributed),
        ] {
            let said = has.map(|has| {
                if has {
                    "in this torch"
                } else {
                    "not in this torch"
                }
            });
            found.extend(said.map(|said| row(name, said)));
        }
    }
    found
}

fn tool(tool: &ToolFacts) -> Row {
    let said = match (&tool.version, &tool.path, &tool.why_not) {
        (_, _, Some(reason)) => reason.clone(),
        (Some(version), Some(path), None) => format!("{version}, `{path}`"),
        (Some(version), None, None) => version.clone(),
        (None, _, None) => "not found".to_owned(),
    };
    row(&tool.name, said)
}

fn profile(profile: &ProfileFacts, examined: &Examined) -> Row {
    let kind = &profile.device_kind;
    let is_seen = examined.torch_refusal.is_none();
    let is_absent = kind == "cuda" && is_seen && examined.cuda.why_not.is_some();
    let make = match kind.as_str() {
        "cpu" => "`memfit calibrate`".to_owned(),
        kind => format!("`memfit calibrate --device {kind}`"),
    };
    let path = profile.path.as_deref().unwrap_or("-");
    let said = match (&profile.calibrated, &profile.why_not) {
        (None, None) if is_absent => {
            "no profile is kept, and no device is here: plans for CUDA use a datasheet".to_owned()
        }
        (None, None) => format!("no profile is kept: {make} makes one in `{path}`"),
        (None, Some(reason)) => format!("no profile can be used: {reason}"),
        (Some(date), None) => format!("calibrated {date}{}, `{path}`", age(profile.age_days)),
        (Some(date), Some(reason)) => format!(
            "calibrated {date}{}, `{path}`; it is not used: {reason}; {make} makes another",
            age(profile.age_days)
        ),
    };
    row(kind, said)
}

fn age(days: Option<u64>) -> String {
    match days {
        None => String::new(),
        Some(0) => ", today".to_owned(),
        Some(days) => format!(", {} ago", words::counted(days, "day")),
    }
}

fn broker(broker: &BrokerFacts) -> Row {
    let socket = &broker.socket;
    let said = match (broker.pid, &broker.why_not) {
        (Some(pid), _) => {
            let version = broker.version.as_deref().unwrap_or("?");
            let leases = words::counted(broker.lease_count.unwrap_or(0), "lease");
            format!("runs at `{socket}`: memfit {version}, process {pid}, {leases}")
        }
        (None, None) => format!("none runs at `{socket}`: `memfit broker` starts one"),
        (None, Some(reason)) => reason.clone(),
    };
    row("broker", said)
}

fn folder(folder: &FolderFacts) -> Row {
    let said = match (&folder.path, &folder.why_not) {
        (_, Some(reason)) => reason.clone(),
        (Some(path), None) => format!("`{path}` can be written to"),
        (None, None) => "-".to_owned(),
    };
    row(&folder.purpose, said)
}

fn offload(offload: &OffloadFacts) -> Row {
    let rate = |rate: Option<f64>| {
        rate.map_or_else(|| "?".to_owned(), |rate| format!("{:.2} GB/s", rate / 1e9))
    };
    let (write, read) = (
        offload.write_bytes_per_second,
        offload.read_bytes_per_second,
    );
    let said = offload.why_not.clone().unwrap_or_else(|| {
        let (write, read) = (rate(write), rate(read));
        format!("`{}` writes {write}, reads {read}", offload.place)
    });
    row("offloading", said)
}

/// The answer, and as the last line what to do where it is no.
fn verdict(document: &DoctorDocument, palette: Palette) -> String {
    if document.is_ready {
        let failing = document.features.iter().filter(|feature| !feature.works);
        let but = match failing.count() {
            0 => String::new(),
            1 => "; one feature does not, see above".to_owned(),
            count => format!("; {count} features do not, see above"),
        };
        return format!(
            "{}\n",
            palette.good(&format!("READY: memfit works here{but}"))
        );
    }
    let reason = document
        .main_jobs
        .first()
        .and_then(|job| job.why_not.as_deref());
    let reason = words::inert(reason.unwrap_or_default(), LONGEST);
    let next = document.next_step.as_deref().unwrap_or_default();
    format!(
        "{}\n{} {}\n",
        palette.bad(&format!("NOT READY: {reason}")),
        palette.hint("next:"),
        words::inert(next, LONGEST)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words_and_not_inside_of_quotes() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(
            wrapped("run `pip install torch` now", 12),
            ["run", "`pip install torch`", "now"]
        );
        assert_eq!(wrapped("a `b c d", 4), ["a `b", "c d"]);
        assert_eq!(wrapped("", 4), [""]);
    }
}

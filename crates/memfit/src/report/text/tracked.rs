//! A track's record and the summary of `memfit run`: what was counted while code ran.

use std::collections::BTreeSet;

use memfit_engine::bytes::Bytes;
use memfit_engine::plan::{ActionKind, ActionSummary, Class};

use super::sections::{indented, section};
use crate::printer::Palette;
use crate::report::table::{Align, Table};
use crate::report::tracked::{
    BudgetVerdict, ByCategory, Ended, FittedLoop, Fitting, LoopPlan, Moment, OutOfMemory,
    OwnedBytes, ProcessMemory, Rhythm, RunDevice, RunDocument, RunLease, RunPhase, Steps,
    TrackDocument, TrackedDevice,
};
use crate::report::words;

/// The categories in the order they are shown.
pub(crate) const CATEGORIES: [&str; 11] = [
    "parameter",
    "module_buffer",
    "gradient",
    "optimizer_state",
    "activation",
    "cast_cache",
    "kv_cache",
    "dataset",
    "variable",
    "temporary",
    "other",
];

/// Owners that are listed, and the part of the peak from which on they are.
const OWNERS: usize = 8;
const OWNER_SHARE: u64 = 50;

/// What is worth a word of what the C library keeps.
const WORTH_TRIMMING: u64 = 8 << 20;

/// Steps before growth can be seen.
const FEW_STEPS: u64 = 8;

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
    let mut text = table.render(2, palette);
    let told = device.peak_told_bytes.unwrap_or(device.peak_bytes);
    if told != device.peak_bytes {
        text.push_str(&indented(&[format!(
            "what is said of the peak was seen with {told} live"
        )]));
    }
    text.push_str(&owners(&device.peak_owners, told));
    text
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
        section(
            &mut text,
            "Refused",
            &refused(oom, document.steps.count, palette),
            palette,
        );
    }
    section(
        &mut text,
        "Peaks",
        &peaks(&document.devices, document.steps.count, palette),
        palette,
    );
    for device in &document.devices {
        let told = device.peak_told_bytes.unwrap_or(device.peak_bytes);
        let heading = if told == device.peak_bytes {
            format!("At the peak on {}", device.device)
        } else {
            format!("Near the peak on {}, with {told} live", device.device)
        };
        let body = device.peak_by_category.as_ref();
        let body = body.map_or_else(String::new, |parts| {
            categories(parts, told, palette) + &owners(&device.peak_owners, told)
        });
        section(&mut text, &heading, &body, palette);
    }
    section(
        &mut text,
        "Optimizer steps",
        &indented(&steps(document)),
        palette,
    );
    section(&mut text, "Growth", &indented(&grown(document)), palette);
    let process = document.process.as_ref().map(outside);
    section(
        &mut text,
        "Outside the tensors",
        &indented(&process.unwrap_or_default()),
        palette,
    );
    if let Some(fitting) = &document.fitting {
        section(&mut text, "Budget", &fitted(fitting, palette), palette);
    }
    if let Some(lease) = &document.lease {
        section(&mut text, "Lease", &indented(&leased(lease)), palette);
    }
    section(&mut text, "Notes", &indented(&document.notes), palette);
    section(&mut text, "Next", &indented(&next(document)), palette);
    text
}

fn refused(oom: &OutOfMemory, steps: u64, palette: Palette) -> String {
    let request = oom.requested_bytes.map_or_else(
        || "a request".to_owned(),
        |bytes| format!("a request of {bytes}"),
    );
    let mut text = format!(
        "  {request} on {}, {}, with {} live\n",
        oom.device,
        moment(&oom.at, steps),
        oom.live_bytes
    );
    if let Some(parts) = &oom.live_by_category {
        text.push_str(&categories(parts, oom.live_bytes, palette));
    }
    text
}

fn peaks(devices: &[RunDevice], steps: u64, palette: Palette) -> String {
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
            device
                .peak
                .as_ref()
                .map_or_else(String::new, |at| moment(at, steps)),
        ]);
    }
    if table.is_empty() {
        String::new()
    } else {
        table.render(2, palette)
    }
}

/// `after 3.1 s, in backward of step 2`.
fn moment(moment: &Moment, steps: u64) -> String {
    let step = moment.steps_done + 1;
    let place = match moment.phase {
        RunPhase::Forward if steps == 0 => "no optimizer has stepped".to_owned(),
        RunPhase::Forward if moment.steps_done == 0 => "before the first optimizer step".to_owned(),
        RunPhase::Forward if moment.steps_done == steps => {
            "after the last optimizer step".to_owned()
        }
        RunPhase::Forward => format!("between optimizer steps {} and {step}", moment.steps_done),
        RunPhase::Backward if moment.steps_done == steps => "in backward".to_owned(),
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

/// Memory past torch, of this process and its children.
fn outside(of: &ProcessMemory) -> Vec<String> {
    let rest = Bytes(of.private_bytes.0.saturating_sub(of.tensor_bytes.0));
    let mut lines = vec![format!(
        "{} resident at most; of {} private, {} were tensors and {rest} Python's and libraries' own",
        of.resident_peak_bytes, of.private_bytes, of.tensor_bytes
    )];
    if of.children > 0 {
        let names = of.children_names.join(", ");
        let (count, bytes) = (of.children, of.children_bytes);
        let children = if count == 1 {
            "child process"
        } else {
            "child processes"
        };
        lines.push(format!(
            "{count} {children} ({names}): {bytes} of their own"
        ));
    }
    if of.trimmed_bytes.0 >= WORTH_TRIMMING {
        lines.push(format!(
            "{} that were freed stayed with the C library: `malloc_trim` gave them back at the end",
            of.trimmed_bytes
        ));
    }
    lines
}

/// Who held most of it.
fn owners(found: &[OwnedBytes], whole: Bytes) -> String {
    let large = found.iter();
    let large = large.filter(|one| one.bytes.0.saturating_mul(OWNER_SHARE) >= whole.0);
    let lines: Vec<String> = large
        .take(OWNERS)
        .map(|one| {
            let blocks = words::counted(one.blocks, "tensor");
            format!("{}, {blocks}: {}", one.bytes, one.owner)
        })
        .collect();
    indented(&lines)
}

/// What `--budget` did, loop by loop.
fn fitted(fitting: &Fitting, palette: Palette) -> String {
    let mut lines = Vec::new();
    if let Some(verdict) = &fitting.verdict {
        let stopped = if fitting.stopped && verdict.kept {
            " (`--strict` stopped the script)"
        } else {
            ""
        };
        lines.push(format!("{}{stopped}", held(verdict, palette)));
    } else {
        lines.push(format!(
            "not judged: what {} comes to is not known, as no step was recorded; bytes can be judged",
            fitting.budget
        ));
    }
    if let Some(reason) = &fitting.refusal {
        lines.push(format!("not kept by memfit: {reason}"));
    } else if fitting.loops.is_empty() {
        lines.push("no training was found: no model with parameters ran with gradients".to_owned());
    }
    let mut text = indented(&lines);
    let remedy = fitting.verdict.as_ref().and_then(|it| it.remedy.as_deref());
    let is_idle = |of: &&FittedLoop| loop_steps(of) == 0 && loop_lines(of, remedy).is_empty();
    let (idle, others): (Vec<_>, Vec<_>) = fitting.loops.iter().partition(is_idle);
    let shown = if idle.len() > 1 {
        others
    } else {
        fitting.loops.iter().collect()
    };
    for of in shown {
        text.push_str(&fitted_loop(of, remedy, palette));
    }
    if idle.len() > 1 {
        let names: BTreeSet<String> = idle.iter().map(|of| of.models.join(" + ")).collect();
        let names: Vec<String> = names.into_iter().collect();
        text.push_str(&indented(&[format!(
            "{} of which no step came to its end: {}",
            words::counted(idle.len() as u64, "model"),
            names.join(", ")
        )]));
    }
    text
}

fn loop_steps(of: &FittedLoop) -> u64 {
    of.observed.steps + of.planned.steps + of.unplanned.steps
}

/// `kept` or `OVER BUDGET by N (why; what would keep it)`.
fn held(verdict: &BudgetVerdict, palette: Palette) -> String {
    let (peak, budget) = (verdict.peak_bytes, verdict.budget_bytes);
    if verdict.kept {
        return format!("{}: {peak} of {budget}", palette.good("kept"));
    }
    let over = palette.bad(&format!("OVER BUDGET by {}", peak - budget));
    let known = [&verdict.why, &verdict.remedy].into_iter().flatten();
    let known: Vec<&str> = known.map(String::as_str).collect();
    format!("{over} ({})", known.join("; what would keep it: "))
}

/// What was leased, and what became of it.
fn leased(lease: &RunLease) -> Vec<String> {
    let waited = match lease.waited_seconds {
        seconds if seconds < 1.0 => String::new(),
        seconds => format!(", after waiting {}", words::seconds(seconds)),
    };
    let mut lines = vec![format!(
        "{} of `{}`{waited}: the budget and {} that torch takes apart from tensors",
        lease.leased_bytes, lease.device, lease.besides_bytes
    )];
    if lease.kept_bytes < lease.leased_bytes {
        let given = lease.leased_bytes - lease.kept_bytes;
        lines.push(format!("{given} that no plan needed were given back"));
    }
    lines
}

fn fitted_loop(of: &FittedLoop, remedy: Option<&str>, palette: Palette) -> String {
    let steps = loop_steps(of);
    let optimizers = match &of.optimizers[..] {
        [] if steps == 0 => "no step came to its end".to_owned(),
        [] => "no optimizer".to_owned(),
        stepped => stepped.join(" + "),
    };
    let mut text = indented(&[format!(
        "{} on {}, {}, {optimizers}",
        of.models.join(" + "),
        of.device,
        words::counted(of.parameters, "parameter"),
    )]);
    let columns = [Align::Left, Align::Right, Align::Right, Align::Right];
    let mut table = Table::new(&columns).header(["steps", "count", "measured peak", "predicted"]);
    let plan = of.plan.as_ref();
    let rows = [
        ("observed", of.observed, None),
        ("planned", of.planned, plan.map(|p| p.predicted_peak_bytes)),
        (
            "unplanned",
            of.unplanned,
            plan.and_then(|p| p.unplanned_peak_bytes),
        ),
    ];
    for (name, seen, predicted) in rows {
        if seen.steps > 0 || (name == "unplanned" && predicted.is_some()) {
            let measured = if seen.steps > 0 {
                seen.peak_bytes.to_string()
            } else {
                "-".to_owned()
            };
            let predicted = predicted.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string());
            table.row([name.to_owned(), seen.steps.to_string(), measured, predicted]);
        }
    }
    if !table.is_empty() {
        text.push_str(&table.render(4, palette));
    }
    let lines: Vec<String> = loop_lines(of, remedy)
        .into_iter()
        .map(|line| format!("  {line}"))
        .collect();
    text.push_str(&indented(&lines));
    text
}

/// What of a step with approximate actions is so.
fn approximate(plan: &LoopPlan) -> &'static str {
    let rounds_gradients = |kind: ActionKind| {
        kind.technique().promise == Class::Approximate && kind != ActionKind::OptimizerBits
    };
    if kinds(plan).any(rounds_gradients) {
        "; gradients are approximate, as was allowed"
    } else {
        "; updates are approximate, as was allowed"
    }
}

fn no_plan_fits(plan: &LoopPlan) -> String {
    let (budget, predicted) = (plan.budget_bytes, plan.predicted_peak_bytes);
    match plan.minimum_peak_bytes {
        Some(least) => format!(
            "no plan fits {budget}: the smallest peak that keeps the script's own loop is {least}"
        ),
        // What the script may hold more of by then has to fit as well.
        None if predicted.0 <= budget.0 => {
            format!("no plan fits {budget} with room to spare: the smallest peak is {predicted}")
        }
        None => format!("no plan fits {budget}"),
    }
}

/// The budget to ask for where no plan fits, unless the verdict has said it already.
fn smallest_budget(plan: &LoopPlan, remedy: Option<&str>) -> Option<String> {
    let least = plan.minimum_budget_bytes.filter(|_| !plan.fits)?;
    let option = format!("`--budget {}`", least.0);
    let is_new = remedy != Some(option.as_str());
    is_new.then(|| format!("the smallest budget to ask for is {least}: {option}"))
}

/// `remedy` is what the verdict has said already.
fn loop_lines(of: &FittedLoop, remedy: Option<&str>) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(plan) = &of.plan {
        let budget = plan.budget_bytes;
        let promised = match promise(plan) {
            Class::Exact => "; results stay bitwise equal",
            Class::Equivalent => "; rounding may differ",
            Class::Approximate => approximate(plan),
        };
        let is_exact = promise(plan) == Class::Exact;
        lines.push(match (plan.fits, plan.actions.is_empty()) {
            (true, true) if is_exact => format!("the step fits {budget} as it is"),
            (true, true) => format!("the step fits {budget} as it is{promised}"),
            (true, false) => format!("planned for {budget}{promised}"),
            (false, _) if is_exact => no_plan_fits(plan),
            (false, _) => no_plan_fits(plan) + promised,
        });
        lines.extend(smallest_budget(plan, remedy));
        for action in &plan.actions {
            lines.push(format!(
                "{}: {}, step time x {:.2} predicted",
                action.kind.technique().title,
                ActionSummary::new(action.kind, action.count, action.bytes).effect(),
                plan.predicted_step_ratio
            ));
        }
        let others: Vec<&str> = plan
            .other_kinds
            .iter()
            .map(|it| it.technique().title)
            .collect();
        if !others.is_empty() {
            lines.push(format!("plans of other steps have {}", others.join(", ")));
        }
    }
    if let Some(reason) = &of.refusal {
        lines.push(format!("steps ran unplanned: {reason}"));
    }
    if of.replans > 0 {
        lines.push(format!("planned again {}", times(of.replans)));
    }
    if let Some(divergence) = &of.divergence {
        lines.push(format!(
            "a step left its plan, results are right: {divergence}"
        ));
    }
    lines.extend(of.notes.iter().cloned());
    lines
}

/// What the plan has, and those that other steps ran by.
fn kinds(plan: &LoopPlan) -> impl Iterator<Item = ActionKind> {
    let own = plan.actions.iter().map(|action| action.kind);
    own.chain(plan.other_kinds.iter().copied())
}

/// The loosest promise among the actions of a loop's plans, and of how ops run.
fn promise(plan: &LoopPlan) -> Class {
    let of_ops = if plan.may_round {
        Class::Equivalent
    } else {
        Class::Exact
    };
    let promises = kinds(plan).map(|kind| kind.technique().promise);
    promises.fold(of_ops, Class::max)
}

fn times(count: u64) -> String {
    if count == 1 {
        "once".to_owned()
    } else {
        format!("{count} times")
    }
}

fn steps(document: &RunDocument) -> Vec<String> {
    let steps = &document.steps;
    match steps.growth_rhythm {
        _ if steps.count == 0 => Vec::new(),
        Some(Rhythm::Step) => growth(steps, &format!("{}; ", steps.count)),
        // Backwards tell that it does; and fewer steps leave nothing to compare.
        Some(_) => vec![steps.count.to_string()],
        None if steps.count < FEW_STEPS => vec![steps.count.to_string()],
        None => vec![format!("{}; what they keep does not grow", steps.count)],
    }
}

/// What keeps more and more where no optimizer steps.
fn grown(document: &RunDocument) -> Vec<String> {
    match document.steps.growth_rhythm {
        None | Some(Rhythm::Step) => Vec::new(),
        Some(_) => growth(&document.steps, ""),
    }
}

fn growth(steps: &Steps, head: &str) -> Vec<String> {
    let (each, all) = (steps.growth_bytes_per_step, steps.growth_bytes);
    let what = match steps.growth_rhythm {
        _ if all == Bytes::ZERO => {
            "each keeps a longer autograd graph than the one before".to_owned()
        }
        Some(Rhythm::Time) => format!("{all} of the last half of the run were kept"),
        Some(Rhythm::Backward) => {
            format!("{} backwards have kept {all}, {each} each", steps.growing)
        }
        _ => format!("{} of them have kept {all}, {each} each", steps.growing),
    };
    let mut lines = vec![format!("{head}{what}")];
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
mod tests;

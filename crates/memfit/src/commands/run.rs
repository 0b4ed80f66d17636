//! `memfit run`: an unmodified script under the count, perhaps fitted to a budget, and what it took.

use std::path::{Path, PathBuf};
use std::time::Duration;

use memfit_engine::bytes::Budget;
use memfit_engine::plan::ActionKind;

use crate::args::{Format, RunArguments, RunLeaseArguments, kinds_of, loosest};
use crate::error::Failure;
use crate::exit::Exit;
use crate::host::{Script, ScriptFitting, ScriptLease};
use crate::report::tracked::RunDocument;
use crate::report::{json, text};
use crate::save::PendingFile;
use crate::session::Session;

/// What a script's own loop leaves no room for, why, and what does it instead.
const NEVER: [(ActionKind, &str, &str); 4] = [
    (
        ActionKind::HalfParameters,
        "`memfit run` leaves a script's parameters in their type: `--allow half_parameters` has no meaning",
        "`memfit.fit(workload, budget=..., allow=\"half_parameters\")` holds them in bfloat16",
    ),
    (
        ActionKind::Int8Weights,
        "`memfit run` leaves a script's parameters in their type: `--allow int8_weights` has no meaning",
        "`memfit.fit(workload, budget=..., allow=\"int8_weights\")` holds those of an inference in 8 bits",
    ),
    (
        ActionKind::Int8Dynamic,
        "`memfit run` leaves a script's parameters in their type: `--allow int8_dynamic` has no meaning",
        "`memfit.fit(workload, budget=..., allow=\"int8_dynamic\")` computes linear layers of an inference in 8 bits",
    ),
    (
        ActionKind::AutocastFp16,
        "`memfit run` does not scale a script's loss: `--allow autocast_fp16` has no meaning",
        "`--allow autocast` runs its passes in bfloat16, which needs no scale; or \
         `memfit.fit(workload, budget=..., allow=\"autocast_fp16\")`",
    ),
];

pub(crate) fn run(arguments: &RunArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    if let Some(flag) = flag_of_the_script(arguments) {
        session.printer.note(&format!(
            "warning: `{flag}` stands after the script and is the script's own: memfit's flags stand before it"
        ))?;
    }
    let allowed = kinds_of(&arguments.allow);
    if let Some((_, reason, hint)) = NEVER.iter().find(|(kind, ..)| allowed.contains(kind)) {
        return Err(Failure::usage(*reason).hint(*hint));
    }
    // The script may change the working folder.
    let report = arguments.report.as_deref().map(writable).transpose()?;
    let snapshot = arguments.snapshot.as_deref().map(writable).transpose()?;
    let budget = arguments
        .budget
        .as_deref()
        .map(Budget::of_step)
        .transpose()?;
    let lease = budget.map(|budget| lease(&arguments.lease, budget));
    let answer = session.host.run_script(&Script {
        command: arguments.command.clone(),
        is_module: arguments.module,
        snapshot,
        fitting: fitting(arguments),
        lease: lease.transpose()?.flatten(),
        announce: session.format == Format::Text && !session.printer.is_quiet(),
    })?;
    let document: RunDocument =
        serde_json::from_value(answer).map_err(|error| Failure::bad_answer("run_script", error))?;
    if document.quiet {
        return Ok(Exit::Script(document.exit_code));
    }
    let summary = match session.format {
        Format::Text => text::run(&document, session.printer.message_palette()),
        Format::Json => json(&document)?,
    };
    // Standard output is the script's.
    session.printer.note(summary.trim_end())?;
    let written = report.map(|path| write(&path, &document)).transpose();
    if let Err(failure) = written {
        // The script is over, and what it exited with counts.
        session.printer.failure(&failure);
    }
    let stopped = document.fitting.is_some_and(|fitting| fitting.stopped);
    Ok(if stopped {
        Exit::OverBudget
    } else {
        Exit::Script(document.exit_code)
    })
}

/// How the steps are fitted; nothing without a budget.
fn fitting(arguments: &RunArguments) -> Option<ScriptFitting> {
    Some(ScriptFitting {
        budget: arguments.budget.clone()?,
        allow: loosest(&arguments.allow),
        allow_kinds: kinds_of(&arguments.allow),
        forbid: arguments.forbid.clone(),
        offload: arguments.offload.clone(),
        may_choose_folder: !arguments.no_offload,
        is_strict: arguments.strict,
    })
}

/// A flag among the script's own arguments that was most likely meant for memfit.
fn flag_of_the_script(arguments: &RunArguments) -> Option<&str> {
    let own = [
        ("--budget", arguments.budget.is_some()),
        ("--offload", arguments.offload.is_some()),
    ];
    let words = arguments.command.iter().skip(1);
    let flags = words.filter_map(|word| word.to_str()?.split('=').next());
    let mut meant = flags.filter(|flag| own.contains(&(*flag, false)));
    meant.next()
}

/// How the budget is leased; nothing where it shall not be.
fn lease(arguments: &RunLeaseArguments, budget: Budget) -> Result<Option<ScriptLease>, Failure> {
    if arguments.no_lease {
        return Ok(None);
    }
    if let (Some(_), Budget::Percent(_)) = (arguments.wait, budget) {
        return Err(Failure::usage(
            "`--wait` leases the budget, and a percentage of an unknown step cannot be leased",
        )
        .hint("write bytes: `--budget 6GiB`; `memfit predict` says what a step takes"));
    }
    let wait_seconds = arguments.wait.map_or(Some(0.0), |seconds| {
        (seconds != f64::INFINITY).then_some(seconds)
    });
    if wait_seconds.is_some_and(|seconds| Duration::try_from_secs_f64(seconds).is_err()) {
        return Err(Failure::usage("`--wait` is a number of seconds, 0 or more"));
    }
    Ok(Some(ScriptLease {
        is_wanted: arguments.wait.is_some() || arguments.device.is_some(),
        wait_seconds,
        priority: arguments.priority,
        device: arguments.device.clone(),
        is_alone_allowed: arguments.alone,
    }))
}

/// Where a file will be, once it is clear that it can be written.
fn writable(path: &Path) -> Result<PathBuf, Failure> {
    let path = std::path::absolute(path)
        .map_err(|error| Failure::usage(format!("cannot write `{}`: {error}", path.display())))?;
    drop(PendingFile::create(&path)?);
    Ok(path)
}

fn write(path: &Path, document: &RunDocument) -> Result<(), Failure> {
    PendingFile::create(path)?.commit(json(document)?.as_bytes())
}

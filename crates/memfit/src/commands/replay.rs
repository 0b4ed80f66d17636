//! `memfit replay`: the requests of a snapshot, run again under other allocator settings.
//!
//! Responsible for reading the settings as typed and for the exit code. Not responsible for the replays.

use std::sync::Arc;

use memfit_engine::allocator::replay::{self, ranking};
use memfit_engine::allocator::{Backend, Device, Settings};
use memfit_engine::bytes::Bytes;
use memfit_engine::snapshot::{Action, DeviceRecord, Snapshot};

use super::explain::{device_memory, read};
use crate::args::{Format, ReplayArguments};
use crate::error::Failure;
use crate::exit::Exit;
use crate::interrupt::interruptible;
use crate::report::document::{
    ReplayDocument, ReplayedCount, ReplayedDevice, ReplayedSettings, SCHEMA_VERSION,
};
use crate::report::{json, text};
use crate::session::Session;

pub(crate) fn run(arguments: &ReplayArguments, session: &mut Session<'_>) -> Result<Exit, Failure> {
    let memory = arguments
        .device_memory
        .as_deref()
        .map(device_memory)
        .transpose()?;
    let asked = settings(arguments)?;
    let snapshot = read(&arguments.snapshot, session)?;
    let (subject, source) = (
        Arc::clone(&snapshot),
        arguments.snapshot.display().to_string(),
    );
    let (document, _) = session.slow("replaying", |host| {
        interruptible(host, move || document(&subject, source, &asked, memory))
    })?;
    let document = document.map_err(Failure::usage)?;
    let report = match session.format {
        Format::Text => text::replay(&document, session.printer.report_palette()),
        Format::Json => json(&document)?,
    };
    session.printer.data(&report)?;
    Ok(exit(&document))
}

/// The settings as PyTorch reads them: all of `--set` together, on top of the recording's own.
fn settings(arguments: &ReplayArguments) -> Result<String, Failure> {
    let mut parts = Vec::new();
    for text in &arguments.settings {
        let Some((name, value)) = text.split_once('=') else {
            return Err(Failure::usage(format!(
                "cannot read `--set {text}`: write `name=value`, as in `--set max_split_size_mb=256`"
            )));
        };
        parts.push(format!("{}:{}", name.trim(), value.trim()));
    }
    Ok(parts.join(","))
}

/// The requests of all devices, replayed.
pub(crate) fn document(
    snapshot: &Snapshot,
    source: String,
    asked: &str,
    memory: Option<Bytes>,
) -> Result<ReplayDocument, String> {
    let parsed = Settings::parse(asked).map_err(|error| error.to_string())?;
    if parsed.backend == Backend::CudaMallocAsync {
        return Err(
            "`backend:cudaMallocAsync` is the allocator of CUDA's driver, which memfit does not simulate: \
             replay settings of the native allocator"
                .to_owned(),
        );
    }
    let devices = snapshot.devices.iter();
    Ok(ReplayDocument {
        schema_version: SCHEMA_VERSION,
        source,
        devices: devices
            .map(|device| one_device(snapshot, device, asked, memory))
            .collect(),
        notes: notes(snapshot, asked),
    })
}

/// What was asked for and can change nothing.
fn notes(snapshot: &Snapshot, asked: &str) -> Vec<String> {
    let text = ranking::on_top_of(&ranking::recorded_text(snapshot), asked);
    // What cannot be read together with the recording's own settings is not replayed either.
    let Ok(settings) = Settings::parse(&text) else {
        return Vec::new();
    };
    // From 1 on there is no limit, as in PyTorch (`setMemoryFraction`).
    if settings.garbage_collection_threshold > 0.0 && settings.per_process_memory_fraction >= 1.0 {
        vec![
            "`garbage_collection_threshold` changes nothing without `per_process_memory_fraction` below 1: \
             it is a share of that limit"
                .to_owned(),
        ]
    } else {
        Vec::new()
    }
}

fn one_device(
    snapshot: &Snapshot,
    device: &DeviceRecord,
    asked: &str,
    memory: Option<Bytes>,
) -> ReplayedDevice {
    let check = replay::check(snapshot, device);
    let model = memory.map_or_else(|| ranking::device_of(device), |bytes| Device::new(bytes.0));
    let is_limited = replay::recorded_settings(snapshot).per_process_memory_fraction < 1.0;
    let mut changes = match asked {
        "" => ranking::TRIED.to_vec(),
        asked => vec![asked],
    };
    // The limit is a share of the device's memory, which no snapshot has.
    if asked.is_empty() && is_limited && memory.is_some() {
        changes.extend(ranking::TRIED_BELOW_A_LIMIT);
    }
    let refused = device
        .events
        .iter()
        .any(|event| event.action == Action::OutOfMemory);
    let ranked = ranking::rank(snapshot, device, model, &changes);
    ReplayedDevice {
        index: device.index,
        events: device.events.len() as u64,
        allocations: count(check.allocations),
        segments: count(check.segments),
        final_segments: count(check.final_segments),
        replays: ranked
            .into_iter()
            .map(|it| ReplayedSettings {
                settings: it.settings,
                is_recorded: it.is_recorded,
                peak_reserved_bytes: Bytes(it.outcome.peak_reserved_bytes),
                peak_allocated_bytes: Bytes(it.outcome.peak_allocated_bytes),
                num_alloc_retries: it.outcome.num_alloc_retries,
                device_calls: it.outcome.device_calls,
                is_refused: it.outcome.oom.is_some(),
                oom_avoided: refused.then_some(it.outcome.oom.is_none()),
            })
            .collect(),
    }
}

const fn count(count: replay::Count) -> ReplayedCount {
    ReplayedCount {
        matched: count.matched,
        total: count.total,
    }
}

/// With a recorded OOM the question is whether something avoids it.
fn exit(document: &ReplayDocument) -> Exit {
    let hopeless = |device: &ReplayedDevice| {
        !device.replays.is_empty()
            && device
                .replays
                .iter()
                .all(|it| it.oom_avoided == Some(false))
    };
    if document.devices.iter().any(hopeless) {
        Exit::No
    } else {
        Exit::Done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_collection_is_tried_where_the_limit_is_known() {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../memfit-engine/tests/data/snapshots"
        );
        let bytes = std::fs::read(format!("{folder}/growing_loss.pickle")).unwrap();
        let mut snapshot = memfit_engine::snapshot::read_bytes(&bytes).unwrap();
        let tries = |snapshot: &Snapshot, memory| {
            let document = document(snapshot, String::new(), "", memory).unwrap();
            let mut replays = document.devices[0].replays.iter();
            replays.any(|it| it.settings.contains("garbage_collection_threshold"))
        };
        let memory = Some(Bytes(80 << 30));
        assert!(!tries(&snapshot, memory));
        let settings = "per_process_memory_fraction:0.5".to_owned();
        snapshot.settings = vec![("PYTORCH_CUDA_ALLOC_CONF".to_owned(), settings)];
        assert!(tries(&snapshot, memory) && !tries(&snapshot, None));
    }
}

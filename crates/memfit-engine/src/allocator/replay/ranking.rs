//! Many settings at once, ranked against the recording's own.
//!
//! Responsible for the settings that are tried when none are named, for the device they are tried on, and
//! for the order of what comes out. Not responsible for a single replay (`counterfactual.rs`) nor for what a
//! report says of them.

use super::{Outcome, under};
use crate::allocator::{Device, FreeOrder, Settings};
use crate::snapshot::{Action, DeviceRecord, Snapshot};

/// Changes that are tried, each alone on top of what was set: the options that PyTorch's documentation and its
/// OOM message name for fragmentation, with values on both sides of a 20 MiB segment's multiples.
pub const TRIED: [&str; 8] = [
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:256",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:64",
];

/// Settings that are also tried where the process has a known limit: the share of it above which the allocator
/// frees unused segments. Without a limit they have no effect.
pub const TRIED_BELOW_A_LIMIT: [&str; 2] = [
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:0.6",
];

/// A device that never refuses, as far as it is known.
const UNLIMITED_BYTES: u64 = 1 << 42;

/// The device the recording ran on, as far as the recording tells.
///
/// A refused request says how much was free; that and what the allocator held is what this process could
/// have. Where more was free than was asked for, a cap refused, and what was held is the least that the
/// cap can have been. Without a refusal nothing says where the end was.
#[must_use]
pub fn device_of(device: &DeviceRecord) -> Device {
    Device::new(room(device).unwrap_or(UNLIMITED_BYTES))
}

/// What the process could have at its first refused request.
fn room(device: &DeviceRecord) -> Option<u64> {
    let is_refusal = |action| action == Action::OutOfMemory;
    let refusal = device.events.iter().position(|it| is_refusal(it.action))?;
    let refused = device.events.get(refusal)?;
    let at_end: u64 = device.segments.iter().map(|it| it.total_size).sum();
    // From what is held at the end, back to the refusal.
    let mut reserved = i128::from(at_end);
    for event in device.events.iter().skip(refusal) {
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => reserved -= i128::from(event.size),
            Action::SegmentFree | Action::SegmentUnmap => reserved += i128::from(event.size),
            _ => {}
        }
    }
    let free = if refused.address < refused.size {
        refused.address
    } else {
        0
    };
    u64::try_from(reserved).ok()?.checked_add(free)
}

/// The settings of a recording as in `PYTORCH_CUDA_ALLOC_CONF`; put together from the single values where
/// that text is missing.
#[must_use]
pub fn recorded_text(snapshot: &Snapshot) -> String {
    let value = |name: &str| {
        let found = snapshot.settings.iter().find(|(known, _)| known == name);
        found.map_or("", |(_, value)| value.as_str())
    };
    let written = value("PYTORCH_CUDA_ALLOC_CONF");
    if !written.is_empty() && Settings::parse(written).is_ok() {
        return written.to_owned();
    }
    let mut parts = Vec::new();
    if value("expandable_segments").eq_ignore_ascii_case("true") {
        parts.push("expandable_segments:True".to_owned());
    }
    if let Ok(bytes @ 1..) = value("max_split_size").parse::<i64>() {
        parts.push(format!("max_split_size_mb:{}", bytes >> 20));
    }
    let text = parts.join(",");
    if Settings::parse(&text).is_ok() {
        text
    } else {
        String::new()
    }
}

/// Settings, and what came of the requests under them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranked {
    /// As in `PYTORCH_CUDA_ALLOC_CONF`; empty for PyTorch's defaults.
    pub settings: String,
    /// They are the recording's own.
    pub is_recorded: bool,
    /// What came of it.
    pub outcome: Outcome,
}

/// A change on top of the recording's own settings. Where both set an option, the change counts, as it
/// comes last.
#[must_use]
pub fn on_top_of(recorded: &str, change: &str) -> String {
    match (recorded, change) {
        (recorded, "") => recorded.to_owned(),
        ("", change) => change.to_owned(),
        (recorded, change) => format!("{recorded},{change}"),
    }
}

/// Replays the requests of a device under its own settings and under each change, on the device `model`.
///
/// The best comes first: no refusal, then the lower peak of reserved bytes, then fewer calls to the driver.
/// Changes that cannot be read, or that change nothing, are left out.
#[must_use]
pub fn rank(
    snapshot: &Snapshot,
    device: &DeviceRecord,
    model: Device,
    changes: &[&str],
) -> Vec<Ranked> {
    let own = recorded_text(snapshot);
    let mut tried: Vec<(String, Settings)> = Vec::new();
    for change in [""].iter().chain(changes) {
        let text = on_top_of(&own, change);
        if let Ok(settings) = Settings::parse(&text)
            && tried.iter().all(|(_, known)| *known != settings)
        {
            tried.push((text, settings));
        }
    }
    // They share nothing; results are joined in the order of the settings.
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let run = |settings| {
            scope.spawn(move || under(snapshot, device, settings, FreeOrder::default(), model))
        };
        let running: Vec<_> = tried.iter().map(|(_, settings)| run(settings)).collect();
        running
            .into_iter()
            .filter_map(|it| it.join().ok())
            .collect()
    });
    let mut ranked: Vec<Ranked> = tried
        .into_iter()
        .zip(outcomes)
        .enumerate()
        .map(|(number, ((settings, _), outcome))| Ranked {
            settings,
            is_recorded: number == 0,
            outcome,
        })
        .collect();
    ranked.sort_by_key(|it| {
        let outcome = &it.outcome;
        (
            outcome.oom.is_some(),
            outcome.peak_reserved_bytes,
            outcome.device_calls,
        )
    });
    ranked
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::read_bytes;

    fn fixture(name: &str) -> Snapshot {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/snapshots");
        let bytes = std::fs::read(format!("{folder}/{name}.pickle")).unwrap();
        read_bytes(&bytes).unwrap()
    }

    fn ranked(name: &str) -> Vec<Ranked> {
        let snapshot = fixture(name);
        let device = &snapshot.devices[0];
        rank(&snapshot, device, device_of(device), &TRIED)
    }

    #[test]
    fn an_oom_of_fragmentation_goes_with_segments_that_grow() {
        let found = ranked("oom_fragmentation");
        let own = found.iter().find(|it| it.is_recorded).unwrap();
        assert!(own.outcome.oom.is_some(), "the replay refuses too");
        assert_eq!(found[0].settings, "expandable_segments:True");
        assert!(found[0].outcome.oom.is_none());
    }

    #[test]
    fn no_setting_helps_where_live_bytes_fill_the_device_or_a_cap_is_set() {
        for name in ["oom_live_set", "oom_cap", "oom_other_process"] {
            assert!(
                ranked(name).iter().all(|it| it.outcome.oom.is_some()),
                "{name}"
            );
        }
    }

    #[test]
    fn the_recording_is_ranked_among_the_changes_and_its_replay_is_the_recording() {
        let snapshot = fixture("growing_loss");
        let device = &snapshot.devices[0];
        let found = rank(&snapshot, device, device_of(device), &TRIED);
        let own: Vec<_> = found.iter().filter(|it| it.is_recorded).collect();
        assert_eq!(own.len(), 1);
        let held: u64 = device.segments.iter().map(|it| it.total_size).sum();
        // Nothing is given back in it.
        assert_eq!(own[0].outcome.peak_reserved_bytes, held);
        assert!(found.is_sorted_by_key(|it| it.outcome.peak_reserved_bytes));
    }

    #[test]
    fn a_change_is_put_on_top_of_what_was_set() {
        let snapshot = fixture("expandable");
        assert!(recorded_text(&snapshot).contains("expandable_segments"));
        let found = ranked("expandable");
        assert!(found.len() > 1);
        let text = |it: &Ranked| it.settings.starts_with("expandable_segments:True");
        assert!(found.iter().all(text), "{found:?}");
    }
}

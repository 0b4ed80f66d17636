//! What other allocator settings would have done with the same requests.
//!
//! Responsible for choosing settings to try, for running them, and for ranking what came out. Not responsible
//! for the replay itself ([`crate::allocator::replay`]).
//!
//! Nothing is advised that was not replayed, and a refusal counts as avoided only where the replay under the
//! recorded settings is refused as the recording was. No replay is needed where it cannot help: reserved
//! bytes are never below active bytes, so nothing saves more than the difference of their peaks. Work is
//! limited by events replayed; the settings that help most often are tried first. A trace that contradicts
//! itself is not replayed.
//!
//! The device of the replays: for a recording without refusal a large one; with one, what this process could
//! have had at that moment, `reserved + device_free`, and where a limit refused, what it held then. A limit is known
//! where it refused, or where the settings have it as a share of a device whose memory is known; there
//! `garbage_collection_threshold` is tried too, which without a limit changes nothing.

use super::document::Counterfactual;
use super::history::History;
use super::oom::{Cause, OutOfMemory};
use super::peak::Peaks;
use crate::allocator::replay::ranking::{TRIED, TRIED_BELOW_A_LIMIT, on_top_of, recorded_text};
use crate::allocator::replay::{Outcome, recorded_settings, under};
use crate::allocator::{AddressOrder, Device, FreeOrder, Settings};
use crate::bytes::Bytes;
use crate::snapshot::{Action, DeviceRecord, Problem, Snapshot};

/// Events replayed at most, once the recorded settings and the first candidate have run.
const MAX_EVENTS: usize = 2_000_000;
/// Replays at a time: each takes a core.
const THREADS: usize = 2;
/// Memory of a device on which nothing is refused.
const LARGE_DEVICE_BYTES: u64 = 1 << 40;

/// The outcomes of a device, the best first, and what they come down to.
#[derive(Debug, Default)]
pub(super) struct Replayed {
    pub(super) counterfactuals: Vec<Counterfactual>,
    pub(super) summary: Option<String>,
    /// Peak of reserved bytes when replayed under the recorded settings.
    pub(super) as_recorded: Option<Bytes>,
}

/// Replays a device under other settings, where that can help.
pub(super) fn replay(
    snapshot: &Snapshot,
    device: &DeviceRecord,
    (history, peaks): (&History, &Peaks),
    (refusals, device_memory): (&[OutOfMemory], Option<Bytes>),
) -> Replayed {
    if device.events.is_empty() {
        return Replayed::default();
    }
    let said = |summary: String| Replayed {
        summary: Some(summary),
        ..Replayed::default()
    };
    let contradicts = |it: &Problem| it.device == Some(device.index);
    if !history.problems.is_empty() || snapshot.problems.iter().any(contradicts) {
        return said("the trace contradicts itself, so it was not replayed".to_owned());
    }
    let most = peaks.reserved.bytes - peaks.active.bytes;
    let matters = u128::from(most.0) * 20 >= u128::from(peaks.reserved.bytes.0);
    if refusals.is_empty() && !matters {
        return said(format!(
            "no other setting can save more than {most}, so none was replayed"
        ));
    }
    let recorded = recorded_settings(snapshot);
    let room = memory(peaks, refusals);
    let limit = limit(&recorded, room, refusals, device_memory);
    let (model, fraction) = place(room, limit, refusals);
    let run = |settings: &Settings| {
        let settings = Settings {
            per_process_memory_fraction: fraction,
            ..settings.clone()
        };
        under(snapshot, device, &settings, FreeOrder::default(), model)
    };
    let baseline = run(&recorded);
    let positions = (0..).zip(device.events.iter());
    let refused: Vec<u64> = positions
        .filter(|(_, event)| event.action == Action::OutOfMemory)
        .map(|(position, _)| position)
        .collect();
    // A replay ends where it is refused; it repeats the recording when that is where the recording was.
    let is_repeated = baseline.oom.map(|it| it.event) == refused.first().map(|&first| Some(first));
    let own = recorded_text(snapshot);
    let tries = (MAX_EVENTS / device.events.len()).max(1);
    let below: &[&str] = if limit.is_some() {
        &TRIED_BELOW_A_LIMIT
    } else {
        &[]
    };
    let candidates = TRIED.iter().chain(below).take(tries);
    let parsed = candidates.filter_map(|change| {
        let text = on_top_of(&own, change);
        Settings::parse(&text).ok().map(|settings| (text, settings))
    });
    let others: Vec<(String, Settings)> = parsed.filter(|(_, it)| *it != recorded).collect();
    let mut outcomes: Vec<(String, Outcome)> = Vec::new();
    for few in others.chunks(THREADS) {
        std::thread::scope(|scope| {
            let run = &run;
            let threads = few
                .iter()
                .map(|(text, it)| (text.clone(), scope.spawn(move || run(it))));
            let threads: Vec<_> = threads.collect();
            // A replay that could not be finished is left out.
            let ended = threads
                .into_iter()
                .map(|(text, it)| Some((text, it.join().ok()?)));
            outcomes.extend(ended.flatten());
        });
    }
    // What was refused did not get as far as the others. The order of the candidates decides among equals.
    outcomes.sort_by_key(|(_, outcome)| (outcome.oom.is_some(), outcome.peak_reserved_bytes));
    let best = outcomes
        .first()
        .filter(|(_, outcome)| outcome.oom.is_none());
    let summary = if !is_repeated {
        "under the recorded settings a replay does not end as the recording did, so nothing is advised"
            .to_owned()
    } else if refused.is_empty() {
        saving(best, baseline.peak_reserved_bytes)
    } else {
        rescue(best, refused.len())
    };
    let counterfactuals = outcomes.iter().map(|(settings, outcome)| Counterfactual {
        settings: settings.clone(),
        peak_reserved_bytes: Bytes(outcome.peak_reserved_bytes),
        oom_avoided: (is_repeated && !refused.is_empty())
            .then(|| outcome.oom.is_none() && outcome.ooms_avoided == refused.len() as u64),
    });
    Replayed {
        counterfactuals: counterfactuals.collect(),
        summary: Some(summary),
        as_recorded: Some(Bytes(baseline.peak_reserved_bytes)),
    }
}

/// What the process could have had.
fn memory(peaks: &Peaks, refusals: &[OutOfMemory]) -> u64 {
    let at_refusal = refusals.iter().map(|it| {
        let parts = &it.parts;
        let held = parts.live_set + parts.pending + parts.fragmentation + parts.private_pools;
        match it.cause {
            Cause::Cap => held,
            _ => held + it.device_free_bytes,
        }
    });
    let most = at_refusal
        .max()
        .map(|bytes| bytes.max(peaks.reserved.bytes));
    most.map_or(LARGE_DEVICE_BYTES, |bytes| bytes.0)
}

/// What the process was allowed to have, where that is known.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "PyTorch computes the limit in double and truncates"
)]
fn limit(
    recorded: &Settings,
    room: u64,
    refusals: &[OutOfMemory],
    device_memory: Option<Bytes>,
) -> Option<u64> {
    let fraction = recorded.per_process_memory_fraction;
    match device_memory {
        Some(Bytes(total)) if fraction < 1.0 => Some((fraction * total as f64) as u64),
        _ => refusals
            .iter()
            .any(|it| it.cause == Cause::Cap)
            .then_some(room),
    }
}

/// The device of the replays, and the share of it that the process may have: half of it is the limit, to the byte.
fn place(room: u64, limit: Option<u64>, refusals: &[OutOfMemory]) -> (Device, f64) {
    let Some(limit) = limit else {
        return (Device::new(room), 1.0);
    };
    let total_bytes = limit.saturating_mul(2);
    let is_limit = refusals.iter().any(|it| it.cause == Cause::Cap);
    let other_bytes = if is_limit {
        0
    } else {
        total_bytes.saturating_sub(room)
    };
    let device = Device {
        total_bytes,
        other_bytes,
        address_order: AddressOrder::default(),
    };
    (device, 0.5)
}

/// What to say where nothing was refused.
fn saving(best: Option<&(String, Outcome)>, as_recorded: u64) -> String {
    let saved = best.map(|(_, outcome)| as_recorded.saturating_sub(outcome.peak_reserved_bytes));
    match best {
        Some((settings, outcome))
            if saved.is_some_and(|it| u128::from(it) * 100 >= u128::from(as_recorded)) =>
        {
            let (peak, as_recorded) = (Bytes(outcome.peak_reserved_bytes), Bytes(as_recorded));
            format!(
                "`PYTORCH_CUDA_ALLOC_CONF={settings}` would have reserved at most {peak} instead of \
                 {as_recorded} (both replayed)"
            )
        }
        _ => "no setting that was replayed saves 1 % of what is reserved".to_owned(),
    }
}

/// What to say where so many requests were refused. What the program would have asked for next is not
/// recorded: a model larger than the device is refused further on.
fn rescue(best: Option<&(String, Outcome)>, refused: usize) -> String {
    let last = if refused > 1 { "last " } else { "" };
    match best {
        Some((settings, outcome)) => format!(
            "`PYTORCH_CUDA_ALLOC_CONF={settings}` would have served every request up to the {last}refused one, with at most {} reserved \
             (replayed)",
            Bytes(outcome.peak_reserved_bytes)
        ),
        None => "no setting that was replayed avoids the OOM".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use crate::explain::{Request, explain};
    use crate::snapshot::read_bytes;

    #[test]
    fn advice_reaches_up_to_the_refused_request() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/snapshots");
        let bytes = std::fs::read(format!("{folder}/oom_fragmentation.pickle")).unwrap();
        let explanation = explain(&read_bytes(&bytes).unwrap(), &Request::default());
        let said = explanation.devices[0].counterfactual_summary.as_deref();
        let expected = "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` would have served every \
                        request up to the refused one, with at most 460.0 MiB reserved (replayed)";
        assert_eq!(said, Some(expected));
    }
}

//! Explanations of snapshots that the real allocator made, against the allocator's own counters.

use std::path::{Path, PathBuf};

use memfit_engine::bytes::Bytes;
use memfit_engine::explain::{Cause, DeviceExplanation, Pattern, Request, explain};
use memfit_engine::snapshot::read_bytes;
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots")
}

fn explained(name: &str, device_memory: Option<u64>) -> DeviceExplanation {
    let file = std::fs::read(folder().join(format!("{name}.pickle"))).unwrap();
    let request = Request {
        device_memory: device_memory.map(Bytes),
        ..Request::default()
    };
    let mut explanation = explain(&read_bytes(&file).unwrap(), &request);
    assert_eq!(explanation.problems, [], "{name}");
    assert_eq!(explanation.devices.len(), 1, "{name}");
    explanation.devices.remove(0)
}

fn expected() -> Value {
    let text = std::fs::read_to_string(folder().join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn the_peaks_are_those_that_the_allocator_counted() {
    let expected = expected();
    let cases = expected.as_object().unwrap();
    assert!(cases.len() >= 12);
    for (name, truth) in cases {
        let device = explained(name, None);
        let (peak, last) = (device.peak, device.last);
        for (what, said) in [
            (
                "peak",
                [peak.allocated_bytes, peak.active_bytes, peak.reserved_bytes],
            ),
            (
                "current",
                [last.allocated_bytes, last.active_bytes, last.reserved_bytes],
            ),
        ] {
            let counted = ["allocated_bytes", "active_bytes", "reserved_bytes"]
                .map(|count| Bytes(truth[what][count].as_u64().unwrap()));
            assert_eq!(said, counted, "{name}: {what}");
        }
        assert_eq!(device.uncertain_bytes, Bytes::ZERO, "{name}");
        assert_eq!(
            Some(device.oom.len() as u64),
            truth["num_ooms"].as_u64(),
            "{name}"
        );
    }
}

#[test]
fn refusals_of_the_real_allocator_have_their_causes() {
    let expected = expected();
    for (name, cause) in [
        ("oom_live_set", Cause::LiveSet),
        ("oom_live_set_expandable", Cause::LiveSet),
        ("oom_fragmentation", Cause::Fragmentation),
        ("oom_cap", Cause::Cap),
        ("oom_other_process", Cause::NonTorch),
    ] {
        let total = expected[name]["total_bytes"].as_u64().unwrap();
        let device = explained(name, Some(total));
        let refusal = &device.oom[0];
        assert_eq!(refusal.cause, cause, "{name}: {}", refusal.summary);
        // The allocator's own message divides the same memory.
        let message = expected[name]["errors"][0].as_str().unwrap();
        let mib = |bytes: Bytes| match bytes {
            Bytes::ZERO => "0 bytes".to_owned(),
            bytes => format!("{:.2} MiB", bytes.as_f64() / f64::from(1 << 20)),
        };
        let parts = &refusal.parts;
        let asked = format!("Tried to allocate {}", mib(refusal.requested_bytes));
        let held = format!("{} is allocated by PyTorch", mib(parts.live_set));
        let unused = format!(
            "{} is reserved by PyTorch but unallocated",
            mib(parts.fragmentation)
        );
        for said in [asked, held, unused] {
            assert!(
                message.contains(&said),
                "{name}: `{said}` is not in `{message}`"
            );
        }
        let known =
            parts.live_set + parts.pending + parts.fragmentation + refusal.device_free_bytes;
        assert_eq!(known + parts.non_torch.unwrap(), Bytes(total), "{name}");
    }
}

#[test]
fn the_growing_loss_is_recognised() {
    let device = explained("growing_loss", None);
    assert_eq!(device.growth[0].pattern, Pattern::KeptGraph);
    assert!(device.growth[0].stack.contains("linear.py"));
    let said = device.growth_summary.unwrap();
    assert!(said.contains("`total_loss += loss`"), "{said}");
    assert!(said.contains("train.py:57"), "{said}");
}

#[test]
fn settings_are_ranked_by_what_their_replay_did() {
    let device = explained("oom_fragmentation", Some(512 << 20));
    let best = &device.counterfactuals[0];
    assert_eq!(
        (best.settings.as_str(), best.oom_avoided),
        ("expandable_segments:True", Some(true)),
        "{:?}",
        device.counterfactual_summary
    );
    assert!(best.peak_reserved_bytes <= Bytes(512 << 20));
    // No setting makes room for tensors that are alive.
    for name in ["oom_live_set", "oom_other_process", "oom_cap"] {
        let device = explained(name, None);
        let avoided: Vec<_> = device
            .counterfactuals
            .iter()
            .map(|it| it.oom_avoided)
            .collect();
        assert!(avoided.len() > 5, "{name}");
        assert!(
            avoided.iter().all(|it| *it == Some(false)),
            "{name}: {avoided:?}"
        );
        let said = device.counterfactual_summary.unwrap();
        assert_eq!(
            said, "no setting that was replayed avoids the OOM",
            "{name}"
        );
    }
    for name in ["streams", "split_limit", "private_pools"] {
        let device = explained(name, None);
        let peaks: Vec<_> = device
            .counterfactuals
            .iter()
            .map(|it| it.peak_reserved_bytes)
            .collect();
        assert!(peaks.is_sorted(), "{name}: {peaks:?}");
    }
}

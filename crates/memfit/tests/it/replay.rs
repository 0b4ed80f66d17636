//! `memfit replay`: reports, JSON, exit codes.

use serde_json::Value;

use crate::program::{Outcome, run};

const FOLDER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../memfit-engine/tests/data/snapshots/"
);

/// Runs on the snapshots that the real allocator made; reports do not show where they lie.
fn replay(arguments: &str) -> Outcome {
    let mut outcome = run(&arguments.replace("@/", FOLDER));
    outcome.stdout = outcome.stdout.replace(FOLDER, "");
    outcome
}

#[test]
fn settings_are_ranked_and_only_what_a_replay_proved_is_advised() {
    let outcome = replay("replay @/oom_fragmentation.pickle");
    assert_eq!(outcome.code, 0);
    insta::assert_snapshot!(outcome.stdout, @"
    oom_fragmentation.pickle

    Events    60 recorded events
    Replayed  23 of 23 addresses, 8 of 8 new segments, 8 of 8 segments at the end as recorded

    Under these settings
       reserved  driver calls  retries  settings
      460.0 MiB            16        1  expandable_segments:True    no OOM
      460.0 MiB             8        1  PyTorch's defaults          as recorded, OOM
      460.0 MiB             8        1  max_split_size_mb:64        OOM
      460.0 MiB             8        1  max_split_size_mb:256       OOM
      460.0 MiB             8        1  max_split_size_mb:128       OOM
      460.0 MiB             8        1  max_split_size_mb:512       OOM
      460.0 MiB             8        1  roundup_power2_divisions:8  OOM
      460.0 MiB             8        1  large_segment_size_mb:64    OOM
      488.0 MiB             8        1  roundup_power2_divisions:4  OOM

    With `expandable_segments:True` every request up to the refused one is served: that OOM would not have happened
    ");
}

#[test]
fn settings_of_ones_own_are_compared_with_the_recording() {
    let outcome = replay(
        "replay @/growing_loss.pickle --set expandable_segments=True --set large_segment_size_mb=64",
    );
    assert_eq!(outcome.code, 0);
    insta::assert_snapshot!(outcome.stdout, @"
    growing_loss.pickle

    Events    248 recorded events
    Replayed  99 of 99 addresses, 5 of 5 new segments, 5 of 5 segments at the end as recorded

    Under these settings
       reserved  driver calls  retries  settings
       82.0 MiB             5        0  PyTorch's defaults                                 as recorded
      130.0 MiB             3        0  expandable_segments:True,large_segment_size_mb:64

    No setting that was replayed reserves 2 % less
    ");
}

#[test]
fn an_oom_that_nothing_avoids_exits_with_1() {
    let outcome = replay("replay @/oom_live_set.pickle --format json");
    assert_eq!(outcome.code, 1);
    let document: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let device = &document["devices"][0];
    assert_eq!(
        device["allocations"]["matched"],
        device["allocations"]["total"]
    );
    let tried = device["replays"].as_array().unwrap();
    assert!(
        tried
            .iter()
            .all(|it| it["oom_avoided"] == false && it["is_refused"] == true)
    );
    assert_eq!(
        tried.iter().filter(|it| it["is_recorded"] == true).count(),
        1
    );
}

#[test]
fn a_larger_device_would_have_served_it() {
    let outcome = replay("replay @/oom_live_set.pickle --device-memory 80GiB --format json");
    let document: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let tried = document["devices"][0]["replays"].as_array().unwrap();
    assert!(tried.iter().all(|it| it["oom_avoided"] == true));
    assert_eq!(outcome.code, 0);
}

#[test]
fn settings_are_refused_in_the_words_of_pytorch() {
    for (set, message) in [
        (
            "nonsense=1",
            "Unrecognized key 'nonsense' in CUDA allocator config.",
        ),
        ("max_split_size_mb=7", "max_split_size_mb too small"),
        ("expandable_segments", "write `name=value`"),
        (
            "backend=cudaMallocAsync",
            "`backend:cudaMallocAsync` is the allocator of CUDA's driver, which memfit does not simulate",
        ),
    ] {
        let outcome = replay(&format!("replay @/streams.pickle --set {set}"));
        assert_eq!(outcome.code, 2, "{set}");
        assert!(outcome.stderr.contains(message), "{}", outcome.stderr);
        assert_eq!(outcome.stdout, "");
    }
}

#[test]
fn a_setting_that_changes_nothing_is_said_to() {
    const NOTE: &str = "`garbage_collection_threshold` changes nothing without \
                        `per_process_memory_fraction` below 1: it is a share of that limit";
    let alone = "replay @/streams.pickle --set garbage_collection_threshold=0.8";
    let outcome = replay(alone);
    assert_eq!(outcome.code, 0);
    assert!(
        outcome.stdout.ends_with(&format!("\n\n{NOTE}\n")),
        "{}",
        outcome.stdout
    );
    let document: Value =
        serde_json::from_str(&replay(&format!("{alone} --format json")).stdout).unwrap();
    assert_eq!(document["notes"], serde_json::json!([NOTE]));
    let limited = replay(&format!(
        "{alone} --set per_process_memory_fraction=0.5 --device-memory 2GiB"
    ));
    assert!(
        !limited.stdout.contains("changes nothing"),
        "{}",
        limited.stdout
    );
    assert!(
        !replay("replay @/streams.pickle")
            .stdout
            .contains("changes nothing")
    );
}

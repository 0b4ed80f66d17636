//! `memfit explain`: reports, JSON, exit codes, files that are no snapshots.

use std::path::Path;

use serde_json::Value;

use crate::pickle::Program;
use crate::program::{Outcome, run};

const LAYER: [&str; 3] = [
    "/home/user/project/block.py:17 forward",
    "/home/user/project/model.py:42 forward",
    "/home/user/project/train.py:30 main",
];
const NODE: [&str; 2] = [
    "??:0 torch::autograd::generated::MmBackward0::apply(x)",
    "??:0 torch::autograd::Engine::evaluate_function(x)",
];
const STEP: [&str; 2] = [
    "/usr/lib/python3/site-packages/torch/optim/adamw.py:88 step",
    "/home/user/project/train.py:33 main",
];
const OUTPUTS: [&str; 1] = ["/home/user/project/train.py:31 main"];

/// Four steps; with `leaks` the outputs of each are kept.
fn training(leaks: bool) -> Program {
    let mut program = Program::default();
    for n in 0..5 {
        let activations: Vec<u64> = (0..3).map(|_| program.take(40, &LAYER)).collect();
        let output = program.take(10, &OUTPUTS);
        let gradient = program.take(20, &NODE);
        for activation in activations {
            program.give(activation);
        }
        let scratch = program.take(12, &STEP);
        if n == 0 {
            program.take(60, &STEP);
        }
        program.give(scratch);
        program.give(gradient);
        if !leaks {
            program.give(output);
        }
    }
    program
}

/// Runs in the folder's name, so that reports do not show it.
fn explain(folder: &Path, arguments: &str) -> Outcome {
    let root = folder.to_str().unwrap();
    let mut outcome = run(&arguments.replace("@/", &format!("{root}/")));
    outcome.stdout = outcome.stdout.replace(&format!("{root}/"), "");
    outcome.stderr = outcome.stderr.replace(&format!("{root}/"), "");
    outcome
}

#[test]
fn a_healthy_run_is_explained_and_exits_with_0() {
    let folder = tempfile::tempdir().unwrap();
    training(false).save(folder.path(), "snapshot.pickle");
    let outcome = explain(folder.path(), "explain @/snapshot.pickle");
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    insta::assert_snapshot!(outcome.stdout, @"
    snapshot.pickle  152 events

    Peak      210.0 MiB allocated
    Reached   after event 41, 10 ms into the recording
    Reserved  210.0 MiB at most
    At first  0 B alive when recording began
    At last   60.0 MiB allocated, 60.0 MiB reserved when the snapshot was taken

    At the peak, by category
      120.0 MiB  57.1 %  3 blocks  activation       ██████████████
       60.0 MiB  28.6 %   1 block  optimizer state  ███████
       20.0 MiB   9.5 %   1 block  gradient         ██
       10.0 MiB   4.8 %   1 block  unknown          █

    At the peak, by module or autograd node
      120.0 MiB  57.1 %  3 blocks  model.py:42 > block.py:17  ██████████████
       60.0 MiB  28.6 %   1 block  train.py:33 main           ███████
       20.0 MiB   9.5 %   1 block  MmBackward0                ██
       10.0 MiB   4.8 %   1 block  train.py:31 main           █

    At the peak, by stack
      120.0 MiB  57.1 %  3 blocks  activation
          user/project/block.py:17 forward
          user/project/model.py:42 forward
          user/project/train.py:30 main
       60.0 MiB  28.6 %   1 block  optimizer state
          torch/optim/adamw.py:88 step
          user/project/train.py:33 main
       20.0 MiB   9.5 %   1 block  gradient
          MmBackward0 (backward)
       10.0 MiB   4.8 %   1 block  unknown
          user/project/train.py:31 main

    Fragmentation
      Fragmentation does not matter: 0 B of 210.0 MiB reserved are in no block

    Growth
      No stack holds more after every step; 3 steps looked at, by the optimizer's stacks

    At the end
      Tensors hold 60.0 MiB of 60.0 MiB reserved; `torch.cuda.empty_cache()` gives nothing back

    Held at the end
      60.0 MiB  100.0 %  1 block  optimizer state  user/project/train.py:33 main

    Under other settings
      No other setting can save more than 0 B, so none was replayed
    ");
}

#[test]
fn a_leak_is_told_with_its_line_and_exits_with_1() {
    let folder = tempfile::tempdir().unwrap();
    training(true).save(folder.path(), "snapshot.pickle");
    let outcome = explain(folder.path(), "explain @/snapshot.pickle");
    assert_eq!((outcome.code, outcome.stderr.as_str()), (1, ""));
    let growth = outcome.stdout.split("Growth\n").nth(1).unwrap();
    let growth = growth.split("\nAt the end").next().unwrap();
    insta::assert_snapshot!(growth, @"
    10.0 MiB more stay after every step
    each step    in all  what  asked for by
     10.0 MiB  30.0 MiB  kept  user/project/train.py:31 main
    ");
}

#[test]
fn a_refusal_is_divided_and_exits_with_1() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = training(false);
    program.take(900, &LAYER);
    program.refuse(500, 100, &LAYER);
    program.save(folder.path(), "oom.pickle");
    let outcome = explain(folder.path(), "explain @/oom.pickle --device-memory 3GiB");
    assert_eq!(outcome.code, 1);
    let refused = outcome.stdout.split("Out of memory\n").nth(1).unwrap();
    insta::assert_snapshot!(refused.split("\n\n").next().unwrap(), @"
    500.0 MiB refused at event 154: others hold the device's memory
    Tensors hold 960.0 MiB and would have left room for 500.0 MiB, but 1.96 GiB of the device belong to other processes or libraries
        user/project/block.py:17 forward
        user/project/model.py:42 forward
        user/project/train.py:30 main
      960.0 MiB  held by tensors
            0 B  let go, waiting for another stream
            0 B  reserved, in no block; the largest gap has 0 B
      100.0 MiB  free on the device
       1.96 GiB  other processes, contexts and libraries
    ");
    let blind = explain(folder.path(), "explain @/oom.pickle").stdout;
    assert!(blind.contains("give --device-memory"), "{blind}");
}

#[test]
fn caches_made_ahead_are_no_leak_and_that_none_was_looked_for_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = Program::default();
    for _ in 0..32 {
        program.take(
            64,
            &["/app/cache.py:18 allocate", "/app/engine.py:77 __init__"],
        );
    }
    program.save(folder.path(), "snapshot.pickle");
    let outcome = explain(folder.path(), "explain @/snapshot.pickle");
    assert_eq!(outcome.code, 0);
    let growth = outcome.stdout.split("Growth\n").nth(1).unwrap();
    let growth = growth.split("\nAt the end").next().unwrap();
    assert_eq!(
        growth,
        "  No steps found: leaks not looked for; give two snapshots \
         (`memfit explain before.pickle after.pickle`)\n"
    );
}

/// Segments alone, or with the last event of a ring buffer of one.
#[test]
fn without_a_history_only_the_end_is_told() {
    let folder = tempfile::tempdir().unwrap();
    for (kept, events) in [(0, "0 events"), (1, "1 event")] {
        let mut program = training(true);
        program.forget_all_but(kept);
        program.save(folder.path(), "snapshot.pickle");
        let outcome = explain(folder.path(), "explain @/snapshot.pickle");
        assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
        let (head, rest) = outcome.stdout.split_once('\n').unwrap();
        assert_eq!(head, format!("snapshot.pickle  {events}"));
        insta::allow_duplicates! {
            insta::assert_snapshot!(rest, @"

            No history was recorded: call `torch.cuda.memory._record_memory_history()` before

            At last  110.0 MiB allocated, 110.0 MiB reserved when the snapshot was taken

            At the end
              Tensors hold 110.0 MiB of 110.0 MiB reserved; `torch.cuda.empty_cache()` gives nothing back

            At the end, by stack
              60.0 MiB  54.5 %   1 block  optimizer state
                  torch/optim/adamw.py:88 step
                  user/project/train.py:33 main
              50.0 MiB  45.5 %  5 blocks  unknown
                  user/project/train.py:31 main
            ");
        }
        let json = explain(folder.path(), "explain @/snapshot.pickle --format json").json();
        let device = &json["devices"][0];
        assert_eq!(device["has_history"], false);
        assert_eq!(device["fragmentation"]["verdict"], "unknown");
        assert_eq!(device["counterfactual_summary"], Value::Null);
        assert_eq!(
            device["peak"]["allocated_bytes"],
            device["last"]["allocated_bytes"]
        );
    }
}

#[test]
fn two_snapshots_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    training(false).save(folder.path(), "before.pickle");
    training(true).save(folder.path(), "after.pickle");
    let outcome = explain(
        folder.path(),
        "explain @/before.pickle @/after.pickle --steps 5",
    );
    assert_eq!(outcome.code, 1);
    assert!(
        outcome
            .stdout
            .starts_with("after.pickle  137 events, compared with before.pickle\n"),
        "{}",
        outcome.stdout
    );
    let growth = outcome.stdout.split("Growth\n").nth(1).unwrap();
    let growth = growth.split("\nAt the end").next().unwrap();
    insta::assert_snapshot!(growth, @"
    50.0 MiB more are held over 5 steps
    each step    in all  what  asked for by
     10.0 MiB  50.0 MiB  kept  user/project/train.py:31 main
    ");
    let back = explain(folder.path(), "explain @/after.pickle @/before.pickle");
    assert_eq!(back.code, 0);
}

fn keys(value: &Value) -> String {
    let keys: Vec<&str> = value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    keys.join(" ")
}

#[test]
fn the_json_keeps_its_contract() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = training(true);
    program.refuse(500, 100, &LAYER);
    program.save(folder.path(), "snapshot.pickle");
    let json = explain(folder.path(), "explain @/snapshot.pickle --format json").json();
    insta::assert_snapshot!(keys(&json), @"before devices events problems schema_version source");
    let device = &json["devices"][0];
    insta::assert_snapshot!(keys(device), @"counterfactual_summary counterfactuals end fragmentation growth growth_summary has_history index last live_before_recording_bytes oom owners peak replayed_reserved_bytes steps uncertain_bytes");
    insta::assert_snapshot!(keys(&device["peak"]), @"active_bytes active_event after_us allocated_bytes event reserved_bytes reserved_event");
    insta::assert_snapshot!(keys(&device["owners"][0]), @"bytes category count evidence module stack");
    insta::assert_snapshot!(keys(&device["fragmentation"]), @"inactive_bytes pinned_bytes pinned_segment_count pinned_segments pinning_bytes private_pools refusal_event releasable_bytes summary verdict");
    insta::assert_snapshot!(keys(&device["end"]), @"owners pinned_segment_count pinned_segments pinning_bytes private_pools releasable_bytes stuck_bytes summary");
    insta::assert_snapshot!(keys(&device["oom"][0]), @"cause device_free_bytes event largest_gap_bytes parts requested_bytes stack summary");
    insta::assert_snapshot!(keys(&device["oom"][0]["parts"]), @"cap fragmentation live_set non_torch pending private_pools");
    insta::assert_snapshot!(keys(&device["growth"][0]), @"bytes bytes_per_step category pattern stack steps");
    insta::assert_snapshot!(keys(&device["counterfactuals"][0]), @"oom_avoided peak_reserved_bytes settings");
    assert_eq!(json["schema_version"], 1);
    assert_eq!(json["source"], "snapshot.pickle");
    let owners = device["owners"].as_array().unwrap();
    let sum: u64 = owners.iter().map(|it| it["bytes"].as_u64().unwrap()).sum();
    assert_eq!(Some(sum), device["peak"]["allocated_bytes"].as_u64());
    let again = explain(folder.path(), "explain @/snapshot.pickle --format json").json();
    assert_eq!(again, json);
}

#[test]
fn files_that_are_no_snapshots_and_options_without_meaning() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.pt"), b"PK\x03\x04model").unwrap();
    std::fs::write(folder.path().join("empty"), b"").unwrap();
    training(false).save(folder.path(), "snapshot.pickle");
    for (arguments, said) in [
        (
            "explain @/absent.pickle",
            "cannot read `absent.pickle`: No such file",
        ),
        ("explain @/model.pt", "cannot read `model.pt`: this is"),
        ("explain @/empty", "the file is empty"),
        (
            "explain @/snapshot.pickle @/model.pt",
            "cannot read `model.pt`",
        ),
        (
            "explain @/snapshot.pickle --device-memory lots",
            "cannot read `--device-memory lots`",
        ),
        (
            "explain @/snapshot.pickle --device-memory 60%",
            "cannot read `--device-memory 60%`",
        ),
        (
            "explain @/snapshot.pickle --steps 4",
            "required arguments were not provided",
        ),
    ] {
        let outcome = explain(folder.path(), arguments);
        assert_eq!(
            (outcome.code, outcome.stdout.as_str()),
            (2, ""),
            "{arguments}"
        );
        assert!(
            outcome.stderr.contains(said),
            "{arguments}: {}",
            outcome.stderr
        );
    }
}

//! `memfit calibrate`, `plan --gpu` and `plan --costs` with a host that answers from memory.

use std::fs;

use serde_json::Value;

use crate::program::{FakeHost, run};

#[test]
fn the_profile_is_kept_in_the_cache_and_shown() {
    let folder = tempfile::tempdir().unwrap();
    let mut host = FakeHost {
        cache: Some(folder.path().join("absent")),
        ..FakeHost::default()
    };
    let outcome = host.run("calibrate --seconds 2.5 --folder /scratch");
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let file = folder.path().join("absent/memfit/cpu.json");
    let kept: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!(kept["device_name"], "a test processor");
    let asked = ("cpu".to_owned(), 2.5, Some("/scratch".into()));
    assert_eq!(host.calibration_seen, Some(asked));
    for word in [
        "matmul.float32",
        "100.0  GFLOP/s",
        "disk read   2.00",
        "/scratch, direct",
    ] {
        assert!(outcome.stdout.contains(word), "{word}: {}", outcome.stdout);
    }
    assert!(outcome.stderr.contains("warning: the machine is busy"));
}

#[test]
fn the_document_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node.json");
    let outcome = run(&format!(
        "calibrate --format json --output {}",
        path.display()
    ));
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let document = outcome.json();
    assert_eq!(document["path"], path.to_str().unwrap());
    assert_eq!(document["samples"][1]["bytes"], 1_000_000);
    assert!(document["samples"][1].get("flops").is_none());
    let absent = folder.path().join("absent/node.json");
    let refused = run(&format!("calibrate --output {}", absent.display()));
    assert_eq!(refused.code, 2);
}

#[test]
fn a_datasheet_is_for_steps_on_a_gpu() {
    let refused = run("plan a.py:build --budget 90% --gpu h100");
    assert_eq!(refused.code, 2);
    assert!(
        refused.stderr.contains("runs on `cpu`"),
        "{}",
        refused.stderr
    );
    let unknown = run("plan a.py:build --budget 90% --gpu mi300x");
    assert_eq!(unknown.code, 2);
    assert!(unknown.stderr.contains("RTX 4090"), "{}", unknown.stderr);
    let both = run("plan a.py:build --budget 90% --gpu h100 --profile");
    assert_eq!(both.code, 2);
}

//! `memfit doctor` with a host that answers from memory.

use memfit::{HostError, HostErrorKind};
use serde_json::{Value, json};

use crate::program::{FakeHost, Outcome};
use crate::sample;

/// A socket in a folder of its own, so that no broker of the machine is seen.
fn doctor(host: &mut FakeHost, arguments: &str) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("broker.sock");
    let mut outcome = host.run(&format!("doctor --socket {} {arguments}", socket.display()));
    let folder = folder.path().display().to_string();
    outcome.stdout = outcome.stdout.replace(&folder, "/run/user");
    outcome
}

/// The text without the memory and the time of the machine that runs the test.
fn fixed(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for line in text.lines() {
        match line.rsplit_once("; ") {
            Some((start, end)) if end.ends_with(" ms") => lines.push(format!("{start}; …")),
            _ if line.starts_with("  host ") => lines.push("  host …".to_owned()),
            _ if line.starts_with("  device ") || line.starts_with("  cuda:") => {}
            _ => lines.push(line.to_owned()),
        }
    }
    lines.join("\n")
}

fn on(examined: Value) -> FakeHost {
    FakeHost {
        examined: Some(examined),
        ..FakeHost::default()
    }
}

fn last_line(outcome: &Outcome) -> &str {
    outcome.stdout.lines().last().unwrap()
}

#[test]
fn where_all_works_the_report_says_so() {
    let outcome = doctor(&mut FakeHost::default(), "--offload /scratch");
    assert_eq!(outcome.code, 0, "{}{}", outcome.stdout, outcome.stderr);
    insta::assert_snapshot!(fixed(&outcome.stdout), @"
    memfit doctor

    Versions
      memfit     0.2.0, in `/home/user/venv/memfit`
      torch      2.15.0+cu132, in `/home/user/venv/torch`
      CUDA       torch is built for CUDA 13.2, and there is no NVIDIA driver here
      Python     3.12.4, `/home/user/venv/bin/python`
      system     Linux 6.8.0, x86_64, glibc 2.39
      processor  a processor, 8 cores

    Main job: train a tiny model within a budget
      cpu  predicted = measured, bitwise: 968.0 KiB of 1.2 MiB unplanned, budget 1.1 MiB; …

    What works
      predict                         works
      plan                            works
      verify                          works
      fit                             works
      fit on CUDA                     does not, because torch is built for CUDA 13.2, and there is no
                                      NVIDIA driver here
      predict for CUDA without a GPU  works
      run                             works
      guard                           works
      track                           works
      offloaded activations           works
      offloaded optimizer state       works
      offloaded parameters            works
      park                            works
      compiled plans on the CPU       works
      compiled plans on CUDA          does not, because torch is built for CUDA 13.2, and there is no
                                      NVIDIA driver here
      explain                         works
      place                           works
      broker and leases               works

    Memory
      host …

    Tools
      C++ compiler  g++ 13.2.0, `/usr/bin/g++`
      Triton        3.9.0
      oneDNN        in this torch
      distributed   in this torch

    What ops cost
      cpu   calibrated 2026-01-02, 3 days ago, `/home/user/.cache/memfit/cpu.json`
      cuda  no profile is kept, and no device is here: plans for CUDA use a datasheet

    Sharing
      broker  none runs at `/run/user/broker.sock`: `memfit broker` starts one

    Folders
      profiles that are kept         `/home/user/.cache/memfit` can be written to
      offloaded tensors, by default  `/tmp` can be written to
      offloading                     `/scratch` writes 1.00 GB/s, reads 2.00 GB/s

    READY: memfit works here; 2 features do not, see above
    ");
}

/// What Python says where torch cannot be used.
fn without_torch() -> Value {
    let refusal = "memfit needs torch, which is not installed: `pip install torch`";
    let mut examined = sample::examined();
    examined["torch"] = Value::Null;
    examined["torch_refusal"] = json!(refusal);
    examined["cuda"] = json!({ "why_not": refusal, "devices": [] });
    examined["tools"] = json!([]);
    examined["trials"] = json!({});
    examined["next_step"] = json!("install torch: `pip install torch`");
    examined
}

#[test]
fn without_torch_the_last_line_says_what_to_do() {
    let mut host = on(without_torch());
    let outcome = doctor(&mut host, "");
    assert_eq!((outcome.code, outcome.stderr.as_str()), (1, ""));
    insta::assert_snapshot!(fixed(&outcome.stdout), @"
    memfit doctor

    Versions
      memfit     0.2.0, in `/home/user/venv/memfit`
      torch      not installed
      CUDA       -
      Python     3.12.4, `/home/user/venv/bin/python`
      system     Linux 6.8.0, x86_64, glibc 2.39
      processor  a processor, 8 cores

    Main job: train a tiny model within a budget
      cpu  fails: memfit needs torch, which is not installed: `pip install torch`

    What works
      predict                         does not, because memfit needs torch, which is not installed:
                                      `pip install torch`
      plan                            does not, for the same reason
      verify                          does not, for the same reason
      fit                             does not, for the same reason
      fit on CUDA                     does not, for the same reason
      predict for CUDA without a GPU  does not, for the same reason
      run                             does not, for the same reason
      guard                           does not, for the same reason
      track                           does not, for the same reason
      offloaded activations           does not, for the same reason
      offloaded optimizer state       does not, for the same reason
      offloaded parameters            does not, for the same reason
      park                            does not, for the same reason
      compiled plans on the CPU       does not, for the same reason
      compiled plans on CUDA          does not, for the same reason
      explain                         works
      place                           works
      broker and leases               works

    Memory
      host …

    What ops cost
      cpu   calibrated 2026-01-02, 3 days ago, `/home/user/.cache/memfit/cpu.json`
      cuda  no profile is kept: `memfit calibrate --device cuda` makes one in
            `/home/user/.cache/memfit/cuda.json`

    Sharing
      broker  none runs at `/run/user/broker.sock`: `memfit broker` starts one

    Folders
      profiles that are kept         `/home/user/.cache/memfit` can be written to
      offloaded tensors, by default  `/tmp` can be written to

    NOT READY: memfit needs torch, which is not installed: `pip install torch`
    next: install torch: `pip install torch`
    ");
    assert_eq!(host.verifications, 0);
}

#[test]
fn a_step_that_differs_from_its_plan_is_named() {
    let mut above = FakeHost {
        measured_ratio: 1.5,
        ..FakeHost::default()
    };
    let outcome = doctor(&mut above, "");
    assert_eq!(outcome.code, 1);
    assert!(
        outcome.stdout.contains("above its budget of"),
        "{}",
        outcome.stdout
    );
    assert_eq!(
        last_line(&outcome),
        "next: report this output as a bug of memfit"
    );

    let mut rounded = FakeHost {
        gradients: "equivalent",
        ..FakeHost::default()
    };
    let outcome = doctor(&mut rounded, "");
    assert_eq!(outcome.code, 1);
    assert!(
        outcome
            .stdout
            .contains("NOT READY: loss or gradients of the planned step have other bits"),
        "{}",
        outcome.stdout
    );
}

#[test]
fn a_prediction_that_is_off_is_measured() {
    let mut below = FakeHost {
        measured_ratio: 0.98,
        ..FakeHost::default()
    };
    let outcome = doctor(&mut below, "");
    assert_eq!(outcome.code, 0, "{}", outcome.stdout);
    assert!(
        outcome.stdout.contains("(predicted +2.04 %), bitwise"),
        "{}",
        outcome.stdout
    );
}

#[test]
fn a_capture_that_fails_is_an_answer_and_an_interruption_is_none() {
    let mut failing = FakeHost::failing(HostErrorKind::Internal, "ImportError: no name `of_torch`");
    let outcome = doctor(&mut failing, "--format json");
    assert_eq!((outcome.code, outcome.stderr.as_str()), (1, ""));
    let document = outcome.json();
    assert_eq!(document["main_jobs"][0]["reached"], Value::Null);
    for feature in ["predict", "plan", "fit", "predict_cuda"] {
        let found = named(&document, feature);
        assert_eq!(
            found["why_not"], "ImportError: no name `of_torch`",
            "{feature}"
        );
    }
    assert_eq!(named(&document, "guard")["works"], true);

    let mut interrupted = FakeHost {
        capture_failure: Some(HostError::new(HostErrorKind::Interrupted, "interrupted")),
        ..FakeHost::default()
    };
    let outcome = doctor(&mut interrupted, "");
    assert_eq!((outcome.code, outcome.stdout.as_str()), (130, ""));
}

fn named<'a>(document: &'a Value, feature: &str) -> &'a Value {
    let mut features = document["features"].as_array().unwrap().iter();
    features.find(|found| found["name"] == feature).unwrap()
}

#[test]
fn a_gpu_is_tried_too() {
    let mut examined = sample::examined();
    examined["cuda"] = json!({ "why_not": null, "devices": [
        { "device": "cuda:0", "name": "a GPU", "total_bytes": 85_899_345_920_u64 },
    ]});
    examined["trials"]["compile_cuda"] = json!("Inductor finds no Triton, which it needs for CUDA");
    let mut host = on(examined);
    let outcome = doctor(&mut host, "");
    assert_eq!(outcome.code, 0, "{}", outcome.stdout);
    assert_eq!(host.verifications, 2);
    for line in [
        "  CUDA       13.2: cuda:0 is a GPU with 80.00 GiB",
        "  cuda:0  predicted = measured, bitwise",
        "  fit on CUDA                     works",
        "  compiled plans on CUDA          does not, because Inductor finds no Triton",
        "READY: memfit works here; one feature does not, see above",
    ] {
        assert!(outcome.stdout.contains(line), "{line}: {}", outcome.stdout);
    }
}

#[test]
fn every_line_fits_and_no_control_character_comes_through() {
    let mut examined = sample::examined();
    let torches =
        "two torches are on the path: 2.15.0 in `/home/user/venv/torch` is used, ".repeat(4);
    examined["remarks"] = json!([torches]);
    examined["trials"]["park"] = json!(format!("\u{1b}[31mred {}", "words ".repeat(40)));
    let outcome = doctor(&mut on(examined), "");
    assert!(!outcome.stdout.contains('\u{1b}'));
    for line in outcome.stdout.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

#[test]
fn the_document_begins_with_its_version_and_says_all_once() {
    let outcome = doctor(&mut FakeHost::default(), "--format json");
    assert!(outcome.stdout.starts_with("{\n  \"schema_version\": 1,"));
    let document = outcome.json();
    assert_eq!(document["is_ready"], true);
    assert_eq!(document["next_step"], Value::Null);
    assert_eq!(outcome.stdout.matches("\"next_step\"").count(), 1);
    assert!(document.get("trials").is_none());
    let job = &document["main_jobs"][0];
    assert_eq!(job["reached"], "verified");
    assert_eq!(
        job["planned"]["predicted_peak_bytes"],
        job["planned"]["measured_peak_bytes"]
    );
    assert_eq!(document["broker"]["pid"], Value::Null);
    assert_eq!(document["devices"][0]["device"], "host");
}

#[test]
fn a_place_where_no_broker_can_listen_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent/deeper/broker.sock");
    let outcome = FakeHost::default().run(&format!(
        "doctor --format json --socket {}",
        absent.display()
    ));
    let document = outcome.json();
    let reason = named(&document, "broker")["why_not"].as_str().unwrap();
    assert!(
        reason.contains("cannot use `") && reason.contains("absent"),
        "{reason}"
    );
    assert!(!absent.parent().unwrap().exists());
    let file = folder.path().join("file.sock");
    std::fs::write(&file, "").unwrap();
    let outcome = FakeHost::default().run(&format!("doctor --socket {}", file.display()));
    assert!(
        outcome.stdout.contains("no socket; it is left as it is"),
        "{}",
        outcome.stdout
    );
}

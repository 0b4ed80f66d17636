//! Saved traces and plans: whole or not at all, and refused when they are not what they should be.

use std::fs;
use std::path::Path;

use crate::program::{FakeHost, run};

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_saved_trace_answers_the_same_questions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.memfit");
    let saved = path.to_str().unwrap();
    let live = run(&format!("predict model.py:build --save {saved}"));
    assert_eq!(live.code, 0);
    assert_eq!(names(folder.path()), ["step.memfit"]);
    assert_eq!(run(&format!("predict {saved}")).stdout, live.stdout);
    let plan = run("plan model.py:build --budget 90%").stdout;
    assert_eq!(run(&format!("plan {saved} --budget 90%")).stdout, plan);
}

#[test]
fn a_saved_plan_can_be_shown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.memfit");
    let saved = path.to_str().unwrap();
    let plan = run(&format!("plan model.py:build --budget 90% --save {saved}"));
    assert_eq!(plan.code, 0);
    assert_eq!(run(&format!("show {saved}")).stdout, plan.stdout);
    let refused = run(&format!("predict {saved}"));
    assert_eq!(refused.code, 2);
    assert!(
        refused
            .stderr
            .contains("the file holds a plan, a trace is needed"),
        "{}",
        refused.stderr
    );
}

#[test]
fn a_plan_that_does_not_fit_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.memfit");
    let outcome = run(&format!(
        "plan model.py:build --budget 200KiB --save {}",
        path.to_str().unwrap()
    ));
    assert_eq!(outcome.code, 1);
    assert!(
        outcome.stderr.contains("was not written"),
        "{}",
        outcome.stderr
    );
    assert!(names(folder.path()).is_empty());
}

#[test]
fn files_that_are_no_traces() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.memfit");
    let saved = path.to_str().unwrap();
    run(&format!("predict model.py:build --save {saved}"));
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0xff;
    let later = b"{\"schema_version\":99,\"kind\":\"trace\",\"memfit\":\"7.0.0\"}\nxxxx".to_vec();
    let cases: [(&str, Vec<u8>, &str); 5] = [
        ("empty", Vec::new(), "not a memfit file"),
        (
            "cut off",
            whole[..whole.len() - 7].to_vec(),
            "damaged or cut off",
        ),
        ("flipped", flipped, "cannot read"),
        ("of a later schema", later, "schema version 99"),
        (
            "something else",
            b"PK\x03\x04".to_vec(),
            "not a memfit file",
        ),
    ];
    for (what, bytes, said) in cases {
        fs::write(&path, bytes).unwrap();
        for command in [format!("predict {saved}"), format!("show {saved}")] {
            let outcome = run(&command);
            assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""), "{what}");
            assert!(outcome.stderr.contains(said), "{what}: {}", outcome.stderr);
        }
    }
}

#[test]
fn a_path_that_cannot_be_written_is_found_before_the_capture() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent").join("step.memfit");
    let mut host = FakeHost::default();
    let outcome = host.run(&format!(
        "predict model.py:build --set n=1 --save {}",
        absent.to_str().unwrap()
    ));
    assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""));
    assert!(
        outcome.stderr.starts_with("error: cannot write `"),
        "{}",
        outcome.stderr
    );
    assert!(host.settings_seen.is_empty(), "the host was asked");
}

#[test]
fn nothing_half_written_is_left_after_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.memfit");
    let mut host = FakeHost::failing(memfit::HostErrorKind::Interrupted, "interrupted");
    let outcome = host.run(&format!(
        "predict model.py:build --save {}",
        path.to_str().unwrap()
    ));
    assert_eq!(outcome.code, 130);
    assert!(names(folder.path()).is_empty());
}

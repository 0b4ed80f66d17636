//! Wrong use and bad input: a clear error, the right exit code, nothing on standard output.

use memfit::{HostError, HostErrorKind};

use crate::program::{FakeHost, run};

/// Runs, expects wrong use, and returns what was said.
fn refused(arguments: &str) -> String {
    let outcome = run(arguments);
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (2, ""),
        "{arguments}: {}",
        outcome.stderr
    );
    outcome.stderr
}

#[test]
fn budgets_that_cannot_be_read() {
    insta::assert_snapshot!(refused("plan model.py:build --budget lots"), @"error: cannot read `lots` as a budget: no number; write bytes (3221225472), 3GiB, 800MiB, 2GB or 60%");
    for budget in ["0", "-3GiB", "0%", "3XiB", "nan"] {
        refused(&format!("plan model.py:build --budget={budget}"));
        refused(&format!("predict model.py:build --budget={budget}"));
    }
    insta::assert_snapshot!(refused("plan model.py:build"), @"
    error: the following required arguments were not provided:
      --budget <BYTES>

    Usage: memfit plan --budget <BYTES> <TARGET>

    For more information, try '--help'.
    ");
}

#[test]
fn targets_that_name_nothing() {
    insta::assert_snapshot!(refused("predict model.py"), @"
    error: `model.py` names no function
    hint: write FILE.py:FUNCTION, package.module:FUNCTION or FILE.memfit
    ");
    insta::assert_snapshot!(refused("predict model.py:"), @"
    error: cannot read `model.py:` as a target
    hint: write FILE.py:FUNCTION, package.module:FUNCTION or FILE.memfit
    ");
    insta::assert_snapshot!(refused("verify step.memfit --budget 1GiB"), @"
    error: `verify` needs a live model, and `step.memfit` is a saved trace
    hint: give the function that builds the workload: FILE.py:FUNCTION
    ");
    insta::assert_snapshot!(refused("predict absent.memfit"), @"error: cannot read `absent.memfit`: No such file or directory (os error 2)");
}

#[test]
fn settings_that_cannot_be_meant() {
    insta::assert_snapshot!(refused("predict model.py:build --set batch"), @"error: cannot read `--set batch`: write NAME=VALUE");
    refused("predict model.py:build --set =4");
    refused("predict model.py:build --set batch=4 --set batch=8");
    refused("predict step.memfit --set batch=4");
}

#[test]
fn options_without_meaning_for_a_saved_trace() {
    refused("predict step.memfit --device cuda");
    refused("predict model.py:build --batch 0");
    refused("predict model.py:build --unknown");
    refused("frobnicate");
}

#[test]
fn another_batch_needs_two_captures() {
    let said = refused("predict model.py:build --batch 8");
    assert!(said.contains("cannot predict another batch size"), "{said}");
}

#[test]
fn settings_and_device_reach_the_host() {
    let mut host = FakeHost::default();
    host.run("predict model.py:build --set batch=8 --set name=a=b --device cuda");
    let settings = [("batch", "8"), ("name", "a=b")].map(|(n, v)| (n.to_owned(), v.to_owned()));
    assert_eq!(host.settings_seen, settings);
    assert_eq!(host.device_seen.as_deref(), Some("cuda"));
}

#[test]
fn a_model_that_fails_shows_its_own_traceback_and_one_line() {
    let failure = HostError {
        kind: HostErrorKind::Workload,
        message: "`model.py:build` failed by itself in forward".to_owned(),
        traceback: Some(
            "Traceback (most recent call last):\n  ...\nRuntimeError: boom\n".to_owned(),
        ),
        hint: Some("run the step without memfit first".to_owned()),
    };
    let mut host = FakeHost {
        capture_failure: Some(failure),
        ..FakeHost::default()
    };
    let outcome = host.run("predict model.py:build");
    assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""));
    insta::assert_snapshot!(outcome.stderr, @"
    Traceback (most recent call last):
      ...
    RuntimeError: boom
    error: `model.py:build` failed by itself in forward
    hint: run the step without memfit first
    ");
}

#[test]
fn every_kind_of_host_failure_has_its_exit_code() {
    let kinds = [
        (HostErrorKind::Usage, 2),
        (HostErrorKind::Workload, 2),
        (HostErrorKind::Capture, 2),
        (HostErrorKind::DoesNotFit, 1),
        (HostErrorKind::Interrupted, 130),
        (HostErrorKind::Internal, 101),
    ];
    for (kind, code) in kinds {
        let outcome = FakeHost::failing(kind, "it went wrong").run("predict model.py:build");
        assert_eq!(outcome.code, code, "{kind:?}");
        assert!(
            outcome.stderr.starts_with("error: it went wrong"),
            "{}",
            outcome.stderr
        );
    }
}

#[test]
fn what_changes_numbers_needs_leave() {
    let planned = |options: &str| {
        let line = format!("plan model.py:build --budget 90% --format json{options}");
        let outcome = run(&line);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""), "{line}");
        outcome.stdout
    };
    for leave in ["approximate", "shrink", "equivalent,shrink"] {
        let made = planned(&format!(" --allow {leave}"));
        assert!(made.contains(r#""promise": "approximate""#), "{made}");
        assert!(made.contains(r#""kind": "shrink""#), "{made}");
    }
    assert!(!planned("").contains("shrink"));
    let forbidden = planned(" --allow approximate --forbid shrink");
    assert!(!forbidden.contains(r#""promise": "approximate""#));
    assert!(forbidden.contains("forbidden by the request"));
}

#[test]
fn a_saved_trace_has_no_weights_to_build() {
    for command in ["predict step.memfit", "plan step.memfit --budget 90%"] {
        let said = refused(&format!("{command} --real-weights"));
        assert!(said.contains("a saved trace has none"), "{said}");
    }
    let built = run("predict model.py:build --real-weights");
    assert_eq!(built.code, 0, "{}", built.stderr);
}

#[test]
fn what_a_script_keeps_as_it_is_cannot_be_allowed_to_change() {
    let outcome = run("run --budget 1GiB --allow half_parameters train.py");
    assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""));
    insta::assert_snapshot!(outcome.stderr, @r#"
    error: `memfit run` leaves a script's parameters in their type: `--allow half_parameters` has no meaning
    hint: `memfit.fit(workload, budget=..., allow="half_parameters")` holds them in bfloat16
    "#);
    let outcome = run("run --budget 1GiB --allow int8_dynamic train.py");
    assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""));
    insta::assert_snapshot!(outcome.stderr, @r#"
    error: `memfit run` leaves a script's parameters in their type: `--allow int8_dynamic` has no meaning
    hint: `memfit.fit(workload, budget=..., allow="int8_dynamic")` computes linear layers of an inference in 8 bits
    "#);
    let outcome = run("run --budget 1GiB --allow autocast_fp16 train.py");
    assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""));
    insta::assert_snapshot!(outcome.stderr, @r#"
    error: `memfit run` does not scale a script's loss: `--allow autocast_fp16` has no meaning
    hint: `--allow autocast` runs its passes in bfloat16, which needs no scale; or `memfit.fit(workload, budget=..., allow="autocast_fp16")`
    "#);
}

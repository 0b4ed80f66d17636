//! Streams, colour, help, completions and the manual.

use memfit::Streams;

use crate::program::{ClosedPipe, FakeHost, run, words};
use crate::sample;

fn run_on_terminal(arguments: &str, no_color: bool) -> (String, String) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let streams = Streams {
        stdout: &mut stdout,
        stderr: &mut stderr,
        stdout_is_terminal: true,
        stderr_is_terminal: true,
        no_color,
    };
    memfit::run(words(arguments), &mut FakeHost::default(), streams);
    (
        String::from_utf8(stdout).unwrap(),
        String::from_utf8(stderr).unwrap(),
    )
}

#[test]
fn colour_only_where_a_person_looks() {
    let escape = '\x1b';
    let predict = "predict model.py:build";
    assert!(!run(predict).stdout.contains(escape));
    assert!(
        run(&format!("{predict} --color always"))
            .stdout
            .contains(escape)
    );
    assert!(run_on_terminal(predict, false).0.contains(escape));
    assert!(!run_on_terminal(predict, true).0.contains(escape));
    assert!(
        !run_on_terminal(&format!("{predict} --color never"), false)
            .0
            .contains(escape)
    );
    let json = run_on_terminal(&format!("{predict} --format json"), false).0;
    assert!(
        serde_json::from_str::<serde_json::Value>(&json).is_ok(),
        "{json}"
    );
}

#[test]
fn colour_changes_no_character() {
    let plain = run("predict model.py:build").stdout;
    let painted = run("predict model.py:build --color always").stdout;
    let mut stripped = String::new();
    let mut inside = false;
    for character in painted.chars() {
        match character {
            '\x1b' => inside = true,
            'm' if inside => inside = false,
            _ if inside => {}
            _ => stripped.push(character),
        }
    }
    assert_eq!(stripped, plain);
}

#[test]
fn verbose_speaks_on_standard_error_only() {
    let plain = run("predict model.py:build");
    let verbose = run("predict model.py:build --verbose");
    assert_eq!(plain.stdout, verbose.stdout);
    assert!(
        verbose.stderr.contains("capturing model.py:build: "),
        "{}",
        verbose.stderr
    );
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let mut stderr = Vec::new();
    let streams = Streams {
        stdout: &mut ClosedPipe,
        stderr: &mut stderr,
        stdout_is_terminal: false,
        stderr_is_terminal: false,
        no_color: false,
    };
    let code = memfit::run(
        words("predict model.py:build"),
        &mut FakeHost::default(),
        streams,
    );
    assert_eq!((code, stderr.as_slice()), (0, &b""[..]));
}

#[test]
fn help_and_version_are_data() {
    for arguments in [
        "--help",
        "predict --help",
        "plan --help",
        "verify --help",
        "show --help",
    ] {
        let outcome = run(arguments);
        assert_eq!(
            (outcome.code, outcome.stderr.as_str()),
            (0, ""),
            "{arguments}"
        );
        assert!(outcome.stdout.contains("Examples:"), "{arguments}");
    }
    let version = run("--version");
    assert_eq!(
        (version.code, version.stdout.as_str()),
        (0, concat!("memfit ", env!("CARGO_PKG_VERSION"), "\n"))
    );
    let nothing = run("");
    assert_eq!((nothing.code, nothing.stdout.as_str()), (2, ""));
    assert!(
        nothing.stderr.contains("Usage: memfit"),
        "{}",
        nothing.stderr
    );
}

#[test]
fn completions_name_the_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let outcome = run(&format!("completions {shell}"));
        assert_eq!(outcome.code, 0);
        assert!(outcome.stdout.contains("budget"), "{shell}");
    }
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let whole = run("man");
    assert_eq!(whole.code, 0);
    assert!(
        whole.stdout.contains(".TH memfit 1"),
        "{}",
        &whole.stdout[..200]
    );
    for command in ["predict", "plan", "verify", "show", "completions", "man"] {
        let page = run(&format!("man {command}"));
        assert_eq!(page.code, 0);
        assert!(
            page.stdout.contains("EXAMPLES") || page.stdout.contains("Examples"),
            "{command}"
        );
    }
    let unknown = run("man sing");
    assert_eq!(unknown.code, 2);
    assert!(
        unknown.stderr.contains("memfit has no command `sing`"),
        "{}",
        unknown.stderr
    );
}

#[test]
fn a_script_keeps_standard_output_and_its_own_arguments() {
    let mut host = FakeHost::default();
    let outcome = host.run("run train.py --quiet -m --format json -- x");
    assert_eq!((outcome.code, outcome.stdout.as_str()), (7, ""));
    assert!(
        outcome.stderr.contains("train.py  exited with 7"),
        "{}",
        outcome.stderr
    );
    let script = host.script_seen.unwrap();
    let expected = words("--quiet -m --format json -- x");
    assert_eq!(script.command[1..], expected[1..]);
    assert_eq!((script.is_module, script.snapshot), (false, None));

    let mut host = FakeHost::default();
    let outcome = host.run("run --format json -m package.train --epochs 3");
    let summary: serde_json::Value = serde_json::from_str(&outcome.stderr).unwrap();
    assert_eq!(summary["exit_code"], 7);
    let script = host.script_seen.unwrap();
    assert!(script.is_module);
    assert_eq!(script.command, words("package.train --epochs 3")[1..]);
}

#[test]
fn a_budget_is_leased_unless_it_shall_not_be_and_waits_only_as_long_as_was_said() {
    let lease = |words: &str| {
        let mut host = FakeHost::default();
        let outcome = host.run(&format!("run {words} a.py"));
        let seen = host.script_seen;
        seen.map(|script| script.lease).ok_or(outcome.stderr)
    };
    assert_eq!(lease(""), Ok(None));
    assert_eq!(lease("--budget 1GiB --no-lease"), Ok(None));
    let plain = lease("--budget 1GiB").unwrap().unwrap();
    assert_eq!((plain.is_wanted, plain.wait_seconds), (false, Some(0.0)));
    // The script's name is not taken for a number of seconds.
    let forever = lease("--budget 1GiB --priority -5 --wait")
        .unwrap()
        .unwrap();
    assert_eq!((forever.is_wanted, forever.wait_seconds), (true, None));
    assert_eq!(forever.priority, -5);
    let bounded = lease("--budget 1GiB --wait=2.5 --device cuda:1")
        .unwrap()
        .unwrap();
    assert_eq!(bounded.wait_seconds, Some(2.5));
    assert_eq!(bounded.device.as_deref(), Some("cuda:1"));
    for wrong in [
        "--wait",
        "--budget 60% --wait",
        "--budget 1GiB --wait=-1",
        "--budget 1GiB --wait=x",
    ] {
        assert!(lease(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn the_summary_of_a_script_says_what_was_leased() {
    let mut host = FakeHost::default();
    let mut summary = sample::run("a.py");
    summary["lease"] = serde_json::json!({
        "device": "host", "leased_bytes": 6_u64 << 30, "besides_bytes": 512 << 20, "waited_seconds": 61.0,
        "kept_bytes": 5_u64 << 30, "changes": 1,
    });
    host.summary = Some(summary);
    let outcome = host.run("run a.py");
    let (_, lease) = outcome.stderr.split_once("Lease\n").unwrap();
    insta::assert_snapshot!(lease, @"
    6.00 GiB of `host`, after waiting 61.0 s: the budget and 512.0 MiB that torch takes apart from tensors
    1.00 GiB that no plan needed were given back
    ");
}

#[test]
fn the_summary_of_a_script_goes_to_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    let outcome = FakeHost::default().run(&format!("--quiet run --report {} a.py", path.display()));
    assert_eq!((outcome.code, outcome.stderr.as_str()), (7, ""));
    let text = std::fs::read_to_string(&path).unwrap();
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["devices"][0]["peak_bytes"], 4_194_304);
    assert!(document.get("quiet").is_none());

    let mut host = FakeHost::default();
    let absent = folder.path().join("absent").join("run.json");
    let outcome = host.run(&format!("run --report {} a.py", absent.display()));
    assert_eq!(outcome.code, 2);
    assert!(
        host.script_seen.is_none(),
        "found out before the script runs"
    );
}

//! What the commands say.

use serde_json::Value;

use crate::program::{FakeHost, run};

#[test]
fn predict_as_text() {
    let outcome = run("predict model.py:build");
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    insta::assert_snapshot!(outcome.stdout, @"
    model.py:build  cpu, batch 64

    Predicted peak  1.2 MiB  (1.2 MiB to 1.3 MiB)
    Reached in      backward, at aten.gelu_backward.default
                    layers.0.gelu  user/project/model.py:13

    Over the step
      ▂▃▃▄▅▆▇▇▇▇▇▇▇█▇▆▅▅▄▃▂▂
      peaks: forward 1.0 MiB, backward 1.2 MiB, optimizer 264.0 KiB

    At the peak, by category
      activation  768.0 KiB  62.7 %  ███████████████
      temporary   256.0 KiB  20.9 %  █████
      parameter   128.0 KiB  10.5 %  ███
      gradient     64.0 KiB   5.2 %  █
      input         8.0 KiB   0.7 %

    At the peak, by module
      layers.*.gelu         768.0 KiB  62.7 %  ███████████████
      layers.*.contract     192.0 KiB  15.7 %  ████
      (before the step)     136.0 KiB  11.1 %  ███
      layers.*.expand       128.0 KiB  10.5 %  ███
      (outside any module)        4 B   0.0 %

    At the peak, by source line
      user/project/model.py:13  768.0 KiB  62.7 %  ███████████████
      user/project/model.py:12  320.0 KiB  26.1 %  ██████
      (before the step)         136.0 KiB  11.1 %  ███
      (no source line)                4 B   0.0 %

    Largest allocations at the peak
      128.0 KiB  activation  float32 [64, 512]  aten.addmm.default layers.0.expand
      128.0 KiB  activation  float32 [64, 512]  aten.gelu.default layers.0.gelu
      128.0 KiB  activation  float32 [64, 512]  aten.gelu.default layers.0.gelu
      128.0 KiB  activation  float32 [64, 512]  aten.gelu.default layers.0.gelu
      128.0 KiB  activation  float32 [64, 512]  aten.gelu.default layers.0.gelu
      128.0 KiB  activation  float32 [64, 512]  aten.gelu.default layers.0.gelu
      128.0 KiB  temporary   float32 [64, 512]  aten.mm.default layers.0.contract
      128.0 KiB  temporary   float32 [64, 512]  aten.gelu_backward.default layers.0.gelu

    Fits unplanned on
      yes  RTX 4060, RTX 3060, T4, V100, A10, L4, RTX 4090, RTX 5090, A100 40 GB, L40S, A100 80 GB, H100, H200

    Not certain
      scratch inside ops was not probed: up to 5 % more
    ");
}

#[test]
fn predict_with_a_budget_answers_by_exit_code() {
    let fits = run("predict model.py:build --budget 1GiB");
    assert_eq!(fits.code, 0);
    assert!(fits.stdout.contains("FITS: "), "{}", fits.stdout);
    let fails = run("predict model.py:build --budget 300KiB");
    assert_eq!(fails.code, 1);
    assert!(fails.stdout.contains("DOES NOT FIT: "), "{}", fails.stdout);
}

#[test]
fn show_on_a_trace_as_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.memfit");
    let path = path.to_str().unwrap();
    assert_eq!(
        run(&format!("predict model.py:build --save {path}")).code,
        0
    );
    let outcome = run(&format!("show {path}"));
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    insta::assert_snapshot!(outcome.stdout, @"
    model.py:build  trace, schema version 1

    Step                 training step, SGD, batch 64, on cpu
    Captured             with fake tensors: no memory was taken, torch 2.15.0
    Other batch sizes    cannot be predicted: the sizes of some allocations are known for this batch only
    Splitting the batch  unknown: only one batch size was captured

    Ops
      phase      ops  random  GFLOPs  bytes moved
      forward      9       0     0.0      1.1 MiB
      backward    11       0     0.0      1.4 MiB
      optimizer    2       0     0.0    256.0 KiB

    Allocations of the whole step
      category    count      bytes
      temporary      10  904.0 KiB
      activation      8  904.0 KiB
      parameter       2  128.0 KiB
      gradient        2  128.0 KiB
      input           1    8.0 KiB

    Also recorded
      23  values
       8  saved tensors
       3  module calls
       0  trainable parameters
    ");
}

#[test]
fn a_plan_within_the_budget_is_done() {
    let outcome = run("plan model.py:build --budget 90%");
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    assert!(outcome.stdout.contains("FITS: "), "{}", outcome.stdout);
    assert!(
        outcome.stdout.contains("roofline (a test machine)"),
        "{}",
        outcome.stdout
    );
}

#[test]
fn an_impossible_budget_is_answered_no() {
    let outcome = run("plan model.py:build --budget 200KiB");
    assert_eq!(outcome.code, 1);
    assert!(
        outcome
            .stdout
            .contains("DOES NOT FIT: the smallest peak found is "),
        "{}",
        outcome.stdout
    );
}

#[test]
fn costs_come_from_a_profile_when_asked_for() {
    let outcome = run("plan model.py:build --budget 90% --profile");
    assert_eq!(outcome.code, 0);
    assert!(
        outcome
            .stdout
            .contains("profile (op times of one real step)"),
        "{}",
        outcome.stdout
    );
}

#[test]
fn verify_compares_and_holds() {
    let mut host = FakeHost::default();
    let outcome = host.run("verify model.py:build --budget 90%");
    assert_eq!((outcome.code, host.verifications), (0, 1));
    assert!(
        outcome.stdout.contains("Peak, measured"),
        "{}",
        outcome.stdout
    );
    assert!(
        outcome.stdout.contains("gradients  bitwise equal"),
        "{}",
        outcome.stdout
    );
    assert!(
        outcome.stdout.contains("1.10 x the step time"),
        "{}",
        outcome.stdout
    );
}

#[test]
fn verify_says_when_the_measured_peak_is_over_the_budget() {
    let mut host = FakeHost {
        measured_ratio: 3.0,
        ..FakeHost::default()
    };
    let outcome = host.run("verify model.py:build --budget 90%");
    assert_eq!(outcome.code, 1);
    assert!(outcome.stdout.contains("OVERSHOOT: "), "{}", outcome.stdout);
}

#[test]
fn verify_says_when_an_exact_plan_is_not_bitwise() {
    let mut host = FakeHost {
        gradients: "equivalent",
        ..FakeHost::default()
    };
    let outcome = host.run("verify model.py:build --budget 90%");
    assert_eq!(outcome.code, 1);
    assert!(outcome.stdout.contains("DIFFERENT: "), "{}", outcome.stdout);
}

#[test]
fn verify_says_when_module_buffers_moved_otherwise() {
    let mut host = FakeHost {
        buffers: "different",
        ..FakeHost::default()
    };
    let outcome = host.run("verify model.py:build --budget 90%");
    assert_eq!(outcome.code, 1);
    assert_eq!(
        outcome.stderr,
        "note: the module buffers differ after the planned step\n"
    );
}

#[test]
fn verify_runs_nothing_when_no_plan_fits() {
    let mut host = FakeHost::default();
    let outcome = host.run("verify model.py:build --budget 200KiB --format json");
    assert_eq!((outcome.code, host.verifications), (1, 0));
    let json = outcome.json();
    assert_eq!(json["verdict"], "does_not_fit");
    assert_eq!(json["planned"]["measured_peak_bytes"], Value::Null);
    assert!(json["minimum_peak_bytes"].as_u64().unwrap() > 200 << 10);
}

#[test]
fn a_compiled_step_is_held_against_eager_and_torch_alone() {
    let mut host = FakeHost {
        gradients: "equivalent",
        ..FakeHost::default()
    };
    let outcome = host.run("verify model.py:build --budget 90% --compile");
    assert_eq!(
        (outcome.code, host.verifications),
        (0, 0),
        "{}",
        outcome.stderr
    );
    let last = outcome.stdout.lines().last().unwrap();
    assert!(last.starts_with("FITS: "), "{last}");
    assert!(
        last.contains("1.10 x torch.compile's time, 0.88 x eager's time"),
        "{last}"
    );
    let json = host
        .run("verify model.py:build --budget 90% --compile --format json")
        .json();
    assert_eq!(json["plan"], Value::Null);
    assert_eq!(
        json["planned"]["predicted_peak_bytes"],
        json["budget_bytes"]
    );
    insta::assert_snapshot!(keys(&json["compiled"]).join(" "), @"actions corrections graphs reference tolerance torch_compile");
    insta::assert_snapshot!(keys(&json["compiled"]["torch_compile"]).join(" "), @"max_relative_error measured_peak_bytes step_cpu_seconds");
    host.gradients = "different";
    assert_eq!(
        host.run("verify model.py:build --budget 90% --compile")
            .code,
        1
    );
}

#[test]
fn a_step_that_cannot_be_compiled_is_verified_eager_and_the_reason_told() {
    let mut host = FakeHost {
        not_compiled: "Inductor finds no C++ compiler: none",
        ..FakeHost::default()
    };
    let outcome = host.run("verify model.py:build --budget 90% --compile --format json");
    assert_eq!((outcome.code, host.verifications), (0, 1));
    assert_eq!(
        outcome.stderr,
        "note: the step runs eager: Inductor finds no C++ compiler: none\n"
    );
    let json = outcome.json();
    assert_eq!(json["not_compiled"], host.not_compiled);
    assert!(json["plan"]["actions"].is_array());
}

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn the_json_of_verify_keeps_its_contract() {
    let json = run("verify model.py:build --budget 90% --format json").json();
    insta::assert_snapshot!(keys(&json).join(" "), @"budget_bytes capture_seconds gradients holds loss minimum_peak_bytes plan plan_seconds planned schema_version target unplanned verdict");
    for way in ["unplanned", "planned"] {
        assert_eq!(
            keys(&json[way]),
            [
                "measured_peak_bytes",
                "predicted_peak_bytes",
                "step_cpu_seconds"
            ]
        );
    }
    for what in ["gradients", "loss"] {
        assert_eq!(keys(&json[what]), ["agreement", "max_relative_error"]);
        assert_eq!(json[what]["agreement"], "bitwise");
    }
    assert_eq!(
        keys(&json["plan"]),
        ["actions", "lower_bound_ratio", "predicted_step_ratio"]
    );
    for action in json["plan"]["actions"].as_array().unwrap() {
        assert_eq!(keys(action), ["bytes", "count", "kind", "promise"]);
    }
    assert_eq!(json["schema_version"], 2);
    assert_eq!(json["verdict"], "fits");
    assert!(json["budget_bytes"].is_u64());
    assert!(json["capture_seconds"].is_f64() && json["plan_seconds"].is_f64());
}

#[test]
fn the_json_of_predict_and_plan_use_the_same_words() {
    let predict = run("predict model.py:build --budget 90% --format json").json();
    insta::assert_snapshot!(keys(&predict).join(" "), @"batch breakdown budget_bytes capture_seconds device_kind devices gpu interval_bytes largest_batch narrower_peak_bytes notes peak phases predicted_peak_bytes reserved schema_version target timeline top uncertainty unneeded_saves unplanned verdict wide_tensors");
    let plan = run("plan model.py:build --budget 90% --format json").json();
    insta::assert_snapshot!(keys(&plan).join(" "), @"arena batch bottleneck breakdown budget_bytes capture_seconds cost_source evaluations margin_bytes minimum_budget_bytes minimum_peak_bytes next_class notes plan plan_seconds planned refusals reserved schema_version stop_reason target unplanned verdict");
    for json in [&predict, &plan] {
        assert_eq!(keys(&json["breakdown"]), ["category", "module", "source"]);
        assert_eq!(json["target"], "model.py:build");
    }
    assert_eq!(
        predict["unplanned"]["predicted_peak_bytes"],
        plan["unplanned"]["predicted_peak_bytes"]
    );
}

#[test]
fn the_same_run_twice_says_the_same() {
    let first = run("plan model.py:build --budget 90%").stdout;
    assert_eq!(first, run("plan model.py:build --budget 90%").stdout);
}

#[test]
fn prune_says_what_went_and_what_stays() {
    let mut host = FakeHost::default();
    let outcome = host.run("prune model.py:build --parameters 50%");
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    for line in [
        "Predicted peak   300.0 MiB  200.0 MiB  66.7 %",
        "Parameters      12,345,678  6,172,839  50.0 %",
        "  h.*.fc.weight                   3,072  1,536       2",
        "  head.weight and 1 more  the model returns it",
    ] {
        assert!(outcome.stdout.contains(line), "{line}\n{}", outcome.stdout);
    }
    let json = host.run("prune model.py:build --budget 60% --scores taylor --format json");
    assert!(
        json.stdout.contains("\"scores\":\"taylor\"")
            || json.stdout.contains("\"scores\": \"taylor\"")
    );
    for wrong in [
        "",
        "--budget 60% --parameters 50%",
        "--budget few",
        "--parameters 50% --save no/folder/file.pt",
    ] {
        let outcome = host.run(&format!("prune model.py:build {wrong}"));
        assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""), "{wrong}");
    }
}

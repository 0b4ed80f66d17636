//! How tracks and runs read.

use serde_json::json;

use super::*;

#[test]
fn a_track_is_a_table() {
    let document: TrackDocument = serde_json::from_value(json!({
        "schema_version": 1, "name": "validation", "seconds": 1.25, "exception": null,
        "notes": [],
        "devices": [
            { "device": "cpu", "before_bytes": 3_000_000, "after_bytes": 3_000_000,
              "peak_bytes": 9_000_000, "before_by_category": { "parameter": 3_000_000 },
              "after_by_category": { "parameter": 3_000_000 },
              "peak_by_category": { "parameter": 3_000_000, "other": 6_000_000 } },
            { "device": "cuda:0", "before_bytes": 512, "after_bytes": 1024,
              "peak_bytes": 4096, "before_by_category": { "other": 512 },
              "after_by_category": { "other": 1024 }, "peak_by_category": null,
              "reserved_before_bytes": 2_097_152, "reserved_after_bytes": 2_097_152,
              "reserved_peak_bytes": 4_194_304 },
        ],
    }))
    .unwrap();
    insta::assert_snapshot!(track(&document, Palette::PLAIN), @"
    validation  1.2 s
      cpu         before     peak    after
      parameter  2.9 MiB  2.9 MiB  2.9 MiB
      other          0 B  5.7 MiB      0 B
      allocated  2.9 MiB  8.6 MiB  2.9 MiB
      cuda:0      before     peak    after
      other        512 B        -  1.0 KiB
      allocated    512 B  4.0 KiB  1.0 KiB
      reserved   2.0 MiB  4.0 MiB  2.0 MiB
    ");
}

#[test]
fn a_run_says_what_was_refused_and_what_grows() {
    let document: RunDocument = serde_json::from_value(json!({
        "schema_version": 1, "script": "train.py", "ended": "out_of_memory", "exit_code": 1,
        "elapsed_seconds": 12.0, "torch_imported": true,
        "devices": [
            { "device": "cpu", "peak_bytes": 8_000_000, "after_bytes": 7_000_000,
              "peak_by_category": { "parameter": 2_000_000, "other": 6_000_000 },
              "reserved_peak_bytes": null,
              "peak": { "seconds": 11.0, "phase": "backward", "steps_done": 7 } },
        ],
        "steps": { "count": 7, "growing": 6, "growth_bytes_per_step": 4096,
                   "growth_bytes": 24_576, "growth_rhythm": "step",
                   "growth_cause": "`total` (train.py:9) sums tensors",
                   "growth_advice": "add `loss.item()`" },
        "oom": { "device": "cpu", "requested_bytes": 1_000_000_000, "live_bytes": 7_000_000,
                 "live_by_category": { "other": 7_000_000 },
                 "at": { "seconds": 11.9, "phase": "forward", "steps_done": 7 } },
        "snapshot": null, "notes": ["one note"],
    }))
    .unwrap();
    insta::assert_snapshot!(run(&document, Palette::PLAIN), @r#"

    train.py  OUT OF MEMORY after 12.0 s

    Refused
      a request of 953.7 MiB on cpu, after 11.9 s, after the last optimizer step, with 6.7 MiB live
      other  6.7 MiB  100.0 %

    Peaks
      device  allocated  reserved  at the end  peak reached
      cpu       7.6 MiB         -     6.7 MiB  after 11.0 s, in backward

    At the peak on cpu
      parameter  1.9 MiB  25.0 %
      other      5.7 MiB  75.0 %

    Optimizer steps
      7; 6 of them have kept 24.0 KiB, 4.0 KiB each
      `total` (train.py:9) sums tensors
      add `loss.item()`

    Notes
      one note

    Next
      `memfit predict` says what a step takes before it runs, `memfit plan` how to make it fit
      `with memfit.track("name")` round a part of the script says what that part takes
    "#);
}

#[test]
fn steps_are_not_said_to_keep_nothing_where_backwards_keep_more_and_more() {
    let document: RunDocument = serde_json::from_value(json!({
        "schema_version": 1, "script": "train.py", "ended": "finished", "exit_code": 0,
        "elapsed_seconds": 12.0, "torch_imported": true, "devices": [],
        "steps": { "count": 30, "growing": 27, "growth_bytes_per_step": 19_456,
                   "growth_bytes": 524_288, "growth_rhythm": "backward",
                   "growth_cause": "`logger.rows` (train.py:9) holds the tensors",
                   "growth_advice": "keep fewer of them" },
        "oom": null, "snapshot": null, "notes": [],
    }))
    .unwrap();
    assert_eq!(steps(&document), ["30"]);
    assert_eq!(
        grown(&document).first().map(String::as_str),
        Some("27 backwards have kept 512.0 KiB, 19.0 KiB each")
    );
}

#[test]
fn why_no_plan_fits_is_not_a_peak_within_the_budget() {
    let said = |predicted: u64, least: Option<u64>| {
        let plan = json!({
            "budget_bytes": 8 << 20, "fits": false, "unplanned_peak_bytes": 16 << 20,
            "predicted_peak_bytes": predicted, "minimum_peak_bytes": least,
            "minimum_budget_bytes": 9 << 20, "predicted_step_ratio": 1.5, "actions": []
        });
        no_plan_fits(&serde_json::from_value(plan).unwrap())
    };
    assert_eq!(
        said(9 << 20, Some(9 << 20)),
        "no plan fits 8.0 MiB: the smallest peak that keeps the script's own loop is 9.0 MiB"
    );
    assert_eq!(
        said(7 << 20, None),
        "no plan fits 8.0 MiB with room to spare: the smallest peak is 7.0 MiB"
    );
    assert_eq!(said(9 << 20, None), "no plan fits 8.0 MiB");
}

#[test]
fn what_plans_of_other_steps_change_is_said_too() {
    let said = |fits: bool, others: &[&str]| {
        let plan = json!({
            "budget_bytes": 8 << 20, "fits": fits, "unplanned_peak_bytes": 16 << 20,
            "predicted_peak_bytes": 7 << 20, "minimum_peak_bytes": null,
            "minimum_budget_bytes": null, "predicted_step_ratio": 1.5,
            "actions": [{ "kind": "remat", "count": 1, "bytes": 3_000_000 }], "other_kinds": others
        });
        let of = FittedLoop {
            plan: Some(serde_json::from_value(plan).unwrap()),
            ..never_stepped("Net")
        };
        loop_lines(&of, None)
    };
    let remat =
        "activation checkpointing: 1 tensor recomputed in backward, step time x 1.50 predicted";
    assert_eq!(
        said(true, &[]),
        ["planned for 8.0 MiB; results stay bitwise equal", remat]
    );
    assert_eq!(
        said(true, &["shrink"]),
        [
            "planned for 8.0 MiB; gradients are approximate, as was allowed",
            remat,
            "plans of other steps have fewer bits"
        ]
    );
    assert_eq!(
        said(false, &["micro_batch"])[0],
        "no plan fits 8.0 MiB with room to spare: the smallest peak is 7.0 MiB; rounding may differ"
    );
}

/// A loop of which only calls were seen.
fn never_stepped(model: &str) -> FittedLoop {
    let none = json!({ "steps": 0, "peak_bytes": 0 });
    serde_json::from_value(json!({
        "models": [model], "parameters": 8, "optimizers": [], "device": "cpu", "refusal": null,
        "observed": none, "planned": none, "unplanned": none, "plan": null, "replans": 0,
        "divergence": null, "notes": []
    }))
    .unwrap()
}

#[test]
fn a_fitted_run_says_what_was_found_and_done() {
    let mut document: RunDocument = serde_json::from_value(json!({
        "schema_version": 1, "script": "train.py", "ended": "finished", "exit_code": 0,
        "elapsed_seconds": 12.0, "torch_imported": true, "devices": [],
        "steps": { "count": 10, "growing": 0, "growth_bytes_per_step": 0,
                   "growth_cause": null, "growth_advice": null },
        "oom": null, "snapshot": null, "notes": [],
        "fitting": {
            "budget": "6MB", "refusal": null,
            "verdict": { "budget_bytes": 6_000_000, "peak_bytes": 6_500_000, "kept": false,
                         "why": "a step took more than the plan for it foresaw",
                         "remedy": "a budget of 6.2 MiB" },
            "loops": [
                { "models": ["Net"], "parameters": 1200, "optimizers": ["AdamW"],
                  "device": "cpu", "refusal": null,
                  "observed": { "steps": 1, "peak_bytes": 3_000_000 },
                  "planned": { "steps": 9, "peak_bytes": 6_500_000 },
                  "unplanned": { "steps": 0, "peak_bytes": 0 },
                  "plan": { "budget_bytes": 6_000_000, "fits": true,
                            "unplanned_peak_bytes": 9_000_000,
                            "predicted_peak_bytes": 5_900_000,
                            "minimum_peak_bytes": 4_000_000,
                            "minimum_budget_bytes": 4_200_000, "predicted_step_ratio": 1.07,
                            "actions": [{ "kind": "remat", "count": 23, "bytes": 3_000_000 }] },
                  "replans": 1, "divergence": "it ran `a` as forward op 3 instead of `b`",
                  "notes": [] },
                { "models": ["Generator", "Discriminator"], "parameters": 12,
                  "optimizers": [], "device": "cpu",
                  "refusal": "it trains in several processes",
                  "observed": { "steps": 0, "peak_bytes": 0 },
                  "planned": { "steps": 0, "peak_bytes": 0 },
                  "unplanned": { "steps": 4, "peak_bytes": 1024 },
                  "plan": null, "replans": 0, "divergence": null, "notes": ["a note"] },
            ],
        },
    }))
    .unwrap();
    let idle = ["ParametrizationList", "Teacher", "ParametrizationList"].map(never_stepped);
    document.fitting.as_mut().unwrap().loops.extend(idle);
    insta::assert_snapshot!(run(&document, Palette::PLAIN), @"

    train.py  finished after 12.0 s

    Optimizer steps
      10; what they keep does not grow

    Budget
      OVER BUDGET by 488.3 KiB (a step took more than the plan for it foresaw; what would keep it: a budget of 6.2 MiB)
      Net on cpu, 1200 parameters, AdamW
        steps      count  measured peak  predicted
        observed       1        2.9 MiB          -
        planned        9        6.2 MiB    5.6 MiB
        unplanned      0              -    8.6 MiB
        planned for 5.7 MiB; results stay bitwise equal
        activation checkpointing: 23 tensors recomputed in backward, step time x 1.07 predicted
        planned again once
        a step left its plan, results are right: it ran `a` as forward op 3 instead of `b`
      Generator + Discriminator on cpu, 12 parameters, no optimizer
        steps      count  measured peak  predicted
        unplanned      4        1.0 KiB          -
        steps ran unplanned: it trains in several processes
        a note
      3 models of which no step came to its end: ParametrizationList, Teacher
    ");
}

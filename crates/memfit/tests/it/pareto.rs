//! `memfit plan --pareto`: the front as text, as JSON and as files.

use std::fs;

use crate::program::run;

#[test]
fn the_front_as_text() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("front.html");
    let outcome = run(&format!(
        "plan model.py:build --pareto {} --quiet",
        page.display()
    ));
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    // How much was looked at changes with the search; what was found should not.
    let (searched, lines): (Vec<&str>, Vec<&str>) = outcome
        .stdout
        .lines()
        .partition(|line| line.starts_with("Search  "));
    assert_eq!(searched.len(), 1);
    insta::assert_snapshot!(lines.join("\n"), @"
    model.py:build  batch 64

         peak           of the unplanned peak     step time  at least  class  actions
      1.2 MiB  100.0 %  ████████████████████████    1.000 x   1.000 x  exact  none: the unplanned step
      1.1 MiB   89.5 %  █████████████████████       1.589 x   1.282 x  exact  remat 1
    968.0 KiB   79.1 %  ███████████████████         2.059 x   1.845 x  exact  remat 2
    840.0 KiB   68.6 %  ████████████████            2.571 x   2.408 x  exact  remat 3

    Costs   roofline (a test machine)

    Not possible
      optimizer step in backward: the step has no optimizer
      micro-batches: the step was captured at one batch size only

    From 1.2 MiB down to 840.0 KiB with exact plans, at up to 2.571 x the step time
    ");
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.starts_with("<!DOCTYPE html>") && html.len() < 200_000);
}

#[test]
fn the_json_keeps_its_contract_and_each_point_is_a_plan() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("front.svg");
    let command = format!(
        "plan model.py:build --pareto {} --format json --budget 60%",
        image.display()
    );
    let front = run(&command).json();
    let keys: Vec<&str> = front
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    insta::assert_snapshot!(keys.join(" "), @"batch bound budget_bytes capture_seconds cost_source device_kind evaluations margin_bytes minimum_peak_bytes notes plan_seconds plans points refusals schema_version stop_reason target unplanned");
    let points = front["points"].as_array().unwrap();
    assert!(points.len() > 2);
    for point in points {
        let plan = format!(
            "plan model.py:build --budget {} --allow {} --format json",
            point["budget_bytes"],
            point["allow"].as_str().unwrap()
        );
        let plan = run(&plan).json();
        assert_eq!(
            plan["plan"]["predicted_step_ratio"],
            point["predicted_step_ratio"]
        );
        assert_eq!(plan["plan"]["actions"], point["actions"]);
        assert_eq!(
            plan["planned"]["predicted_peak_bytes"],
            point["predicted_peak_bytes"]
        );
    }
    let first = fs::read(&image).unwrap();
    run(&command);
    assert_eq!(first, fs::read(&image).unwrap());
}

#[test]
fn what_cannot_be_drawn_is_refused_before_any_work() {
    for (arguments, said) in [
        ("--pareto front.png", "images are written as SVG"),
        ("--pareto front", "cannot tell what to write from `front`"),
        (
            "--pareto absent/front.html",
            "cannot write `absent/front.html`",
        ),
        (
            "--pareto a.html --budget lots",
            "cannot read `lots` as a budget",
        ),
        ("--pareto a.html --save b.memfit", "cannot be used with"),
        ("", "--budget"),
    ] {
        let outcome = run(&format!("plan model.py:build {arguments}"));
        assert_eq!(outcome.code, 2, "{arguments}");
        assert!(outcome.stderr.contains(said), "{}", outcome.stderr);
    }
}

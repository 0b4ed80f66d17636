//! `memfit place` from the outside.

use std::fs;

use crate::program::{Outcome, run};

/// Runs `memfit place` on `csv` with `options`.
fn place(csv: &str, options: &str) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.csv");
    fs::write(&path, csv).unwrap();
    run(&format!("place {} {options}", path.to_str().unwrap()))
}

const STEP: &str = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n";

#[test]
fn the_json_keeps_its_contract() {
    let outcome = place(STEP, "--capacity 12 --format json");
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    let json = outcome.json();
    let keys: Vec<&str> = json
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    assert_eq!(
        keys,
        [
            "height",
            "lower_bound",
            "offsets",
            "schema_version",
            "seconds",
            "status",
            "stop_reason"
        ]
    );
    assert_eq!(json["status"], "optimal");
    assert_eq!(json["stop_reason"], "proved_optimal");
    assert_eq!(
        (&json["height"], &json["lower_bound"]),
        (&12.into(), &12.into())
    );
    assert!(json["seconds"].is_f64());
    // In the order of the file, which `serde_json` does not keep.
    let order: Vec<usize> = ["b1", "b2", "b3", "b4", "b5"]
        .map(|id| outcome.stdout.find(&format!("\"{id}\"")).unwrap())
        .into();
    assert!(order.is_sorted());
}

#[test]
fn a_capacity_that_is_not_met_is_answered_no() {
    let outcome = place(STEP, "--capacity 11 --format json");
    assert_eq!(outcome.code, 1);
    let json = outcome.json();
    assert_eq!(json["status"], "infeasible");
    assert_eq!(json["stop_reason"], "proved_infeasible");
    assert_eq!(json["lower_bound"], 12);
    assert_eq!(place(STEP, "--capacity 13").code, 0);
}

#[test]
fn offsets_are_written_and_aligned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("placed.csv");
    let output = path.to_str().unwrap();
    let outcome = place(
        STEP,
        &format!("--minimize --alignment 512 --output {output}"),
    );
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    let placed = fs::read_to_string(&path).unwrap();
    assert!(placed.starts_with("id,lower,upper,size,alignment,offset\nb1,0,3,4,512,"));
    let offsets = placed.lines().skip(1);
    let offsets = offsets.map(|line| line.rsplit(',').next().unwrap().parse::<u64>().unwrap());
    assert!(offsets.clone().all(|offset| offset % 512 == 0));
    assert_eq!(offsets.max(), Some(1024));
    fs::remove_file(&path).unwrap();
    let outcome = place(STEP, &format!("--capacity 3 --output {output}"));
    assert_eq!(outcome.code, 1);
    assert_eq!(
        outcome.stderr,
        format!("note: `{output}` was not written\n")
    );
    assert!(!path.exists());
}

#[test]
fn bad_input_is_refused_with_its_position() {
    let bad = |csv: &str, options: &str| {
        let outcome = place(csv, options);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""));
        outcome.stderr
    };
    let said = bad("id,lower,upper,size\na,5,2,1\n", "--minimize");
    assert!(
        said.ends_with("step.csv`: line 2, column 3: `lower` 5 is not below `upper` 2\n"),
        "{said}"
    );
    for options in [
        "",
        "--minimize --capacity 12",
        "--capacity 60%",
        "--capacity many",
        "--minimize --time-limit -1",
        "--minimize --threads 0",
        "--minimize --alignment 0",
    ] {
        assert!(bad(STEP, options).starts_with("error: "), "{options}");
    }
    assert_eq!(run("place nowhere.csv --minimize").code, 2);
}

#[test]
fn no_time_still_gives_an_answer() {
    let outcome = place(STEP, "--minimize --time-limit 0 --threads 2 --format json");
    assert_eq!(outcome.code, 0);
    assert!(outcome.json()["height"].as_u64().unwrap() >= 12);
}

//! `memfit explain --html`: one page, whole or not at all, the same every time.

use std::fs;

use crate::pickle::Program;
use crate::program::run;

fn recorded() -> Program {
    let mut program = Program::default();
    let kept = program.take(40, &["/home/user/<b>train</b>.py:30 main"]);
    let freed = program.take(10, &["/home/user/train.py:31 main"]);
    program.give(freed);
    program.give(kept);
    program
}

#[test]
fn the_page_is_the_same_every_time_and_its_texts_are_escaped() {
    let folder = tempfile::tempdir().unwrap();
    recorded().save(folder.path(), "snapshot.pickle");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let mut pages = Vec::new();
    for name in ["one.html", "two.html"] {
        let outcome = run(&format!(
            "explain {} --html {}",
            path("snapshot.pickle"),
            path(name)
        ));
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert!(outcome.stdout.contains("Peak"), "{}", outcome.stdout);
        pages.push(fs::read_to_string(path(name)).unwrap());
    }
    assert_eq!(pages[0], pages[1]);
    assert!(pages[0].len() < 5_000_000);
    assert!(!pages[0].contains("<b>"));
    assert!(pages[0].contains("Peak"));
}

#[test]
fn a_snapshot_that_cannot_be_read_leaves_no_page() {
    let folder = tempfile::tempdir().unwrap();
    let (snapshot, page) = (folder.path().join("a.pickle"), folder.path().join("a.html"));
    fs::write(&snapshot, b"not a pickle").unwrap();
    fs::write(&page, b"old").unwrap();
    let outcome = run(&format!(
        "explain {} --html {}",
        snapshot.display(),
        page.display()
    ));
    assert_eq!(outcome.code, 2);
    assert_eq!(fs::read(&page).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

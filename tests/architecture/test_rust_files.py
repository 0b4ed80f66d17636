"""No circle of uses between the files of a crate; `rust_modules.py` says what a use is."""

from __future__ import annotations

from pathlib import Path

import pytest
from directions import circle
from rust_modules import arrows

CRATES = Path(__file__).parents[2] / "crates"

MADE_UP = {
    "a parent that uses a child": (
        {"lib": "mod a;\nfn f() { a::g(); }", "a": "pub fn g() {}"},
        [],
    ),
    "a child that uses its parent too": (
        {"lib": "mod a;\nconst C: u8 = 1;\nfn f() { a::g(); }", "a": "pub fn g() { super::C; }"},
        ["a.rs", "lib.rs"],
    ),
    "a use through a re-export, a group and another name": (
        {
            "lib": "mod a;\nmod b;",
            "a/mod": "mod deep;\npub(crate) use deep::{Deep, inner};",
            "a/deep": "use crate::b::{self, B as Other};\npub struct Deep;\npub mod inner {}",
            "b": "use crate::{a::Deep};\npub struct B;",
        },
        ["a/deep.rs", "b.rs"],
    ),
    "a function that bears the name of its file": (
        {
            "lib": "mod a;\npub use a::a;\nconst C: u8 = 1;\nfn f() { a(); }",
            "a": "pub fn a() { super::C; }",
        },
        ["a.rs", "lib.rs"],
    ),
    "re-exports alone": (
        {"lib": "mod a;\npub use a::A;\nmod b;", "a": "pub struct A;", "b": "use super::A;"},
        [],
    ),
    "all names at once, by the type that an `impl` is of": (
        {
            "lib": "mod a;\nmod b;",
            "a": "use crate::b::*;\nimpl B {}\npub struct A;",
            "b": "use crate::a::A;\npub struct B;",
        },
        ["a.rs", "b.rs"],
    ),
    "what a macro makes": (
        {
            "lib": "mod a;\nmod b;",
            "a": "macro_rules! m { ($n:ident) => { pub struct $n; } }\nm!(Made);\nuse crate::b::B;",
            "b": "use crate::a::Made;\npub struct B;",
        },
        ["a.rs", "b.rs"],
    ),
    "tests, comments and texts": (
        {
            "lib": "mod a;\nmod b;\n#[cfg(test)]\nmod naive;",
            "a": "use crate::b::B;\npub struct A;",
            "b": '// crate::a::A\npub struct B;\nconst C: &str = r#"crate::a::A"#;\n'
            "#[cfg(test)]\nmod tests { use crate::a::A; }",
            "naive": "use crate::a::A;",
        },
        [],
    ),
}


@pytest.mark.skipif(not CRATES.exists(), reason="the crates are not beside the tests")
@pytest.mark.parametrize("crate", sorted(folder.parent.name for folder in CRATES.glob("*/src")))
def test_no_circle_of_files(crate):
    graph = arrows(CRATES / crate / "src")
    assert sum(map(len, graph.values())) > len(graph) > 10
    assert circle(graph) == []


@pytest.mark.parametrize(("sources", "expected"), MADE_UP.values(), ids=MADE_UP)
def test_a_circle_is_found(tmp_path, sources, expected):
    for name, source in sources.items():
        file = tmp_path / f"{name}.rs"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    assert circle(arrows(tmp_path)) == expected

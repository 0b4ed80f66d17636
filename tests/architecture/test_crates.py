"""The engine's folders use each other one way, and crates only those below them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from directions import circle

ROOT = Path(__file__).parents[2]
CRATES = ROOT / "crates"

BELOW = {
    "memfit-engine": set(),
    "memfit-guard": set(),
    "memfit-memory": {"memfit-engine"},
    "memfit": {"memfit-engine", "memfit-memory"},
    "memfit-python": {"memfit-engine", "memfit-memory", "memfit-guard", "memfit"},
}
"""Crates of this workspace that each may depend on."""

pytestmark = pytest.mark.skipif(not CRATES.exists(), reason="the crates are not beside the tests")


def is_of_tests(file: Path) -> bool:
    """Whether a file is a module of tests, which the module above it compiles for tests alone."""
    above = (file.parent.with_suffix(".rs"), file.parent / "mod.rs")
    declared = any("#[cfg(test)]\nmod tests;" in one.read_text() for one in above if one.exists())
    return file.name == "tests.rs" and declared


def uses(folder: Path) -> dict[str, set[str]]:
    """Which modules right under a crate's root each of them names, tests aside."""
    graph: dict[str, set[str]] = {}
    for file in sorted(folder.rglob("*.rs")):
        name = file.relative_to(folder).parts[0].removesuffix(".rs")
        if name in {"lib", "main"} or is_of_tests(file):
            continue
        source = re.sub(r"//[^\n]*", "", file.read_text()).partition("#[cfg(test)]\nmod tests {")[0]
        named = set(re.findall(r"\bcrate::(\w+)", source))
        for group in re.findall(r"\bcrate::\{([^}]*)\}", source):
            named |= {part.strip().partition("::")[0] for part in group.split(",")} - {""}
        graph.setdefault(name, set()).update(named - {name})
    return graph


@pytest.mark.parametrize("crate", ["memfit-engine", "memfit-memory", "memfit"])
def test_no_circle_of_folders(crate):
    graph = uses(CRATES / crate / "src")
    assert sum(map(len, graph.values())) > 2
    assert circle(graph) == []


def test_crates_depend_on_those_below_them():
    found = {}
    for manifest in CRATES.glob("*/Cargo.toml"):
        read = tomllib.loads(manifest.read_text())
        ours = {name for name in read.get("dependencies", {}) if name.startswith("memfit")}
        found[read["package"]["name"]] = ours
    assert found.keys() == BELOW.keys()
    for crate, names in found.items():
        assert names <= BELOW[crate], crate

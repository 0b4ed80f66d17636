"""``--largest NAME``: what it finds fits, and one more does not, as the program itself says."""

from __future__ import annotations

import json
import sys

import pytest

from memfit import _native
from memfit.program.host import Host
from program import FOLDER

BUDGET = "600KiB"


@pytest.fixture
def answer(capfd, monkeypatch):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def ask(command: str, *words: str, target: str = "mlp") -> tuple[int, dict]:
        capfd.readouterr()
        of_mlp = ["--set", "width=32"] if target == "mlp" else []
        line = [command, f"workloads.py:{target}", "--budget", BUDGET, *of_mlp, *words]
        code = _native.run(["memfit", *line, "--format", "json"], Host())
        said = capfd.readouterr()
        return code, json.loads(said.out) if said.out else {"said": said.err}

    return ask


def test_the_largest_batch_as_it_is_and_by_plans(answer):
    code, found = answer("plan", "--largest", "batch", "--set", "depth=3")
    assert code == 0
    as_it_is, exact, equivalent = (row["value"] for row in found["rows"])
    assert 0 < as_it_is < exact < equivalent
    assert all(row["is_largest"] for row in found["rows"])
    for value, fits in ((exact, True), (exact + 1, False)):
        _, plan = answer("plan", "--set", f"batch={value}", "--set", "depth=3")
        is_exact = all(action["promise"] == "exact" for action in plan["plan"]["actions"])
        assert (plan["verdict"] == "fits" and is_exact) == fits


def test_batches_that_do_not_divide_are_found(answer):
    """Of primes, and of even ones above odd ones whose smallest pieces are larger."""
    code, found = answer("plan", "--largest", "batch", "--forbid", "chunk", target="images")
    value = found["rows"][-1]["value"]
    assert code == 0
    for batch in (value, value + 1, value + 2):
        _, plan = answer("plan", "--set", f"batch={batch}", "--forbid", "chunk", target="images")
        assert (plan["verdict"] == "fits") == (batch == value)
    prime = next(n for n in range(value - 1, 2, -2) if all(n % k for k in range(2, n)))
    _, plan = answer("plan", "--set", f"batch={prime}", target="images")
    assert [action["kind"] for action in plan["plan"]["actions"]] == ["micro_batch"]


def test_any_integer_argument(answer):
    code, found = answer("predict", "--largest", "depth", "--set", "batch=64")
    (row,) = found["rows"]
    assert (code, row["is_largest"]) == (0, True)
    for value, expected in ((row["value"], 0), (row["value"] + 1, 1)):
        assert answer("predict", "--set", f"depth={value}", "--set", "batch=64")[0] == expected


def test_an_argument_that_is_none(answer):
    code, found = answer("predict", "--largest", "length")
    assert code == 2
    assert "has no parameter `length`" in found["said"]

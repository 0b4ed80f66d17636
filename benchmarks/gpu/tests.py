"""The tests that need a GPU, run against the memfit that is installed.

Responsible for finding them, for running them where pytest may be older than this repository asks
for, and for counting what became of them. Not responsible for the tests.

On the CPU the same tests are collected and skipped, which rehearses all but the tests themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

from benchmarks.gpu import page_parts
from benchmarks.gpu.piece import Order
from benchmarks.gpu.results import Document, Results, Row, bar
from benchmarks.record import ROOT

MARK = "mark.gpu"
OUTCOMES = ("passed", "failed", "skipped")
_SPARE_SECONDS = 10.0
_TEST_SECONDS = 150
"""Longest that one test may take, where pytest-timeout is there to end it."""


def run(order: Order, results: Results) -> None:
    """Run each file in a process of its own: an error of CUDA stays with its process."""
    for path in files():
        name = str(path.relative_to(ROOT))
        if not results.fits(name, 2 * _SPARE_SECONDS):
            continue
        results.put(name, run_file(path, order.scratch, results.seconds_left - _SPARE_SECONDS))
    if order.kind == "cuda":
        rows = [test for row in _tests(results) for test in row]
        skipped = [test["name"] for test in rows if test["outcome"] == "skipped"]
        results.put(
            "all",
            {
                "bars": [
                    bar(
                        "tests that were skipped though there is a GPU",
                        met=not skipped,
                        got=", ".join(skipped) or "none",
                        wanted="none",
                    )
                ]
            },
        )


def _tests(results: Results) -> list[list[Row]]:
    return [row["tests"] for row in results.rows.values() if "tests" in row]


def files() -> list[Path]:
    """Test files in which the mark is used; others need libraries that may not be here."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if MARK in path.read_text(encoding="utf-8")]


def command(path: Path, report: Path) -> list[str]:
    """How a file's tests are run."""
    found = [sys.executable, "-m", "pytest", str(path), "-m", "gpu", f"--junitxml={report}"]
    # What this repository asks of pytest itself, and warnings of libraries it was not tested with.
    found += ["-o", "minversion=0", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    try:
        import pytest_timeout  # type: ignore[import-not-found]  # noqa: F401 - is it there?
    except ImportError:
        return found
    return [*found, "-o", f"timeout={_TEST_SECONDS}"]


def run_file(path: Path, scratch: Path, seconds: float) -> Row:
    """Run the tests of a file and say what became of each."""
    report = scratch / f"{path.stem}.xml"
    started = subprocess.Popen(
        command(path, report),
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        started.kill()
        said, _ = started.communicate()
        return _not_run(f"ended after {seconds:.0f} s", said)
    if not report.exists():
        return _not_run(f"pytest ended with {started.returncode} and no report", said)
    tests = outcomes(report.read_text(encoding="utf-8"))
    if not tests:
        return _not_run(f"pytest ended with {started.returncode} and ran nothing", said)
    counts = dict.fromkeys(OUTCOMES, 0)
    for test in tests:
        counts[test["outcome"]] += 1
    found: Row = {
        "counts": counts,
        "tests": tests,
        "bars": [
            bar(
                f"`{test['name']}`",
                met=test["outcome"] != "failed",
                got=test["reason"] or test["outcome"],
                wanted="passed",
            )
            for test in tests
        ],
    }
    return {**found, "output_tail": said.splitlines()[-60:]} if counts["failed"] else found


def _not_run(why: str, said: str) -> Row:
    missed = bar("its tests", met=False, got=why, wanted="to run")
    return {"failed": why, "output_tail": said.splitlines()[-60:], "bars": [missed]}


def outcomes(report: str) -> list[Row]:
    """Every test of a JUnit report: ``name``, ``outcome``, ``reason`` and ``seconds``."""
    found = []
    for case in ET.fromstring(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in {"failure", "error"}:
                outcome, reason = "failed", child.get("message", "")
            elif child.tag == "skipped" and outcome == "passed":
                outcome, reason = "skipped", child.get("message", "")
        found.append(
            {
                "name": case.get("name", ""),
                "outcome": outcome,
                "reason": " ".join(reason.split())[:300],
                "seconds": float(case.get("time", "0")),
            }
        )
    return found


def page(document: Document) -> list[str]:
    """Counts by file, and every test that did not pass."""
    rows: dict[str, Row] = {k: v for k, v in document["rows"].items() if k != "all"}
    cells = [
        [name, *(str(row.get("counts", {}).get(kind, "")) for kind in OUTCOMES), _seconds(row)]
        for name, row in rows.items()
    ]
    others = [
        f"- `{test['name']}` ({name}): {test['outcome']}: {test['reason']}"
        for name, row in rows.items()
        for test in row.get("tests", [])
        if test["outcome"] != "passed"
    ]
    table = page_parts.table(("file", *OUTCOMES, "time"), cells)
    return [*table, "\n".join(others)] if others else table


def _seconds(row: Row) -> str:
    tests = row.get("tests")
    return page_parts.seconds(sum(test["seconds"] for test in tests)) if tests else ""

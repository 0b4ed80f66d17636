"""Training scripts that know nothing of memfit, under `memfit run --budget` on the GPU.

Responsible for running each script plain and again plain, then within shares of its own peak, and
for whether the budget was kept and the output stayed the same. Peaks are those of torch's allocator
(:mod:`benchmarks.gpu.peak_of`). Not responsible for the scripts (``benchmarks/gpu/scripts``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import page_parts
from benchmarks.gpu.piece import Order, collect
from benchmarks.gpu.results import Document, Results, Row, bar
from benchmarks.record import ROOT

FOLDER = ROOT / "benchmarks" / "gpu" / "scripts"
PERCENTS = (75, 55)
SMALL = {
    "bert_trainer": "--batch-size 4 --length 32 --layers 2 --width 64 --steps 4",
    "gpt2_clip": "--batch-size 2 --length 32 --layers 2 --width 64 --steps 3",
    "resnet50_amp": "--batch-size 2 --image-size 32 --steps 3",
    "vit_bf16": "--batch-size 1 --model vit_tiny_patch16_224 --steps 3",
}
"""Arguments of rehearsal size; without any the scripts are of full size."""

_SCRIPT_SECONDS = 90.0
_SAID_LINES = 14


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended.

    Attributes:
        exit_code: Its exit code.
        output: What it wrote to its standard output.
        said: The last lines that it wrote to its standard error.
        measured: Peaks and seconds.
    """

    exit_code: int
    output: list[str]
    said: list[str]
    measured: Row


def run(order: Order, results: Results) -> None:
    """Measure every script."""
    for path in sorted(FOLDER.glob("*.py")):
        if order.models and path.stem not in order.models:
            continue
        if results.fits(path.stem, _SCRIPT_SECONDS):
            collect(results, path.stem, script(path, order, results.seconds_left))


def script(path: Path, order: Order, seconds: float) -> Iterator[Row]:
    """A script plain, then within each budget; runs that do not depend on each other at once."""
    arguments = SMALL[path.stem].split() if order.is_small else []
    plain, again = _ended(
        [[str(path), *arguments], [str(path), *arguments]], order.scratch, seconds / 2
    )
    if plain.exit_code:
        yield {"failed": f"plain, it ended with {plain.exit_code}", "output_tail": plain.said}
        return
    repeats = plain.output == again.output
    yield {"plain": plain.measured, "eager_repeats_itself": repeats}
    if order.kind != "cuda":
        return
    peak_bytes = plain.measured["peak_allocated_bytes"]
    budgets = [peak_bytes * percent // 100 for percent in PERCENTS]
    within = [
        ["-m", "memfit", "run", "--no-offload", "--budget", str(budget), str(path), *arguments]
        for budget in budgets
    ]
    for percent, budget, ended in zip(
        PERCENTS, budgets, _ended(within, order.scratch, seconds / 2), strict=True
    ):
        yield {
            f"{percent}%": {
                **ended.measured,
                "budget_bytes": budget,
                "is_same": ended.output == plain.output,
                "exit_code": ended.exit_code,
                "said": ended.said,
            },
            "bars": list(_bars(percent, budget, ended, plain, repeats=repeats)),
        }


def _bars(
    percent: int, budget_bytes: int, ended: Ended, plain: Ended, *, repeats: bool
) -> Iterator[Row]:
    peak_bytes = ended.measured.get("peak_allocated_bytes", 0)
    yield bar(
        f"peak at {percent} %",
        met=0 < peak_bytes <= budget_bytes and ended.exit_code == 0,
        got=f"{peak_bytes:,} bytes, exit code {ended.exit_code}",
        wanted=f"at most {budget_bytes:,}",
    )
    if repeats:
        same = ended.output == plain.output
        yield bar(
            f"output at {percent} %",
            met=same,
            got="the same" if same else "another",
            wanted="that of the plain run",
        )


def _ended(commands: list[list[str]], scratch: Path, seconds: float) -> list[Ended]:
    """Run Python programs at the same time."""
    results = [scratch / f"run-{index}.json" for index in range(len(commands))]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.peak_of", str(result), *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for result, command in zip(results, commands, strict=True)
    ]
    found = []
    for process, result in zip(started, results, strict=True):
        try:
            output, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, said = process.communicate()
        measured = json.loads(result.read_text()) if result.exists() else {}
        result.unlink(missing_ok=True)
        lines = said.splitlines()[-_SAID_LINES:]
        found.append(Ended(process.returncode, output.splitlines(), lines, measured))
    return found


def page(document: Document) -> list[str]:
    """One line a script and budget."""
    gib = page_parts.gib
    cells = []
    for name, row in document["rows"].items():
        plain = row.get("plain", {})
        cells.append(
            [
                name,
                "none",
                gib(plain.get("peak_allocated_bytes")),
                gib(plain.get("peak_reserved_bytes")),
                page_parts.failed(row) or ("yes" if row.get("eager_repeats_itself") else "no"),
                page_parts.seconds(plain.get("seconds", 0.0)),
            ]
        )
        for percent in PERCENTS:
            found = row.get(f"{percent}%")
            if found is None:
                continue
            cells.append(
                [
                    "",
                    gib(found["budget_bytes"]),
                    gib(found.get("peak_allocated_bytes")),
                    gib(found.get("peak_reserved_bytes")),
                    "yes" if found["is_same"] else "no",
                    page_parts.seconds(found.get("seconds", 0.0)),
                ]
            )
    return [
        (
            "Unmodified scripts under `memfit run --no-offload --budget`. *Same*: every line of "
            "output, the hash of the weights last, is that of the plain run; without a budget: "
            "that of a second plain run. Seconds are those of the whole process."
        ),
        *page_parts.table(("script", "budget", "peak", "reserved", "same", "time"), cells),
    ]

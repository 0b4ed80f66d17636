"""Predicted against measured step time: unplanned and planned, by each source of op times.

Each example runs in a process of its own with one thread, so that CPU time is step time whatever
else the machine does. Each source of op times makes its own plan for 60 % of the peak. Measured
are medians of the process's CPU time, the unplanned step and the three planned ones in turn.

    .venv/bin/python benchmarks/step_time.py              # all examples, about ten minutes
    .venv/bin/python benchmarks/step_time.py vit unet     # some

Results go to benchmarks/results/DATE-step-time.json and .md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import memfit
from memfit import _native
from memfit.measure.step_time import cpu_seconds
from memfit.plan import cost_source
from memfit.program.target import workload_factory
from memfit.run.fitted import Fitted
from memfit.run.profile import profiled
from record import ROOT, Machine, write_results

EXAMPLES = ("gpt2", "llama", "bert", "t5", "resnet50", "vit", "convnext", "unet")
BUDGET = "60%"
TURNS = 3
SOURCES = ("quick roofline", "calibrated", "profiled step")
WITHIN = 0.10

HEADER = "| model | step | quick roofline | calibrated | profiled step |\n|---|---|---|---|---|"


def main(arguments: list[str]) -> int:
    """Run the examples one by one, each in a process of its own; write and print the table."""
    if arguments[:1] == ["--one"]:
        print(json.dumps(one(arguments[1], Path(arguments[2]))))
        return 0
    names = arguments or list(EXAMPLES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    rows = []
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        profile = str(Path(folder) / "cpu.json")
        calibrate = [sys.executable, "-m", "memfit", "calibrate", "--output", profile, "--quiet"]
        subprocess.run(calibrate, cwd=ROOT, env=environment, check=True, capture_output=True)
        for name in names:
            program = [sys.executable, __file__, "--one", name, profile]
            done = subprocess.run(
                program, cwd=ROOT, env=environment, check=False, stdout=subprocess.PIPE, text=True
            )
            if done.returncode:
                print(f"| {name} | did not run | | | |")
                continue
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(table_rows(rows[-1]), flush=True)
    errors = [error(row, SOURCES[2], way) for row in rows for way in ("unplanned", "planned")]
    if not errors:
        return 1
    verdict = (
        f"Predicted of measured CPU seconds, one thread, budget {BUDGET} of the peak. "
        f"Profiled step: {sum(abs(e) <= WITHIN for e in errors)} of {len(errors)} within "
        f"{WITHIN:.0%}, "
        f"worst {max(errors, key=abs):+.0%}."
    )
    print(verdict)
    table = "\n".join([HEADER, *map(table_rows, rows), "", verdict])
    write_results("step-time", Machine.here(), rows, table)
    return 0


def one(name: str, profile: Path) -> dict[str, Any]:
    """Predictions and measurements of one example: unplanned, and by the plan of each source."""
    trace, workload = captured(name)
    sources = {
        "quick roofline": roofline(cost_source.quick("cpu")),
        "calibrated": cost_source.roofline("cpu", profile),
        "profiled step": profiled(workload, trace.native),
    }
    request = {"budget": BUDGET, "allow": "exact", "own_loop": False, "forbid": ["micro_batch"]}
    plans = {source: _native.plan(trace.native, cost, request) for source, cost in sources.items()}
    steps = {"unplanned": Fitted(workload, {"actions": []}).step}
    steps |= {source: Fitted(workload, plan).step for source, plan in plans.items()}
    times: dict[str, list[float]] = {key: [] for key in steps}
    for turn in range(1 + TURNS):
        for key, step in steps.items():
            seconds = cpu_seconds(step)
            if turn > 0:
                times[key].append(seconds)
    measured = {key: statistics.median(found) for key, found in times.items()}
    return {
        "model": name,
        "measured": measured,
        "predicted": {
            source: {
                "unplanned": plan["unplanned"]["predicted_step_seconds"],
                "planned": plan["planned"]["predicted_step_seconds"],
                "fits": plan["verdict"] == "fits",
            }
            for source, plan in plans.items()
        },
    }


def captured(name: str) -> tuple[memfit.Trace, memfit.Workload]:
    """An example's step and the trace of it."""
    workload = workload_factory(f"examples/{name}.py:build", [])()
    return memfit.trace(workload), workload


def roofline(profile: dict[str, Any]) -> dict[str, Any]:
    """A profile as the engine's cost source."""
    return {"kind": "roofline", "profile": profile}


def error(row: dict[str, Any], source: str, way: str) -> float:
    """Predicted over measured, less one."""
    measured = row["measured"]["unplanned" if way == "unplanned" else source]
    return float(row["predicted"][source][way] / measured - 1)


def table_rows(row: dict[str, Any]) -> str:
    """Two lines of the table: unplanned, and each source's own plan."""
    lines = []
    for way in ("unplanned", "planned"):
        cells = [row["model"] if way == "unplanned" else "", way]
        for source in SOURCES:
            key = "unplanned" if way == "unplanned" else source
            predicted = row["predicted"][source][way]
            cells.append(
                f"{predicted:.2f} of {row['measured'][key]:.2f} s ({error(row, source, way):+.0%})"
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

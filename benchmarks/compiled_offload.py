"""Compiled steps with saved tensors on a disk, beside computing them again: peak and CPU time.

The transformer of `offload.py` runs under `torch.compile` alone and by memfit's compiled plans for
parts of that peak, with a folder to offload to and without. Peaks by allocator events, above what
is there before the step; times are medians of CPU seconds, all threads and the system's own
included, interleaved.

    .venv/bin/python benchmarks/compiled_offload.py            # some minutes on two cores

Exits with 1 where a step takes more than its budget.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import torch

import memfit
from memfit.measure import measure_peak, static_tensors
from memfit.measure.step_time import cpu_seconds
from memfit.run.compiled.fitted import CompiledFitted
from memfit.run.fitted import Fitted
from offload import build
from record import Machine, gib, write_results

PARTS = (0.4, 0.35)
"""Of what `torch.compile` adds to what is static, the budgets."""

FORBIDDEN = ("offload_optimizer", "offload_parameters", "micro_batch", "chunk")
"""What is compared is what becomes of activations."""

SETTLING = 12
"""Most steps until a plan is cut for what was measured."""

ROUNDS = 4

HEADER = (
    "| step | budget above the start | peak above the start | CPU time | elapsed | again, ops "
    "| offloaded | waited |\n|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    """Compare, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        plain = _under_torch()
        static_bytes = plain["static_bytes"]
        print(HEADER)
        rows = [plain]
        print(table_row(plain), flush=True)
        for part in PARTS:
            budget = static_bytes + int(part * plain["added_peak_bytes"])
            for place in (None, folder):
                rows.append(_fitted(budget, place, plain))
                print(table_row(rows[-1]), flush=True)
    table = "\n".join([HEADER, *map(table_row, rows)])
    write_results("compiled-offload", Machine.here(), [_plain(row) for row in rows], table)
    return 0 if _holds(rows[1:]) else 1


def _under_torch() -> dict[str, Any]:
    """The step under `torch.compile` alone."""
    workload = build()
    assert workload.loss is not None, "it trains"
    compiled = memfit.Workload(
        workload.model, workload.batch, torch.compile(workload.loss), workload.optimizer
    )
    step = Fitted(compiled, {"actions": []})
    return {"step": "torch.compile", **_measured(step, step)}


def _fitted(budget: int, place: str | None, plain: dict[str, Any]) -> dict[str, Any]:
    """The step by a compiled plan, timed in turn with that of `torch.compile`."""
    name = "memfit, with a folder" if place else "memfit"
    row: dict[str, Any] = {"step": name, "budget_bytes": budget - plain["static_bytes"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitted = memfit.fit(build(), budget, compile=True, offload=place, forbid=FORBIDDEN)
        except memfit.DoesNotFit as error:
            return {**row, "refused": str(error).splitlines()[0]}
    if not isinstance(fitted, CompiledFitted):
        return {**row, "refused": fitted.report().not_compiled}
    for _ in range(SETTLING):
        if fitted.has_settled:
            break
        fitted.step()
    if fitted.report().not_compiled:
        return {**row, "refused": fitted.report().not_compiled}
    row |= _measured(fitted, plain["fitted"])
    report = fitted.report()
    row["recomputed_ops"] = sum(graph.recomputed_ops for graph in report.graphs)
    row["offloaded_tensors"] = report.offloaded_tensors
    row["offloaded_bytes"] = sum(graph.offloaded_bytes for graph in report.graphs)
    return row


def _measured(fitted: Fitted, beside: Fitted) -> dict[str, Any]:
    """Peak and times of a step, and its time over that of another, in turn."""
    fitted.step()
    peak = measure_peak(fitted.step, static_tensors(fitted.workload, fitted.optimizer))
    waited = fitted.report().offload_seconds_waited
    seconds, ratios, elapsed = [], [], []
    for _ in range(ROUNDS):
        base = cpu_seconds(beside.step)
        start = time.perf_counter()
        seconds.append(cpu_seconds(fitted.step))
        elapsed.append(time.perf_counter() - start)
        ratios.append(seconds[-1] / base)
    return {
        "fitted": fitted,
        "static_bytes": peak.static_bytes,
        "added_peak_bytes": peak.peak_bytes - peak.static_bytes,
        "step_cpu_seconds": statistics.median(seconds),
        "step_seconds": statistics.median(elapsed),
        "step_ratio": statistics.median(ratios),
        "waited_seconds": (fitted.report().offload_seconds_waited - waited) / ROUNDS,
    }


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "fitted"}


def _holds(rows: list[dict[str, Any]]) -> bool:
    """Whether every budget was kept, and something ran."""
    run = [row for row in rows if "refused" not in row]
    return bool(run) and all(row["added_peak_bytes"] <= row["budget_bytes"] for row in run)


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    budget = gib(row["budget_bytes"]) if "budget_bytes" in row else ""
    if "refused" in row:
        return f"| {row['step']} | {budget} | does not fit | | | | | |"
    cells = [
        row["step"],
        budget,
        gib(row["added_peak_bytes"]),
        f"{row['step_cpu_seconds']:.2f} s, {row['step_ratio']:.2f} x",
        f"{row['step_seconds']:.2f} s",
        str(row.get("recomputed_ops", "")),
        f"{row.get('offloaded_tensors', 0)}, {gib(row.get('offloaded_bytes', 0))}",
        f"{row['waited_seconds']:.2f} s",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())

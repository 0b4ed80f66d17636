"""Against activation checkpointing round every block: lowest peak, and time at 45 % of the peak.

For each transformer example one process holds one model and runs three ways in turn: plain, with
the library's own checkpointing of every block (`torch.utils.checkpoint`, not re-entrant), and with
memfit's plan for its minimum; for GPT-2 also memfit's plan for 45 % of the peak, from profiled op
times. Peaks by allocator events; times are medians of CPU seconds, interleaved.

    .venv/bin/python benchmarks/checkpointing.py             # about half an hour on two cores
    .venv/bin/python benchmarks/checkpointing.py vit bert

Exits with 1 where memfit's lowest peak is above checkpointing's.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import memfit
from memfit.measure import measure_peak, static_tensors
from memfit.measure.step_time import cpu_seconds
from memfit.program.target import workload_factory
from memfit.run.fitted import Fitted
from record import Machine, gib, write_results

MODELS = ("gpt2", "llama", "bert", "vit")
AT_FRACTION = {"gpt2": "45%"}
ROUNDS = 3

HEADER = (
    "| model | plain | every block checkpointed | memfit, minimum | memfit, 45 % of the peak |\n"
    "|---|---|---|---|---|"
)


def main(names: list[str]) -> int:
    """Compare, print, write."""
    rows = []
    print(HEADER)
    for name in names or MODELS:
        rows.append(compare(name))
        print(table_row(rows[-1]), flush=True)
    if not names:
        write_results(
            "checkpointing", Machine.here(), rows, "\n".join([HEADER, *map(table_row, rows)])
        )
    worse = [r for r in rows if r["minimum"]["peak_bytes"] > r["checkpointed"]["peak_bytes"]]
    return 1 if worse else 0


def compare(name: str) -> dict[str, Any]:
    """Peak and time of each way of running one model's step."""
    workload = workload_factory(f"examples/{name}.py:build", [])()
    plain = Fitted(workload, {"actions": []})
    workload.optimizer = plain.optimizer
    trace = memfit.trace(workload)
    least = memfit.plan(trace, "1%", forbid=["micro_batch"])
    plans = {"minimum": memfit.plan(trace, least.minimum_peak_bytes + least.margin_bytes)}
    if name in AT_FRACTION:
        plans["at_fraction"] = memfit.plan(workload, AT_FRACTION[name], profile=True)
    ways: dict[str, Callable[[], Any]] = {"plain": plain.step}
    ways["checkpointed"] = lambda: with_checkpointing(workload.model, plain.step)
    for label, plan in plans.items():
        ways[label] = Fitted(workload, plan).step
    for way in ways.values():
        way()
    static = static_tensors(workload, plain.optimizer)
    peaks = {label: measure_peak(way, static).peak_bytes for label, way in ways.items()}
    times: dict[str, list[float]] = {label: [] for label in ways}
    for _ in range(ROUNDS):
        for label, way in ways.items():
            times[label].append(cpu_seconds(way))
    base = statistics.median(times["plain"])
    return {"model": name} | {
        label: {
            "peak_bytes": peaks[label],
            "step_cpu_seconds": statistics.median(times[label]),
            "step_ratio": statistics.median(times[label]) / base,
        }
        for label in ways
    }


def with_checkpointing(model: Any, step: Callable[[], Any]) -> None:
    """One step with every block under the library's own activation checkpointing."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            step()
        finally:
            model.gradient_checkpointing_disable()
    else:
        model.set_grad_checkpointing(True)
        try:
            step()
        finally:
            model.set_grad_checkpointing(False)


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    cells = [row["model"]]
    for label in ("plain", "checkpointed", "minimum", "at_fraction"):
        way = row.get(label)
        cells.append(f"{gib(way['peak_bytes'])}, {way['step_ratio']:.2f} x" if way else "")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

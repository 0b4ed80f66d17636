"""Parameters offloaded to a disk: peak and CPU time against eager, training and inference.

The transformer of ``offload.py``: trained under Adam by the plans that memfit makes at three
budgets with a disk to use; and its inference in half and a quarter of its parameters' bytes. Peaks
by allocator events, everything included; times are medians of CPU seconds, all threads and the
system's own included, interleaved; results are compared bit by bit.

    .venv/bin/python benchmarks/offload_parameters.py      # some minutes on two cores

Exits with 1 unless every measured peak is within its budget and all results are bitwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import tempfile
from typing import Any

import torch

import memfit
from memfit.measure import measure_peak, static_tensors
from memfit.measure.peak import storage_bytes
from memfit.measure.step_time import cpu_seconds
from memfit.run.fitted import Fitted
from offload import build
from record import Machine, gib, write_results

ROUNDS = 5
TRAINING_BUDGETS = (0.6, 0.4, 0.25)
"""Parts of the unplanned peak."""
INFERENCE_BUDGETS = (0.5, 0.25)
"""Parts of the parameters' bytes, on top of what inference takes besides."""

HEADER = (
    "| step | budget | peak | of eager's | room for parameters | actions | predicted time "
    "| CPU time | read | waited | result |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    """Compare, print, write."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in [*training(folder), *inference(folder)]:
            rows.append(row)
            print(table_row(row), flush=True)
    table = "\n".join([HEADER, *map(table_row, rows)])
    write_results("offload-parameters", Machine.here(), rows, table)
    fits = all(row["measured_peak_bytes"] <= row["budget_bytes"] for row in rows[1:])
    return 0 if fits and all(row["is_bitwise"] for row in rows) else 1


def training(folder: str) -> list[dict[str, Any]]:
    """Plans of a training step beside eager."""

    def workload() -> memfit.Workload:
        torch.manual_seed(0)
        made = build()
        return dataclasses.replace(made, optimizer=lambda p: torch.optim.Adam(p, lr=1e-4))

    trace = memfit.trace(workload())
    unplanned = memfit.plan(trace, budget="100%").unplanned.predicted_peak_bytes
    budgets = [int(unplanned * part) for part in TRAINING_BUDGETS]
    plans = [memfit.plan(trace, budget=b, offload=folder).as_dict() for b in budgets]
    return compared("training", workload, plans)


def inference(folder: str) -> list[dict[str, Any]]:
    """Plans of inference beside eager."""

    def workload() -> memfit.Workload:
        torch.manual_seed(0)
        made = build()
        return dataclasses.replace(made, model=made.model.eval(), loss=None, optimizer=None)

    trace = memfit.trace(workload())
    unplanned = memfit.plan(trace, budget="100%").unplanned.predicted_peak_bytes
    parameters = storage_bytes(workload().model.parameters())
    budgets = [unplanned - int(parameters * (1 - part)) for part in INFERENCE_BUDGETS]
    plans = [memfit.plan(trace, budget=b, offload=folder).as_dict() for b in budgets]
    return compared("inference", workload, plans)


def compared(name: str, workload: Any, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Eager and the plans that fit: one step of each for the result, then peaks and times."""
    rows = []
    with contextlib.ExitStack() as stack:
        ways = [stack.enter_context(Fitted(workload(), {"actions": []}))]
        ways += [
            stack.enter_context(Fitted(workload(), plan, loss_reduction="mean"))
            for plan in plans
            if plan["verdict"] == "fits"
        ]
        made = [None, *(plan for plan in plans if plan["verdict"] == "fits")]
        results = [seeded(way) for way in ways]
        peaks, read = [], []
        for way in ways:
            way.place_state()
            static = static_tensors(way.workload, way.optimizer)
            peaks.append(measure_peak(way.step, static).peak_bytes)
            before = way.report()
            way.step()
            after = way.report()
            read.append(
                (
                    after.offloaded_bytes_read - before.offloaded_bytes_read,
                    after.offload_seconds_waited - before.offload_seconds_waited,
                )
            )
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(ROUNDS):
            for way, seconds in zip(ways, times, strict=True):
                way.place_state()
                seconds.append(cpu_seconds(way.step))
        for index, plan in enumerate(made):
            seconds = statistics.median(times[index])
            rows.append(
                {
                    "step": name if plan is None else f"{name}, planned",
                    "budget_bytes": plan["budget_bytes"] if plan else peaks[0],
                    "measured_peak_bytes": peaks[index],
                    "peak_ratio": peaks[index] / peaks[0],
                    "room_bytes": room_bytes(plan),
                    "actions": [action["kind"] for action in plan["actions"]] if plan else [],
                    "predicted_step_ratio": plan["predicted_step_ratio"] if plan else 1.0,
                    "step_cpu_seconds": seconds,
                    "step_ratio": seconds / statistics.median(times[0]),
                    "read_bytes": read[index][0],
                    "waited_seconds": read[index][1],
                    "is_bitwise": same(results[index], results[0]),
                }
            )
    return rows


def seeded(way: Fitted) -> list[torch.Tensor]:
    """What a step returns, and the parameters after it."""
    torch.manual_seed(1)
    result = way.step()
    return [result, *(p.detach().clone() for p in way.workload.model.parameters())]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether all bits are the same."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def room_bytes(plan: dict[str, Any] | None) -> int | None:
    """What a plan leaves in memory of parameters; ``None`` for all."""
    kinds = {action["kind"]: action for action in plan["actions"]} if plan else {}
    away = kinds.get("offload_parameters")
    return away["offload_parameters"]["room_bytes"] if away else None


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    room = row["room_bytes"]
    cells = [
        row["step"],
        gib(row["budget_bytes"]),
        gib(row["measured_peak_bytes"]),
        f"{100 * row['peak_ratio']:.0f} %",
        "all" if room is None else gib(room),
        ", ".join(row["actions"]) or "none",
        f"{row['predicted_step_ratio']:.2f} x",
        f"{row['step_cpu_seconds']:.2f} s, {row['step_ratio']:.2f} x",
        gib(row["read_bytes"]),
        f"{row['waited_seconds']:.2f} s",
        "bitwise" if row["is_bitwise"] else "different",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(HEADER)
    sys.exit(main())

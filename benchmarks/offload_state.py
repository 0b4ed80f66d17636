"""The optimizer's state offloaded to a disk: peak and CPU time against eager.

The transformer of ``offload.py`` under Adam, whose state is twice its parameters. It runs plain and
by the plans that memfit makes with nothing else allowed, for the smallest budget with and without a
window, after backward and inside it. Peaks by allocator events, everything included; times are
medians of CPU seconds, all threads and the system's own included, interleaved.

    .venv/bin/python benchmarks/offload_state.py      # some minutes on two cores

Exits with 1 unless every measured peak is the predicted one to 64 bytes, and the state's bytes
are gone from it.
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
from memfit.measure.step_time import cpu_seconds
from memfit.run.fitted import Fitted
from offload import build
from record import Machine, gib, write_results

ROUNDS = 5
UNSEEN_BYTES = 64
"""Numbers that autograd keeps as tensors: a few bytes each, predicted by nobody."""

HEADER = (
    "| way | window | peak | of eager's | predicted time | CPU time | moved | waited |\n"
    "|---|---|---|---|---|---|---|---|"
)
OTHERS = ("remat", "offload", "offload_parameters", "micro_batch", "chunk")


def plans(trace: memfit.Trace, folder: str) -> dict[str, dict[str, Any]]:
    """The plans, by name."""
    found = {}
    for name, forbid in (("after backward", ["fuse_optimizer"]), ("inside backward", [])):
        options: dict[str, Any] = {"forbid": [*OTHERS, *forbid], "offload": folder}
        narrow = memfit.plan(trace, "1", **options).as_dict()
        margin = narrow["margin_bytes"]
        narrow = memfit.plan(trace, narrow["minimum_peak_bytes"] + margin, **options).as_dict()
        state = action(narrow)["bytes"]
        # Any budget that all of the state would be too much for: the fastest plan has a window.
        wide = narrow["planned"]["predicted_peak_bytes"] + margin + state * 3 // 4
        for plan in (narrow, memfit.plan(trace, wide, **options).as_dict()):
            window = action(plan)["offload_optimizer"]["window_bytes"]
            found[f"{name}, {window >> 20} MiB"] = plan
    return found


def action(plan: dict[str, Any]) -> dict[str, Any]:
    """What a plan does with the state."""
    kinds: dict[str, dict[str, Any]] = {action["kind"]: action for action in plan["actions"]}
    return kinds["offload_optimizer"]


def main() -> int:
    """Compare, print, write."""
    workload = dataclasses.replace(build(), optimizer=lambda p: torch.optim.Adam(p, lr=1e-4))
    eager = Fitted(workload, {"actions": []})
    workload.optimizer = eager.optimizer
    trace = memfit.trace(workload)
    rows = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        made = plans(trace, folder)
        ways = {"eager": eager}
        for name, plan in made.items():
            ways[name] = stack.enter_context(Fitted(workload, plan))
        peaks, times, moved = {}, {name: [] for name in ways}, {}
        for name, way in ways.items():
            way.place_state()
            way.step()
            static = static_tensors(workload, way.optimizer)
            peaks[name] = measure_peak(way.step, static).peak_bytes
            moved[name] = per_step(way)
        for _ in range(ROUNDS):
            for name, way in ways.items():
                way.place_state()
                times[name].append(cpu_seconds(way.step))
        base = statistics.median(times["eager"])
        for name in ways:
            plan = made.get(name)
            rows.append(
                {
                    "way": name,
                    "measured_peak_bytes": peaks[name],
                    "peak_ratio": peaks[name] / peaks["eager"],
                    "predicted_peak_bytes": plan["planned"]["predicted_peak_bytes"] if plan else 0,
                    "state_bytes": action(plan)["bytes"] if plan else 0,
                    "predicted_step_ratio": plan["predicted_step_ratio"] if plan else 1.0,
                    "step_cpu_seconds": statistics.median(times[name]),
                    "step_ratio": statistics.median(times[name]) / base,
                    **moved[name],
                }
            )
            print(table_row(rows[-1]), flush=True)
    write_results("offload-state", Machine.here(), rows, "\n".join([HEADER, *map(table_row, rows)]))
    return 0 if all(is_as_promised(row, rows[0]) for row in rows[1:]) else 1


def per_step(way: Fitted) -> dict[str, Any]:
    """Bytes moved in a step so far, and what it waited."""
    before = way.report()
    way.step()
    after = way.report()
    written = after.offloaded_bytes_written - before.offloaded_bytes_written
    waited = after.offload_seconds_waited - before.offload_seconds_waited
    return {"written_bytes": written, "waited_seconds": waited}


def is_as_promised(row: dict[str, Any], eager: dict[str, Any]) -> bool:
    """Whether the peak is what was predicted, and lower by most of the state."""
    off = abs(row["measured_peak_bytes"] - row["predicted_peak_bytes"])
    saved = eager["measured_peak_bytes"] - row["measured_peak_bytes"]
    return off <= UNSEEN_BYTES and saved >= row["state_bytes"] // 4


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    way, _, window = row["way"].partition(", ")
    cells = [
        way,
        window or "-",
        gib(row["measured_peak_bytes"]),
        f"{100 * row['peak_ratio']:.0f} %",
        f"{row['predicted_step_ratio']:.2f} x",
        f"{row['step_cpu_seconds']:.2f} s, {row['step_ratio']:.2f} x",
        gib(row["written_bytes"]),
        f"{row['waited_seconds']:.2f} s",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(HEADER)
    sys.exit(main())

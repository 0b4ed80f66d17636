"""memfit against one peer in one process, step by step in turn: for ties.

Responsible for a ratio of two ways directly, where the head-to-head has the ratio of two medians of
separate processes. The plan is exact and made for the peer's measured peak. Not judged, not
written: `measurement.py` and `judgement.py` have the bars.

    .venv/bin/python -m benchmarks.planners.duel gpt2 "every block" --pairs 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.planners import checkpointing, fitted
from benchmarks.planners.models import MODELS, build, make_optimizer
from benchmarks.planners.points import INEXACT
from benchmarks.planners.way import Way

from memfit import Workload
from memfit.measure import measure_peak, static_tensors
from memfit.measure.step_time import cpu_seconds

PEERS: dict[str, Callable[[str, Workload], Way]] = {
    "every block": checkpointing.every_block,
    "every second block": lambda name, workload: checkpointing.every_block(
        name, workload, stride=2
    ),
    "selective": checkpointing.keeping_matmuls,
}


def main(arguments: list[str]) -> None:
    """Plan for the peer's peak, time both in turn, print each pair and the median ratio."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planners.duel", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--pairs", type=int, default=8, help="timed pairs of steps")
    parser.add_argument("--quick", action="store_true", help="the small version of the model")
    chosen = parser.parse_args(arguments)
    theirs = build(chosen.model, quick=chosen.quick)
    optimizer = make_optimizer(theirs)
    peer = PEERS[chosen.peer](chosen.model, theirs)
    peer.step()
    peak = measure_peak(peer.step, static_tensors(theirs, optimizer)).peak_bytes
    ours = _planned(chosen, peak)
    ours.step()
    print(f"budget {peak} bytes, {ours.notes['actions']}", flush=True)
    ratios = []
    for pair in range(chosen.pairs):
        seconds = [0.0, 0.0]
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[which] = cpu_seconds((peer.step, ours.step)[which])
        ratios.append(seconds[1] / seconds[0])
        print(f"{seconds[0]:.2f} s, memfit {seconds[1]:.2f} s: {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f}")


def _planned(chosen: argparse.Namespace, budget_bytes: int) -> Way:
    """An exact plan for so many bytes, by op times of a profiled step."""
    exact: dict[str, Any] = {"allow": "exact", "forbid": list(INEXACT)}
    workload = build(chosen.model, quick=chosen.quick)
    with tempfile.TemporaryDirectory() as folder:
        fitted.prepare(workload, Path(folder), chosen.model)
        make_optimizer(workload)
        prepared = Path(folder) / chosen.model
        return fitted.planned(workload, prepared, budget=str(budget_bytes), **exact)


if __name__ == "__main__":
    main(sys.argv[1:])

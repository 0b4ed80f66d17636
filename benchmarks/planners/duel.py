"""memfit against one peer in one process, step by step in turn: for ties.

Responsible for a ratio of two ways directly, where the head-to-head has the ratio of two medians of
separate processes. The plan is made for the peer's measured peak, exact against an eager peer,
compiled against a compiled one. Not judged, not written: `measurement.py` and `judgement.py` have
the bars.

    .venv/bin/python -m benchmarks.planners.duel gpt2 "every block" --pairs 4
    .venv/bin/python -m benchmarks.planners.duel resnet50 "torch.compile, 0.9"
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch._functorch.config as functorch
from benchmarks.planners import checkpointing, compiled, fitted
from benchmarks.planners.measurement import numerics
from benchmarks.planners.models import MODELS, build, make_optimizer
from benchmarks.planners.points import COMPILE_BUDGETS, INEXACT
from benchmarks.planners.way import Way, ordinary_step
from torch.optim import Optimizer

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

COMPILED: dict[str, float | None] = {
    "torch.compile": None,
    **{f"torch.compile, {budget:g}": budget for budget in COMPILE_BUDGETS},
}
EXACT: dict[str, Any] = {"allow": "exact", "forbid": list(INEXACT)}


def main(arguments: list[str]) -> None:
    """Plan for the peer's peak, time both in turn, print each pair and the median ratio."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planners.duel", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("peer", choices=[*PEERS, *COMPILED])
    parser.add_argument("--pairs", type=int, default=8, help="timed pairs of steps")
    parser.add_argument("--quick", action="store_true", help="the small version of the model")
    parser.add_argument("--no-dropout", action="store_true", help="leave dropout out of the model")
    chosen = parser.parse_args(arguments)
    theirs = _build(chosen)
    optimizer = make_optimizer(theirs)
    peer = _peer(chosen, theirs)
    error = numerics(theirs, ordinary_step(theirs), peer)["gradient_error"]
    peer.step()
    print(f"the peer's gradients are off by {error:.0e}", flush=True)
    peak = measure_peak(peer.step, static_tensors(theirs, optimizer)).peak_bytes
    mine = _build(chosen)
    ours = (_compiled if chosen.peer in COMPILED else _planned)(chosen, mine, peak)
    # The peer's budget is the process's.
    with functorch.patch(activation_memory_budget=1.0):
        error = numerics(mine, ordinary_step(mine), ours)["gradient_error"]
    ours.step()
    peer.step()  # Where gradients were held against compiled ones, all code was forgotten for it.
    print(f"memfit's gradients are off by {error:.0e}")
    assert isinstance(mine.optimizer, Optimizer), "it was made with the plan"
    measured = measure_peak(ours.step, static_tensors(mine, mine.optimizer)).peak_bytes
    print(f"budget {peak} bytes, measured {measured}, {dict(ours.notes)}", flush=True)
    ratios = []
    for pair in range(chosen.pairs):
        seconds = [0.0, 0.0]
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[which] = cpu_seconds((peer.step, ours.step)[which])
        ratios.append(seconds[1] / seconds[0])
        print(f"{seconds[0]:.2f} s, memfit {seconds[1]:.2f} s: {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f}")


def _build(chosen: argparse.Namespace) -> Workload:
    return build(chosen.model, quick=chosen.quick, dropout=not chosen.no_dropout)


def _peer(chosen: argparse.Namespace, workload: Workload) -> Way:
    if chosen.peer in PEERS:
        return PEERS[chosen.peer](chosen.model, workload)
    return compiled.budgeted(workload, budget=COMPILED[chosen.peer], reference=_drawing(chosen))


def _drawing(chosen: argparse.Namespace) -> str:
    """How compiled code draws random numbers: its own way, unless there are none to draw."""
    return "eager" if chosen.no_dropout else "compiled"


def _planned(chosen: argparse.Namespace, workload: Workload, budget_bytes: int) -> Way:
    """An exact plan for so many bytes, by op times of a profiled step."""
    with tempfile.TemporaryDirectory() as folder:
        fitted.prepare(workload, Path(folder), chosen.model)
        make_optimizer(workload)
        prepared = Path(folder) / chosen.model
        return fitted.planned(workload, prepared, budget=str(budget_bytes), **EXACT)


def _compiled(chosen: argparse.Namespace, workload: Workload, budget_bytes: int) -> Way:
    """A compiled step inside so many bytes."""
    make_optimizer(workload)
    reference = _drawing(chosen)
    return fitted.compiled(workload, budget=str(budget_bytes), reference=reference, **EXACT)


if __name__ == "__main__":
    main(sys.argv[1:])

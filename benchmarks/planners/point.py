"""One point in a process of its own: `python -m benchmarks.planners.point SPEC`.

Responsible for turning a specification (JSON) into a way of running the step, and for printing the
row. A method that cannot run says so in the row; a crash is what its parent sees of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.planners import checkpointing, fitted
from benchmarks.planners.measurement import measure
from benchmarks.planners.models import build, make_optimizer
from benchmarks.planners.points import peer_of
from benchmarks.planners.rounding import rounding
from benchmarks.planners.way import CannotRunError, Way, ordinary_step

from memfit import Workload


def main(text: str) -> None:
    """Run a specification and print its row."""
    spec = json.loads(text)
    dropout = spec.get("dropout", True) and spec["method"] != "rounding"
    workload = build(spec["model"], quick=spec["quick"], dropout=dropout)
    folder = Path(spec["folder"])
    stem = spec["model"] + ("" if spec.get("dropout", True) else "-without-dropout")
    if spec["method"] == "prepare":
        row = fitted.prepare(workload, folder, stem)
    elif spec["method"] == "rounding":
        row = rounding(workload)
    else:
        make_optimizer(workload)
        try:
            way = way_of(spec, workload, folder / stem)
            peer = partial(_peers_step, spec, folder) if "beside" in spec else None
            row = measure(workload, way, spec["pairs"], peer)
            row |= way.notes
            row["predicted_peak_bytes"] = way.predicted_peak_bytes
            row["predicted_seconds"] = way.predicted_seconds
        except CannotRunError as reason:
            row = {"refused": str(reason)}
    sys.stdout.write(json.dumps(row) + "\n")


def _peers_step(spec: dict[str, Any], folder: Path) -> Callable[[], Any]:
    """The step of the peer that a specification names beside its own method, run once."""
    peer = peer_of(spec)
    workload = build(peer["model"], quick=peer["quick"], dropout=peer.get("dropout", True))
    make_optimizer(workload)
    step = way_of(peer, workload, folder).step
    step()
    return step


def way_of(spec: dict[str, Any], workload: Workload, prepared: Path) -> Way:
    """The way of running the step that a specification names.

    Args:
        spec: The specification.
        workload: The workload; its optimizer exists already.
        prepared: Where memfit's trace and op times are, less the ends of their names.

    Returns:
        The way.

    Raises:
        CannotRunError: The method has no answer for this point.
        ValueError: There is no such method.
    """
    name, options = spec["model"], spec.get("options", {})
    match spec["method"]:
        case "eager":
            way = Way(ordinary_step(workload))
        case "every block":
            way = checkpointing.every_block(name, workload)
        case "every second block":
            way = checkpointing.every_block(name, workload, stride=2)
        case "selective":
            way = checkpointing.keeping_matmuls(name, workload)
        case "sac_milp":
            from benchmarks.planners import milp  # needs pulp and pwlf

            way = milp.planned(workload, **options)
        case "torch.compile":
            from benchmarks.planners import compiled

            way = compiled.budgeted(workload, **options)
        case "memfit":
            way = fitted.planned(workload, prepared, **options)
        case "memfit compiled":
            way = fitted.compiled(workload, **options)
        case unknown:
            raise ValueError(f"unknown method `{unknown}`")
    return way


if __name__ == "__main__":
    main(sys.argv[1])

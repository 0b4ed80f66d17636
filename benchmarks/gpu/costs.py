"""Predicted step times against measured ones, by a profile that `memfit calibrate` made here.

Responsible for the unplanned step and one at half the peak, each predicted from the calibrated
profile, from the quick measurement that plans make by default, and, on a GPU whose datasheet is
known, from that. Not responsible for peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu import apart, models, page_parts, steps, timing
from benchmarks.gpu.calibrated import calibrate
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import Case
from benchmarks.gpu.piece import Order, collect
from benchmarks.gpu.results import Document, Results, Row

import memfit
from memfit.run.fitted import Fitted

MODELS = ("gpt2", "bert", "resnet50", "vit", "llama", "unet", "t5", "convnext")
BUDGET = "50%"
SOURCES = ("calibrated", "quick")
_SECONDS = 40.0
_TIMING_SECONDS = 8.0


def run(order: Order, results: Results) -> None:
    """Calibrate, then measure all that there is time for."""
    file, profile = calibrate(order.kind, order.scratch, small=order.is_small)
    kept = ("seconds", "median_spread", "warnings", "samples", "profile")
    results.put("profile", {key: profile[key] for key in kept})
    names = [name for name in (order.models or MODELS) if name in models.MODELS]
    for case in models.cases(names, small=order.is_small):
        if results.fits(case.name, _SECONDS):
            left = results.seconds_left
            collect(results, case.name, apart.rows(timed, case, order.kind, file, seconds=left))


def timed(case: Case, kind: str, costs: Path) -> Iterator[Row]:
    """A step's predicted and measured seconds, unplanned and at half its peak."""
    device = Device(kind)  # type: ignore[arg-type]
    workload = models.build(case, device.place)
    trace = memfit.trace(workload)
    told: dict[str, dict[str, Any]] = {
        "calibrated": {"costs": costs},
        "quick": {},
    }
    unplanned = {
        source: memfit.plan(trace, "100%", **how).as_dict()["unplanned"]["predicted_step_seconds"]
        for source, how in told.items()
    }
    plan = memfit.plan(workload, BUDGET, costs=costs)
    yield {"kind": "steps", "predicted_seconds": unplanned, "verdict": plan.as_dict()["verdict"]}
    workload, eager = steps.ordinary(workload)
    ways = {"unplanned": eager.step}
    if plan.fits:
        document = plan.as_dict()
        fitted = Fitted(workload, document, loss_reduction=plan.loss_reduction)
        ways["planned"] = fitted.step
        yield {
            "predicted_planned_seconds": document["planned"]["predicted_step_seconds"],
            "predicted_ratio": document["predicted_step_ratio"],
        }
    found = timing.in_turn(ways, device, seconds=_TIMING_SECONDS)
    seconds = found["unplanned"].seconds
    row: Row = {
        "times": {name: asdict(times) for name, times in found.items()},
        "errors": {source: guess / seconds - 1 for source, guess in unplanned.items()},
    }
    if "planned" in found:
        row["ratio_error"] = document["predicted_step_ratio"] / found["planned"].ratio - 1
    yield row


def page(document: Document) -> list[str]:
    """One line a model."""
    cells = [
        [
            name,
            *page_parts.times(row, "unplanned", "unplanned")[:1],
            *(page_parts.percent(row.get("errors", {}).get(source)) for source in SOURCES),
            _ratio(row),
            f"{row['predicted_ratio']:.3f}" if "predicted_ratio" in row else "",
            page_parts.failed(row) or page_parts.percent(row.get("ratio_error")),
        ]
        for name, row in document["rows"].items()
        if row.get("kind") == "steps"
    ]
    head = ("model", "step", *SOURCES, "ratio at 50 %", "predicted", "off")
    return [
        (
            "How far the predicted time of the unplanned step is off, by where op times come from, "
            "and the measured and predicted ratio of a step at half the peak to it."
        ),
        *page_parts.table(head, cells),
    ]


def _ratio(row: Row) -> str:
    if row.get("verdict") != "fits":
        return "none fits"
    times = row.get("times")
    return "" if not times else f"{times['planned']['ratio']:.3f}"

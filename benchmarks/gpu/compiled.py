"""Compiled steps inside a budget, beside `torch.compile` alone.

Responsible for: the peak and time of the step under `torch.compile`; then `memfit.fit(...,
compile=True)` for shares of that peak, each with its peak and its time in turn. Not responsible for
rounding, which `memfit verify --compile` judges, nor for eager plans.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from benchmarks.gpu import apart, models, page_parts, peaks, steps, timing
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import Case
from benchmarks.gpu.piece import Order, collect
from benchmarks.gpu.results import Document, Results, Row

import memfit

MODELS = ("gpt2", "llama", "vit", "bert")
SHARES = (0.8, 0.6)
_SECONDS = 90.0
_TIMING_SECONDS = 8.0


def run(order: Order, results: Results) -> None:
    """Measure all that there is time for, what is trained most first."""
    names = [name for name in (order.models or MODELS) if name in models.MODELS]
    for case in models.cases(names, small=order.is_small, precisions=("bf16", "fp32")):
        for share in SHARES:
            name = f"{case.name}, {share:.0%}"
            if results.fits(name, _SECONDS):
                left = results.seconds_left
                found = apart.rows(compiled, case, order.kind, share, seconds=left)
                collect(results, name, found)


def compiled(case: Case, kind: str, share: float) -> Iterator[Row]:
    """The step under ``torch.compile`` alone, and fitted into a share of its peak."""
    device = Device(kind)  # type: ignore[arg-type]
    workload, _ = steps.ordinary(models.build(case, device.place))
    alone = compiled_step(workload)
    alone()
    found = steps.peaks(alone, workload, device)
    device.library_bytes()
    budget_bytes = int(share * found.allocated_bytes)
    yield {
        "alone": steps.as_row(found),
        "budget_bytes": budget_bytes,
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            fitted = memfit.fit(workload, budget_bytes, compile=True)
        except memfit.DoesNotFit as error:
            yield {"does_not_fit": str(error).partition("\n")[0]}
            return
        for _ in range(3):  # the second step is measured, and may have the graphs cut again
            fitted.step()
        planned = steps.peaks(fitted.step, workload, device)
    report = fitted.report()
    yield {
        **steps.as_row(planned),
        "not_compiled": report.not_compiled,
        "warnings": sorted({str(one.message).partition("\n")[0] for one in said}),
        "graphs": [asdict(graph) for graph in getattr(report, "graphs", ())],
        "bars": [peaks.within(planned.allocated_bytes, budget_bytes)],
    }
    times = timing.in_turn(
        {"alone": alone, "planned": fitted.step}, device, seconds=_TIMING_SECONDS
    )
    yield {"times": {name: asdict(measured) for name, measured in times.items()}}


def compiled_step(workload: memfit.Workload) -> Callable[[], Any]:
    """The step whose loss is compiled, as a person writes it."""
    from benchmarks.planners.way import ordinary_step

    loss = torch.compile(lambda model, batch: peaks.loss_of(workload, model, batch))
    return ordinary_step(workload, loss)


def page(document: Document) -> list[str]:
    """One line a budget."""
    cells = [
        [
            name,
            page_parts.gib(row.get("alone", {}).get("peak_allocated_bytes")),
            page_parts.gib(row.get("budget_bytes")),
            _peak(row),
            *page_parts.times(row, "alone", "planned"),
        ]
        for name, row in document["rows"].items()
    ]
    reasons = [
        f"- {name}: runs eager: {row['not_compiled']}"
        for name, row in document["rows"].items()
        if row.get("not_compiled")
    ]
    table = page_parts.table(
        ("model, share", "alone", "budget", "peak", "alone", "planned", "ratio"), cells
    )
    return [*table, "\n".join(reasons)] if reasons else table


def _peak(row: Row) -> str:
    if "does_not_fit" in row:
        return "none fits"
    return page_parts.failed(row) or page_parts.gib(row.get("peak_allocated_bytes"))

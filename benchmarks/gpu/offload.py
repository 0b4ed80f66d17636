"""Offloading to pinned memory of the host: rates, what hides behind computing, and what steps take.

Responsible for: copies between host and device with torch's pinned memory and with memfit's own;
how much of a copy's time a computation hides; and steps at half the peak with and without a place
for what is offloaded, with their bits. Not responsible for parking.

On a CPU there is no such copy; the steps are rehearsed with a folder of a disk in its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import apart, models, page_parts, peaks, steps, timing
from benchmarks.gpu.calibrated import calibrate
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import Case
from benchmarks.gpu.piece import Order, collect
from benchmarks.gpu.results import Document, Results, Row, bar

import memfit
from memfit.run.fitted import Fitted

MODELS = ("gpt2", "llama", "vit", "bert", "resnet50")
WAYS = ("recomputing", "offloading")
BUDGET = "50%"
HIDDEN_BAR = 0.8
"""Least share of a copy's time that a computation twice as long has to hide."""

_COPY_BYTES = 1 << 30
_MODEL_SECONDS = 60.0
_TIMING_SECONDS = 10.0
_COPIES = 5


def run(order: Order, results: Results) -> None:
    """Measure all that there is time for."""
    file, profile = calibrate(order.kind, order.scratch, small=order.is_small)
    results.put("calibrated", {"transfers": profile["profile"]["transfers"]})
    if order.kind == "cuda":
        for measure in (pinning, hidden):
            found = apart.rows(measure, order.kind, seconds=results.seconds_left)
            collect(results, measure.__name__, found)
    else:
        results.leave_out("pinning, hidden", "a CPU copies nothing to its host")
    names = [name for name in (order.models or MODELS) if name in models.MODELS]
    place = "host" if order.kind == "cuda" else str(order.scratch)
    for case in models.cases(names, small=order.is_small):
        name = f"{case.name}, {BUDGET}"
        if results.fits(name, _MODEL_SECONDS):
            left = results.seconds_left
            found = apart.rows(offloading, case, order.kind, place, file, seconds=left)
            collect(results, name, found)


def pinning(kind: str) -> Iterator[Row]:
    """Memfit's own pinned memory: what pinning takes, and copies each way."""
    from memfit.apply.offload.cuda_copies import CudaCopies

    device, copies = Device(kind), CudaCopies()  # type: ignore[arg-type]
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device.place)
    began = time.perf_counter()
    host = copies.pin(_COPY_BYTES)
    pin_seconds = time.perf_counter() - began
    rates = {}
    for way, (target, source) in {
        "device_to_host": (host.bytes, there),
        "host_to_device": (there, host.bytes),
    }.items():
        seconds = []
        for _ in range(_COPIES):
            device.synchronize()
            began = time.perf_counter()
            copies.wait(copies.begin(target, source))
            seconds.append(time.perf_counter() - began)
        rates[way] = _COPY_BYTES / min(seconds)
    yield {"pin_bytes_per_second": _COPY_BYTES / pin_seconds, "transfers": rates}


def hidden(kind: str) -> Iterator[Row]:
    """How much of a copy's time a computation hides that takes twice as long."""
    from memfit.apply.offload.cuda_copies import CudaCopies

    device, copies = Device(kind), CudaCopies()  # type: ignore[arg-type]
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device.place)
    host = copies.pin(_COPY_BYTES)
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device.place)

    def move(target: torch.Tensor, source: torch.Tensor, products: int) -> None:
        end = copies.begin(target, source)
        for _ in range(products):
            torch.mm(matrix, matrix)
        copies.order_after(end)

    def seconds(call: Any) -> float:
        call()
        return min(timing.one_turn(call, device, 1)[1] for _ in range(_COPIES))

    once = seconds(lambda: [torch.mm(matrix, matrix) for _ in range(100)]) / 100
    for way, (target, source) in {
        "device_to_host": (host.bytes, there),
        "host_to_device": (there, host.bytes),
    }.items():
        alone = seconds(lambda target=target, source=source: move(target, source, 0))
        products = max(1, round(2 * alone / once))
        computing = seconds(lambda n=products: [torch.mm(matrix, matrix) for _ in range(n)])
        both = seconds(lambda t=target, s=source, n=products: move(t, s, n))
        share = (computing + alone - both) / alone
        yield {
            way: {
                "copy_seconds": alone,
                "computing_seconds": computing,
                "both_seconds": both,
                "hidden_share": share,
            },
            "bars": [
                bar(
                    f"copy hidden behind computing, {way.replace('_', ' ')}",
                    met=share >= HIDDEN_BAR,
                    got=f"{share:.0%}",
                    wanted=f"at least {HIDDEN_BAR:.0%}",
                )
            ],
        }


def offloading(case: Case, kind: str, place: str, costs: Path) -> Iterator[Row]:
    """A step at half its peak, by recomputing alone and with a place for what is offloaded."""
    device = Device(kind)  # type: ignore[arg-type]
    workload = models.build(case, device.place)
    plans = {
        "recomputing": memfit.plan(workload, BUDGET, costs=costs),
        "offloading": memfit.plan(workload, BUDGET, costs=costs, offload=place),
    }
    yield {"kind": "steps", "plans": {way: peaks.of_plan(plan) for way, plan in plans.items()}}
    workload, eager = steps.ordinary(workload)
    ways = {
        way: Fitted(workload, plan, loss_reduction=plan.loss_reduction)
        for way, plan in plans.items()
        if plan.fits
    }
    bits = steps.Bits(workload, eager)
    rows = {
        way: peaks.of_bits(bits, bits.of(fitted), exact=plans[way].as_dict()["promise"] == "exact")
        for way, fitted in ways.items()
    }
    del bits  # it holds three times the parameters
    for way, fitted in ways.items():
        compared = rows[way]
        found = steps.peaks(fitted.step, workload, device)
        report = fitted.report()
        bars = [
            *compared.pop("bars", []),
            peaks.within(found.allocated_bytes, plans[way].budget_bytes),
        ]
        yield {
            way: {
                **compared,
                **steps.as_row(found),
                "offloaded_bytes_written": report.offloaded_bytes_written,
                "divergence": report.divergence,
            },
            "bars": [{**one, "what": f"{way}: {one['what']}"} for one in bars],
        }
    before = {"unplanned": eager.place_state}
    before |= {way: fitted.place_state for way, fitted in ways.items()}
    yield {
        "times": {
            way: asdict(times)
            for way, times in timing.in_turn(
                {"unplanned": eager.step, **{way: fitted.step for way, fitted in ways.items()}},
                device,
                before=before,
                seconds=_TIMING_SECONDS,
            ).items()
        }
    }
    for fitted in ways.values():
        fitted.close()


def page(document: Document) -> list[str]:
    """Rates, then steps."""
    rows: dict[str, Row] = document["rows"]
    parts = []
    rates = [
        [f"{source}, {what.replace('_', ' ')}", page_parts.rate(rate)]
        for source, row in rows.items()
        for what, rate in row.get("transfers", {}).items()
        if rate is not None and "disk" not in what
    ]
    pin = rows.get("pinning", {}).get("pin_bytes_per_second")
    rates += [["pinning, the pinning itself", page_parts.rate(pin)]] if pin else []
    if rates:
        parts += page_parts.table(("copies", "rate"), rates)
    overlap = [
        [
            way.replace("_", " "),
            *(
                page_parts.seconds(found[f"{what}_seconds"])
                for what in ("copy", "computing", "both")
            ),
            f"{found['hidden_share']:.0%}",
        ]
        for way, found in rows.get("hidden", {}).items()
        if isinstance(found, dict)
    ]
    if overlap:
        parts += page_parts.table(("1 GiB", "copy", "computing", "both", "hidden"), overlap)
    cells = [
        [name, way, *_cells(row, way)]
        for name, row in rows.items()
        if row.get("kind") == "steps"
        for way in WAYS
    ]
    return [
        *parts,
        (
            "Steps at half the predicted peak. *Wall* is the ratio by the wall, with the device "
            "synchronised: copies may go on after the stream that computes."
        ),
        *page_parts.table(
            (
                "model",
                "way",
                "smallest budget",
                "peak",
                "bits",
                "unplanned",
                "step",
                "ratio",
                "wall",
            ),
            cells,
        ),
    ]


def _cells(row: Row, way: str) -> list[str]:
    plan, found = row["plans"][way], row.get(way, {})
    smallest = page_parts.gib(plan["minimum_budget_bytes"])
    if plan["verdict"] != "fits":
        return [smallest, "none fits", *[""] * 5]
    times = row.get("times") or {}
    wall = f"{times[way]['wall_ratio']:.3f}" if way in times else ""
    return [
        smallest,
        page_parts.gib(found.get("peak_allocated_bytes")),
        page_parts.failed(row) or page_parts.bits(found),
        *page_parts.times(row, "unplanned", way),
        wall,
    ]

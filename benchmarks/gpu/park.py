"""Parking on a device beside plain moves of a model, and a pool of models under one budget.

Responsible for: seconds and bytes a second of parking and waking, to the host's memory and to a
disk; whether addresses stay, bits are equal and the device's memory is really returned; and a pool
that is asked for models in turn. Not responsible for failures (the tests).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import apart, page_parts
from benchmarks.gpu.device import Device
from benchmarks.gpu.piece import Order, collect
from benchmarks.gpu.results import Document, Results, Row, bar
from torch import Tensor, nn

import memfit

ROUNDS = 5
RETURNED_BAR = 0.01
"""Most that the memory returned may be off the parameters' bytes."""

WIDTH, LAYERS = 4096, 32
SMALL_WIDTH, SMALL_LAYERS = 512, 4
POOLED = 4
USES = (0, 1, 2, 3, 0, 0, 2, 3, 1, 1, 3, 2, 0, 1)
"""Which model is asked for, in turn."""


def run(order: Order, results: Results) -> None:
    """Measure all."""
    measures: dict[str, tuple[Callable[..., Iterator[Row]], tuple[Any, ...]]] = {
        "moved by .to": (moved, ()),
        "parked, host": (parked, (order.scratch, None)),
        "parked, disk": (parked, (order.scratch, 0)),
        "pool": (pooled, (order.scratch,)),
    }
    if order.kind == "cpu":
        for name in ("moved by .to", "parked, host"):
            measures.pop(name)
            results.leave_out(name, "the model is in the host's memory already")
    for name, (measure, arguments) in measures.items():
        if results.fits(name, 30):
            left = results.seconds_left
            found = apart.rows(measure, order.kind, order.is_small, *arguments, seconds=left)
            collect(results, name, found)


def build(seed: int, device: Device, *, small: bool) -> nn.Module:
    """A model that is nothing but weights."""
    torch.manual_seed(seed)
    width, layers = (SMALL_WIDTH, SMALL_LAYERS) if small else (WIDTH, LAYERS)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(device.place)


def inputs(device: Device, *, small: bool) -> Tensor:
    """What the models are called with."""
    return torch.ones(64, SMALL_WIDTH if small else WIDTH, device=device.place)


def output(model: nn.Module, given: Tensor) -> Tensor:
    """What a call returns."""
    with torch.no_grad():
        returned: Tensor = model(given)
        return returned


def bytes_of(model: nn.Module) -> int:
    """Bytes of the parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def timed(call: Callable[[], Any], device: Device) -> float:
    """Seconds by the wall, the device synchronised on both sides."""
    device.synchronize()
    began = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - began


def moved(kind: str, small: bool) -> Iterator[Row]:  # noqa: FBT001 - handed to another process
    """``.to("cpu")`` and back."""
    device = Device(kind)  # type: ignore[arg-type]
    model, given = build(0, device, small=small), inputs(device, small=small)
    expected = output(model, given)
    out, back = [], []
    for _ in range(ROUNDS):
        out.append(timed(lambda: model.to("cpu"), device))
        device.give_back_free()
        back.append(timed(lambda: model.to(device.place), device))
    same = torch.equal(output(model, given), expected)
    yield {**_rates(bytes_of(model), out, back), "is_bitwise": same}


def parked(kind: str, small: bool, spill: Path, host: int | None) -> Iterator[Row]:  # noqa: FBT001
    """``memfit.park`` and ``wake``."""
    device = Device(kind)  # type: ignore[arg-type]
    model, given = build(0, device, small=small), inputs(device, small=small)
    expected = output(model, given)
    bits = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    size = bytes_of(model)
    held = []
    asleep = memfit.park(model, spill, host=host) if device.is_gpu else memfit.park(model, spill)
    asleep.wake()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    out, back, stay = [], [], True
    for _ in range(ROUNDS):
        for parameter in model.parameters():
            parameter.data.mul_(1.0)  # it was written to, so that it has to be kept anew
        device.synchronize()
        device.give_back_free()
        awake, _ = device.memory()
        out.append(timed(asleep.park, device))
        held.append(device.memory()[0] - awake)
        back.append(timed(asleep.wake, device))
        stay = stay and addresses == [parameter.data_ptr() for parameter in model.parameters()]
    same = torch.equal(output(model, given), expected) and all(
        torch.equal(before, parameter.detach().cpu())
        for before, parameter in zip(bits, model.parameters(), strict=True)
    )
    found = {**_rates(size, out, back), "is_bitwise": same, "addresses_stay": stay}
    bars = [
        bar("bits of a woken model", met=same, got="same" if same else "other", wanted="same"),
        bar("addresses of it", met=stay, got="same" if stay else "other", wanted="same"),
    ]
    if device.is_gpu:
        returned = statistics.median(held)
        found["returned_bytes"] = returned
        off = returned / size - 1
        bars.append(
            bar(
                "memory returned to the device",
                met=abs(off) <= RETURNED_BAR,
                got=f"{off:+.2%} off the parameters' bytes",
                wanted=f"within {RETURNED_BAR:.0%}",
            )
        )
    yield {**found, "bars": bars}


def _rates(size: int, out: list[float], back: list[float]) -> Row:
    """Times and rates of both ways; the first time is apart, since memory is pinned then."""
    return {
        "bytes": size,
        "first_out_seconds": out[0],
        "out_seconds": statistics.median(out[1:]),
        "back_seconds": statistics.median(back[1:]),
        "out_bytes_per_second": size / statistics.median(out[1:]),
        "back_bytes_per_second": size / statistics.median(back[1:]),
    }


def pooled(kind: str, small: bool, spill: Path) -> Iterator[Row]:  # noqa: FBT001
    """A pool that has room for about half of its models."""
    device = Device(kind)  # type: ignore[arg-type]
    given = inputs(device, small=small)
    expected = [output(build(seed, device, small=small), given) for seed in range(POOLED)]
    size = bytes_of(build(0, device, small=small))
    budget = round(2.5 * size)
    pool = memfit.Pool(budget, spill, device="cuda" if device.is_gpu else "host")
    for seed in range(POOLED):
        pool.add(str(seed), build(seed, device, small=small), example=given)
        device.give_back_free()
    hits, misses, same, most = [], [], True, 0
    resting = device.memory()[0] + pool.counted_bytes
    for index in USES:
        was_awake = str(index) in pool.awake
        began = time.perf_counter()
        with pool.use(str(index)) as model:
            (hits if was_awake else misses).append(time.perf_counter() - began)
            same = same and torch.equal(output(model, given), expected[index])
        most = max(most, resting - device.memory()[0])
    done = pool.statistics
    bars = [
        bar("bits of a pool's models", met=same, got="same" if same else "other", wanted="same"),
        bar(
            "bytes that a pool counts",
            met=done.peak_bytes <= budget,
            got=f"{done.peak_bytes:,}",
            wanted=f"at most {budget:,}",
        ),
    ]
    if device.is_gpu:
        bars.append(
            bar(
                "bytes that a pool takes of the device",
                met=most <= budget,
                got=f"{most:,}",
                wanted=f"at most {budget:,}",
            )
        )
    yield {
        "bytes": size,
        "budget_bytes": budget,
        "models": POOLED,
        "uses": done.uses,
        "hits": done.hits,
        "wakes": done.wakes,
        "peak_bytes": done.peak_bytes,
        "taken_bytes": most,
        "hit_seconds": statistics.median(hits) if hits else None,
        "miss_seconds": statistics.median(misses) if misses else None,
        "bars": bars,
    }


def page(document: Document) -> list[str]:
    """Moves, then the pool."""
    rows: dict[str, Row] = document["rows"]
    cells = [
        [
            name,
            page_parts.gib(row.get("bytes")),
            page_parts.seconds(row.get("first_out_seconds")),
            page_parts.seconds(row.get("out_seconds")),
            page_parts.rate(row.get("out_bytes_per_second")),
            page_parts.seconds(row.get("back_seconds")),
            page_parts.rate(row.get("back_bytes_per_second")),
            page_parts.failed(row) or page_parts.gib(row.get("returned_bytes")),
        ]
        for name, row in rows.items()
        if name != "pool"
    ]
    head = ("model", "bytes", "first out", "out", "rate", "back", "rate", "returned")
    parts = [
        "Medians after the first time, which pins memory; the model is written to before each.",
        *page_parts.table(head, cells),
    ]
    pool = rows.get("pool")
    if pool and "uses" in pool:
        parts.append(
            f"A pool of {pool['models']} models of {page_parts.gib(pool['bytes'])} within "
            f"{page_parts.gib(pool['budget_bytes'])}: {pool['uses']} uses, {pool['hits']} hits; "
            f"a hit took {page_parts.seconds(pool['hit_seconds'])}, a miss "
            f"{page_parts.seconds(pool['miss_seconds'])}; at most "
            f"{page_parts.gib(pool['peak_bytes'])} counted."
        )
    return parts

"""The simulated allocator against the real one: runs recorded here, replayed event by event.

Responsible for recording real steps from the first allocation on, and for holding what `memfit
replay` and `memfit explain` make of the recording against torch's own statistics, byte for byte.
Not responsible for the simulator (the engine's tests drive it beside the real one without a GPU).

On a CPU nothing is recorded; a recording that is kept with the engine's tests is read instead.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import apart, models, page_parts, steps
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import Case
from benchmarks.gpu.piece import Order, collect
from benchmarks.gpu.results import Document, Results, Row, bar
from benchmarks.record import ROOT, memfit_json

import memfit
from memfit.apply.allocator_settings import EXPANDABLE, set_up
from memfit.run.fitted import Fitted

KEPT = ROOT / "crates/memfit-engine/tests/data/snapshots/streams.pickle"
STEPS = 3
_SECONDS = 30.0

MODELS = ("gpt2", "resnet50", "lstm", "bert", "unet", "moe")
KINDS = ("allocations", "segments", "final_segments")


def run(order: Order, results: Results) -> None:
    """Record and replay all that there is time for."""
    if order.kind == "cpu":
        results.leave_out("recordings", "a CPU has no such allocator")
        results.put("kept recording", {**compared(KEPT), "is_kept": True})
        return
    names = [name for name in (order.models or MODELS) if name in models.MODELS]
    for case in models.cases(names, small=order.is_small):
        ways = ["eager", "planned"] if case.precision == "fp32" else ["eager"]
        for way in [*ways, *(["expandable"] if case.model in {"gpt2", "moe"} else [])]:
            name = f"{case.name}, {way}"
            if results.fits(name, _SECONDS):
                file = order.scratch / f"{case.model}-{case.precision}-{way}.pickle"
                found = apart.rows(recorded, case, way, file, seconds=results.seconds_left)
                collect(results, name, found)
                file.unlink(missing_ok=True)


def recorded(case: Case, way: str, file: Path) -> Iterator[Row]:
    """Record steps from the first allocation on, and replay them."""
    device = Device("cuda")
    if way == "expandable":
        set_up(EXPANDABLE)
    plan = _plan_with_settings(case, device) if way == "planned" else None
    device.start_recording()
    workload = models.build(case, device.place)
    if plan is not None:
        fitted = Fitted(workload, plan, loss_reduction=plan.loss_reduction)
    else:
        _, fitted = steps.ordinary(workload)
    for _ in range(STEPS):
        fitted.step()
    device.synchronize()
    truth = statistics()
    with file.open("wb") as target:
        pickle.dump(device.stop_recording(), target)
    yield {"truth": truth}
    found = compared(file)
    yield {**found, "bars": [*found["bars"], *bars_of_bytes(found, truth)]}


def _plan_with_settings(case: Case, device: Device) -> memfit.Plan:
    """A plan, its allocator settings applied: a recording has one setting from its begin on."""
    workload = models.build(case, device.place)
    plan = memfit.plan(workload, "60%")
    if not plan.fits:
        plan = memfit.plan(workload, plan.minimum_budget_bytes)
    for action in plan.actions:
        if action.kind == "allocator_settings":
            set_up(action.settings)
    del workload
    device.give_back_free()
    return plan


def statistics() -> dict[str, int]:
    """What torch's allocator counts of itself."""
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
    }


def compared(file: Path) -> Row:
    """What `memfit replay` and `memfit explain` say of a recording.

    Args:
        file: The recording.

    Returns:
        Events and matches of the first device with events, the replayed peak under the recorded
        settings, the explained peaks, problems found in the file, and bars.
    """
    replayed = memfit_json("replay", str(file))["devices"][0]
    explained = memfit_json("explain", str(file))
    device = next(one for one in explained["devices"] if one["index"] == replayed["index"])
    own = next((one for one in replayed["replays"] if one["is_recorded"]), None)
    found: Row = {
        "events": replayed["events"],
        **{kind: replayed[kind] for kind in KINDS},
        "replayed_peak_reserved_bytes": own and own["peak_reserved_bytes"],
        "explained": {
            "peak_allocated_bytes": device["peak"]["allocated_bytes"],
            "peak_reserved_bytes": device["peak"]["reserved_bytes"],
            "allocated_bytes": device["last"]["allocated_bytes"],
            "reserved_bytes": device["last"]["reserved_bytes"],
        },
        "uncertain_bytes": device["uncertain_bytes"],
        "problems": explained["problems"],
    }
    found["bars"] = [
        bar(
            f"{kind.replace('_', ' ')} predicted",
            met=found[kind]["matched"] == found[kind]["total"],
            got=f"{found[kind]['matched']:,} of {found[kind]['total']:,}",
            wanted="all",
        )
        for kind in KINDS
    ]
    found["bars"].append(
        bar(
            "contradictions found in the recording",
            met=not found["problems"],
            got=str(len(found["problems"])),
            wanted="none",
        )
    )
    return found


def bars_of_bytes(found: Row, truth: dict[str, int]) -> list[dict[str, Any]]:
    """The explained and the replayed bytes against torch's own."""
    pairs = {f"explained {name}": (found["explained"][name], truth[name]) for name in truth}
    pairs["replayed peak_reserved_bytes"] = (
        found["replayed_peak_reserved_bytes"],
        truth["peak_reserved_bytes"],
    )
    return [
        bar(name.replace("_", " "), met=got == wanted, got=f"{got:,}", wanted=f"{wanted:,}")
        for name, (got, wanted) in pairs.items()
        if got is not None
    ]


def page(document: Document) -> list[str]:
    """One line a recording."""
    cells = [
        [
            name,
            f"{row['events']:,}" if "events" in row else "",
            *(
                f"{row[kind]['matched']:,} of {row[kind]['total']:,}" if kind in row else ""
                for kind in KINDS
            ),
            _bytes(row, "peak_allocated_bytes"),
            page_parts.failed(row) or _bytes(row, "peak_reserved_bytes"),
        ]
        for name, row in document["rows"].items()
    ]
    return [
        "Predicted event by event from the requests alone. Peaks as explained, less torch's own.",
        *page_parts.table(
            ("recording", "events", "addresses", "segments", "at the end", "allocated", "reserved"),
            cells,
        ),
    ]


def _bytes(row: Row, name: str) -> str:
    if "explained" not in row or "truth" not in row:
        return ""
    return f"{row['explained'][name] - row['truth'][name]:+,} B"

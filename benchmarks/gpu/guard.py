"""The guard on a device: what exceeds the budget is refused, and a neighbour goes on unharmed.

Responsible for: where exactly requests are refused, what is so afterwards, a second process on the
same device that computes meanwhile, and what a guard costs a step. Not responsible for recovery
(the tests).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch
from benchmarks.gpu import apart, models, page_parts, steps, timing
from benchmarks.gpu.device import Device
from benchmarks.gpu.piece import Order, collect
from benchmarks.gpu.results import Document, Results, Row, bar
from benchmarks.record import ROOT

import memfit

ROOM_BYTES, SMALL_ROOM_BYTES = 2 << 30, 64 << 20
BLOCKS = 16
"""The room is asked for in so many pieces, and half as many again."""
COST_BAR = 0.02
_NEIGHBOUR_SECONDS = 60.0
_TIMING_SECONDS = 10.0


def run(order: Order, results: Results) -> None:
    """Measure both."""
    found = apart.rows(refusal, order.kind, order.is_small, seconds=results.seconds_left)
    collect(results, "refusal", found)
    if results.fits("cost", 30):
        found = apart.rows(cost, order.kind, order.is_small, seconds=results.seconds_left)
        collect(results, "cost", found)


class Neighbour:
    """The second process."""

    def __init__(self, kind: str, size_bytes: int) -> None:
        """Start it and wait until it has its memory.

        Raises:
            RuntimeError: It did not come up.
        """
        command = [sys.executable, "-m", "benchmarks.gpu.neighbour", kind, str(size_bytes)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            message = f"the neighbour ended with exit code {self._process.wait()}"
            raise RuntimeError(message)

    def stop(self) -> Row:
        """End it; what it says, or that it died."""
        try:
            said, _ = self._process.communicate(timeout=_NEIGHBOUR_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return {"rounds": 0, "wrong": 0, "exit_code": None}
        lines = said.strip().splitlines()
        found: Row = json.loads(lines[-1]) if lines else {"rounds": 0, "wrong": 0}
        return {**found, "exit_code": self._process.returncode}


def refusal(kind: str, small: bool) -> Iterator[Row]:  # noqa: FBT001 - handed to another process
    """Ask for more than a guard allows, piece by piece, beside a neighbour."""
    device = Device(kind)  # type: ignore[arg-type]
    room_bytes = SMALL_ROOM_BYTES if small else ROOM_BYTES
    block_bytes = room_bytes // BLOCKS
    torch.ones(1, device=device.place).add_(1)  # what a context takes is taken before
    neighbour = Neighbour(kind, room_bytes // 2)
    try:
        share = torch.cuda.get_per_process_memory_fraction() if device.is_gpu else 1.0
        in_use = memfit.guard("1TiB", device=kind).in_use_bytes
        blocks: list[torch.Tensor] = []
        error: memfit.OutOfBudget | None = None
        with contextlib.suppress(memfit.OutOfBudget):
            try:
                with memfit.guard(in_use + room_bytes, device=kind):
                    while len(blocks) < BLOCKS + BLOCKS // 2:
                        block = torch.empty(block_bytes, dtype=torch.uint8, device=device.place)
                        blocks.append(block)
            except memfit.OutOfBudget as refused:
                error = refused
        got_bytes = sum(block.nbytes for block in blocks)
        # Outside the guard the same request is granted, and the device computes.
        again = torch.ones(block_bytes // 4, device=device.place)
        goes_on = float(again[:1000].sum()) == 1000.0
        restored = not device.is_gpu or torch.cuda.get_per_process_memory_fraction() == share
    finally:
        said = neighbour.stop()
    unharmed = said["exit_code"] == 0 and said["wrong"] == 0 and said["rounds"] > 0
    least = room_bytes - 2 * block_bytes
    yield {
        "room_bytes": room_bytes,
        "block_bytes": block_bytes,
        "got_bytes": got_bytes,
        "error": None if error is None else str(error).partition("\n")[0],
        "error_in_use_bytes": None if error is None else error.in_use_bytes,
        "error_budget_bytes": None if error is None else error.budget_bytes,
        "neighbour": said,
        "bars": [
            bar(
                "a request above the budget",
                met=error is not None,
                got="OutOfBudget" if error else "granted",
                wanted="OutOfBudget",
            ),
            bar(
                "bytes granted inside the budget",
                met=least <= got_bytes <= room_bytes,
                got=f"{got_bytes:,}",
                wanted=f"{least:,} to {room_bytes:,}",
            ),
            bar("torch's share afterwards", met=restored, got=str(restored), wanted="restored"),
            bar("a request afterwards", met=goes_on, got=str(goes_on), wanted="granted"),
            bar(
                "the neighbour",
                met=unharmed,
                got=f"{said['rounds']} rounds, {said['wrong']} wrong, exit {said['exit_code']}",
                wanted="unharmed",
            ),
        ],
    }


def cost(kind: str, small: bool) -> Iterator[Row]:  # noqa: FBT001 - handed to another process
    """Steps inside a guard beside the same without."""
    device = Device(kind)  # type: ignore[arg-type]
    workload = models.build(models.Case("gpt2", "bf16", small), device.place)
    workload, eager = steps.ordinary(workload)
    eager.step()
    budget = device.memory()[1]

    def guarded() -> None:
        with memfit.guard(budget, device=kind):
            eager.step()

    found = timing.in_turn(
        {"unplanned": eager.step, "planned": guarded}, device, seconds=_TIMING_SECONDS
    )
    times = {name: asdict(measured) for name, measured in found.items()}
    row: Row = {"times": times}
    if device.is_gpu:  # on a CPU what is allocated is counted, which benchmarks/guard.py measures
        over = times["planned"]["wall_ratio"] - times["planned"]["spread"] / 2 - 1
        row["bars"] = [
            bar(
                "what a guard adds to a step",
                met=over <= COST_BAR,
                got=f"{over:+.1%} less half the spread",
                wanted=f"at most {COST_BAR:.0%}",
            )
        ]
    yield row


def page(document: Document) -> list[str]:
    """What was asked, granted and refused; what it costs."""
    rows: dict[str, Row] = document["rows"]
    parts = []
    found = rows.get("refusal", {})
    if "room_bytes" in found:
        said = found["neighbour"]
        parts.append(
            f"Asked for {page_parts.gib(found['block_bytes'])} at a time with "
            f"{page_parts.gib(found['room_bytes'])} left of the budget: "
            f"{page_parts.gib(found['got_bytes'])} were granted, then: "
            f"*{found['error'] or 'nothing was refused'}*. A second process on the device computed "
            f"{said['rounds']} rounds meanwhile, {said['wrong']} of them wrong."
        )
    if "times" in rows.get("cost", {}):
        cells = [["gpt2 bf16", *page_parts.times(rows["cost"], "unplanned", "planned")]]
        parts += page_parts.table(("step", "without", "guarded", "ratio"), cells)
    return parts

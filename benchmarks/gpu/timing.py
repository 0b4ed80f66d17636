"""Times of ways to run the same step, in turn: by CUDA events on a GPU, by the wall on a CPU.

Responsible for turns whose order alternates, for as many steps a turn as make a time worth reading,
and for medians of the rounds' ratios. Not responsible for what runs.

Events tell the GPU's time between two points of the stream that computes. Copies on streams of
their own may go on after it, so the wall time, with the device synchronised on both sides, stands
beside it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.device import Device, clock

ROUNDS = 7
_TURN_SECONDS = 0.1
_MOST_STEPS = 20
"""Steps of a turn: as many as take a tenth of a second, so that its ends count little."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step run one way.

    Attributes:
        seconds: Median, by the device's clock.
        wall_seconds: Median by the wall.
        ratio: Median over the rounds of this way's seconds over the first way's.
        wall_ratio: The same by the wall.
        spread: Between the outer quarters of those ratios.
        rounds: How many there were.
    """

    seconds: float
    wall_seconds: float
    ratio: float
    wall_ratio: float
    spread: float
    rounds: int


def one_turn(step: Callable[[], Any], device: Device, steps: int) -> tuple[float, float]:
    """Seconds of a step, by the device's clock and by the wall, over some steps.

    Args:
        step: What runs.
        device: Where.
        steps: How often.
    """
    device.synchronize()
    began = time.perf_counter()
    stop = clock(device)()
    for _ in range(steps):
        step()
    seconds = stop()
    device.synchronize()
    return seconds / steps, (time.perf_counter() - began) / steps


def in_turn(
    ways: Mapping[str, Callable[[], Any]],
    device: Device,
    *,
    before: Mapping[str, Callable[[], Any]] | None = None,
    rounds: int = ROUNDS,
    seconds: float = math.inf,
) -> dict[str, Times]:
    """Time ways to run a step, in turn; each is run once before, which does not count.

    Args:
        ways: The ways by name; ratios are to the first.
        device: Where they run.
        before: What undoes the traces of the other ways before each, and does not count.
        rounds: How often each has its turn.
        seconds: No round begins after so many seconds; there are two at least.

    Returns:
        The times by name.
    """
    undo = before or {}
    began = time.perf_counter()
    steps = {}
    for name, step in ways.items():
        undo.get(name, _nothing)()
        step()
        _, once = one_turn(step, device, 1)
        steps[name] = max(1, min(_MOST_STEPS, math.ceil(_TURN_SECONDS / max(once, 1e-6))))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds):
        if turn > 1 and time.perf_counter() - began > seconds:
            break
        for name in ways if turn % 2 == 0 else reversed(list(ways)):
            undo.get(name, _nothing)()
            if undo:
                ways[name]()  # what was undone has to settle
            found[name].append(one_turn(ways[name], device, steps[name]))
    first = found[next(iter(ways))]
    return {name: _times(first, turns) for name, turns in found.items()}


def _times(first: list[tuple[float, float]], turns: list[tuple[float, float]]) -> Times:
    by_device, by_wall = (
        [mine[which] / theirs[which] for theirs, mine in zip(first, turns, strict=True)]
        for which in (0, 1)
    )
    quarters = statistics.quantiles(by_device, n=4) if len(by_device) > 1 else [0.0, 0.0, 0.0]
    return Times(
        seconds=statistics.median(seconds for seconds, _ in turns),
        wall_seconds=statistics.median(wall for _, wall in turns),
        ratio=statistics.median(by_device),
        wall_ratio=statistics.median(by_wall),
        spread=quarters[2] - quarters[0],
        rounds=len(turns),
    )


def _nothing() -> None:
    """Nothing has to be undone."""

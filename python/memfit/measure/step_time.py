"""Step times that two ways of running the same step can be compared by.

Responsible for pairing: machines are shared and speed drifts, so both ways run in turn, and the
medians are compared. CPU time of the process, not wall time, is what is counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def cpu_seconds(call: Callable[[], Any]) -> float:
    """CPU seconds, over all threads of the process, that one call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start


def _nothing() -> None:
    """Nothing has to be undone."""


def paired_cpu_seconds(
    first: Callable[[], Any],
    second: Callable[[], Any],
    pairs: int,
    before: tuple[Callable[[], Any], Callable[[], Any]] = (_nothing, _nothing),
) -> tuple[float, float]:
    """Median CPU seconds of two calls, run in turn; the order alternates from pair to pair.

    Args:
        first: One call, warmed up.
        second: The other, warmed up.
        pairs: How often each runs; at least 1.
        before: What undoes the traces of the other call before each, and does not count.

    Returns:
        The medians, in the order of the arguments.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        for which in order:
            before[which]()
            times[which].append(cpu_seconds((first, second)[which]))
    return statistics.median(times[0]), statistics.median(times[1])

"""Step times that ways of running the same step can be compared by.

Responsible for turns: machines are shared and speed drifts, so all ways run in turn, and the
medians are compared. CPU time of the process, not wall time, is what is counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
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
    first_seconds, second_seconds = cpu_seconds_in_turn((first, second), pairs, before)
    return first_seconds, second_seconds


def cpu_seconds_in_turn(
    calls: Sequence[Callable[[], Any]], rounds: int, before: Sequence[Callable[[], Any]]
) -> list[float]:
    """Median CPU seconds of calls, run in turn; the order is reversed from round to round.

    Args:
        calls: The calls, warmed up.
        rounds: How often each runs; at least 1.
        before: For each, what undoes the traces of the others, and does not count.

    Returns:
        The medians, in the order of the calls.
    """
    times: list[list[float]] = [[] for _ in calls]
    order = range(len(calls))
    for turn in range(rounds):
        for which in order if turn % 2 == 0 else reversed(order):
            before[which]()
            times[which].append(cpu_seconds(calls[which]))
    return [statistics.median(seconds) for seconds in times]

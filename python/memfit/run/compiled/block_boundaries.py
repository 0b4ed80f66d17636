"""Decisions for tight budgets: a chain of blocks, of which few boundaries are kept.

Responsible for finding where a forward graph is narrow, and for the decisions that follow: of all
that forward makes, only what crosses every n-th narrow place is kept; backward computes a block
from the last kept boundary, lets the insides of the blocks on the way go again, and computes each
block's own insides when its backward comes. So a block runs up to twice more, and never are two
blocks' insides there at once. Not responsible for which of them is best
(:mod:`memfit.run.compiled.search`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from memfit.run.compiled.joint import Joint
from memfit.run.compiled.schedule import Decision

_WIDTHS = (1.01, 2.0)
"""How much wider than the narrowest place a boundary may be."""

_GRAINS = (1, 2, 4)
"""Narrow places to a block."""

_STRIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Blocks to a kept boundary."""


def decisions(joint: Joint) -> Iterator[Decision]:
    """Decisions from kept boundaries, from coarse to fine, each once.

    Args:
        joint: The graph.

    Yields:
        Decisions; what they take is not looked at.
    """
    seen: set[tuple[tuple[int, ...], int]] = set()
    droppable = joint.droppable()
    for width in _WIDTHS:
        places = narrow_places(joint, width)
        for grain in _GRAINS:
            cuts = tuple(places[grain - 1 :: grain])
            for stride in _STRIDES:
                if not cuts or stride > len(cuts) or (cuts, stride) in seen:
                    continue
                seen.add((cuts, stride))
                yield _decision(joint, droppable, cuts, stride)


def narrow_places(joint: Joint, width: float) -> list[int]:
    """Positions in forward which few bytes cross.

    Args:
        joint: The graph.
        width: Most bytes that cross, as a multiple of the fewest.

    Returns:
        Op indices; a position lies just before its op. Of adjacent ones the first.
    """
    end = joint.forward_end
    change = [0] * (end + 1)
    for storage in joint.storages:
        if 0 <= storage.op < storage.last_forward < end:
            change[storage.op + 1] += storage.bytes
            change[storage.last_forward + 1] -= storage.bytes
    crossing: list[int] = []
    alive = 0
    for step in change[:end]:
        alive += step
        crossing.append(alive)
    first, last = end // 20, end - end // 20
    inner = [b for b in crossing[first:last] if b > 0]
    if not inner:
        return []
    limit = min(_local_minima(crossing[first:last]) or inner) * width
    places = [p for p in range(1, end) if 0 < crossing[p] <= limit]
    return [p for p, before in zip(places, [-1, *places], strict=False) if p != before + 1]


def _local_minima(values: list[int]) -> list[int]:
    """Values lower than what comes before and not higher than what follows, scalars left out."""
    largest = max(values, default=0)
    return [
        b
        for a, b, c in zip(values, values[1:], values[2:], strict=False)
        if a > b <= c and b * 1000 > largest
    ]


def _decision(joint: Joint, droppable: list[int], cuts: tuple[int, ...], stride: int) -> Decision:
    kept = cuts[stride - 1 :: stride]
    dropped: set[int] = set()
    homes: dict[int, int] = {}
    for index in droppable:
        storage = joint.storages[index]
        if _crosses(storage.op, storage.last_forward, kept):
            continue
        dropped.add(index)
        following = bisect_right(cuts, storage.op)
        if following < len(cuts) and cuts[following] > storage.last_forward:
            homes[index] = cuts[following]
    return Decision(frozenset(dropped), homes)


def _crosses(made: int, last: int, cuts: tuple[int, ...]) -> bool:
    """Whether a cut lies after the op that makes something and not after the last that reads it."""
    following = bisect_right(cuts, made)
    return following < len(cuts) and cuts[following] <= last

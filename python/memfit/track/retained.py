"""What a loop keeps from its iterations.

Responsible for telling growth from what only changes: a loop grows where blocks of its earlier
iterations are still live, some of every stretch of them. Larger batches grow nothing. Not
responsible for who holds the blocks (:mod:`memfit.track.growth`).
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from dataclasses import dataclass

from memfit import _native
from memfit.tensors.storage import exchanged

GROUPS = 4
"""Stretches of iterations that must each have left something behind."""

_LATEST = 2
"""Iterations whose blocks may be live because the loop goes on with them."""

IN_FILES: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()
"""What stands for a block whose contents were written to a file: its bytes, and the event by which
it came."""

_MARKS = 512
_LEAST_BYTES = 128


@dataclass(slots=True, frozen=True)
class Growth:
    """What a loop has kept.

    Attributes:
        bytes: Bytes of blocks that its earlier iterations have left.
        iterations: How many those are.
        blocks: Those that have an address: address and bytes.
        is_longer: Whether it is one block that takes the place of a shorter one again and again.
    """

    bytes: int
    iterations: int
    blocks: tuple[tuple[int, int], ...]
    is_longer: bool = False

    @property
    def bytes_per_iteration(self) -> int:
        """How much each keeps, on average."""
        return self.bytes // max(self.iterations, 1)


class Kept:
    """The iterations of one loop, by the events at which they ended."""

    def __init__(self) -> None:
        """Know none yet."""
        self.iterations = 0
        self._marks: list[int] = []
        self._stride = 1
        self._next = 0

    def mark(self) -> None:
        """An iteration has ended."""
        self.iterations += 1
        if self.iterations % self._stride == 0:
            self._marks.append(_native.last_event())
        if len(self._marks) > _MARKS:
            self._marks = self._marks[1::2]
            self._stride *= 2

    def is_due(self) -> bool:
        """Whether it is time to ask: after each of a few iterations, then ever more rarely."""
        if self.iterations < self._next or (self._stride > 1 and self.iterations % self._stride):
            return False
        self._next = self.iterations + max(1, self.iterations // 8)
        return True

    def growth(self) -> Growth | None:
        """What the loop has kept, where it keeps more and more."""
        return growth_between(self._marks[:-_LATEST], self._stride)


def growth_over_time() -> Growth | None:
    """The same of the last half of all events, where nobody knows the iterations."""
    # Without what belongs to models: one that is being built does not grow.
    last = _native.last_event()
    parts = 2 * GROUPS + _LATEST
    marks = [last // 2 + last * part // (2 * parts) for part in range(parts + 1)]
    return growth_between(marks[:-_LATEST], 0, with_models=False)


def growth_between(marks: list[int], stride: int, *, with_models: bool = True) -> Growth | None:
    """What was kept between marks, where every group of intervals has kept something.

    Args:
        marks: Numbers of events, rising.
        stride: Iterations from one mark to the next; 0 where that is not known.
        with_models: Whether blocks of models and optimizers count.
    """
    intervals = len(marks) - 1
    if intervals < GROUPS:
        return None
    first, last = marks[0] + 1, marks[-1]
    blocks = _native.survivors(first, last + 1, with_models=with_models)
    if with_models:
        moved = exchanged()
        places = {address for address, _, _ in moved}
        blocks = [it for it in blocks if it[0] not in places]
        moved += [(0, size, event) for size, event in IN_FILES.values()]
        blocks += [it for it in moved if first <= it[2] <= last]
    groups = [0] * GROUPS
    for _, size, event in blocks:
        interval = bisect_right(marks, event - 1) - 1
        groups[interval * GROUPS // intervals] += size
    kept_bytes = sum(groups)
    if min(groups) == 0 or min(groups) * GROUPS * GROUPS < kept_bytes:
        return None
    iterations = intervals * stride
    if kept_bytes < _LEAST_BYTES * max(iterations, 1):
        return None
    here = tuple((address, size) for address, size, _ in blocks if address)
    return Growth(kept_bytes, iterations, here)

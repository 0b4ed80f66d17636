"""Steps of sizes that were not recorded, foreseen from two that were.

Responsible for which recordings are two sizes of one step, and for rounding sizes up so that a few
plans serve many. Not responsible for the law (the engine's) nor for planning
(:mod:`memfit.run.script.recorded_step`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from memfit.errors import MemfitError
from memfit.run.script.planned_step import Key
from memfit.run.script.recorded_step import RecordedStep

_IN_AN_OCTAVE = 8
"""Sizes that are told apart between a size and its double."""


def kind_of(key: Key) -> Key:
    """What two steps that differ in sizes alone have in common.

    Args:
        key: The key of a pass.
    """
    return (key[0], *((len(shape), dtype) for shape, dtype in key[1:]))


def sizes_of(key: Key) -> list[int]:
    """All sizes of the tensors that a pass is called with.

    Args:
        key: Its key.
    """
    return [size for shape, _ in key[1:] for size in shape]


def covers(key: Key, other: Key) -> bool:
    """Whether a step is at least as large in every size as another of the same kind.

    Args:
        key: The key of the one.
        other: The key of the other.
    """
    if kind_of(key) != kind_of(other):
        return False
    pairs = zip(sizes_of(key), sizes_of(other), strict=True)
    return all(size >= wanted for size, wanted in pairs)


def growth(key: Key, other: Key) -> float:
    """How many times as large the tensor of a step is that has grown most since another.

    Args:
        key: The key of the one.
        other: The key of a larger one of the same kind.
    """
    numbers = ([torch.Size(shape).numel() for shape, _ in it[1:]] for it in (key, other))
    pairs = list(zip(*numbers, strict=True))
    if any(wanted and not size for size, wanted in pairs):
        return math.inf
    return max((wanted / size for size, wanted in pairs if size), default=1.0)


def most_growth(key: Key, other: Key) -> float:
    """How many times as much a step of other sizes takes at most.

    What it takes is taken to grow with the square of each size at most, as attention does, and
    nothing is counted on from sizes that are smaller.

    Args:
        key: The key of a step.
        other: The key of another one of the same kind.
    """
    pairs = zip(key[1:], other[1:], strict=True)
    return max((_grown(shape, wanted) for (shape, _), (wanted, _) in pairs), default=1.0) ** 2


def _grown(shape: Iterable[int], wanted: Iterable[int]) -> float:
    pairs = list(zip(shape, wanted, strict=True))
    if any(more and not size for size, more in pairs):
        return math.inf
    return math.prod(max(more / size, 1.0) for size, more in pairs if size)


class RecordedSizes:
    """What was recorded of one loop, to foresee steps of other sizes."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._recorded: list[tuple[Key, RecordedStep]] = []
        self._foreseen: dict[Key, RecordedStep | None] = {}
        self._is_trusted = True

    def add(self, key: Key, step: RecordedStep) -> None:
        """Know a recorded step.

        Args:
            key: Its key.
            step: The recording.
        """
        self._recorded = [(known, it) for known, it in self._recorded if known != key]
        self._recorded.append((key, step))
        self._foreseen.clear()

    def distrust(self) -> None:
        """A step took more than was foreseen: nothing is foreseen any more."""
        self._is_trusted = False

    def foreseen(self, key: Key) -> tuple[Key, RecordedStep] | None:
        """A step that is at least as large as the one wanted, and by little.

        Args:
            key: The key of the pass that is about to begin.

        Returns:
            Its key and itself; ``None`` where no two recordings tell.
        """
        kind = kind_of(key)
        known = [(at, it) for at, it in reversed(self._recorded) if kind_of(at) == kind]
        if not self._is_trusted or len(known) < 2:  # noqa: PLR2004 - it takes two for a law
            return None
        seen = [sizes_of(at) for at, _ in known]
        varies = [len(set(column)) > 1 for column in zip(*seen, strict=True)]
        wanted = [
            _rounded_up(size) if differs else size
            for size, differs in zip(sizes_of(key), varies, strict=True)
        ]
        rounded = _with_sizes(key, wanted)
        if rounded not in self._foreseen:
            step = _of_two(known, wanted)
            if step is not None and step.made_bytes() > _most_made_bytes(known, rounded):
                step = None  # lines through numbers that follow no law of these sizes
            self._foreseen[rounded] = step
        step = self._foreseen[rounded]
        return None if step is None else (rounded, step)


def _of_two(known: list[tuple[Key, RecordedStep]], wanted: list[int]) -> RecordedStep | None:
    """The step at some sizes by the latest two recordings that tell."""
    for later, (key, step) in enumerate(known):
        for earlier, first in known[later + 1 :]:
            try:
                return step.at_sizes(first, (sizes_of(earlier), sizes_of(key), wanted))
            except MemfitError:
                continue
    return None


def _most_made_bytes(known: list[tuple[Key, RecordedStep]], key: Key) -> float:
    """What a step makes in all at most, by what others of its kind made."""
    return max(step.made_bytes() * most_growth(at, key) for at, step in known)


def _rounded_up(size: int) -> int:
    step = max((1 << max(size.bit_length() - 1, 0)) // _IN_AN_OCTAVE, 1)
    return -(-size // step) * step


def _with_sizes(key: Key, sizes: list[int]) -> Key:
    left = iter(sizes)
    return (key[0], *((tuple(next(left) for _ in shape), dtype) for shape, dtype in key[1:]))

"""What calls of one model add to the memory that is taken, as far as was seen.

Responsible for seeing it, and for the most that another call may add by that. Not responsible for
what follows (:mod:`memfit.run.script.pieces`), nor for calls of which nothing was seen, which fakes
tell of (:mod:`memfit.plan.call_bytes`): they take as long as a step or more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memfit.capture.record.recorder import BACKWARD, FORWARD
from memfit.plan.items_apart import alive_bytes
from memfit.run.script.planned_step import Key
from memfit.run.script.script_recorder import ScriptRecorder
from memfit.run.script.sizes import kind_of, most_growth
from memfit.run.script.step_updates import live_bytes
from memfit.run.script.verdict import Peak


class CallGrowth:
    """Calls of one model that were seen."""

    def __init__(self) -> None:
        """None was."""
        self._steps: dict[Key, int] = {}
        self._forwards: dict[Key, int] = {}
        self._evaluations: dict[Key, int] = {}

    def recorded(self, key: Key, recorder: ScriptRecorder) -> None:
        """Know a step that was recorded whole, on the CPU.

        Args:
            key: Its key.
            recorder: What recorded it.
        """
        self._forwards[key] = _added_bytes(recorder, FORWARD)
        self._steps[key] = _added_bytes(recorder, FORWARD, BACKWARD)

    @contextmanager
    def evaluation(self, key: Key, device: torch.device) -> Iterator[None]:
        """See what a call without gradients adds that runs inside this, whole.

        Args:
            key: Its key.
            device: Where the model is.
        """
        before, peak = live_bytes(device), Peak(device)
        try:
            yield
        finally:
            if most := peak.close():  # else nothing is counted
                # The most of all: one that fails ends early.
                added = max(most - before, self._evaluations.get(key, 0))
                self._evaluations[key] = added

    def of_evaluation(self, key: Key) -> int | None:
        """What a call without gradients adds at most; ``None`` where nothing tells.

        Where none of its kind was seen, as much as a step's forward, which computes the same.

        Args:
            key: Its key.
        """
        seen = _at_most(self._evaluations, key)
        return seen if seen is not None else _at_most(self._forwards, key, in_any_mode=True)

    def of_step(self, key: Key) -> int | None:
        """What a step adds at most while it is recorded, but for gradients of parameters.

        Those may have been there before, or have gone to files.

        Args:
            key: Its key.

        Returns:
            The bytes; ``None`` where nothing tells.
        """
        return _at_most(self._steps, key)


def _added_bytes(recorder: ScriptRecorder, *phases: str) -> int:
    """The most that some phases of a step make, but for what autograd saves."""
    ledger = recorder.ledger
    made = (i for i, producer in enumerate(ledger.producer) if producer is not None)
    alive = alive_bytes(ledger.now, ((ledger.bytes[i], ledger.ranges(i)) for i in made))
    each = zip(recorder.ops, alive, recorder.scratch, strict=False)
    return max((size + inside for op, size, inside in each if op.phase in phases), default=0)


def _at_most(seen: dict[Key, int], key: Key, *, in_any_mode: bool = False) -> int | None:
    """What was seen of a call, or the most that follows from others of its kind."""
    if key in seen:
        return seen[key]
    alike = (at for at in seen if _are_alike(at, key, in_any_mode=in_any_mode))
    grown = [seen[at] * most_growth(at, key) for at in alike]
    return int(min(max(grown), sys.maxsize)) if grown else None


def _are_alike(key: Key, other: Key, *, in_any_mode: bool) -> bool:
    """Whether two calls differ in sizes alone; or in whether the module trains and is trained."""
    (mode, *shapes), (other_mode, *others) = kind_of(key), kind_of(other)
    return shapes == others and (mode == other_mode or (in_any_mode and mode[0] == other_mode[0]))

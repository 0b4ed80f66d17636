"""What the script writes now and then, as the target network that follows another every so often.

Responsible for when a tensor that was written counts as only read again. If it had been read for
long enough before the write, it goes to a file again at once. If not, it has to stay unwritten for
a while, twice as long each time. What is written while a model is only asked, and read in all
passes that follow, as what an agent has seen, goes when such passes begin. Not responsible for
where they are (:mod:`memfit.run.script.held_in_files`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.apply.offload.mapped import bytes_sampled

if TYPE_CHECKING:
    from torch import Tensor

CALLS = 8
"""Calls of models from one look at what was written to the next."""

_LOOKS = 2
"""Looks through which a tensor rests at first."""

_MOST_LOOKS = 64
"""Looks through which it rests at most."""


LEAST_PASSES = 4
"""Passes in a row for whose sake a tensor goes to a file that is written before each such row."""


@dataclass(slots=True)
class _Resting:
    """A tensor that was written.

    Attributes:
        tensor: It.
        version: Its version at the last look.
        sample: A few of its bytes then.
        call: Calls of models up to when it was written last.
        looks: Through how many looks it has to rest.
        looks_left: How many of them are still to come.
        is_read_in_passes: Whether the passes of the last row, or of this, did not write it.
        at_passes: Its version and sample where those passes began; ``None`` where they had begun.
    """

    tensor: weakref.ref[Tensor]
    version: int
    sample: bytes
    call: int
    looks: int
    looks_left: int
    is_read_in_passes: bool
    at_passes: tuple[int, bytes] | None

    def is_written(self, tensor: Tensor) -> bool:
        """Whether it has been written since the last look."""
        return tensor._version != self.version or bytes_sampled(tensor) != self.sample


class Written:
    """Tensors that were written after they had been taken for what is only read."""

    def __init__(self) -> None:
        """Know of none."""
        self._known: dict[int, _Resting] = {}
        self._calls = 0
        self._passes = 0
        self._is_in_passes = False

    def note(self, tensor: Tensor) -> bool:
        """It was written.

        Args:
            tensor: The tensor.

        Returns:
            Whether it may go again at once.
        """
        before = self._known.get(id(tensor))
        call, looks = 0, _LOOKS
        # Seen where passes are over: until then it was in its file.
        is_read, at_passes = not self._is_in_passes and self._passes > 0, None
        if before is not None and before.tensor() is tensor:
            call, looks = before.call, before.looks
            is_read, at_passes = before.is_read_in_passes, before.at_passes
        has_rested = self._calls - call >= CALLS * looks
        if not has_rested:
            looks = min(2 * looks, _MOST_LOOKS)
        self._known[id(tensor)] = _Resting(
            weakref.ref(tensor),
            tensor._version,
            bytes_sampled(tensor),
            self._calls,
            looks,
            0 if has_rested else looks,
            is_read,
            at_passes,
        )
        return has_rested

    def resting(self) -> set[int]:
        """The ``id`` of those that may not go yet."""
        known = self._known.items()
        return {key for key, it in known if it.looks_left > 0 and it.tensor() is not None}

    def call_begins(self, *, is_pass: bool) -> bool:
        """A model is about to be called.

        Args:
            is_pass: Whether a pass begins, and not a call that only asks the model.

        Returns:
            Whether any may go now: these passes are to read it as those of the last row did.
        """
        was_in_passes, self._is_in_passes = self._is_in_passes, is_pass
        if not is_pass:
            return False
        if was_in_passes:
            self._passes += 1
            self._look_at_row()
            return False
        passes, self._passes = self._passes, 1
        return self._row_begins(is_worth=passes >= LEAST_PASSES)

    def _look_at_row(self) -> None:
        for it in self._known.values():
            if it.is_read_in_passes and it.at_passes != _state(it):
                it.is_read_in_passes = False

    def _row_begins(self, *, is_worth: bool) -> bool:
        may_go = False
        for it in self._known.values():
            it.at_passes = _state(it)
            if it.at_passes is None:
                continue
            if is_worth and it.is_read_in_passes and it.looks_left:
                it.version, it.sample = it.at_passes
                it.looks_left = 0
                may_go = True
            it.is_read_in_passes = True  # until they write it
        return may_go

    def rested(self) -> dict[int, weakref.ref[Tensor]]:
        """Those that have rested since this was called last, by their ``id``.

        Call it before each call of a model.
        """
        self._calls += 1
        found: dict[int, weakref.ref[Tensor]] = {}
        if self._calls % CALLS:
            return found
        for key, it in list(self._known.items()):
            tensor = it.tensor()
            if tensor is None:
                del self._known[key]
            elif it.looks_left > 0 and it.is_written(tensor):
                self.note(tensor)
            elif it.looks_left > 0:
                it.looks_left -= 1
                if it.looks_left == 0:
                    found[key], it.looks = it.tensor, _LOOKS
        return found


def _state(known: _Resting) -> tuple[int, bytes] | None:
    """What tells of writes; ``None`` where the tensor has gone."""
    tensor = known.tensor()
    return None if tensor is None else (tensor._version, bytes_sampled(tensor))

"""A function mode that lasts for one forward, whatever else is on torch's stack of modes.

Responsible for entering and leaving it. Not responsible for what it puts off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.overrides import TorchFunctionMode

from memfit.apply.slices.writes import WATCHED
from memfit.tensors.function_modes import put_beneath, take_off

_ENDED: list[ForwardMode] = []
"""Modes of forwards that ended in a call which they handled, as ``loss.backward()`` is one: torch
puts them back on its stack when it returns. The last may still watch."""


def take_off_ended() -> None:
    """Take off modes of forwards that are over, outside any call."""
    watches = any(it.watches for it in _ENDED) and bool(WATCHED)
    while len(_ENDED) > watches:
        take_off(_ENDED.pop(0))


class ForwardMode(TorchFunctionMode):
    """Sees the calls of one forward.

    Attributes:
        is_over: Whether the forward has ended.
        watches: Whether the mode goes on watching for writes then.
    """

    def __init__(self) -> None:
        """Prepare; nothing is entered before :meth:`entered`."""
        super().__init__()
        self.is_over = self.watches = False

    @contextlib.contextmanager
    def entered(self, *, watches: bool = False) -> Iterator[None]:
        """See what is called inside this; it may end in a call that the mode handles.

        Args:
            watches: Whether to stay on the stack while there is something that was put off.
        """
        take_off_ended()
        put_beneath(self)
        try:
            yield
        finally:
            self.is_over, self.watches = True, watches
            if watches:
                _ENDED.append(self)
                take_off_ended()
            elif not take_off(self):
                _ENDED.append(self)

"""What calls of a pool's models really take, beside what was said of them.

Responsible for the peak of torch's tensors during one use, where no other use ran and no model was
moved at the same time. It is of the process: what another thread computes meanwhile counts too. Not
responsible for what follows (:mod:`memfit.share.pool.pool`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memfit import _native
from memfit.share.pool.device import HOST
from memfit.track import cpu, cuda


@dataclass(frozen=True, slots=True)
class Activations:
    """What a call of a model takes beside the model.

    Attributes:
        declared_bytes: What the pool was told, or predicted from the example.
        measured_bytes: The most that a use took; 0 before one ran alone.
        unforeseen: Why larger calls are not foreseen; empty where they are.
    """

    declared_bytes: int
    measured_bytes: int
    unforeseen: str


_TOLERATED = 20
_TOLERATED_BYTES = 1 << 20
"""A use may take so small a part more than it counted, or so little, before anything follows."""


def tolerated(counted: int) -> int:
    """The most that a use may take before anything follows.

    Args:
        counted: Bytes that it counted with.
    """
    return counted + max(counted // _TOLERATED, _TOLERATED_BYTES)


class UseMeter:
    """Measures uses, one at a time; each call is made with the pool's lock held."""

    def __init__(self, device: str) -> None:
        """Measure nothing yet.

        Args:
            device: ``host`` or ``cuda:0``: where the models are.
        """
        self._device = device
        self._running = 0
        self._is_on = False
        self._before = 0
        self._count: _native.AllocationWindow | None = None
        self._counts: bool | None = None
        self._on_gpu: cuda.Window | None = None

    def begin(self) -> None:
        """A use begins, its model awake."""
        self._running += 1
        if self._running > 1:
            self.disturbed()
        else:
            self._start()

    def resume(self) -> None:
        """Room was made within a use: models may have been moved, and it computes from here on."""
        if self._running == 1:
            self.disturbed()
            self._start()

    def _start(self) -> None:
        if self._device == HOST:
            if self._counts is None:  # once: trying whether it counts takes longer than a use
                self._counts = cpu.start() is None
                self._count = _native.AllocationWindow() if self._counts else None
            if self._count is not None:
                self._count.restart()
                self._before, self._is_on = _native.counted_bytes(), True
        elif cuda.in_use():
            self._on_gpu = cuda.Window()

    def end(self) -> int | None:
        """A use ends.

        Returns:
            The most bytes above what was there when it began; ``None`` where others ran meanwhile,
            or nothing can be counted.
        """
        self._running -= 1
        if self._is_on and self._count is not None:
            self._is_on = False
            return max(self._count.peak()[0] - self._before, 0)
        window, self._on_gpu = self._on_gpu, None
        if window is not None:
            seen = window.close().get(torch.device(self._device).index or 0)
            return None if seen is None else seen.peak["allocated"] - seen.before["allocated"]
        return None

    def disturbed(self) -> None:
        """A model is moved: what that takes is no use's."""
        self._is_on = False
        window, self._on_gpu = self._on_gpu, None
        if window is not None:
            window.close()

"""Tensor bytes on the CPU, counted where torch allocates them.

Responsible for starting the count, for checking that it counts, and for the windows of it. Not
responsible for the counting (the native half, ``memfit-guard``) nor for who owns a block
(:mod:`memfit.track.owners`).

What counts: every tensor whose memory torch's CPU allocator hands out, in all threads of the
process, those that were live and within Python's reach when counting began, and what optimizers
write in mapped files (:mod:`memfit.track.mapped`). What does not: memory of numpy, of files that
are only read or shared between processes, scratch memory that oneDNN, MKL and OpenMP take for
themselves, and Python's own objects.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from memfit import _native
from memfit.track import owners

_PROBE_BYTES = 4096
_lock = threading.Lock()
_started = False


def start() -> str | None:
    """Begin to count, once in a process.

    Returns:
        Why the CPU cannot be counted; ``None`` when it is counted.
    """
    global _started  # noqa: PLW0603 - the hooks are installed once in a process
    with _lock, torch._C._DisableTorchDispatch():  # no op of the script's, which may be recorded
        torch.empty(1)  # the first call binds the functions that are to be redirected
        problem = _native.count_allocations()
        if problem is not None:
            return problem
        before = _native.counted_bytes()
        probe = _probe()
        counted = _native.counted_bytes() - before
        del probe
        # Other threads may allocate meanwhile, but not free what was not counted.
        if counted < _PROBE_BYTES and not _counts_again():
            return "another tool has redirected torch's allocations, so they cannot be counted"
        if not _started:
            _started = True
            _native.seed_blocks(owners.live_blocks())
        return None


def _probe() -> torch.Tensor:
    return torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cpu")


def _counts_again() -> bool:
    """Try some more: another thread that frees may hide what one allocation adds."""
    for _ in range(8):
        before = _native.counted_bytes()
        probe = _probe()
        counted = _native.counted_bytes() - before
        del probe
        if counted >= _PROBE_BYTES:
            return True
    return False


@dataclass(slots=True, frozen=True)
class Reading:
    """What a window has seen.

    Attributes:
        current_bytes: Bytes live now.
        current_by_category: The same, divided.
        peak_bytes: Most bytes live at once since the window was opened.
        peak_by_category: The same, divided by what is known of each block.
        peak_by_owner: The same by owner: category, number of the owner, blocks and bytes.
        peak_event: Number of the event that reached it.
        peak_at_ns: Time from the opening to the peak.
        peak_mark: The mark set when the peak was reached.
        allocations: Allocations since the opening.
    """

    current_bytes: int
    current_by_category: dict[str, int]
    peak_bytes: int
    peak_by_category: dict[str, int]
    peak_by_owner: list[dict[str, Any]]
    peak_event: int
    peak_at_ns: int
    peak_mark: int
    allocations: int


class Window:
    """A stretch of time with its own peak; windows may overlap in any way."""

    def __init__(self) -> None:
        """Open it."""
        self._window = _native.AllocationWindow()

    def peak_event(self) -> int:
        """Number of the event that reached the peak so far; rises with every new peak."""
        return self._window.peak()[1]

    def peak_bytes(self) -> int:
        """Most bytes live at once so far."""
        return self._window.peak()[0]

    def restart(self) -> None:
        """Begin it anew, with what is live now."""
        self._window.restart()

    def read(self) -> Reading | None:
        """What it has seen so far; ``None`` when it is closed."""
        return _reading(self._window.read())

    def close(self) -> Reading | None:
        """End it; ``None`` when it was closed before."""
        return _reading(self._window.close())


def _reading(fields: dict[str, Any] | None) -> Reading | None:
    return None if fields is None else Reading(**fields)

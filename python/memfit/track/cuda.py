"""Tensor bytes on CUDA devices, from the caching allocator's statistics.

Responsible for peaks that nest although torch keeps one peak a device. Not responsible for who owns
the bytes (:mod:`memfit.track.owners`).

Torch's only way to ask for the peak of a stretch is ``reset_peak_memory_stats``, and no way exists
to set a peak back. So opening and closing a window resets the peaks that
``torch.cuda.max_memory_allocated`` and its kin report: they hold the peak since the last window
began or ended. Before every reset the peak so far is folded into all open windows, so that theirs
are exact. A reset by the program itself while a window is open can hide a peak from that window.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

KINDS = ("allocated", "active", "reserved")
"""The caching allocator's measures, in torch's words."""

_lock = threading.Lock()


@dataclass(slots=True, frozen=True)
class DeviceReading:
    """What a window has seen of one device; bytes for each of :data:`KINDS`."""

    before: dict[str, int]
    current: dict[str, int]
    peak: dict[str, int]


def in_use() -> bool:
    """Whether the process uses CUDA; asking does not start it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _statistics() -> dict[int, dict[str, int]]:
    """``{device: {"allocated_bytes.all.current": ...}}`` for all devices."""
    if not in_use():
        return {}
    return {index: torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())}


def _of(statistics: dict[str, int], measure: str) -> dict[str, int]:
    # A device on which nothing was allocated yet has no statistics.
    return {kind: int(statistics.get(f"{kind}_bytes.all.{measure}", 0)) for kind in KINDS}


@dataclass(slots=True, eq=False)
class Window:
    """A stretch of time with its own peaks; windows may overlap in any way."""

    before: dict[int, dict[str, int]] = field(default_factory=dict)
    peaks: dict[int, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Open it."""
        with _lock:
            _fold(reset=True)
            for index, statistics in _statistics().items():
                self.before[index] = _of(statistics, "current")
            _open.append(self)

    def read(self) -> dict[int, DeviceReading]:
        """What it has seen so far, of devices that hold or held bytes of torch."""
        with _lock:
            return self._read(_fold(reset=False))

    def close(self) -> dict[int, DeviceReading]:
        """End it."""
        with _lock:
            statistics = _fold(reset=len(_open) > 1)
            if self in _open:
                _open.remove(self)
            return self._read(statistics)

    def _read(self, statistics: dict[int, dict[str, int]]) -> dict[int, DeviceReading]:
        nothing = dict.fromkeys(KINDS, 0)
        readings = {
            index: DeviceReading(
                before=self.before.get(index, nothing),
                current=_of(values, "current"),
                peak=self.peaks.get(index, nothing),
            )
            for index, values in statistics.items()
        }
        return {index: r for index, r in readings.items() if r.peak["reserved"]}


_open: list[Window] = []


def _fold(*, reset: bool) -> dict[int, dict[str, int]]:
    """Raise the peaks of all open windows to torch's, and perhaps begin torch's anew."""
    statistics = _statistics()
    for index, values in statistics.items():
        peak = _of(values, "peak")
        for window in _open:
            known = window.peaks.setdefault(index, dict(peak))
            for kind, value in peak.items():
                known[kind] = max(known[kind], value)
        # Nothing to forget where the peak is what is held now: the program's statistics stay.
        if reset and peak != _of(values, "current"):
            torch.cuda.reset_peak_memory_stats(index)
    return statistics


def allocated_bytes() -> int:
    """Bytes allocated now, on all devices."""
    return sum(_of(values, "current")["allocated"] for values in _statistics().values())

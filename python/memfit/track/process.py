"""Memory past torch: what the system says of this process and of its children.

Responsible for the system's numbers beside those of the tensors, taken now and then while a script
runs, and for what the C library keeps at its end. Not responsible for tensors.

Private bytes are those that no other process shares: of children that were forked, the pages that
they have copied by writing to them. Linux only; elsewhere there is nothing to say.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit import _native

_LEAST_SECONDS = 0.02
_SHARE = 100
"""Asking takes at most this part of the time."""

_MOST_SAMPLES = 256
_GROUPS = 4
"""Stretches of a run in each of which memory must have risen."""

_LEAST_RISE = 16 << 20
_PROC = Path("/proc")
_KIB = 1024


@dataclass(slots=True)
class Memory:
    """What was seen.

    Attributes:
        resident_peak_bytes: Most bytes resident at once.
        private_bytes: Private bytes, when they were most.
        tensor_bytes: Bytes of tensors then.
        children: Child processes, when their private bytes were most.
        children_names: Their names, each once.
        children_bytes: Their private bytes together.
        trimmed_bytes: What the C library kept after frees, and gave back when asked at the end.
    """

    resident_peak_bytes: int = 0
    private_bytes: int = 0
    tensor_bytes: int = 0
    children: int = 0
    children_names: tuple[str, ...] = ()
    children_bytes: int = 0
    trimmed_bytes: int = 0


class ProcessMemory:
    """The memory of this process and its children, from now on."""

    def __init__(self) -> None:
        """Ask nothing yet."""
        self._seen = Memory()
        self._next = 0.0
        self._outside: list[int] = []  # private bytes that are no tensors', from time to time
        self._every, self._asked = 1, 0

    def ask(self) -> None:
        """Ask the system, unless it was asked a moment ago."""
        started = time.perf_counter()
        if started < self._next:
            return
        cost = time.thread_time()
        with contextlib.suppress(OSError, ValueError):
            self._ask()
        cost = time.thread_time() - cost
        self._next = started + max(_LEAST_SECONDS, _SHARE * cost)

    def _ask(self) -> None:
        private_bytes = _status("self").get("RssAnon", 0)
        self._sample(private_bytes - _native.counted_bytes())
        if private_bytes > self._seen.private_bytes:
            self._seen.private_bytes = private_bytes
            self._seen.tensor_bytes = _native.counted_bytes()
        children = _children("self")
        if not children:
            return
        total = sum(_private_bytes(child) for child in children)
        if total > self._seen.children_bytes:
            self._seen.children_bytes = total
            self._seen.children = len(children)
            self._seen.children_names = tuple(sorted({_name(child) for child in children}))

    def _sample(self, outside_bytes: int) -> None:
        self._asked += 1
        if self._asked % self._every == 0:
            self._outside.append(outside_bytes)
        if len(self._outside) > _MOST_SAMPLES:
            self._outside = self._outside[1::2]
            self._every *= 2

    def rise_bytes(self) -> int:
        """How much memory that is no tensor's has risen, all through the run but its begin.

        What the C library only kept is left out, once :meth:`end` knows it; 0 where it stood still
        or fell in a part of the run.
        """
        rest = self._outside[len(self._outside) // _GROUPS :]
        ends = (
            [rest[part * (len(rest) - 1) // _GROUPS] for part in range(_GROUPS + 1)] if rest else []
        )
        rises = [after - before for before, after in itertools.pairwise(ends)]
        risen = sum(rises) - self._seen.trimmed_bytes
        is_steady = len(rest) > 2 * _GROUPS and min(rises) * _GROUPS * _GROUPS >= sum(rises)
        return risen if is_steady and risen >= _LEAST_RISE else 0

    def end(self) -> dict[str, Any] | None:
        """What was seen, and what the C library keeps; ``None`` where the system does not tell."""
        self._next = 0.0
        self.ask()
        if not self._seen.private_bytes:
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        self._seen.resident_peak_bytes = peak
        self._seen.trimmed_bytes = _trimmed_bytes()
        return asdict(self._seen)


def _status(process: str) -> dict[str, int]:
    """Bytes of each kind that a process has resident."""
    found = {}
    for line in (_PROC / process / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Rss"):
            found[name] = int(value.split()[0]) * _KIB
    return found


def _children(process: str) -> list[str]:
    """The children of a process, and theirs; forked off by any of its threads."""
    found = []
    for thread in (_PROC / process / "task").iterdir():
        with contextlib.suppress(OSError):  # it may have ended
            for child in (thread / "children").read_text().split():
                found += [child, *_children(child)]
    return found


def _private_bytes(process: str) -> int:
    """What a process shares with no other; 0 for one that has ended."""
    with contextlib.suppress(OSError):
        lines = (_PROC / process / "smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * _KIB for line in lines if line.startswith("Private_"))
    return 0


def _name(process: str) -> str:
    with contextlib.suppress(OSError):
        return (_PROC / process / "comm").read_text().strip()
    return "?"


def _trimmed_bytes() -> int:
    """What the C library gives back when it is asked to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or os.name != "posix":
        return 0
    with contextlib.suppress(OSError, ValueError):
        before = _status("self").get("RssAnon", 0)
        trim(0)
        return max(0, before - _status("self").get("RssAnon", 0))
    return 0

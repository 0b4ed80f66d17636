"""The system's own limit behind a budget.

Responsible for setting and restoring ``RLIMIT_DATA``. The limit is for all private memory of the
process, so it also stops what no budget counts: a request above it fails as if no memory were left.
"""

from __future__ import annotations

import resource
from pathlib import Path

_INFINITY = resource.RLIM_INFINITY


class Backstop:
    """A limit, on from the start until it is removed."""

    def __init__(self, room_bytes: int) -> None:
        """Let the process's private memory grow by so much, and no further than it may already.

        Args:
            room_bytes: Bytes that it may grow by.
        """
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [limit for limit in self._before if limit != _INFINITY]
        soft = min([_private_bytes() + room_bytes, *limits])
        resource.setrlimit(resource.RLIMIT_DATA, (soft, self._before[1]))

    def remove(self) -> None:
        """Set the limit to what it was."""
        resource.setrlimit(resource.RLIMIT_DATA, self._before)


def _private_bytes() -> int:
    """What the limit counts: private memory that can be written, touched or not."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmData:"))
    return int(kibibytes) * 1024

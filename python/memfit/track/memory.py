"""Bytes of this process's memory, read without an op of torch, which a program's modes would see.

Responsible for that alone.
"""

from __future__ import annotations

import os


def bytes_at(address: int, count: int) -> bytes | None:
    """Bytes of memory; ``None`` where there is none any more, which another thread may see to.

    Args:
        address: Where they lie.
        count: How many.
    """
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            return os.pread(memory.fileno(), count, address)
    except (OSError, OverflowError):
        return None

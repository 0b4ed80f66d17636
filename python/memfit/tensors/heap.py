"""The C library's heap, which keeps what was freed for later."""

from __future__ import annotations

import contextlib
import ctypes


def trim() -> None:
    """Give back to the system what the C library's allocator keeps for later."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

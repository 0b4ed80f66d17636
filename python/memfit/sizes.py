"""Sizes as people write them.

Responsible for turning ``"3GiB"`` or a number into bytes, with an error that names what was asked.
"""

from __future__ import annotations

from memfit import _native
from memfit.errors import UsageError

Size = int | str
"""Bytes, as a number or as written: ``"3GiB"``."""

_LARGEST = 2**64 - 1


def in_bytes(size: Size, verb: str) -> int:
    """A size in bytes.

    Args:
        size: The size.
        verb: What is to be done with it, for the error: ``lease``.

    Returns:
        The bytes.

    Raises:
        BudgetError: It cannot be read.
        UsageError: It is a percentage, negative or beyond all memory.
    """
    if isinstance(size, str):
        if size.strip().endswith("%"):
            message = f"cannot {verb} `{size}`: write bytes, a percentage of what is not said"
            raise UsageError(message)
        return _native.parse_budget(size, 0)
    if isinstance(size, bool) or not 0 <= size <= _LARGEST:
        message = f"cannot {verb} `{size}` bytes: a size is 0 to 2**64 - 1"
        raise UsageError(message)
    return size

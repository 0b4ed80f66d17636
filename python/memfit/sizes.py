"""Sizes as people write them.

Responsible for turning ``"3GiB"`` or a number into bytes, with an error that names what was asked,
and for refusing budgets that no step can have.
"""

from __future__ import annotations

from memfit import _native
from memfit.errors import UsageError

Size = int | str
"""Bytes, as a number or as written: ``"3GiB"``."""

_LARGEST = 2**64 - 1


def in_bytes(size: Size | float, verb: str) -> int:
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
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _LARGEST:
        message = f"cannot {verb} `{size}` bytes: a size is a whole number, 0 to 2**64 - 1"
        raise UsageError(message)
    return size


def step_budget(budget: str | float) -> str:
    """The budget of a step as the engine reads it.

    Args:
        budget: As a person gave it.

    Raises:
        BudgetError: It cannot be read, or is so little that another unit was meant: ``50``.
    """
    is_whole = isinstance(budget, float) and budget.is_integer()
    text = str(int(budget) if is_whole else budget)
    _native.check_step_budget(text)
    return text

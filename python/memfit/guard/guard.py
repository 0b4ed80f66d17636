"""``memfit.guard``: what torch allocates never exceeds a budget.

    with memfit.guard("3GiB"):
        train(model)

Responsible for the context manager: setting the budget, ending it, and turning torch's error into
:class:`~memfit.errors.OutOfBudget` on the way out. Not responsible for refusing (the native half,
``memfit-guard``) nor for what the error says (:mod:`memfit.guard.refused`).
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from memfit import _native
from memfit.errors import BudgetError, UsageError
from memfit.guard.backstop import Backstop
from memfit.guard.limit import limit_on

Size = int | str
"""Bytes, as a number or as written: ``"3GiB"``."""


def guard(
    budget: Size, *, device: str | torch.device = "cpu", backstop: Size | None = None
) -> Guard:
    """Hold the tensors of this process to a budget, for as long as the block runs.

    The budget counts for all threads of the process and for what lives already. A request that
    would exceed it is refused before any memory is taken. Guards may be nested: the tightest
    counts. A child that is forked inside goes on with the budget and the count it was born with.

    What counts on the CPU: memory that torch's CPU allocator hands out, in whole pages from 256 KiB
    on. What does not: scratch memory that oneDNN, MKL and OpenMP take for themselves, numpy and
    Python's objects, files mapped into memory or shared between processes, and other processes.

    On CUDA, torch's share of the device is set to the budget less what is taken of the device past
    torch, measured again after every step of an optimizer, and restored at the end.

    Args:
        budget: Bytes, as a number or as written: ``"3GiB"``.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        backstop: Bytes that everything else in the process may grow by. Sets the system's limit
            for private memory (``RLIMIT_DATA``) to that, and restores it afterwards.

    Returns:
        The context manager.

    Raises:
        UsageError: A size that is none, a device where no budget can be held, or a backstop for
            another device than the CPU.
    """
    where = torch.device(device)
    if backstop is not None and where.type != "cpu":
        message = f"a backstop limits memory of the host, and the guard is for `{where}`"
        raise UsageError(message)
    return Guard(_bytes(budget), where, None if backstop is None else _bytes(backstop))


class Guard:
    """A budget for the tensors of this process; what ``with memfit.guard(...) as g`` gives.

    Attributes:
        budget_bytes: The budget.
    """

    def __init__(
        self, budget_bytes: int, device: torch.device, backstop_bytes: int | None = None
    ) -> None:
        """Prepare it; nothing is refused before it is entered.

        Args:
            budget_bytes: The budget.
            device: The device.
            backstop_bytes: As in :func:`guard`.

        Raises:
            UsageError: No budget can be held on that device.
        """
        self.budget_bytes = budget_bytes
        self._limit = limit_on(device, budget_bytes)
        self._is_on = False
        self._backstop_bytes = backstop_bytes
        self._backstop: Backstop | None = None

    @property
    def in_use_bytes(self) -> int:
        """What counts against the budget now."""
        return self._limit.in_use_bytes()

    def __enter__(self) -> Self:
        """Set the budget.

        Raises:
            BudgetError: More is in use already.
            UsageError: It is set already, or no budget can be held here.
        """
        if self._is_on:
            raise UsageError("this guard is on already: make one for each block")
        try:
            self._limit.set()
        except BudgetError as error:
            self._limit.end()
            error.add_note("hint: free what is not needed, or ask for a larger budget")
            raise
        self._is_on = True
        if self._backstop_bytes is not None:
            room = max(0, self.budget_bytes - self.in_use_bytes) + self._backstop_bytes
            self._backstop = Backstop(room)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the budget; what is kept for reuse goes back to the system with the last one.

        Raises:
            OutOfBudget: In place of torch's error, where the block ends with one.
        """
        backstop, self._backstop = self._backstop, None
        if backstop is not None:
            backstop.remove()
        self._limit.end()
        self._is_on = False
        refused = self._limit.refused(error) if error is not None else None
        if refused is not None:
            raise refused from error


def _bytes(size: Size | float) -> int:
    """A size as bytes."""
    if isinstance(size, str) and "%" in size:
        message = f"`{size}` is a share of something: a guard needs bytes, such as `3GiB`"
        raise UsageError(message)
    if isinstance(size, float) and not size.is_integer():
        raise UsageError(f"a guard holds whole bytes, such as `3GiB`, and not `{size}`")
    try:
        return _native.parse_budget(str(size), 0)
    except BudgetError as error:
        raise UsageError(str(error)) from None

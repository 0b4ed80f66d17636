"""``memfit.guard``: what torch allocates never exceeds a budget.

    with memfit.guard("3GiB"):
        train(model)

Responsible for the context manager: setting the budget, ending it, and turning torch's error into
:class:`~memfit.errors.OutOfBudget` on the way out. Not responsible for refusing (the native half,
``memfit-guard``) nor for what the error says (:mod:`memfit.guarding.refused`).
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from memfit import _native
from memfit.errors import BudgetError, UsageError
from memfit.guarding.backstop import Backstop
from memfit.guarding.refused import out_of_budget
from memfit.tracking import cpu

Size = int | str
"""Bytes, as a number or as written: ``"3GiB"``."""


def guard(budget: Size, *, backstop: Size | None = None) -> Guard:
    """Hold the tensors of this process on the CPU to a budget, for as long as the block runs.

    The budget counts for all threads of the process and for what lives already. A request that
    would exceed it is refused before any memory is taken. Guards may be nested: the tightest
    counts. A child that is forked inside goes on with the budget and the count it was born with.

    What is counted: memory that torch's CPU allocator hands out, in whole pages from 256 KiB on.
    What is not: scratch memory that oneDNN, MKL and OpenMP take for themselves, numpy and Python's
    objects, files mapped into memory or shared between processes, and other processes.

    Args:
        budget: Bytes, as a number or as written: ``"3GiB"``.
        backstop: Bytes that everything else in the process may grow by. Sets the system's limit
            for private memory (``RLIMIT_DATA``) to that, and restores it afterwards.

    Returns:
        The context manager.

    Raises:
        UsageError: A size that is none.
    """
    budget_bytes = _bytes(budget)
    return Guard(budget_bytes, None if backstop is None else _bytes(backstop))


class Guard:
    """A budget for the tensors of this process; what ``with memfit.guard(...) as g`` gives.

    Attributes:
        budget_bytes: The budget.
    """

    def __init__(self, budget_bytes: int, backstop_bytes: int | None = None) -> None:
        """Prepare it; nothing is refused before it is entered.

        Args:
            budget_bytes: The budget.
            backstop_bytes: As in :func:`guard`.
        """
        self.budget_bytes = budget_bytes
        self._backstop_bytes = backstop_bytes
        self._budget: _native.AllocationBudget | None = None
        self._backstop: Backstop | None = None
        self._refusals_before = 0

    @property
    def in_use_bytes(self) -> int:
        """What counted blocks take now, in this process."""
        return _native.taken_bytes()

    def __enter__(self) -> Self:
        """Set the budget.

        Raises:
            BudgetError: More is taken already.
            UsageError: It is set already, or what torch allocates cannot be counted here.
        """
        if self._budget is not None:
            raise UsageError("this guard is on already: make one for each block")
        problem = cpu.start()
        if problem is not None:
            message = f"no budget can be held here: {problem}"
            raise UsageError(message)
        self._refusals_before = _native.refusals()
        try:
            self._budget = _native.AllocationBudget(self.budget_bytes)
        except BudgetError as error:
            error.add_note("hint: free what is not needed, or ask for a larger budget")
            raise
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
        self._end()
        if error is not None:
            translated = out_of_budget(error, self.budget_bytes, self._refusals_before)
            if translated is not None:
                raise translated from error

    def _end(self) -> None:
        backstop, self._backstop = self._backstop, None
        if backstop is not None:
            backstop.remove()
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.lift()


def _bytes(size: Size) -> int:
    """A size as bytes."""
    if isinstance(size, str) and "%" in size:
        message = f"`{size}` is a share of something: a guard needs bytes, such as `3GiB`"
        raise UsageError(message)
    try:
        return _native.parse_budget(str(size), 0)
    except BudgetError as error:
        raise UsageError(str(error)) from None

"""A budget for what torch allocates on the CPU.

Responsible for switching it in the native half, which refuses. Not responsible for what an error
says (:mod:`memfit.guard.refused`).

While it is loosened, what was freed is still kept for the next time: a step that begins again does
not pay for fresh pages.
"""

from __future__ import annotations

from memfit import _native
from memfit.errors import BudgetError, OutOfBudget, UsageError
from memfit.guard.refused import out_of_budget
from memfit.track import cpu

_NO_LIMIT = 2**63


class CpuLimit:
    """A budget on the CPU, for all tensors of the process."""

    device_type = "cpu"

    def __init__(self, budget_bytes: int) -> None:
        """Prepare it; nothing is counted or refused before it is set.

        Args:
            budget_bytes: The budget.
        """
        self._budget_bytes = budget_bytes
        self._budget: _native.AllocationBudget | None = None
        self._is_set = False
        self._refusals_before = 0

    @property
    def budget_bytes(self) -> int:
        """See :class:`~memfit.guard.limit.Limit`."""
        return self._budget_bytes

    def start_counting(self) -> None:
        """Begin to count, which a budget needs.

        Raises:
            UsageError: Nothing can be counted here.
        """
        problem = cpu.start()
        if problem is not None:
            message = f"no budget can be held here: {problem}"
            raise UsageError(message)

    def set(self) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        if self._budget is None:
            self.start_counting()
            self._budget = _native.AllocationBudget(_NO_LIMIT)
        self._refusals_before = _native.refusals()
        self._budget.change(self._budget_bytes)
        self._is_set = True

    def change(self, budget_bytes: int) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        taken_bytes = _native.taken_bytes()
        if self._budget is not None and self._is_set:
            self._budget.change(budget_bytes)
        elif taken_bytes > budget_bytes:
            taken, budget = _native.bytes_text(taken_bytes), _native.bytes_text(budget_bytes)
            message = f"tensors already take {taken}, more than the budget of {budget}"
            raise BudgetError(message)
        self._budget_bytes = budget_bytes

    def refresh(self) -> None:
        """See :class:`~memfit.guard.limit.Limit`: all of it is counted."""

    def loosen(self) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        self._is_set = False
        if self._budget is not None:
            self._budget.change(_NO_LIMIT)

    def end(self) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        budget, self._budget = self._budget, None
        self._is_set = False
        if budget is not None:
            budget.lift()

    def in_use_bytes(self) -> int:
        """See :class:`~memfit.guard.limit.Limit`."""
        return _native.taken_bytes()

    def refused(self, error: BaseException) -> OutOfBudget | None:
        """See :class:`~memfit.guard.limit.Limit`."""
        return out_of_budget(error, self._budget_bytes, self._refusals_before)

"""Uses of a pool held to what was set aside for them.

Responsible for a budget of torch's tensors on the host while models are used: what was there when
the first of the uses that run now began, and what was set aside for all of them. Not responsible
for refusing (:mod:`memfit.guard`) nor for what is set aside (:mod:`memfit.share.pool.pool`).

A budget is of the process: while uses run one into the other, what they leave behind and what
others take meanwhile counts as theirs.
"""

from __future__ import annotations

from contextlib import suppress

from memfit import _native
from memfit.errors import BudgetError, OutOfBudget
from memfit.guard.cpu_limit import CpuLimit


class HeldUses:
    """A limit that is on while uses run; each call is made with the pool's lock held."""

    def __init__(self) -> None:
        """Hold nothing yet.

        Raises:
            UsageError: No budget can be held here.
        """
        self._limit = CpuLimit(0)
        self._limit.start_counting()
        self._running = 0

    def begin(self, counted_bytes: int) -> None:
        """A use begins.

        Args:
            counted_bytes: What was set aside for it.
        """
        self._running += 1
        if self._running > 1:
            self.grow(counted_bytes)
            return
        while True:
            self._limit = CpuLimit(_native.taken_bytes() + counted_bytes)
            try:
                self._limit.set()
            except BudgetError:  # another thread took some before it was on
                self._limit.end()
            else:
                return

    def grow(self, by_bytes: int) -> None:
        """More was set aside for a use.

        Args:
            by_bytes: How much more.
        """
        self._limit.change(self._limit.budget_bytes + by_bytes)

    def end(self, counted_bytes: int) -> None:
        """A use has ended.

        Args:
            counted_bytes: What was set aside for it.
        """
        self._running -= 1
        if self._running == 0:
            self._limit.end()
            return
        left = self._limit.budget_bytes - counted_bytes
        # What it leaves behind, as its outputs, is not the others'.
        with suppress(BudgetError):
            self._limit.change(max(left, _native.taken_bytes()))

    def refused(self, error: BaseException) -> OutOfBudget | None:
        """What an error is about; ``None`` where the limit is not its reason.

        Args:
            error: What a use ended with.
        """
        return self._limit.refused(error)

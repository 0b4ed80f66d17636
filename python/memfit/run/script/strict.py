"""``memfit run --strict``: a script ends before it exceeds its budget.

Responsible for the guard, for the ways out that are named, and for the exit code. Not responsible
for what a step needs (:mod:`memfit.run.script.loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from memfit import _native
from memfit.answers import Plan
from memfit.errors import MemfitError, OutOfBudget
from memfit.guard.limit import Limit, limit_on
from memfit.run.script.request import OVER_BUDGET

_PAGES = 64
"""The guard counts whole pages: so small a part of the budget more is left to the verdict."""

_LARGEST = 3
"""Holders of memory that are named."""

MOST_WAYS = 3
"""Ways out that are named."""


class Strict:
    """Holds a script to its budget."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Hold nothing yet.

        Args:
            say: Shows a line to the user.
        """
        self._say = say
        self._limit: Limit | None = None
        self._budget_bytes = 0
        self._stopped = False

    def hold(self, budget_bytes: int, device: torch.device) -> None:
        """Refuse from now on what would exceed the budget.

        Args:
            budget_bytes: The budget.
            device: Where it is.

        Raises:
            SystemExit: More is taken already.
        """
        if self._limit is not None:
            return
        self._budget_bytes = budget_bytes
        limit = limit_on(device, budget_bytes + budget_bytes // _PAGES + (1 << 20))
        try:
            limit.set()
        except MemfitError as error:
            limit.end()
            self._stop(str(error))
        self._limit = limit

    def require(self, plan: Plan, ways: Sequence[tuple[str, Plan]]) -> None:
        """Let a step run whose plan fits.

        Args:
            plan: The plan.
            ways: Options that would be given, each with the plan that follows.

        Raises:
            SystemExit: It does not.
        """
        if plan.fits:
            return
        least = plan.minimum_budget_bytes
        lines = [f"`--budget {least}` ({_native.bytes_text(least)})"]
        for option, other in sorted(ways, key=lambda way: not way[1].fits):
            peak = _native.bytes_text(other.planned.predicted_peak_bytes)
            lines.append(f"`{option}`: {peak}, step time x {other.predicted_step_ratio:.2f}")
        budget = _native.bytes_text(plan.budget_bytes)
        lowest = _native.bytes_text(plan.minimum_peak_bytes)
        self._stop(
            f"no plan fits {budget}, the smallest peak is {lowest}; ways out: "
            + "; ".join(lines[:MOST_WAYS])
        )

    def _stop(self, why: str) -> None:
        self._stopped = True
        self._say(f"stopped before the budget would be exceeded: {why}")
        raise SystemExit(OVER_BUDGET)

    def _refused(self, refused: OutOfBudget) -> str:
        """What is said of a request that no plan foresaw."""
        asked, in_use = map(_native.bytes_text, (refused.requested_bytes, refused.in_use_bytes))
        largest = ", ".join(
            f"{_native.bytes_text(holder.bytes)} {holder.name}"
            for holder in refused.holders[:_LARGEST]
        )
        return (
            f"stopped before the budget of {_native.bytes_text(self._budget_bytes)} would be "
            f"exceeded: {asked} were asked for with {in_use} in use"
            + (f" ({largest})" if largest else "")
            + "; without `--strict` the script goes on, and the end says what would keep the budget"
        )

    def ended(self, error: BaseException | None) -> bool:
        """Refuse nothing any more.

        Args:
            error: What ended the script, if anything did.

        Returns:
            Whether it ended for its budget.
        """
        limit, self._limit = self._limit, None
        if limit is None:
            return self._stopped
        limit.end()
        refused = limit.refused(error) if error is not None else None
        if refused is not None:
            self._say(self._refused(refused))
        return self._stopped or refused is not None or isinstance(error, OutOfBudget)

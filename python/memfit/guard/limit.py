"""A budget on one device, in whatever way it is held there.

Responsible for what the two ways have in common and for choosing one. Not responsible for either
(:mod:`memfit.guard.cpu_limit`, :mod:`memfit.guard.cuda_limit`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from memfit.errors import OutOfBudget, UsageError


class Limit(Protocol):
    """A budget that can be set and loosened again and again, until it ends."""

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""

    @property
    def budget_bytes(self) -> int:
        """The budget."""

    def set(self) -> None:
        """Refuse from now on what would exceed the budget.

        Raises:
            BudgetError: More is in use already; nothing is refused then.
            UsageError: No budget can be held here.
        """

    def change(self, budget_bytes: int) -> None:
        """Hold another budget from now on, at once where it is set.

        Args:
            budget_bytes: The budget.

        Raises:
            BudgetError: More is in use, with what allocators keep given back; the budget is as
                before.
        """

    def refresh(self) -> None:
        """Follow what is taken past the budget's own count, where that is measured now and then."""

    def loosen(self) -> None:
        """Refuse nothing until it is set again."""

    def end(self) -> None:
        """Refuse nothing any more, and leave everything as it was found."""

    def in_use_bytes(self) -> int:
        """What counts against the budget now."""

    def refused(self, error: BaseException) -> OutOfBudget | None:
        """What an error is about; ``None`` where this limit is not its reason."""


def limit_on(device: torch.device, budget_bytes: int) -> Limit:
    """A budget on a device.

    Args:
        device: The device.
        budget_bytes: The budget.

    Raises:
        UsageError: No budget can be held on such a device.
    """
    if device.type == "cpu":
        from memfit.guard.cpu_limit import CpuLimit

        return CpuLimit(budget_bytes)
    if device.type == "cuda":
        from memfit.guard.cuda_limit import CudaLimit

        return CudaLimit(budget_bytes, device)
    message = f"a budget is held on `cpu` and `cuda`, not on `{device}`"
    raise UsageError(message)

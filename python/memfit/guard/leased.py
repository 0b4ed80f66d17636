"""Holding torch to what a lease has on each of its devices, however large that is at the moment.

Responsible for the order: budgets shrink before bytes are given back, and grow after more is
granted, so that what torch may take is leased at every moment. Not responsible for a single budget
(:mod:`memfit.guard.limit`) nor for the lease (:mod:`memfit.share.lease`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

import torch

from memfit._native import bytes_text
from memfit.errors import BudgetError, LeaseError, OutOfBudget
from memfit.guard.limit import Limit, limit_on


class LeaseGuard:
    """The budgets of one lease, by device."""

    def __init__(self, limits: Mapping[str, Limit]) -> None:
        """Prepare; see :meth:`of` for those of all devices.

        Args:
            limits: A budget for each device that is to be held, as the broker names devices.
        """
        self._limits = dict(limits)
        self._resizing = threading.Lock()

    @classmethod
    def of(cls, claims: Mapping[str, int]) -> LeaseGuard:
        """The budgets of a lease; nothing is refused before :meth:`start`.

        Args:
            claims: Bytes by device.

        Raises:
            UsageError: No budget can be held on one of the devices.
        """
        return cls({device: leased_limit(device, size) for device, size in claims.items()})

    def start(self) -> None:
        """Refuse from now on what would exceed the lease.

        Raises:
            BudgetError: More is in use already; nothing is refused then.
            UsageError: No budget can be held here.
        """
        try:
            for limit in self._limits.values():
                limit.set()
        except BaseException as error:
            self.end()
            if isinstance(error, BudgetError):
                error.add_note("hint: lease more, or free what is not needed first")
            raise

    def refresh(self) -> None:
        """Follow what the process takes past what the budgets count; called now and then."""
        if not self._resizing.acquire(blocking=False):
            return  # a resize measures by itself
        try:
            for limit in self._limits.values():
                limit.refresh()
        finally:
            self._resizing.release()

    def end(self) -> None:
        """Refuse nothing any more."""
        for limit in self._limits.values():
            limit.end()

    @contextlib.contextmanager
    def following(self, before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[None]:
        """Resize the lease inside this; where that fails, the budgets are as before.

        Args:
            before: What it holds, bytes by device.
            after: What it shall hold.

        Raises:
            LeaseError: More is in use than it shall hold (``in_use``), or another thread resizes
                it; the lease must not be resized then, and the block does not begin.
        """
        if not self._resizing.acquire(blocking=False):
            message = "another thread is resizing this lease"
            raise LeaseError(message, "already_waiting")
        try:
            shrunk: list[str] = []
            try:
                for device, limit in self._limits.items():
                    if after.get(device, 0) < before.get(device, 0):
                        _shrink(device, limit, before.get(device, 0), after.get(device, 0))
                        shrunk.append(device)
                yield
            except BaseException:
                self._widen(shrunk, before)
                raise
            self._widen([d for d in self._limits if d not in shrunk], after)
        finally:
            self._resizing.release()

    def _widen(self, devices: list[str], sizes: Mapping[str, int]) -> None:
        for device in devices:
            # More than that was taken meanwhile besides tensors: the tighter budget stays.
            with contextlib.suppress(BudgetError):
                self._limits[device].change(sizes.get(device, 0))

    def refused(self, error: BaseException) -> OutOfBudget | None:
        """What an error is about; ``None`` where no budget of the lease is its reason."""
        found = (limit.refused(error) for limit in self._limits.values())
        return next((refused for refused in found if refused is not None), None)

    def in_use(self) -> dict[str, int]:
        """What counts against the lease now, bytes by device."""
        return {device: limit.in_use_bytes() for device, limit in self._limits.items()}


def leased_limit(device: str, leased_bytes: int) -> Limit:
    """A budget for all that this process takes of a device.

    Args:
        device: ``host`` or ``cuda:0``.
        leased_bytes: The budget, for tensors and all else.

    Raises:
        UsageError: No budget can be held there.
    """
    if device == "host":
        from memfit.guard.host_limit import HostLimit

        return HostLimit(leased_bytes)
    return limit_on(torch.device(device), leased_bytes)


def _shrink(device: str, limit: Limit, before_bytes: int, after_bytes: int) -> None:
    try:
        limit.change(after_bytes)
    except BudgetError as error:
        message = (
            f"the lease stays at {bytes_text(before_bytes)} on `{device}`: {error}\n"
            "hint: free what is not needed before giving the bytes back"
        )
        raise LeaseError(message, "in_use", device, after_bytes) from error

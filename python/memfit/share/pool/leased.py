"""A pool's budget as large as its lease is at the moment.

Responsible for giving bytes to another process that asks for them, and for having them back when a
model needs them. Not responsible for what is parked (the engine) nor for who gets what (the
broker).

The order is that of a guarded lease: the budget comes down before bytes are given back, and grows
after they are granted, so that what counts is leased at every moment.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from memfit._native import bytes_text
from memfit.errors import LeaseError, PoolError, UsageError
from memfit.guard import overhead
from memfit.share.lease import Lease

GROW_EVERY = 0.25
"""Seconds between two tries to have more again that do not wait."""

WAIT_AT_A_TIME = 0.5
"""Seconds that one try waits in the broker's queue: so long no other lets the pool grow."""

GIVE_WITHIN = 5.0
"""Seconds after which a pool gives what it has: the broker asks for about ten."""


class LeasedBudget:
    """What a lease leaves for a pool.

    Attributes:
        lease: The lease.
        device: The device of it that counts.
        whole_bytes: The budget with all of it.
    """

    def __init__(self, lease: Lease, device: str) -> None:
        """Know what the lease leaves for models and their calls.

        Args:
            lease: The lease; it has to be held.
            device: Where the models lie, as the broker names it.

        Raises:
            UsageError: It has nothing there, or too little for what torch takes besides.
        """
        self.lease = lease
        self.device = device
        held = lease.claims.get(device)
        if held is None:
            message = f"the pool is of models on `{device}`, and {lease} holds nothing there"
            raise UsageError(message)
        self._besides = overhead.expected(device)
        if held <= self._besides:
            message = (
                f"the lease holds {bytes_text(held)} on `{device}`, and torch itself takes "
                f"{bytes_text(self._besides)} there\nhint: lease more"
            )
            raise UsageError(message)
        self.whole_bytes = held - self._besides
        self._held = held
        self._asked_since: float | None = None
        self._tried = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all of it is held."""
        return self._held >= self.whole_bytes + self._besides

    def check(self) -> None:
        """See that the lease is held.

        Raises:
            PoolError: It has ended.
        """
        if self.device not in self.lease.claims:
            message = "the pool's lease has ended\nhint: lease again and make another pool"
            raise PoolError(message, "lease_ended")

    def asked(self) -> int | None:
        """The budget that another's need would leave; ``None`` when nobody asks."""
        asked: Mapping[str, int] | None = self.lease.asked
        if asked is None:
            self._asked_since = None
            return None
        if self._asked_since is None:
            self._asked_since = time.monotonic()
        return max(asked.get(self.device, 0) - self._besides, 0)

    def may_wait(self) -> bool:
        """Whether there is time for more to be given up before who asks is answered."""
        since = self._asked_since
        return since is not None and time.monotonic() - since < GIVE_WITHIN

    def give(self, budget_bytes: int) -> bool:
        """Give back all but so much, or say no where that is nothing.

        Args:
            budget_bytes: What stays for the pool.

        Returns:
            Whether anything was given back; if not, the budget has to be as before.
        """
        self._asked_since = None
        size = budget_bytes + self._besides
        if size >= self._held:
            self.lease.decline()
            return False
        try:
            self._resize(size, 0.0)
        except LeaseError as error:
            if error.reason not in {"in_use", "already_waiting"}:
                raise
            self.lease.decline()
            return False
        return True

    def grow(self, short_bytes: int | None, *, waits: bool) -> None:
        """Have more again: all of it, else as much as is needed or can be had.

        Args:
            short_bytes: The budget that the next request needs, where it lacks any.
            waits: Whether to wait in the broker's queue for that.
        """
        now = time.monotonic()
        if not waits and now - self._tried < GROW_EVERY:
            return
        self._tried = now
        whole = self.whole_bytes + self._besides
        try:
            self._resize(whole, 0.0)
        except LeaseError as error:
            part = self._held + (error.largest_bytes or 0)
        else:
            return
        needed = None if short_bytes is None else short_bytes + self._besides
        if part > self._held and (needed is None or part >= needed):
            self._try(min(part, whole), 0.0)
        elif waits and needed is not None:
            self._try(needed, WAIT_AT_A_TIME)

    @property
    def budget_bytes(self) -> int:
        """What the lease leaves for the pool now."""
        return self._held - self._besides

    def _try(self, size: int, wait: float) -> None:
        try:
            self._resize(size, wait)
        except LeaseError as error:
            if error.reason in {"ended", "forked"}:
                raise

    def _resize(self, size: int, wait: float) -> None:
        self.lease.resize({**self.lease.claims, self.device: size}, wait=wait)
        self._held = size

"""A budget for all that the process takes of the host, held where torch allocates.

Responsible for what the tensors may take of a lease: the lease less what the process takes besides
tensors. Not responsible for refusing (:mod:`memfit.guard.cpu_limit`).

What is taken besides is resident private memory less those pages of tensors, and of blocks that are
kept for the next step, that are in memory: pages nobody has touched yet make it no smaller. It is
measured when the limit is first set and at every change, after the allocators have given back what
they only keep, and again whenever somebody looks (:meth:`HostLimit.refresh`) without giving
anything back. Nobody looks while a fitted step has the limit: its plans are made for one budget,
and what planning again takes besides would make each try tighter than the one before.

Where more is taken than the lease holds, nothing more is granted until something is freed. A woken
model's pages are those of its parked file until they are written, and are not counted; written ones
are taken besides.
"""

from __future__ import annotations

import time

from memfit import _native
from memfit.errors import BudgetError
from memfit.guard import overhead
from memfit.guard.cpu_limit import CpuLimit

LOOK_EVERY = 0.5
"""Seconds between two measurements of what is taken besides."""

_WORTH_A_CHANGE = 1 << 18
"""Bytes more or less besides that change the budget: all else is the interpreter's breathing."""

_STILL = 1 << 20
"""Bytes that tensors may have come and gone by while it is measured."""

_TRIES = 3


class HostLimit(CpuLimit):
    """A lease on the host, for all tensors of the process."""

    def __init__(self, leased_bytes: int) -> None:
        """Prepare it; nothing is measured, counted or refused before it is set.

        Args:
            leased_bytes: What the process may take, tensors and all else.
        """
        super().__init__(leased_bytes)
        self._leased_bytes = leased_bytes
        self._besides_bytes: int | None = None
        self._looked = 0.0

    @property
    def budget_bytes(self) -> int:
        """What the process may take, tensors and all else."""
        return self._leased_bytes

    def set(self) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        if self._besides_bytes is None:
            self.start_counting()
            besides_bytes = _besides()
            self._budget_bytes = _part(self._leased_bytes, besides_bytes)
            self._besides_bytes = besides_bytes
            self._looked = time.monotonic()
        super().set()

    def change(self, budget_bytes: int) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        if self._besides_bytes is not None:
            besides_bytes = _besides()
            super().change(_part(budget_bytes, besides_bytes))
            self._besides_bytes = besides_bytes
            self._looked = time.monotonic()
        self._leased_bytes = budget_bytes

    def refresh(self) -> None:
        """See :class:`~memfit.guard.limit.Limit`."""
        now = time.monotonic()
        if self._besides_bytes is None or now - self._looked < LOOK_EVERY:
            return
        found = _seen()
        if found is None:  # too much comes and goes: the next look
            return
        self._looked = now
        if abs(found - self._besides_bytes) < _WORTH_A_CHANGE:
            found = self._besides_bytes
        for _ in range(_TRIES):
            # What is live cannot be refused any more; what would come on top of it can.
            budget_bytes = max(self._leased_bytes - found, _native.taken_bytes())
            try:
                if budget_bytes != self._budget_bytes:
                    super().change(budget_bytes)
            except BudgetError:
                continue  # another thread has just taken some
            self._besides_bytes = found
            return

    def in_use_bytes(self) -> int:
        """Tensors, and what was taken besides them when that was last measured."""
        return super().in_use_bytes() + (self._besides_bytes or 0)


def _besides() -> int:
    """What the process takes now besides the tensors that are counted."""
    overhead.release("host")
    for _ in range(_TRIES):
        found = _seen()
        if found is not None:
            return found
    # Tensors come and go: the larger number is the safer one.
    return max(overhead.resident() - _native.resident_bytes(), 0)


def _seen() -> int | None:
    """The same, giving nothing back; ``None`` where tensors came and went meanwhile."""
    before = _native.resident_bytes()
    found = overhead.resident()
    after = _native.resident_bytes()
    if abs(after - before) > _STILL:
        return None
    return max(found - max(before, after), 0)


def _part(leased_bytes: int, besides_bytes: int) -> int:
    """What tensors may take of a lease."""
    tensor_bytes = _native.taken_bytes()
    if tensor_bytes + besides_bytes > leased_bytes:
        sizes = (tensor_bytes, besides_bytes, leased_bytes)
        tensors, rest, leased = (_native.bytes_text(size) for size in sizes)
        message = (
            f"tensors take {tensors} of `host` and the rest of this process {rest}: more than the "
            f"lease of {leased}"
        )
        raise BudgetError(message)
    return leased_bytes - besides_bytes

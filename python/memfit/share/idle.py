"""Idle processes that give way: what their allocators only keep goes back when another needs it.

Responsible for answering the broker's requests to shrink on behalf of leases whose holders asked
for that. Not responsible for training steps, which answer between two steps
(:mod:`memfit.run.elastic`), nor for whom the broker asks.

One thread looks after all such leases of the process, and after what else their holders want looked
at now and then (a pool's lease, a guard's budget). It gives back cached memory first, and then
what the process does not use of the lease: never what it uses, and never below the floor.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from memfit.errors import LeaseError
from memfit.guard import overhead

if TYPE_CHECKING:
    from memfit.guard.leased import LeaseGuard

LOOK_EVERY = 0.05
"""Seconds between two looks at whether anybody asks."""


class Asked(Protocol):
    """What is needed of a lease to answer for it (:class:`memfit.Lease`)."""

    @property
    def asked(self) -> Mapping[str, int] | None:
        """Bytes on each device that the broker asks for it to shrink to; ``None``: it does not."""

    @property
    def claims(self) -> dict[str, int]:
        """Bytes that it holds on each device."""

    @property
    def is_released(self) -> bool:
        """Whether its holder gave it back."""

    def decline(self) -> None:
        """Say that it cannot be smaller now."""

    def resize(self, sizes: dict[str, int], /) -> object:
        """Hold other bytes."""


_lock = threading.Lock()
_leases: weakref.WeakKeyDictionary[Asked, list[Callable[[], object]]] = weakref.WeakKeyDictionary()
_thread: threading.Thread | None = None


def look_after(lease: Asked, looks: Callable[[], object] | None = None) -> None:
    """Answer for a lease from now on, until it is released.

    Args:
        lease: A lease with a floor.
        looks: Called now and then instead, for whatever its holder looks after; must not keep the
            lease alive.
    """
    if looks is None:
        weakly = weakref.ref(lease)

        def looks() -> None:
            if (held := weakly()) is not None:
                answer(held)

    global _thread  # noqa: PLW0603 - one thread for the process
    with _lock:
        _leases.setdefault(lease, []).append(looks)
        if _thread is None or not _thread.is_alive():  # a fork leaves it behind
            _thread = threading.Thread(target=_look, name="memfit-courtesy", daemon=True)
            _thread.start()


def refreshing(guard: LeaseGuard) -> Callable[[], object]:
    """A look at what the process takes past a guard's count, for as long as there is the guard.

    Args:
        guard: The guard.
    """
    held = weakref.ref(guard)

    def looks() -> None:
        if (guard := held()) is not None:
            guard.refresh()

    return looks


def answer(
    lease: Asked,
    *,
    release: Callable[[str], None] = overhead.release,
    in_use: Callable[[str], int] = overhead.in_use,
) -> bool:
    """Give back what the process does not use, if anybody asks.

    Args:
        lease: The lease.
        release: Lets go of what allocators keep on a device.
        in_use: What the process then uses of it.

    Returns:
        Whether it gave anything back.
    """
    asked = lease.asked
    if asked is None:
        return False
    held = lease.claims
    wanted: dict[str, int] = {}
    for device, size in held.items():
        target = asked.get(device, 0)
        if target < size:
            release(device)
            target = max(target, min(in_use(device), size))
        wanted[device] = min(target, size)
    if wanted == held:
        lease.decline()
        return False
    try:
        lease.resize(wanted)
    except LeaseError as error:
        if error.reason not in {"in_use", "already_waiting"}:
            raise
        lease.decline()  # its guard counts what is not touched yet too
        return False
    return True


def _look() -> None:
    """Answer for all leases for as long as there are any."""
    global _thread  # noqa: PLW0603 - the one above
    while True:
        time.sleep(LOOK_EVERY)
        with _lock:
            for ended in [lease for lease in _leases if lease.is_released]:
                del _leases[ended]
            all_looks = [looks for of_one in _leases.values() for looks in of_one]
            if not all_looks:
                _thread = None
                return
        for looks in all_looks:
            # Ended or away: the next look knows.
            with contextlib.suppress(LeaseError):
                looks()

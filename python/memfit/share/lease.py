"""Leases: memory that the broker has set aside for this process.

Responsible for :func:`lease` and :class:`Lease`. Not responsible for who gets what (the broker,
``memfit broker``) nor for holding torch to what was leased (:mod:`memfit.guard.leased`).

Each thread is one line of work with a connection of its own: while it holds something and asks for
more, the broker knows that it does. A child of a fork has no part in its parent's leases.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from memfit import _native
from memfit.errors import LeaseError, NoBrokerWarning, UsageError
from memfit.guard import overhead
from memfit.share.idle import look_after, refreshing
from memfit.sizes import Size, in_bytes

if TYPE_CHECKING:
    from memfit.guard.leased import LeaseGuard

_PRIORITIES = range(-128, 128)


class _Lines(threading.local):
    """The connection of each thread, which ends with the thread."""

    client: _native.LeaseClient | None = None
    path: Path | None = None
    process: int = 0


_lines = _Lines()


def lease(
    size: Size | Mapping[str, Size],
    *,
    device: str = "host",
    wait: float | None = 0.0,
    priority: int = 0,
    floor: Size | Mapping[str, Size] | None = None,
    time_to_live: float | None = None,
    label: str | None = None,
    courteous: bool = False,
    guard: bool = False,
    alone: bool = False,
) -> Lease:
    """Lease memory from the broker, for as long as the ``with`` block runs.

    Ask for all that is needed at the peak, on all devices at once. What does not fit yet waits;
    what can never fit is refused at once. Where no broker was started the lease is granted with a
    warning, and holds nothing back from others. A broker that is away, while others may hold what
    it granted, is waited for: as long as ``wait``, and at least as long as a restart takes.

    Args:
        size: Bytes on ``device``, or bytes by device: ``{"host": "2GiB", "cuda:0": "8GiB"}``.
        device: ``host`` or ``cuda:0``.
        wait: Seconds to wait for room; ``None`` waits without end.
        priority: Higher goes first, -128 to 127.
        floor: What would do when another needs memory; makes the lease elastic.
        time_to_live: Seconds after which the lease ends by itself.
        label: What the memory is for, for ``memfit ps``.
        courteous: Give way while idle: when another needs memory, cached blocks are returned and
            what this process does not use of the lease is given back, down to ``floor``. Take it
            again with :meth:`Lease.resize` before using it again.
        guard: Hold torch in this process to what the lease has, less what the process takes
            besides tensors, until it is released; see :func:`memfit.guard` for what counts. The
            budget follows the lease. Where the ``with`` block ends with torch's error of a refused
            request, :class:`~memfit.errors.OutOfBudget` is raised instead.
        alone: Go on as where no broker was started when it is still away then, instead of raising.

    Returns:
        The lease, which is held from now on.

    Raises:
        BudgetError: With ``guard``, this process takes more than the lease already.
        LeaseError: It does not fit, or did not within ``wait``, or the broker is away.
        UsageError: A size, a device or a priority that is none, or no guard can be held there.
    """
    if courteous and floor is None:
        raise UsageError("a courteous lease says how far it gives way: give a `floor`")
    claims = _claims(size, device)
    lowest = None if floor is None else _claims(floor, device)
    if priority not in _PRIORITIES:
        message = f"priority `{priority}` is not within -128 to 127"
        raise UsageError(message)
    guarding = _guard(claims) if guard else None
    deadline = None if wait is None else time.monotonic() + wait
    client = _client(wait, alone=alone)
    if deadline is not None:
        wait = max(0.0, deadline - time.monotonic())
    if client is None:
        held = Lease(None, 0, claims)
    else:
        number, _, granted = client.acquire(claims, lowest, priority, wait, time_to_live, label)
        held = Lease(client, number, granted)
    if guarding is not None:
        held.begin_guard(guarding)
    if courteous and client is not None:
        look_after(held)
    return held


def take(
    claims: Mapping[str, int],
    *,
    wait: float | None,
    priority: int,
    label: str,
    waits: Callable[[int | None], object],
    floor: Mapping[str, int] | None = None,
) -> Lease:
    """Lease memory for all that this thread does from here on, from a broker that must run.

    Args:
        claims: Bytes by device.
        wait: As for :func:`lease`.
        priority: As for :func:`lease`.
        label: As for :func:`lease`.
        waits: Called now and then while waiting, with the number of requests before this one.
        floor: As for :func:`lease`.

    Raises:
        LeaseError: As for :func:`lease`, or no broker runs.
    """
    client = connection(wait, waits)
    number, _, granted = client.acquire(claims, floor, priority, wait, None, label, waits)
    return Lease(client, number, granted)


class Lease:
    """Memory that is set aside, until it is released.

    Attributes:
        is_alone: Whether no broker runs, so that nothing is held back from others.
    """

    def __init__(
        self, client: _native.LeaseClient | None, number: int, claims: Mapping[str, int]
    ) -> None:
        """Create it; :func:`lease` does.

        Args:
            client: The connection, or ``None`` without a broker.
            number: The broker's number for it.
            claims: Bytes by device.
        """
        self.is_alone = client is None
        self._client = client
        self._number = number
        self._claims = dict(claims)
        self._is_released = False
        self._guard: LeaseGuard | None = None

    def begin_guard(self, guard: LeaseGuard) -> None:
        """Hold torch to the lease until it is released; where that cannot be, it is released now.

        Args:
            guard: Its budgets.

        Raises:
            BudgetError: More is in use already.
            UsageError: No budget can be held here.
        """
        try:
            guard.start()
        except BaseException:
            self.release()
            raise
        self._guard = guard
        look_after(self, refreshing(guard))

    @property
    def in_use(self) -> dict[str, int] | None:
        """What counts against a guarded lease now, by device; ``None`` without a guard."""
        return None if self._guard is None or self._is_released else self._guard.in_use()

    @property
    def claims(self) -> dict[str, int]:
        """Bytes by device that it holds now; nothing when it has ended."""
        if self._is_released:
            return {}
        if self._client is None:
            return dict(self._claims)
        held = self._client.held(self._number)
        return {} if held is None else held[2]

    @property
    def is_held(self) -> bool:
        """Whether it is this process's: not released, not ended, and not a parent's."""
        if self._is_released or self._client is None:
            return not self._is_released
        try:
            return self._client.held(self._number) is not None
        except LeaseError:
            return False

    @property
    def is_released(self) -> bool:
        """Whether it was given back here."""
        return self._is_released

    @property
    def bytes(self) -> int:
        """Bytes that it holds now, on all devices."""
        return sum(self.claims.values())

    @property
    def asked(self) -> dict[str, int] | None:
        """What another's need asks this one to shrink to; ``None`` when nobody asks.

        Answer with :meth:`resize` or :meth:`decline`.
        """
        if self._client is None or self._is_released:
            return None
        return self._client.asked_to_shrink(self._number)

    def resize(
        self,
        size: Size | Mapping[str, Size],
        *,
        device: str = "host",
        wait: float | None = 0.0,
        waits: Callable[[int | None], object] | None = None,
    ) -> None:
        """Give a part back, or ask for more.

        Growth while others wait may be refused: this one holds memory that they wait for. A
        refused lease is as before. A guard's budget shrinks before bytes are given back, and grows
        after more is granted.

        Args:
            size: The new size, as for :func:`lease`; 0 holds nothing for now.
            device: Where, when the size is a single one.
            wait: Seconds to wait for room; ``None`` waits without end.
            waits: Called now and then while it waits, with the number of requests before it.

        Raises:
            LeaseError: It does not fit, the lease has ended, or its guard counts more than it
                shall shrink to (``in_use``).
            UsageError: A size or device that is none.
        """
        claims = _claims(size, device)
        if self._is_released:
            message = "the lease was released"
            raise LeaseError(message, "ended")
        if self._guard is None:
            self._resize(claims, wait, waits)
            return
        unguarded = sorted(claims.keys() - self._claims.keys())
        if unguarded:
            message = f"the lease's guard is not on `{unguarded[0]}`: take another lease for it"
            raise UsageError(message)
        with self._guard.following(self.claims, claims):
            self._resize(claims, wait, waits)

    def _resize(
        self,
        claims: dict[str, int],
        wait: float | None,
        waits: Callable[[int | None], object] | None,
    ) -> None:
        if self._client is None:
            self._claims = claims
        else:
            self._client.resize(self._number, claims, wait, waits)

    def decline(self) -> None:
        """Answer a request to shrink with no."""
        if self._client is not None and not self._is_released:
            self._client.decline(self._number)

    def release(self) -> None:
        """Give it back; a second time does nothing, and neither does a forked child's.

        What allocators only keep for later goes back to the system before.
        """
        if self._is_released:
            return
        self._is_released = True
        try:
            self._give_back()
        finally:
            if self._guard is not None:
                self._guard.end()

    def _give_back(self) -> None:
        if self._client is not None:
            for device in self._claims:
                overhead.release(device)
            try:
                self._client.release(self._number)
            except LeaseError as error:
                if error.reason != "forked":
                    raise

    def __enter__(self) -> Self:
        """Return the lease, which is held already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back.

        Raises:
            OutOfBudget: In place of torch's error, where the block of a guarded lease ends with
                one.
        """
        try:
            guard = self._guard
            refused = guard.refused(error) if guard is not None and error is not None else None
        finally:
            self.release()
        if refused is not None:
            raise refused from error

    def __repr__(self) -> str:
        """Say what it holds."""
        state = "released" if self._is_released else f"{self.claims if self.is_held else 'ended'}"
        return f"<memfit.Lease {state}{', alone' if self.is_alone else ''}>"


def _guard(claims: Mapping[str, int]) -> LeaseGuard:
    """The budgets of a lease; imports torch."""
    from memfit.guard.leased import LeaseGuard

    return LeaseGuard.of(claims)


def _client(wait: float | None, *, alone: bool) -> _native.LeaseClient | None:
    """This thread's connection; ``None``, and a warning, where the process goes on alone."""
    try:
        return connection(wait)
    except LeaseError as error:
        if error.reason == "broker_away" and not alone:
            error.add_note("start it again: `memfit broker`; or go on without it: `alone=True`")
        if error.reason != "no_broker" and not (alone and error.reason == "broker_away"):
            raise
        message = f"{error}: the lease holds nothing back from others; start one: `memfit broker`"
        warnings.warn(message, NoBrokerWarning, stacklevel=3)
        return None


def connection(
    wait: float | None = 0.0, waits: Callable[[int | None], object] | None = None
) -> _native.LeaseClient:
    """This thread's connection to the broker.

    Args:
        wait: Seconds to wait for a broker that is away, or longer where a restart may take longer;
            ``None`` waits without end.
        waits: Called now and then while it waits, with ``None``.

    Raises:
        LeaseError: No broker runs, or it is not one to talk to.
    """
    path = _native.broker_path()
    is_own = _lines.process == os.getpid() and _lines.path == path
    if _lines.client is not None and is_own:
        try:
            _lines.client.devices()
        except LeaseError:
            pass
        else:
            return _lines.client
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    client = _native.LeaseClient.within(path, name[:100], wait, waits)
    _lines.client, _lines.path, _lines.process = client, path, os.getpid()
    return client


def _claims(size: Size | Mapping[str, Size], device: str) -> dict[str, int]:
    """Bytes by device."""
    if isinstance(size, Mapping):
        return {name: in_bytes(part, "lease") for name, part in size.items()}
    return {device: in_bytes(size, "lease")}

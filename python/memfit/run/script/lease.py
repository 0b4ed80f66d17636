"""The room that a script has: its budget, leased from the broker before it runs.

Responsible for asking, for saying how the waiting goes, for giving back what no plan needs, for
asking again before a step of which nothing is known, and for saying no to who asks for bytes while
no plan could do with less. Not responsible for plans (:mod:`memfit.run.script.loop`,
:mod:`memfit.run.script.shrinking`) nor for who gets what (the broker).

What is leased is the budget, which is for tensors, and what torch takes besides. Imports no torch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from memfit import _native
from memfit.errors import LeaseError, UsageError
from memfit.guard import overhead
from memfit.share import lease
from memfit.tensors.heap import trim

if TYPE_CHECKING:
    import torch

from memfit.run.script.announce import Announcer

_SAY_EVERY = 30.0
"""Seconds between two lines about waiting where no line can be rewritten."""

_WORTH_A_CHANGE = 0.01
"""Share of a lease that makes it worth changing."""


_AWAY = "start it again: `memfit broker`; or go on without it: `--alone`"

_LOOK_EVERY = 0.25
"""Seconds between two looks at whether anybody asks while nothing can be given."""


class Wish(NamedTuple):
    """How a lease shall be taken.

    Attributes:
        is_wanted: Whether the user asked for it.
        wait_seconds: Seconds to wait for room; ``None`` for as long as it takes.
        priority: Who goes first.
        device: ``host`` or ``cuda:0``; ``None`` for the broker's first GPU, else the host.
        is_alone_allowed: Whether to go on without a lease where the broker is away.
    """

    is_wanted: bool
    wait_seconds: float | None
    priority: int
    device: str | None
    is_alone_allowed: bool


class Room:
    """What is leased for a script; with no lease, all questions are answered as if alone."""

    def __init__(self, say: Announcer) -> None:
        """Have no lease.

        Args:
            say: Shows lines to the user.
        """
        self._say = say
        self._lease: lease.Lease | None = None
        self._wait: float | None = 0.0
        self._device = ""
        self._leased = 0
        self._expected = 0
        self._besides = 0
        self._waited = 0.0
        self._changes = 0
        self._gives_way = False

    def open(self, budget: str, wish: Wish, *, label: str) -> None:
        """Lease the budget, and wait for it as the user wishes.

        Where no broker was started nothing is leased, which is said where the user asked for a
        lease. One that is away, while others may hold what it granted, is waited for.

        Args:
            budget: As the user wrote it.
            wish: How.
            label: What the memory is for.

        Raises:
            LeaseError: It is not granted.
            UsageError: The broker has no such device, or it cannot be measured what torch takes
                besides tensors.
        """
        away = _Waiting(self._say, "the broker, which is away", "")
        try:
            devices = lease.connection(wish.wait_seconds, away).devices()
        except LeaseError as error:
            is_away = error.reason == "broker_away"
            if is_away and not wish.is_alone_allowed:
                error.add_note(_AWAY)
                raise
            if error.reason != "no_broker" and wish.is_wanted and not is_away:
                raise
            if wish.is_wanted or is_away:
                self._say(f"{error}: the script runs alone, and nothing is held back from others")
            return
        finally:
            away.done()
        if budget.strip().endswith("%"):
            self._say(f"nothing is leased: `{budget}` of an unknown step cannot be")
            return
        self._device = wish.device or _usual(devices)
        if self._device not in devices:
            known = "`, `".join(devices)
            message = f"the broker grants no device `{self._device}`; it grants `{known}`"
            raise UsageError(message)
        self._wait = wish.wait_seconds
        self._say.passing("measuring what torch itself takes, once")
        self._expected = self._besides = overhead.expected(self._device)
        self._say.done()
        tensors = _native.parse_budget(budget, 0)
        began = time.monotonic()
        waits = _Waiting.of(self._say, self._device, tensors + self._besides)
        self._lease = lease.take(
            {self._device: tensors + self._besides},
            wait=wish.wait_seconds,
            priority=wish.priority,
            label=label,
            waits=waits,
            floor={self._device: self._besides},
        )
        waits.done()
        threading.Thread(target=self._say_no, name="memfit-room", daemon=True).start()
        self._waited = time.monotonic() - began
        self._leased = self._lease.bytes
        size = _native.bytes_text
        after = f" after {self._waited:.0f} s" if self._waited >= 1 else ""
        self._say(
            f"leased {size(self._leased)} of `{self._device}`{after}: {size(tensors)} for tensors "
            f"and {size(self._besides)} for torch itself"
        )

    def within(self, budget: str | int) -> str | int:
        """A budget, or what the lease leaves of it.

        Args:
            budget: As the user wrote it, or bytes.
        """
        held = self._held()
        if held is None:
            return budget
        left = max(held - self._besides, 1)
        return min(_native.parse_budget(str(budget), left), left)

    def whole(self) -> None:
        """See that all of the first lease is held again: what comes next may take it."""
        self._gives_way = False
        held = self._held()
        if held is not None and held < self._leased:
            self._resize(self._leased, self._wait)

    def keep(self, peak_bytes: int, device: torch.device, *, gives_way: bool) -> None:
        """Hold what the planned steps take, and give the rest back.

        Args:
            peak_bytes: The highest peak of the plans.
            device: Where they run.
            gives_way: Whether they could be planned for less, between two steps.
        """
        held = self._held()
        if held is None:
            return
        if device.type != ("cpu" if self._device == "host" else "cuda"):
            self._say(f"the script trains on `{device}`, and `{self._device}` is leased")
            return
        trim()
        self._besides = overhead.present(self._device) or self._besides
        need = peak_bytes + self._besides
        if abs(need - held) > held * _WORTH_A_CHANGE:
            self._resize(need, 0.0)
        self._gives_way = gives_way

    def asked(self) -> int | None:
        """Bytes for tensors that another's need would leave; ``None`` when nobody asks."""
        if self._lease is None or not self._gives_way:
            return None
        try:
            asked = self._lease.asked
        except LeaseError:  # a child of a fork trains as it is
            return None
        return None if asked is None else max(asked.get(self._device, 0) - self._besides, 0)

    def decline(self) -> None:
        """Say no to who asks."""
        with contextlib.suppress(LeaseError):
            if self._lease is not None:
                self._lease.decline()

    def give(self, tensor_bytes: int, peak_bytes: int, ratio: float) -> None:
        """Give back to another all but so much, which steps planned for less can do with.

        Args:
            tensor_bytes: What stays for tensors.
            peak_bytes: The highest peak of the plans.
            ratio: Their predicted step time, by that of steps without a plan.
        """
        held = self._held()
        if held is None:
            return
        overhead.release(self._device)
        size = _native.bytes_text
        if self._resize(tensor_bytes + self._besides, 0.0):
            given = held - tensor_bytes - self._besides
            self._say(
                f"gave {size(given)} of `{self._device}` to a process that needs them; the steps "
                f"are planned for {size(peak_bytes)}, step time x {ratio:.2f}"
            )

    def take_again(self, peak_bytes: int) -> bool:
        """Take back what was given away, if there is room.

        Args:
            peak_bytes: The highest peak of the plans before.

        Returns:
            Whether it is held.
        """
        held, need = self._held(), peak_bytes + self._besides
        if held is None or self._lease is None:
            return False
        if held < need:
            try:
                self._lease.resize({self._device: need})
            except LeaseError:
                return False  # not yet
            self._changes += 1
            self._say(f"holds {_native.bytes_text(need)} of `{self._device}` again")
        return True

    def close(self) -> None:
        """Give everything back."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def described(self) -> dict[str, Any] | None:
        """The lease for the record, in the program's words."""
        if self._lease is None:
            return None
        return {
            "device": self._device,
            "leased_bytes": self._leased,
            "besides_bytes": self._expected,
            "waited_seconds": self._waited,
            "kept_bytes": self._held() or 0,
            "changes": self._changes,
        }

    def _held(self) -> int | None:
        """Bytes held; ``None`` without a lease, and in a child of the process that has it."""
        if self._lease is None:
            return None
        try:
            return self._lease.bytes
        except LeaseError:
            return None

    def _say_no(self) -> None:
        """Answer who asks while nothing can be given, so that somebody else is asked at once."""
        while (lease := self._lease) is not None:
            if not self._gives_way:
                with contextlib.suppress(LeaseError):
                    if lease.asked is not None and not self._gives_way:
                        lease.decline()
            time.sleep(_LOOK_EVERY)

    def _resize(self, size: int, wait: float | None) -> bool:
        """Say whether the lease has that size now."""
        assert self._lease is not None
        waits = _Waiting.of(self._say, self._device, size)
        try:
            self._lease.resize({self._device: size}, wait=wait, waits=waits)
        except LeaseError as error:
            held = _native.bytes_text(self._held() or 0)
            wanted = _native.bytes_text(size)
            self._say(f"the lease stays at {held}, and {wanted} are wanted: {error}")
            return False
        else:
            self._changes += 1
            return True
        finally:
            waits.done()


class _Waiting:
    """Says how the waiting goes."""

    def __init__(self, say: Announcer, what: str, hint: str) -> None:
        self._say = say
        self._what = what
        self._hint = hint
        self._began = time.monotonic()
        self._said = self._began - _SAY_EVERY

    @classmethod
    def of(cls, say: Announcer, device: str, size: int) -> _Waiting:
        what = f"{_native.bytes_text(size)} of `{device}`"
        return cls(say, what, "; `memfit ps` says who holds it")

    def __call__(self, ahead: int | None) -> None:
        now = time.monotonic()
        seconds = now - self._began
        before = "" if not ahead else f", {ahead} requests before it"
        line = f"waiting for {self._what}{before} ({seconds:.0f} s{self._hint})"
        if self._say.rewrites:
            self._say.passing(line)
        elif now - self._said >= _SAY_EVERY:
            self._said = now
            self._say(line)

    def done(self) -> None:
        self._say.done()


def _usual(devices: dict[str, int]) -> str:
    """The broker's first GPU, else the host."""
    gpus = (name for name in devices if name != "host")
    return min(gpus, key=lambda name: int(name.partition(":")[2]), default="host")

"""When to look at what is live, so that what was live at a peak can be told later.

Responsible for the moments, for what they cost, and for the best account of each window's peak. Not
responsible for a look itself (:mod:`memfit.track.look`).

A block can be asked whose it is only while it lives. So a look is taken where what is live has
clearly risen, at the next moment at which Python runs again; before a backward, whose peak lies
where no look can be taken, as long as the backwards before have raised a peak; and now and then.
Together they take one part in :data:`SHARE` of the time, and a little at the beginning. Looks at
rises that take more are taken above every peak that was looked at, whatever they told of it: what
lives for one op of a backward rises in each of its ops.

Between two looks lies a *stretch* with a peak of its own, told with the names that the looks on
both ends have given. The account of a window's peak is that of its own peak, or of the stretch that
is told best, whose peak may be a little lower: it says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit import _native
from memfit.tensors.garbage import no_collection
from memfit.track.backwards import BACKWARDS
from memfit.track.cpu import Reading, Window
from memfit.track.look import NAMES, OF_BACKWARD, OF_UPDATE, Look, Owner, is_own, look
from memfit.track.owners import ACTIVATION, OTHER, TEMPORARY
from memfit.track.unused_graphs import UnusedGraphs
from memfit.track.variables import Running

SHARE = 50
"""Looks take at most this part of the time, those at clear rises left out."""

FREE_SECONDS = 0.04
"""What looks at clear rises may take before they become fewer."""

EARLY_SECONDS = 0.05
"""What the first looks without a clear rise may take beside that, in scripts that are soon over."""

_EARLY_SHARE = 8
"""The part of the time since the look before that such a one may take."""

_LEAST_BYTES = 2 << 20
"""Below so many live bytes nothing rings."""

_RISES = (1.15, 1.3)
"""What is a clear rise, and what is one where looks take long."""

_FEW_EVENTS = 2000
_FEW_BACKWARDS = 2
_TOLD = 0.9
"""The part of a peak that must have an owner for it to be told well."""


@dataclass(slots=True, frozen=True)
class Holding:
    """Blocks of one category and one owner.

    Attributes:
        category: What they are.
        owner: Who holds them.
        blocks: How many.
        bytes: Their bytes.
    """

    category: str
    owner: Owner
    blocks: int
    bytes: int


@dataclass(slots=True, frozen=True)
class Account:
    """What was live at the peak of a stretch of time.

    Attributes:
        bytes: Bytes live at it.
        by_category: The same, divided.
        holdings: The same by owner, the largest first.
        event: Number of the event that reached it.
    """

    bytes: int
    by_category: dict[str, int]
    holdings: tuple[Holding, ...]
    event: int

    @property
    def told_bytes(self) -> int:
        """How much of it has a name."""
        return self.bytes - self.by_category.get(OTHER, 0)


def account_of(reading: Reading) -> Account:
    """What a window's reading says about its peak."""
    holdings = [
        Holding(one["category"], NAMES.owner(one["owner"]), one["blocks"], one["bytes"])
        for one in reading.peak_by_owner
    ]
    holdings.sort(key=lambda holding: -holding.bytes)
    return Account(
        reading.peak_bytes, reading.peak_by_category, tuple(holdings), reading.peak_event
    )


class Looks:
    """The looks of this process.

    Attributes:
        listeners: Called after every look.
        arrays: Bytes of arrays of numpy that a variable held at most, by its name and line.
        unused: Graphs that went without a backward.
        problem: Why no more looks are taken; empty as long as they are.
    """

    def __init__(self) -> None:
        """Take none before a window is added."""
        self.listeners: list[Callable[[], None]] = []
        self.arrays: dict[str, int] = {}
        self.unused = UnusedGraphs()
        self.problem = ""
        self._windows: dict[Window, tuple[int, Account | None]] = {}
        self._stretch: Window | None = None
        self._started = 0.0
        self._spent_seconds = 0.0
        self._rise_seconds = 0.0
        self._last_seconds = 0.0
        self._ended = 0.0
        self._above = 0
        self._told = 0
        self._tried = 0
        self._looked_at = 0
        self._backward_event = 0
        self._differentiated = 0
        self._backwards: list[int] = []  # the events at which those under way began
        self._backward_looks = 0
        self._is_looking = False
        self._has_looked = False

    # Windows

    def add(self, window: Window) -> None:
        """Look for a window's sake, until it is removed."""
        self._windows[window] = (_native.last_event(), None)
        if self._stretch is None:
            self._stretch = Window()
            self._started = time.perf_counter()
            self._spent_seconds = self._rise_seconds = 0.0
            _native.on_alarm(self._rung, _obstacle())
            BACKWARDS.watch(self)
        self._told = self._tried = self._looked_at = 0  # its peak begins below those of others
        self._set_alarm()

    def remove(self, window: Window) -> None:
        """Look no more for a window's sake."""
        self._windows.pop(window, None)
        if not self._windows:
            self._stop()

    def _stop(self) -> None:
        _native.switch_alarm_off()
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            stretch.close()

    def account(self, window: Window, reading: Reading) -> Account:
        """The best account of a window's peak.

        Args:
            window: The window.
            reading: What it has seen.
        """
        own = account_of(reading)
        _, kept = self._windows.get(window, (0, None))
        return kept if kept is not None and kept.told_bytes > own.told_bytes else own

    # Moments

    def _rung(self) -> None:
        """What is live has risen; Python runs again."""
        if self._stretch is None or self._is_looking:
            return
        self.look(since=_native.alarm_event())

    def look(self, more: Sequence[Running] = (), *, since: int | None = None) -> None:
        """Look now; what fails in it is nobody's business.

        Args:
            more: Frames whose variables count as the program's, although they run no more.
            since: The event of this line that has raised what is live.
        """
        if self._stretch is None or self._is_looking or _has_compiled():
            return
        started = time.thread_time()
        peak_bytes = self._stretch.peak_bytes()
        is_rise = since is not None and peak_bytes > self._above
        with self._looking():
            found = look(more)
            if since is not None:
                self._name_gone(found, since)
            self._has_looked = True
            if not self._backwards:
                self.unused.looked(found.in_graphs())
            for name, held_bytes in found.walk.array_bytes().items():
                self.arrays[name] = max(held_bytes, self.arrays.get(name, 0))
            self.tell()
            for listener in self.listeners:
                listener()
            self._tried = max(self._tried, peak_bytes)
            self._last_seconds = time.thread_time() - started
            self._ended = time.perf_counter()
            if is_rise:
                self._rise_seconds += self._last_seconds
            else:
                self._spent_seconds += self._last_seconds
            self._set_alarm()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """A stretch of memfit's own code in the middle of the program; where it fails, it ends."""
        self._is_looking = True
        try:
            with no_collection():
                yield
        except Exception as error:
            # A handler of signals may run in here, and what it raises is the program's.
            if not is_own(error):
                raise
            self.problem = f"{type(error).__name__}: {error}"
            self._stop()
        finally:
            self._is_looking = False

    def _name_gone(self, found: Look, since: int) -> None:
        """Name what was live when the alarm rang and is gone at the end of the line."""
        if self._stretch is None or self._stretch.peak_event() < since:
            return
        if self._backward_event > self._looked_at:
            # A backward lets go of what others made; this may be before it is said to have ended.
            for began in self._backwards[-1:]:
                _native.label_gone_blocks(began, TEMPORARY, NAMES.named(OF_BACKWARD))
            return
        owner = NAMES.named(f"made and freed again at {found.here.place}")
        _native.label_gone_blocks(self._looked_at, TEMPORARY, owner)

    def backward_begins(self) -> None:
        """Look, where backwards have raised a peak: what their graphs hold is known only now."""
        self._backward_event = _native.last_event() + 1
        if not self._backwards and not self._is_looking:
            self.unused.settle()
        self._backwards.append(self._backward_event)
        if self._stretch is None or self._is_looking:
            return
        peak = max((window.peak_event() for window in self._windows), default=0)
        if peak > self._looked_at and (self._backward_looks < _FEW_BACKWARDS or self._has_time()):
            self._backward_looks += 1
            self.look()

    def backward_ended(self) -> None:
        """Name what backward made for itself."""
        # One may have begun before anybody looked.
        began = self._backwards.pop() if self._backwards else self._backward_event
        self._differentiated = _native.last_event()
        if self._stretch is not None and not self._is_looking:
            _native.label_gone_blocks(began, TEMPORARY, NAMES.named(OF_BACKWARD))

    def update_ended(self, since: int) -> None:
        """Name what an optimizer made for itself, after the closures that it called.

        Args:
            since: Number of the first event of its step.
        """
        if self._stretch is not None and not self._is_looking:
            began = max(since, self._differentiated)
            _native.label_gone_blocks(began, TEMPORARY, NAMES.named(OF_UPDATE))
            if self._has_looked:
                self._has_looked = False
                with self._looking():
                    self.tell()

    def graph_bytes(self) -> int:
        """How much graphs hold now; 0 where that cannot be looked at."""
        if self._stretch is None or self._is_looking or _has_compiled():
            return 0
        with self._looking():
            found = look()
            return sum(found.sizes[a] for a, it in found.categories.items() if it == ACTIVATION)
        return 0

    def look_if_there_is_time(self) -> None:
        """Look now, unless looks have taken their part of the time."""
        if self._has_time():
            self.look()

    # Accounts

    def tell(self) -> None:
        """Take down what the stretch up to now has to say of a peak, and begin another."""
        if self._stretch is None:
            return
        reading = self._stretch.read()
        self._stretch.restart()
        self._looked_at = _native.last_event()
        if reading is None:
            return
        found = account_of(reading)
        if found.told_bytes >= _TOLD * found.bytes:
            self._told = max(self._told, found.bytes)
        for window, (opened, kept) in list(self._windows.items()):
            if found.event >= opened and (kept is None or found.told_bytes >= kept.told_bytes):
                self._windows[window] = (opened, found)

    # Cost

    def _has_time(self) -> bool:
        return time.perf_counter() >= self._next()

    def _next(self) -> float:
        """When there is time for a look without a clear rise."""
        taken = self._spent_seconds + self._last_seconds
        usual = self._started + SHARE * taken
        if taken > EARLY_SECONDS:
            return usual
        return min(usual, self._ended + _EARLY_SHARE * self._last_seconds)

    def _set_alarm(self) -> None:
        """Ring at a clear rise at once, at any rise and after long silence when there is time."""
        if self._stretch is None:
            return
        elapsed_seconds = time.perf_counter() - self._started
        is_long = self._rise_seconds > FREE_SECONDS + elapsed_seconds / SHARE
        known_bytes = max(_native.counted_bytes(), self._told, self._tried if is_long else 0)
        self._above = max(_LEAST_BYTES, int(_RISES[is_long] * known_bytes))
        later_above = max(_LEAST_BYTES, self._told)
        later = max(0.0, self._next() - self._started - elapsed_seconds)
        events = _native.last_event()
        _native.set_alarm(self._above, later_above, later, max(2 * events, events + _FEW_EVENTS))


def _has_compiled() -> bool:
    """Whether `torch.compile` has compiled anything.

    Its frames, and what a graph saves in them, have crashed a process that was looked at. So no
    look is taken from then on, and what had no owner by then stays without.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", {})
    return any(backend is not None for backend in backends.values())  # without one, it is disabled


def _obstacle() -> Any:
    """A function that returns something where a compiler watches what runs."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback


LOOKS = Looks()
"""The looks of this process; the alarm is one."""

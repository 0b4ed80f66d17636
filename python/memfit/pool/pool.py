"""The pool: many models, one budget, any number of threads.

Responsible for waiting and waking threads and for doing what the engine decides. Not responsible
for the decisions (``crates/memfit-engine/src/pool``).

Whoever waits for a model does the work that is due meanwhile: there is no thread of the pool's own,
and nothing is moved unless somebody waits for it, be it another process that needs bytes of the
pool's lease (:mod:`memfit.pool.leased`): then the thread does it that looks after idle leases
(:mod:`memfit.courtesy`). Bytes are moved without the lock.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import nn

from memfit import _native, besides
from memfit.courtesy import look_after
from memfit.errors import MemfitError, ParkError, PoolError, UsageError
from memfit.leases import Lease
from memfit.parking import layout
from memfit.parking.parked import ParkedModel
from memfit.pool.activations import activation_bytes as predicted
from memfit.pool.leased import DEVICE, GROW_EVERY, LeasedBudget
from memfit.sizes import Size, in_bytes


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool did so far.

    Attributes:
        uses: Uses granted.
        hits: Uses whose model was awake when it was asked for.
        waits: Uses that were not granted at once.
        wakes: Models woken.
        parks: Models parked.
        bytes_woken: Bytes read by waking.
        bytes_written: Bytes written by parking.
        waited_seconds: What uses waited, together.
        peak_bytes: Most bytes of models and activations at a time.
    """

    uses: int
    hits: int
    waits: int
    wakes: int
    parks: int
    bytes_woken: int
    bytes_written: int
    waited_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A model of the pool.

    Attributes:
        name: What it is called.
        number: The engine's number for it.
        parked: The model.
        activations: Bytes that a call takes, where it says nothing else.
    """

    name: str
    number: int
    parked: ParkedModel
    activations: int


_Refused = tuple[str, int, int]


class Pool:
    """Keeps models under one budget: those that are used in memory, the others parked."""

    def __init__(
        self,
        budget: Size | None = None,
        spill: str | PathLike[str] | None = None,
        *,
        lease: Lease | None = None,
        allow_memory: bool = False,
    ) -> None:
        """Create a pool without models.

        Args:
            budget: Most bytes for models and activations together: ``"4GiB"``.
            spill: Folder on a disk for parked models; it is made if it is not there.
            lease: A lease on the host instead of a budget: the pool has what it holds, less what
                torch takes besides tensors. Where the lease has a floor and another process needs
                memory, models that nobody uses are parked and their bytes given back; when a model
                needs them they are asked for again. Leave resizing it to the pool.
            allow_memory: Accept a folder whose files are kept in memory.

        Raises:
            BudgetError: The budget cannot be read.
            UsageError: It is no size; both or none of ``budget`` and ``lease``; no ``spill``; or
                the lease leaves nothing.
        """
        if (budget is None) == (lease is None):
            raise UsageError("give a `budget`, or a `lease` to live in")
        if spill is None:
            raise UsageError("a pool needs a folder for parked models: give `spill`")
        self._leased = None if lease is None else LeasedBudget(lease)
        whole = in_bytes(budget or 0, "keep a pool within")
        if self._leased is not None:
            whole = self._leased.whole_bytes
        self._whole = whole
        self._spill = spill
        self._allow_memory = allow_memory
        with suppress(OSError):  # adding the first model says what is wrong with it
            os.makedirs(spill, exist_ok=True)  # noqa: PTH103 - takes every kind of path
        self._machine = _native.PoolMachine(whole)
        self._entries: dict[str, _Entry] = {}
        self._numbers: dict[int, _Entry] = {}
        self._answers: dict[int, _Refused | None] = {}
        self._failures: dict[int, MemfitError] = {}
        self._changed = threading.Condition(threading.Lock())
        self._process = os.getpid()
        self._is_resizing = self._is_giving = False
        if lease is not None:
            weakly = weakref.ref(self)

            def looks() -> None:
                if (pool := weakly()) is not None:
                    pool._make_room()

            look_after(lease, looks)

    @property
    def budget_bytes(self) -> int:
        """Most bytes for models and activations now."""
        return self._machine.budget()

    def add(
        self,
        name: str,
        model: nn.Module,
        *,
        pinned: bool = False,
        activation_bytes: Size | None = None,
        example: Any = None,
        source: str | PathLike[str] | None = None,
        leave: Collection[str] = (),
    ) -> None:
        """Add a model; it stays in memory if there is room, and is parked if there is none.

        Args:
            name: What to call it.
            model: The model, on the CPU.
            pinned: Never park it once it is awake.
            activation_bytes: What a call takes besides the model.
            example: Inputs as large as they come, to predict that from; without either, calls
                count nothing.
            source: Safetensors file that the model was loaded from.
            leave: Names of parameters and module buffers to leave where they are, uncounted.

        Raises:
            PoolError: It can never fit beside what is pinned (``too_large``), or the name is taken.
            ParkError: It cannot be parked.
            UsageError: Both ``activation_bytes`` and ``example``.
        """
        if activation_bytes is not None and example is not None:
            raise UsageError("`activation_bytes` and `example` say the same: give one")
        if not isinstance(model, nn.Module):
            message = f"`model` must be an `nn.Module`, got `{type(model).__name__}`"
            raise UsageError(message)
        _check_is_on_host(name, model, leave)
        with self._changed:
            self._check_name_is_free(name)
        activations = in_bytes(activation_bytes or 0, "count")
        if example is not None:
            activations = predicted(model, example)
        parked = ParkedModel(
            model, self._spill, source=source, leave=leave, allow_memory=self._allow_memory
        )
        try:
            with self._changed:
                self._add(name, parked, activations, pinned=pinned)
        except BaseException:
            parked.close()
            raise

    def remove(self, name: str) -> ParkedModel:
        """Take a model out of the pool.

        Args:
            name: The model.

        Returns:
            The model as it is, parked or awake; it is not counted any more.

        Raises:
            PoolError: There is no such model, or it is used or waited for (``in_use``).
        """
        with self._changed:
            entry = self._entry(name)
            if not self._machine.remove(entry.number):
                message = f"`{name}` is used or waited for, and cannot be taken out now"
                raise PoolError(message, "in_use")
            del self._entries[name], self._numbers[entry.number]
            self._collect()
            return entry.parked

    @contextmanager
    def use(
        self, name: str, *, wait: float | None = None, activation_bytes: Size | None = None
    ) -> Iterator[nn.Module]:
        """Use a model for a block: it is woken if it is parked, and others are parked if need be.

        Waits rather than exceed the budget. Several threads may use one model at once; each call
        counts its own activations. A thread that uses one model may ask for another: one such
        thread may wait at a time, another is refused at once, so that no two wait for each other.

        Args:
            name: The model.
            wait: Seconds to wait for room; ``None`` waits without end.
            activation_bytes: What this call takes besides the model, if it is not what the model
                was added with.

        Yields:
            The model.

        Raises:
            PoolError: It can never fit (``too_large``), or did not within ``wait``
                (``timed_out``), or two threads would wait for each other (``contended``), or its
                wake failed (``not_woken``), or what is in its way cannot be parked (``stuck``);
                the last two with the reason as ``__cause__``.
        """
        entry, ticket = self._acquire(name, wait, activation_bytes)
        try:
            yield entry.parked.model
        finally:
            if self._process == os.getpid():
                unsaved = entry.parked.unsaved_bytes
                with self._changed:
                    self._machine.end(ticket, unsaved, _now())
                    self._collect()

    def shrink(self, to: Size = 0) -> int:
        """Park models that nobody uses or waits for, until no more than so many bytes count.

        For a process that is idle and gives its memory to others, as with the end of a lease. The
        budget stays what it is, and the next use wakes its model as ever.

        Args:
            to: Bytes that may stay.

        Returns:
            Bytes that count then: more than asked for where models are used or pinned.

        Raises:
            ParkError: A model cannot be parked; all others are.
            BudgetError: The size cannot be read.
        """
        target = in_bytes(to, "shrink to")
        if self._process != os.getpid():
            message = "the pool belongs to the process that this one is a fork of"
            raise PoolError(message, "forked")
        failures = []
        with self._changed:
            while (job := self._machine.shed(target, _now())) is not None:
                self._carry_out(job)
                failures += [error] if (error := self._failures.get(job[1])) else []
            if failures and self._machine.counted() > target:
                raise failures[0]
            return self._machine.counted()

    @property
    def statistics(self) -> PoolStatistics:
        """What was done so far."""
        counts = json.loads(self._machine.statistics())
        waited = counts.pop("waited_micros") / 1e6
        return PoolStatistics(waited_seconds=waited, **counts)

    @property
    def counted_bytes(self) -> int:
        """Bytes of models and activations that count now."""
        return self._machine.counted()

    @property
    def awake(self) -> list[str]:
        """Names of the models that are in memory."""
        return [name for name, entry in list(self._entries.items()) if not entry.parked.is_parked]

    def __contains__(self, name: object) -> bool:
        """Whether there is a model of that name."""
        return name in self._entries

    def __len__(self) -> int:
        """How many models there are."""
        return len(self._entries)

    def __repr__(self) -> str:
        """Say how full it is."""
        counted, budget = map(_native.bytes_text, (self.counted_bytes, self.budget_bytes))
        return f"<memfit.Pool {len(self.awake)} of {len(self)} models awake, {counted} of {budget}>"

    def _add(self, name: str, parked: ParkedModel, activations: int, *, pinned: bool) -> None:
        """Add what can be parked; the lock is held."""
        self._check_name_is_free(name)
        added, refused = self._machine.add(parked.nbytes, activations, pinned, _now())
        if added is None:
            raise _refusal(name, refused or ("", 0, 0), self._whole)
        number, is_awake = added
        if not is_awake:
            try:
                parked.park()
            except BaseException:
                self._machine.remove(number)
                raise
        entry = _Entry(name, number, parked, activations)
        self._entries[name] = self._numbers[number] = entry

    def _acquire(
        self, name: str, wait: float | None, activation_bytes: Size | None
    ) -> tuple[_Entry, int]:
        """Wait for a use; returns its ticket."""
        deadline = None if wait is None else time.monotonic() + wait
        if self._process != os.getpid():
            message = "the pool belongs to the process that this one is a fork of"
            raise PoolError(message, "forked")
        if self._leased is not None:
            self._leased.check()
        with self._changed:
            entry = self._entry(name)
            activations = entry.activations
            if activation_bytes is not None:
                activations = in_bytes(activation_bytes, "count")
            client = threading.get_ident()
            ticket = self._machine.ask(entry.number, activations, client, _now())
            try:
                refused = self._wait(ticket, deadline)
            except BaseException:
                self._give_up(ticket)
                raise
            if refused is None:
                return entry, ticket
            error = _refusal(name, refused, self._whole)
            raise error from self._cause(entry, refused)

    def _wait(self, ticket: int, deadline: float | None) -> _Refused | None:
        """Do what is due until the ticket is answered; the lock is held, but for the doing."""
        while True:
            self._collect()
            if ticket in self._answers:
                return self._answers.pop(ticket)
            leased = self._leased
            if leased is not None and not leased.is_whole:
                self._grow(leased, waits=False)
            job = self._machine.begin(_now())
            if job is not None:
                self._carry_out(job)
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                message = (
                    f"no room within the time given: {self._machine.counted()} of "
                    f"{self.budget_bytes} bytes are in use\nhint: wait longer, or raise the budget"
                )
                raise PoolError(message, "timed_out")
            if leased is None:
                self._changed.wait(left)
            elif self._machine.short() is None or not self._grow(leased, waits=True):
                self._changed.wait(GROW_EVERY if left is None else min(left, GROW_EVERY))

    def _grow(self, leased: LeasedBudget, *, waits: bool) -> bool:
        """Ask for more of the lease, without the lock; says whether there is more."""
        if self._is_resizing or (waits and self._machine.short() is None):
            return False
        before, short = leased.budget_bytes, self._machine.short()
        self._is_resizing = True
        self._changed.release()
        try:
            leased.grow(short, waits=waits)
        finally:
            self._changed.acquire()
            self._is_resizing = False
            if leased.budget_bytes > before:
                self._machine.aim(leased.budget_bytes, _now())
                self._collect()
        return leased.budget_bytes > before

    def _make_room(self) -> None:
        """Answer a process that needs memory: called now and then, by a thread of its own."""
        leased = self._leased
        if leased is None or self._process != os.getpid():
            return
        asked = leased.asked()
        with self._changed:
            if self._is_resizing:
                return
            if asked is None:
                if self._is_giving:  # nobody needs it any more
                    self._is_giving = False
                    self._machine.aim(leased.budget_bytes, _now())
                    self._collect()
                return
            self._is_resizing = self._is_giving = True
            try:
                # Comes down as far as nothing counts, and further whenever something is given up.
                self._machine.aim(asked, _now())
                while (job := self._machine.shed(asked, _now())) is not None:
                    self._carry_out(job)
                budget = self._machine.budget()
                if budget > asked and leased.may_wait():
                    return
                self._changed.release()
                try:
                    besides.release(DEVICE)
                    leased.give(budget)
                finally:
                    self._changed.acquire()
                    self._is_giving = False
                    self._machine.aim(leased.budget_bytes, _now())
            finally:
                self._is_resizing = False
                self._collect()

    def _give_up(self, ticket: int) -> None:
        """Forget a request whose thread has stopped waiting."""
        self._collect()
        if ticket not in self._answers:
            self._machine.cancel(ticket)
        elif self._answers.pop(ticket) is None:
            self._machine.end(ticket, 0, _now())
        self._collect()

    def _carry_out(self, job: tuple[bool, int]) -> None:
        """Wake or park a model, without the lock."""
        is_wake, number = job
        parked = self._numbers[number].parked
        written = parked.statistics.bytes_written
        start = time.perf_counter()
        self._changed.release()
        try:
            if is_wake:
                parked.wake()
            else:
                parked.park()
            self._failures.pop(number, None)
        except MemfitError as error:
            self._failures[number] = error
        finally:
            took = int((time.perf_counter() - start) * 1e6)
            moved = parked.nbytes if is_wake else parked.statistics.bytes_written - written
            # Not by whether there was an error: a signal may come when it is done.
            is_done = parked.is_parked is not is_wake
            self._changed.acquire()
            self._machine.ended(job, is_done, moved, took, _now())
            self._collect()

    def _collect(self) -> None:
        """Take in what the engine has answered; tell everyone that something may have changed."""
        self._answers.update(self._machine.answers())
        self._changed.notify_all()

    def _cause(self, entry: _Entry, refused: _Refused) -> MemfitError | None:
        """What went wrong with a model, where that is why a use was refused."""
        if refused[0] == "not_woken":
            return self._failures.get(entry.number)
        if refused[0] == "stuck":
            return next(iter(reversed(self._failures.values())), None)
        return None

    def _entry(self, name: str) -> _Entry:
        """The model of a name."""
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(f"`{known}`" for known in self._entries) or "none"
            message = f"the pool has no model `{name}`; it has {known}"
            raise PoolError(message, "unknown")
        return entry

    def _check_name_is_free(self, name: str) -> None:
        """Refuse a second model of one name."""
        if name in self._entries:
            message = f"the pool has a model `{name}` already"
            raise PoolError(message, "name_taken")


def _now() -> int:
    """Microseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1000


def _check_is_on_host(name: str, model: nn.Module, leave: Collection[str]) -> None:
    """Refuse a model on a GPU: the budget is of the host's memory."""
    for member in layout.members(model, leave):
        if member.tensor.is_cuda:
            message = (
                f"cannot add `{name}`: `{member.names[0]}` is on `{member.tensor.device}`, and a "
                "pool is of models on the CPU so far\nhint: park it alone, with `memfit.park`"
            )
            raise ParkError(message, "unsupported", member.names[0])


def _refusal(name: str, refused: _Refused, budget: int) -> PoolError:
    """The error for a request that the engine refused."""
    reason, wanted, available = refused
    sizes = [_native.bytes_text(size) for size in (wanted, available, budget)]
    messages = {
        "too_large": (
            f"`{name}` can never fit: it takes {sizes[0]} ({wanted} bytes) with its activations, "
            f"and pinned models and this thread's own uses leave {sizes[1]} ({available} bytes) of "
            f"the pool's {sizes[2]}\nhint: raise the budget, or pin fewer models"
        ),
        "contended": (
            f"`{name}` has no room now, and another thread that uses a model waits for one "
            "already: they could wait for each other\nhint: leave the first model's block before"
        ),
        "not_woken": f"`{name}` could not be woken; it is parked, and whole",
        "stuck": f"no room for `{name}`: what is awake and not used cannot be parked",
    }
    message = messages.get(reason, f"`{name}` was refused: {reason}")
    return PoolError(message, reason, wanted or None, available if wanted else None)

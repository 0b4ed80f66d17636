"""The pool: many models, one budget, any number of threads.

Responsible for waiting and waking threads and for doing what the engine decides. Not responsible
for the decisions (``crates/memfit-engine/src/share/pool``).

Whoever waits for a model does the work that is due meanwhile: there is no thread of the pool's own,
and nothing is moved unless somebody waits for it, be it another process that needs bytes of the
pool's lease (:mod:`memfit.share.pool.leased`): then the thread does it that looks after idle leases
(:mod:`memfit.share.idle`). Bytes are moved without the lock.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn

from memfit import _native
from memfit.errors import MemfitError, PoolError, UsageError
from memfit.guard import overhead
from memfit.share.idle import look_after
from memfit.share.lease import Lease
from memfit.share.park.parked import ParkedModel
from memfit.share.pool.calls import Calls, Use
from memfit.share.pool.device import HOST, check, device_of
from memfit.share.pool.held import HeldUses
from memfit.share.pool.law import CallLaw
from memfit.share.pool.leased import GROW_EVERY, LeasedBudget
from memfit.share.pool.measured import Activations, UseMeter, tolerated
from memfit.share.pool.refusals import Refused, excess, refusal, refused_call
from memfit.share.pool.statistics import PoolStatistics
from memfit.sizes import Size, in_bytes


@dataclass(frozen=True, slots=True)
class _Entry:
    """A model of the pool.

    Attributes:
        name: What it is called.
        number: The engine's number for it.
        parked: The model.
        activations: Bytes that a call takes, where it says nothing else.
        law: What it takes at other sizes, where there is an example.
        calls: Sees its calls, where the law says anything.
    """

    name: str
    number: int
    parked: ParkedModel
    activations: int
    law: CallLaw | None
    calls: Calls | None


_Job = tuple[str, int, int]


class Pool:
    """Keeps models under one budget: those that are used in memory, the others parked.

    Attributes:
        device: Where its models lie, as the broker names it: ``host`` or ``cuda:0``.
        host_budget_bytes: Most bytes of the host's memory for parked copies of models on a GPU.
    """

    def __init__(
        self,
        budget: Size | None = None,
        spill: str | PathLike[str] | None = None,
        *,
        lease: Lease | None = None,
        device: str | torch.device | None = None,
        host: Size | None = None,
        stream: bool = False,
        guard: bool = False,
        allow_memory: bool = False,
    ) -> None:
        """Create a pool without models.

        Args:
            budget: Most bytes of the device for models and activations together: ``"4GiB"``.
            spill: Folder on a disk for parked models; it is made if it is not there.
            lease: A lease instead of a budget: the pool has what it holds on the pool's device,
                less what torch takes there besides tensors. Where the lease has a floor and another
                process needs memory, models that nobody uses are parked and their bytes given back;
                when a model needs them they are asked for again. Leave resizing it to the pool.
            device: Where all its models lie: ``host`` or ``cpu``, ``cuda:0``, or ``cuda`` for the
                current GPU. By default the only device of the lease, else the host.
            host: For a pool on a GPU, most bytes of the host's memory for all its parked copies
                together; the rest goes to the disk. By default half of what is free there now.
            stream: Let a use begin while its model is still read: each tensor is waited for, and
                compared with what was parked, when an op first needs it
                (:meth:`memfit.ParkedModel.wake`). Not for a pool on a GPU.
            guard: Refuse what tensors of the process would take beyond what was set aside, and a
                little, while models are used: an :class:`~memfit.errors.OutOfBudget` where it
                leaves the block. Each model needs ``example`` or ``activation_bytes``.
            allow_memory: Accept a folder whose files are kept in memory.

        Raises:
            BudgetError: The budget cannot be read.
            UsageError: It is no size; both or none of ``budget`` and ``lease``; no ``spill``; the
                lease leaves nothing; there is no such device; ``host`` for a pool on the host, or
                ``stream`` or ``guard`` for one on a GPU.
        """
        if (budget is None) == (lease is None):
            raise UsageError("give a `budget`, or a `lease` to live in")
        if spill is None:
            raise UsageError("a pool needs a folder for parked models: give `spill`")
        self.device = device_of(device, lease)
        self.host_budget_bytes = self._share_of_host(host)
        self._leased = None if lease is None else LeasedBudget(lease, self.device)
        whole = in_bytes(budget or 0, "keep a pool within")
        if self._leased is not None:
            whole = self._leased.whole_bytes
        self._whole = whole
        self._spill = spill
        self._allow_memory = allow_memory
        if stream and self.device != HOST:
            message = "`stream` is for models on the host\nhint: leave it out for a GPU's"
            raise UsageError(message)
        self._stream = stream
        if guard and self.device != HOST:
            message = (
                "`guard` is for models on the host\nhint: `memfit.guard` around it for a GPU's"
            )
            raise UsageError(message)
        self._held = HeldUses() if guard else None
        with suppress(OSError):  # adding the first model says what is wrong with it
            os.makedirs(spill, exist_ok=True)  # noqa: PTH103 - takes every kind of path
        self._machine = _native.PoolMachine(
            whole, None if self.device == HOST else self.host_budget_bytes
        )
        self._entries: dict[str, _Entry] = {}
        self._numbers: dict[int, _Entry] = {}
        self._answers: dict[int, Refused | None] = {}
        self._failures: dict[int, MemfitError] = {}
        self._seconds: dict[int, float] = {}
        self._measured: dict[int, int] = {}
        self._exceeded: dict[int, int] = {}
        self._meter = UseMeter(self.device)
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
        """Most bytes of the device for models and activations now."""
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
            model: The model, on the pool's device. What a model on a GPU has on the host stays
                there, uncounted.
            pinned: Never park it once it is awake.
            activation_bytes: What a call takes besides the model.
            example: Inputs as large as they mostly come, to predict that from, on a GPU what
                torch's allocator reserves of it. Larger calls are foreseen from it: they have more
                set aside before they run, or are refused. Without either, calls count nothing.
            source: Safetensors file that the model was loaded from; not on a GPU.
            leave: Names of parameters and module buffers to leave where they are, uncounted.

        Raises:
            PoolError: It can never fit beside what is pinned (``too_large``), or the name is taken.
            ParkError: It cannot be parked, or does not lie on the pool's device.
            UsageError: Both ``activation_bytes`` and ``example``.
        """
        if activation_bytes is not None and example is not None:
            raise UsageError("`activation_bytes` and `example` say the same: give one")
        if not isinstance(model, nn.Module):
            message = f"`model` must be an `nn.Module`, got `{type(model).__name__}`"
            raise UsageError(message)
        check(name, model, leave, self.device)
        with self._changed:
            self._check_name_is_free(name)
        if self._held is not None and activation_bytes is None and example is None:
            raise UsageError("a pool with `guard` needs `example` or `activation_bytes`")
        activations, law = in_bytes(activation_bytes or 0, "count"), None
        if example is not None:
            law = CallLaw(model, example, self.device)
            activations = law.declared_bytes
        parked = ParkedModel(
            model, self._spill, source=source, leave=leave, allow_memory=self._allow_memory
        )
        try:
            with self._changed:
                self._add(name, parked, activations, law, pinned=pinned)
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
            self._seconds.pop(entry.number, None)
            self._measured.pop(entry.number, None)
            self._exceeded.pop(entry.number, None)
            if entry.calls is not None:
                entry.calls.end()
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
        entry, use = self._acquire(name, wait, activation_bytes)
        took, pool_counted = None, 0
        try:
            yield entry.parked.model
        except RuntimeError as error:
            refused = None if self._held is None else self._held.refused(error)
            if refused is None:
                raise
            raise refused from error
        finally:
            if self._process == os.getpid():
                # From a GPU all of it is copied whenever it is parked.
                unsaved = entry.parked.unsaved_bytes if self.device == HOST else 0
                with self._changed:
                    if entry.calls is not None:
                        entry.calls.end_use(use)
                    took, pool_counted = self._meter.end(), self._machine.counted()
                    if self._held is not None:
                        self._held.end(use.counted_bytes)
                    self._machine.end(use.ticket, unsaved, _now())
                    self._collect()
        self._compare(entry, use, took, pool_counted)

    def activations(self, name: str) -> Activations:
        """What calls of a model take beside it: as said, and as measured.

        Args:
            name: The model.

        Raises:
            PoolError: There is no such model.
        """
        with self._changed:
            entry = self._entry(name)
            refusal = "it was added without an example" if entry.law is None else entry.law.refusal
            return Activations(entry.activations, self._measured.get(entry.number, 0), refusal)

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
                failures += [error] if (error := self._carry_out(job)) else []
            if failures and self._machine.counted() > target:
                raise failures[0]
            return self._machine.counted()

    @property
    def statistics(self) -> PoolStatistics:
        """What was done so far."""
        counts = self._machine.statistics()
        waited = counts.pop("waited_micros") / 1e6
        return PoolStatistics(waited_seconds=waited, **counts)

    @property
    def counted_bytes(self) -> int:
        """Bytes of models and activations that count now."""
        return self._machine.counted()

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that parked copies of models on a GPU have now."""
        return self._machine.in_host()

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
        sizes = (self.counted_bytes, self.budget_bytes, self.host_bytes, self.host_budget_bytes)
        counted, budget, copies, share = map(_native.bytes_text, sizes)
        said = f"{len(self.awake)} of {len(self)} models awake, {counted} of {budget}"
        if self.device != HOST:
            said = f"on {self.device}, {said}, copies in {copies} of {share} of the host"
        return f"<memfit.Pool {said}>"

    def _add(
        self,
        name: str,
        parked: ParkedModel,
        activations: int,
        law: CallLaw | None,
        *,
        pinned: bool,
    ) -> None:
        """Add what can be parked; the lock is held."""
        self._check_name_is_free(name)
        added, refused = self._machine.add(parked.nbytes, activations, pinned, _now())
        if added is None:
            raise self._refusal(name, refused or ("", 0, 0))
        number, is_awake, in_host = added
        if not is_awake:
            try:
                self._park(parked, in_host)
            except BaseException:
                self._machine.remove(number)
                raise
            self._machine.copied(number, parked.host_bytes)
        calls = None
        if law is not None and not law.refusal:
            calls = Calls(law, weakref.WeakMethod(self._make_room_for))
            calls.watch(parked.model)
        entry = _Entry(name, number, parked, activations, law, calls)
        self._entries[name] = self._numbers[number] = entry

    def _acquire(
        self, name: str, wait: float | None, activation_bytes: Size | None
    ) -> tuple[_Entry, Use]:
        """Wait for a use."""
        deadline = None if wait is None else time.monotonic() + wait
        if self._process != os.getpid():
            message = "the pool belongs to the process that this one is a fork of"
            raise PoolError(message, "forked")
        if self._leased is not None:
            self._leased.check()
        with self._changed:
            entry = self._entry(name)
            activations = self._expected(entry)
            if activation_bytes is not None:
                activations = in_bytes(activation_bytes, "count")
            if self._held is not None:
                activations = tolerated(activations)
            client = threading.get_ident()
            ticket = self._machine.ask(entry.number, activations, client, _now())
            try:
                refused = self._wait(ticket, deadline)
            except BaseException:
                self._give_up(ticket)
                raise
            if refused is None:
                use = Use(ticket, entry.number, activations, wait)
                if entry.calls is not None:
                    entry.calls.begin_use(use)
                if self._held is not None:
                    self._held.begin(activations)
                self._meter.begin()
                return entry, use
            error = self._refusal(name, refused)
            raise error from self._cause(entry, refused)

    def _make_room_for(self, use: Use, takes: int, call: str) -> None:
        """Set more aside for a call of a use that is about to begin."""
        if self._process != os.getpid():
            return
        deadline = None if use.wait_seconds is None else time.monotonic() + use.wait_seconds
        if self._held is not None:
            takes = tolerated(takes)
        with self._changed:
            ticket = self._machine.grow(use.ticket, takes - use.counted_bytes, _now())
            try:
                refused = self._wait(ticket, deadline)
            except BaseException:
                self._give_up(ticket)
                raise
            if refused is None:
                if self._held is not None:
                    self._held.grow(takes - use.counted_bytes)
                use.counted_bytes = takes
                self._meter.resume()
                return
            entry = self._numbers[use.model]
            budget, counted = self._whole, use.counted_bytes
            error = refused_call(entry.name, call, takes, refused, counted, budget, self.device)
            raise error from self._cause(entry, refused)

    def _expected(self, entry: _Entry) -> int:
        """What a call counts with: what calls took, where that is more and the budget has room."""
        exceeded = self._exceeded.get(entry.number, 0)
        return max(entry.activations, min(exceeded, self.budget_bytes - entry.parked.nbytes))

    def _compare(self, entry: _Entry, use: Use, took: int | None, pool_counted: int) -> None:
        """Hold what a use took against what it counted with, of all that the pool counted."""
        number, counted = entry.number, use.counted_bytes
        if took is None:
            return
        self._measured[number] = max(took, self._measured.get(number, 0))
        if took <= max(tolerated(counted), self._exceeded.get(number, 0)):
            return
        self._exceeded[number] = took
        held, budget = pool_counted - counted + took, self.budget_bytes
        said = excess(entry.name, took, counted, held, budget, use.unforeseen)
        warnings.warn(said, stacklevel=4)

    def _wait(self, ticket: int, deadline: float | None) -> Refused | None:
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
                where = "" if self.device == HOST else f" of `{self.device}`"
                message = (
                    f"no room within the time given: "
                    f"{_native.bytes_text(self._machine.counted())} of "
                    f"{_native.bytes_text(self.budget_bytes)}{where} are in use\n"
                    "hint: wait longer, or raise the budget"
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
                    overhead.release(self.device)
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

    def _carry_out(self, job: _Job) -> MemfitError | None:
        """Do what is due, without the lock; returns what went wrong."""
        kind, number, in_host = job
        if kind == "release":
            self._release()
            return None
        self._meter.disturbed()
        parked = self._numbers[number].parked
        written, failure = _written(parked), None
        start = time.perf_counter()
        self._changed.release()
        try:
            if kind == "wake":
                parked.wake(stream=self._stream)
            elif kind == "park":
                self._park(parked, in_host)
            else:
                parked.to_disk()
        except MemfitError as error:
            failure = error
        finally:
            seconds = time.perf_counter() - start
            took = int((self._woken_seconds(number) if kind == "wake" else seconds) * 1e6)
            moved = parked.nbytes if kind == "wake" else _written(parked) - written
            copied = parked.host_bytes
            # Not by whether there was an error: a signal may come when it is done.
            is_done = copied == 0 if kind == "spill" else parked.is_parked is (kind == "park")
            self._changed.acquire()
            self._failures.pop(number, None)
            if failure is not None:
                self._failures[number] = failure
            done = {"is_done": is_done, "moved": moved, "in_host": copied}
            self._machine.ended(kind, number, {**done, "took": took, "now": _now()})
            self._collect()
        return failure

    def _woken_seconds(self, number: int) -> float:
        """What waking a model took since this was asked last.

        Where it streams, that is when the last wake began and what uses have waited for it since.
        """
        seconds = self._numbers[number].parked.statistics.wake_seconds
        before = self._seconds.get(number, 0.0)
        self._seconds[number] = seconds
        return seconds - before

    def _release(self) -> None:
        """Give torch's free blocks back, without the lock."""
        self._changed.release()
        try:
            overhead.release(self.device)
        finally:
            self._changed.acquire()
            done = {"is_done": True, "moved": 0, "in_host": 0, "took": 0, "now": _now()}
            self._machine.ended("release", 0, done)
            self._collect()

    def _park(self, parked: ParkedModel, in_host: int) -> None:
        """Park a model; on a GPU, with so much of its copy in the host's memory."""
        if self.device == HOST:
            parked.park()
        else:
            parked.park(host=in_host)

    def _collect(self) -> None:
        """Take in what the engine has answered; tell everyone that something may have changed."""
        self._answers.update(self._machine.answers())
        self._changed.notify_all()

    def _share_of_host(self, host: Size | None) -> int:
        """Bytes of the host's memory for parked copies."""
        if self.device != HOST:
            return _native.half_of_free_host_bytes() if host is None else in_bytes(host, "keep")
        if host is not None:
            raise UsageError(
                "`host` is for copies of models on a GPU, and the pool is of models on the host\n"
                'hint: name the GPU: `device="cuda:0"`'
            )
        return 0

    def _refusal(self, name: str, refused: Refused) -> PoolError:
        """The error for a request that the engine refused."""
        return refusal(name, refused, self._whole, self.device)

    def _cause(self, entry: _Entry, refused: Refused) -> MemfitError | None:
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


def _written(parked: ParkedModel) -> int:
    """Bytes that a model's parking has written so far, to the disk and to the host's memory."""
    statistics = parked.statistics
    return statistics.bytes_written + statistics.bytes_to_host

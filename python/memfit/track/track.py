"""``memfit.track``: what a piece of code takes.

    with memfit.track("validation") as t:
        validate(model)
    print(t)

Responsible for the context manager and the decorator. Not responsible for the bytes on a device
(:mod:`memfit.track.cpu`, :mod:`memfit.track.cuda`) nor for why they grow
(:mod:`memfit.track.growth`).

A track counts all threads of the process: an allocator does not know for whom it works. Tracks may
nest, overlap and run in several threads; each has its own peak, and none disturbs another's.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

from memfit.errors import UsageError
from memfit.track import cpu, cuda, growth, record
from memfit.track.looks import LOOKS
from memfit.track.owners import OWNERS
from memfit.track.record import DeviceBytes, Tracked
from memfit.track.steps import STEPS

F = TypeVar("F", bound=Callable[..., Any])


class Span:
    """One tracked stretch of time: live numbers while it is open, a record after.

    What ``with memfit.track(...) as t`` gives. The numbers are those of :class:`Tracked`.
    """

    def __init__(self, name: str, *, categories: bool = True) -> None:
        """Prepare it; nothing is measured before :meth:`open`.

        Args:
            name: Name for the report.
            categories: Whether bytes are divided by category, for which Python's objects are
                searched for modules and optimizers.
        """
        self.name = name
        self._categories = categories
        self._record: Tracked | None = None
        self._problem: str | None = None
        self._cpu: cpu.Window | None = None
        self._cpu_before: cpu.Reading | None = None
        self._cuda: cuda.Window | None = None
        self._cuda_before: dict[int, dict[str, int]] = {}
        self._start = 0.0

    def open(self) -> None:
        """Begin to measure."""
        self._problem = cpu.start()
        if self._categories:
            STEPS.watch()
            self._cuda_before = self._name_blocks()
        self._cuda = cuda.Window()
        if self._problem is None:
            self._cpu = cpu.Window()
            self._cpu_before = self._cpu.read()
            if self._categories:
                STEPS.add(self._cpu)
                LOOKS.add(self._cpu)
        self._start = time.perf_counter()

    def close(self, exception: type[BaseException] | None = None) -> Tracked:
        """Stop measuring and keep the record.

        Args:
            exception: What ended the tracked code, if anything did.
        """
        if self._record is None:
            self._record = self._measure(exception.__name__ if exception else None, close=True)
        return self._record

    def _name_blocks(self) -> dict[int, dict[str, int]]:
        """Name the blocks of known owners to the count; their bytes on CUDA devices."""
        OWNERS.search(self.name)
        OWNERS.label()
        return OWNERS.cuda_bytes() if cuda.in_use() else {}

    def _measure(self, exception: str | None, *, close: bool) -> Tracked:
        if self._cuda is None:
            raise UsageError(f"the track `{self.name}` was never entered")
        seconds = time.perf_counter() - self._start
        owned = self._name_blocks() if self._categories else {}
        devices: list[DeviceBytes] = []
        if self._cpu is not None and self._cpu_before is not None:
            if self._categories:
                LOOKS.look_if_there_is_time()
            reading = self._cpu.read()
            if reading is not None:
                account = LOOKS.account(self._cpu, reading)
                devices.append(record.cpu_bytes(self._cpu_before, reading, account))
            if close:
                STEPS.remove(self._cpu)
                LOOKS.remove(self._cpu)
                self._cpu.close()
        for index, of_device in (self._cuda.close() if close else self._cuda.read()).items():
            before, after = self._cuda_before.get(index, {}), owned.get(index, {})
            devices.append(record.cuda_bytes(index, of_device, before, after))
        notes = () if self._problem is None else (self._problem,)
        return Tracked(self.name, tuple(devices), seconds, exception, notes)

    @property
    def record(self) -> Tracked:
        """The numbers: final ones after the end, those up to now before."""
        return self._record or self._measure(None, close=False)

    @property
    def devices(self) -> tuple[DeviceBytes, ...]:
        """One entry for each device in use, the CPU first."""
        return self.record.devices

    @property
    def before_bytes(self) -> int:
        """Allocated bytes at the start, on :attr:`Tracked.main`."""
        return self.record.main.before_bytes

    @property
    def after_bytes(self) -> int:
        """Allocated bytes at the end, on :attr:`Tracked.main`."""
        return self.record.main.after_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated at once, on :attr:`Tracked.main`."""
        return self.record.main.peak_bytes

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.record.seconds

    @property
    def exception(self) -> str | None:
        """Name of the exception's class that ended it."""
        return self.record.exception

    def __getitem__(self, device: str) -> DeviceBytes:
        """The bytes of a device, ``t["cuda:0"]``."""
        return self.record[device]

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON has it; integers are bytes."""
        return self.record.as_dict()

    def __str__(self) -> str:
        """The record as a table."""
        return str(self.record)


class _Loop:
    """The spans of one name: they are the iterations of a loop when they follow each other."""

    def __init__(self) -> None:
        self.open = 0
        self.watch = growth.GrowthWatch()


_loops: dict[str, _Loop] = {}
_loops_lock = threading.Lock()


class Track:
    """A context manager and decorator; each use is a :class:`Span` of its own.

    Attributes:
        name: Name of the track.
        last: The span that ended last.
    """

    def __init__(self, name: str, *, categories: bool = True) -> None:
        """Name it.

        Args:
            name: Name for reports, and of the loop whose growth is watched.
            categories: Whether bytes are divided by category.
        """
        self.name = name
        self.last: Span | None = None
        self._categories = categories
        self._spans = threading.local()

    def __enter__(self) -> Span:
        """Begin a span."""
        with _loops_lock:
            _loops.setdefault(self.name, _Loop()).open += 1
        span = Span(self.name, categories=self._categories)
        span.open()
        if not hasattr(self._spans, "open"):
            self._spans.open = []
        self._spans.open.append(span)
        return span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the span entered last in this thread; an exception passes through."""
        span: Span = self._spans.open.pop()
        kept = span.close(kind)
        self.last = span
        with _loops_lock:
            loop = _loops[self.name]
            loop.open -= 1
            # A span inside one of the same name is part of an iteration, not one.
            is_iteration = loop.open == 0 and kind is None
        if is_iteration:
            on_cuda = [device for device in kept.devices if device.device != "cpu"]
            cause = loop.watch.observe(sum(device.after_bytes for device in on_cuda))
            if cause is not None:
                growth.warn(self.name, loop.watch, cause)

    def __call__(self, function: F) -> F:
        """Track every call of a function.

        Raises:
            UsageError: It is a generator, whose code runs outside its call.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            error = UsageError(f"`{function.__name__}` is a generator: its calls run none of it")
            error.add_note("use `with memfit.track(...)` inside it or round the loop over it")
            raise error
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                # Coroutines interleave in one thread: each call has its own spans.
                own = Track(self.name, categories=self._categories)
                try:
                    with own:
                        return await function(*args, **kwargs)
                finally:
                    self.last = own.last

            run_async.track = self  # type: ignore[attr-defined]
            return run_async  # type: ignore[return-value]

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        run.track = self  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]


@overload
def track(name: str | None = None, *, categories: bool = True) -> Track: ...
@overload
def track(name: F) -> F: ...
def track(name: str | F | None = None, *, categories: bool = True) -> Track | F:
    """Measure what a piece of code takes, on the CPU and on CUDA devices.

    A context manager, ``with memfit.track("validation") as t``, and a decorator, ``@memfit.track``
    or ``@memfit.track("validation")``; the decorated function's ``track.last`` is its last span.
    ``t`` has ``before_bytes``, ``after_bytes``, ``peak_bytes``, ``devices`` and ``as_dict()``, and
    prints as a table.

    Exact: on the CPU the bytes before, after and at the peak, of all threads, as torch's allocator
    handed them out; on CUDA those of the caching allocator's statistics. By category, before and
    after are exact for modules and optimizers that Python reaches. What was live at the peak is
    known from looks at what Python and autograd hold, taken where memory rises, in about a fiftieth
    of the time: with the variables and lines that hold it. What came and went between two looks is
    ``other``.

    On CUDA, torch's own peak statistics (``torch.cuda.max_memory_allocated``) begin anew when a
    track begins, and when one nested in another ends: torch has no other way to ask for a peak.

    Entered again and again, a track warns once with
    :class:`~memfit.errors.MemoryGrowthWarning` when each of four iterations in a row kept more
    bytes than the one before, or when a sum of losses keeps the graph of every iteration.

    Args:
        name: Name for reports; by default the function's, or the file and line.
        categories: Whether bytes are divided by category. That searches Python's objects for
            modules and optimizers, some 40 ms, at the first uses of a name.

    Returns:
        A :class:`Track`; the tracked function where one was given.
    """
    if callable(name):
        return Track(name.__qualname__, categories=categories)(name)
    if name is None:
        frame = sys._getframe(1)
        name = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return Track(name, categories=categories)

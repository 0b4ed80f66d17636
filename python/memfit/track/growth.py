"""Memory that grows from iteration to iteration, and why.

Responsible for noticing it, for finding what keeps a growing autograd graph alive, and for saying
so once. Not responsible for measuring the bytes.

The usual cause is a loss that is summed or collected with its graph, ``total_loss += loss``: each
iteration's graph then stays reachable from the sum.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor

from memfit import _native
from memfit.errors import MemoryGrowthWarning
from memfit.track import owners

GROWTHS = 4
"""Iterations in a row that must each keep more than the one before."""

LOOK_SHARE = 100
"""A loop whose bytes do not grow spends at most this part of its time on being looked at."""

LOOK_SECONDS = 0.05
"""What a first look is taken to cost: a search through all objects, torch's among them."""

_CHAIN_LIMIT = 4096
_TENSOR_LIMIT = 4096
_SUMS = ("AddBackward", "SubBackward", "CatBackward", "StackBackward")
_OWN_REFERENCES = 3  # the frame's, that of `_local_name` and that of `getrefcount`'s argument
_PACKAGE = Path(__file__).parents[1]


@dataclass(slots=True, frozen=True)
class Cause:
    """What keeps more and more memory alive.

    Attributes:
        kind: ``summed_graph``, ``collected_graphs`` or ``unknown``.
        message: One sentence.
        advice: What to do.
    """

    kind: str
    message: str
    advice: str


_UNKNOWN = Cause(
    "unknown",
    "no retained autograd graph was found, so something else is collected",
    "look for a list, a cache or a hook that keeps tensors from each iteration",
)


class GrowthWatch:
    """What is kept after each iteration of one loop.

    Bytes are compared after every iteration. Graphs cost a search through Python's objects, so they
    are looked at when bytes begin to grow and when they have grown. Otherwise they are looked at
    after iterations 4, 8, 16 and so on, as long as the looks take no more than one part in
    ``look_share`` of the loop's time.
    """

    def __init__(self, look_share: int | None = None) -> None:
        """Know no iteration yet.

        Args:
            look_share: 0 looks whatever it takes; :data:`LOOK_SHARE` when left out.
        """
        self._look_share = LOOK_SHARE if look_share is None else look_share
        self.iterations = 0
        self._run: list[int] = []
        self._last: int | None = None
        self._graphs: Graphs | None = None
        self._looked_at = 0
        self._found = False
        self._started = time.perf_counter()
        self._looking_seconds = 0.0

    def observe(self, kept_bytes: int) -> Cause | None:
        """Note what an iteration left behind.

        Args:
            kept_bytes: Bytes live after the iteration.

        Returns:
            The cause, the first time that :data:`GROWTHS` iterations in a row each kept more bytes,
            or that a sum's graph has grown with the iterations; ``None`` otherwise.
        """
        self.iterations += 1
        if self._last is not None and kept_bytes > self._last:
            self._run.append(kept_bytes - self._last)
        else:
            self._run.clear()
        self._last = kept_bytes
        if self._found:
            return None
        grows = len(self._run) >= GROWTHS
        if not grows and not self._begins_to_grow() and not self._may_look():
            return None
        start = time.perf_counter()
        graphs = Graphs()
        cause = graphs.cause(self._graphs) if grows else None
        if cause is None and self._graphs is not None:
            cause = graphs.steady_sum(self._graphs, self.iterations - self._looked_at)
        self._graphs, self._looked_at = graphs.forget(), self.iterations
        self._found = cause is not None
        self._looking_seconds += time.perf_counter() - start
        return cause

    def _begins_to_grow(self) -> bool:
        """Whether to look at what is there, so that what comes can be told from it."""
        is_fresh = self._graphs is not None and self.iterations < 2 * self._looked_at
        return len(self._run) == GROWTHS // 2 and not is_fresh

    def _may_look(self) -> bool:
        """Whether it is time for a look although no bytes grow, and the loop can afford one."""
        is_turn = self.iterations >= GROWTHS and self.iterations & (self.iterations - 1) == 0
        elapsed_seconds = time.perf_counter() - self._started
        next_seconds = max(LOOK_SECONDS, self._looking_seconds)
        return is_turn and elapsed_seconds >= self._look_share * (
            self._looking_seconds + next_seconds
        )

    @property
    def bytes_per_iteration(self) -> int:
        """By how much the iterations of the present run grew, on average; 0 where nothing grows."""
        return sum(self._run) // len(self._run) if len(self._run) >= GROWTHS else 0

    @property
    def growing_iterations(self) -> int:
        """Iterations in a row that grew, up to now."""
        return len(self._run)


class Graphs:
    """The autograd graphs that Python holds at one moment."""

    def __init__(self) -> None:
        """Look."""
        # No second list of them may be alive when their holders are looked for.
        self._tensors = [t for t in owners.instances(Tensor) if t.grad_fn is not None]
        del self._tensors[:-_TENSOR_LIMIT]
        self._sums = {id(tensor): _sum_links(tensor) for tensor in self._tensors}
        self._holders = _holders(self._tensors)
        self._counts = {id(holder): count for count, holder in self._holders}

    def forget(self) -> Graphs:
        """Keep the numbers only, not the tensors."""
        self._tensors, self._holders = [], []
        return self

    def cause(self, before: Graphs | None) -> Cause:
        """What has changed since another look, or is there at all."""
        sums = before._sums if before is not None else {}
        counts = before._counts if before is not None else {}
        changed = [t for t in self._tensors if self._sums[id(t)] != sums.get(id(t))]
        tensor = max(changed, key=lambda t: self._sums[id(t)], default=None)
        if tensor is not None and self._sums[id(tensor)] >= GROWTHS:
            return self._summed(tensor)
        for count, holder in self._holders:
            if count >= GROWTHS and count > counts.get(id(holder), 0):
                place = _place_of(holder) or f"a {type(holder).__name__}"
                return Cause(
                    "collected_graphs",
                    f"{place} holds {count} tensors with their autograd graphs",
                    "keep `tensor.item()` or `tensor.detach()` there instead",
                )
        return _UNKNOWN

    def steady_sum(self, before: Graphs, iterations: int) -> Cause | None:
        """A sum that got the same number of terms in each iteration since another look."""
        earlier = {links for links in before._sums.values() if links >= GROWTHS - 1}
        for tensor in self._tensors:
            links = self._sums[id(tensor)]
            steps = {links - iterations * terms for terms in range(1, 5)}
            if steps & earlier and links != before._sums.get(id(tensor)):
                return self._summed(tensor)
        return None

    def _summed(self, tensor: Tensor) -> Cause:
        place = _place_of(tensor) or "a tensor"
        return Cause(
            "summed_graph",
            f"{place} sums {self._sums[id(tensor)]} tensors with their autograd graphs, so the "
            "graph of every iteration stays alive",
            "add `loss.item()` or `loss.detach()` instead of `loss`",
        )


def warn(name: str, watch: GrowthWatch, cause: Cause) -> None:
    """Warn about a loop that keeps growing, at the line of the user's that runs it."""
    if watch.bytes_per_iteration:
        grown = _native.bytes_text(watch.bytes_per_iteration)
        times = f"{watch.growing_iterations} times in a row"
        what = f"`{name}` keeps {grown} more after every iteration, {times}"
    else:
        what = f"`{name}` keeps a longer autograd graph after every iteration"
    message = f"{what}: {cause.message}; {cause.advice}"
    warnings.warn(message, MemoryGrowthWarning, stacklevel=_user_level())


def _user_level() -> int:
    """The stack level of the nearest frame that is not memfit's, as seen from :func:`warn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_memfit(frame):
        level, frame = level + 1, frame.f_back
    return level


def _is_memfit(frame: FrameType) -> bool:
    return _PACKAGE in Path(frame.f_code.co_filename).parents


def _sum_links(tensor: Tensor) -> int:
    """How many sums lead to a tensor, one through the other: ``s += loss`` adds one each time."""
    links, node = 0, tensor.grad_fn
    while node is not None and links < _CHAIN_LIMIT and node.name().startswith(_SUMS):
        links += 1
        before = [earlier for earlier, _ in node.next_functions if earlier is not None]
        sums = [earlier for earlier in before if earlier.name().startswith(_SUMS)]
        node = sums[0] if sums else None
    return links


def _holders(tensors: list[Any]) -> list[tuple[int, Any]]:
    """The containers that hold such tensors and how many, the fullest first."""
    if not tensors:
        return []
    wanted = {id(tensor) for tensor in tensors}
    found = []
    for holder in gc.get_referrers(*tensors):
        if holder is tensors or not isinstance(holder, list | tuple | set | dict | deque):
            continue
        values = holder.values() if isinstance(holder, dict) else holder
        found.append((sum(1 for value in list(values) if id(value) in wanted), holder))
    return sorted(found, key=lambda pair: -pair[0])


def _place_of(thing: Any) -> str | None:
    """The variable that holds an object, where a frame, a module or an instance has it."""
    for frame in _frames():
        name = _local_name(frame, thing)
        if name is not None:
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            return f"`{name}` ({where})"
    for holder in gc.get_referrers(thing):
        if isinstance(holder, FrameType):
            continue
        attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if not isinstance(attributes, dict):
            continue
        for name, value in list(attributes.items()):
            if value is thing and isinstance(name, str):
                return f"`{_prefix_of(holder, attributes)}{name}`"
    return None


def _local_name(frame: FrameType, thing: Any) -> str | None:
    """The local variable of a frame that holds an object."""
    variables = frame.f_locals
    try:
        return next((name for name, value in variables.items() if value is thing), None)
    finally:
        # Before Python 3.13 this is a copy that the frame keeps, and every value with it, as long
        # as it runs. It is emptied unless the program has it too, from `locals()`.
        is_copy = sys.version_info < (3, 13) and variables is not frame.f_globals
        if is_copy and sys.getrefcount(variables) <= _OWN_REFERENCES:
            variables.clear()


def _prefix_of(holder: Any, attributes: dict[str, Any]) -> str:
    """What stands before an attribute's name."""
    if not isinstance(holder, dict):
        return f"{type(holder).__name__}."
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module) is attributes:
            return f"{module.__name__}."
    for owner in gc.get_referrers(attributes):
        if getattr(owner, "__dict__", None) is attributes:
            return f"{type(owner).__name__}."
    return ""


def _frames() -> list[FrameType]:
    """The frames of the program, this thread's first, without memfit's own.

    A list and no generator: one that holds its own frame would live on, and all it refers to.
    """
    this = threading.get_ident()
    others = [frame for thread, frame in sys._current_frames().items() if thread != this]
    found: dict[int, FrameType] = {}
    for start in (sys._getframe(1), *others):
        frame: FrameType | None = start
        while frame is not None:
            if not _is_memfit(frame):
                found.setdefault(id(frame), frame)
            frame = frame.f_back
    return list(found.values())

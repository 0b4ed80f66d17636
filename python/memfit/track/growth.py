"""Memory that grows from iteration to iteration, and why.

Responsible for finding who holds what a loop keeps, for noticing sums whose graph grows though
backward has freed the bytes, and for saying so once. Not responsible for what a loop keeps
(:mod:`memfit.track.retained`), nor for measuring the bytes.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from memfit import _native
from memfit.errors import MemoryGrowthWarning
from memfit.tensors.garbage import no_collection
from memfit.tensors.storage import graph_of
from memfit.track import owners, variables
from memfit.track.backwards import BACKWARDS
from memfit.track.cause import Cause
from memfit.track.cycles import cycle_of
from memfit.track.lengthened import Lengthened
from memfit.track.live_objects import instances
from memfit.track.look import NAMES, Look, Owner, is_own, search
from memfit.track.retained import GROUPS, Growth, Kept

TERMS = 4
"""Terms of a sum from which on it is looked at."""

LOOK_SHARE = 100
"""A loop whose bytes do not grow spends at most this part of its time on being looked at."""

LOOK_SECONDS = 0.05
"""What a first look is taken to cost: a search through all objects, torch's among them."""

_NEW_PARAMETERS = 8
"""Parameters come with gradients and state: where they are one part in so many, they are the cause.
"""

_CHAIN_LIMIT = 4096
_TENSOR_LIMIT = 4096
_JOINS = ("CatBackward", "StackBackward")
_SUMS = ("AddBackward", "SubBackward", *_JOINS)
_SCALES = ("MulBackward", "DivBackward")
_NO_GRAPH = "keep fewer of them, or numbers (`tensor.item()`)"
_STATE = "it grows no more once all has state; `history_size` says how much `LBFGS` keeps"
_PARAMETERS = "if that is not meant, make them once, before the loop"
_LONGER = "is made anew and longer each time, and begins with what it was, as by `torch.cat`"
_SHORTER = "keep of it what is used again, or numbers (`tensor.item()`)"
_FORWARD = "no backward ran: use `torch.no_grad()`"
_FRAMES = "holds exceptions, and these the variables of the functions that they have ended"
_NO_FRAMES = "keep `str(error)`, or `error.with_traceback(None)`, which holds no functions"
_GRAPH = "keep `tensor.item()` or `tensor.detach()` there instead"


class GrowthWatch:
    """What is kept after each iteration of one loop.

    What it keeps is asked of the count after every few iterations. Sums whose graph grows though no
    bytes do cost a search through Python's objects: they are looked for after iterations 4, 8, 16
    and so on, as long as that takes no more than one part in ``look_share`` of the loop's time.

    Attributes:
        growth: What it has kept when it was last asked; ``None`` where it does not grow.
    """

    def __init__(self, look_share: int | None = None, *, asks_again: bool = False) -> None:
        """Know no iteration yet.

        Args:
            look_share: 0 looks whatever it takes; :data:`LOOK_SHARE` when left out.
            asks_again: Whether the cause is looked for again when twice as much is kept: what
                grew at first may have come to its end, as a cache does, and something else not.
        """
        self._asks_again = asks_again
        self._asked_at_bytes = 0
        self._look_share = LOOK_SHARE if look_share is None else look_share
        self.growth: Growth | None = None
        self._kept = Kept()
        self._lengthened = Lengthened()
        self._sums: Sums | None = None
        self._looked_at = 0
        self._found = False
        self._started = time.perf_counter()
        self._looking_seconds = 0.0
        self._cuda_bytes: list[int] = []

    @property
    def iterations(self) -> int:
        """How many there were."""
        return self._kept.iterations

    def observe(self, cuda_bytes: int = 0) -> Cause | None:
        """An iteration is over.

        Args:
            cuda_bytes: Bytes live on CUDA devices, whose allocator does not tell blocks apart.

        Returns:
            The cause, the first time that the loop keeps something of all its parts, or that a
            sum's graph has grown with the iterations, and where it is asked for again; ``None``
            otherwise.
        """
        self._kept.mark()
        if self._kept.is_due():
            longer = self._lengthened.growth(self.iterations)
            self.growth = self._kept.growth() or longer
        self.growth = self._growth_on_cuda(cuda_bytes) or self.growth
        grown = 0 if self.growth is None else self.growth.bytes
        if self.growth is not None and (
            not self._found or (self._asks_again and grown >= 2 * self._asked_at_bytes)
        ):
            self._found, self._asked_at_bytes = True, grown
            return cause_of(self.growth)
        if self._found:
            return None
        if not self._may_look():
            return None
        start = time.perf_counter()
        sums = Sums()
        cause = None
        if self._sums is not None:
            cause = sums.steady(self._sums, self.iterations - self._looked_at)
        self._sums, self._looked_at = sums.forget(), self.iterations
        self._found = cause is not None
        self._looking_seconds += time.perf_counter() - start
        return cause

    def _growth_on_cuda(self, cuda_bytes: int) -> Growth | None:
        """The last iterations in a row that each kept more, where there are enough."""
        before = self._cuda_bytes
        if before and cuda_bytes <= before[-1]:
            before.clear()
        before.append(cuda_bytes)
        rises = len(before) - 1
        return Growth(cuda_bytes - before[0], rises, ()) if rises >= GROUPS else None

    def _may_look(self) -> bool:
        """Whether it is time for a look although no bytes grow, and the loop can afford one."""
        is_turn = self.iterations >= TERMS and self.iterations & (self.iterations - 1) == 0
        elapsed_seconds = time.perf_counter() - self._started
        next_seconds = max(LOOK_SECONDS, self._looking_seconds)
        return is_turn and elapsed_seconds >= self._look_share * (
            self._looking_seconds + next_seconds
        )


class Sums:
    """The sums with an autograd graph that Python holds at one moment."""

    def __init__(self) -> None:
        """Look."""
        self._tensors = [t for t in instances(Tensor) if graph_of(t) is not None]
        del self._tensors[:-_TENSOR_LIMIT]
        counted = [(it, _links(it, _SCALES)) for it in self._tensors]
        self._tensors = [it for it, links in counted if links >= TERMS - 1]
        self._links = {_number(it): links for it, links in counted if links >= TERMS - 1}

    def forget(self) -> Sums:
        """Keep the numbers only, not the tensors."""
        self._tensors = []
        return self

    def steady(self, before: Sums, iterations: int) -> Cause | None:
        """A sum that got the same number of terms in each iteration since another look.

        The sum that it was then is one of its terms: another one may be as long by chance, as where
        each iteration makes sums of several lengths.
        """
        for tensor in self._tensors:
            sums = list(_sums_behind(tensor, _SCALES))
            for more in range(iterations, min(4 * iterations + 1, len(sums)), iterations):
                if before._links.get(_number(sums[more])) == len(sums) - more:
                    return _summed(search(), tensor, len(sums))
        return None


def cause_of(growth: Growth) -> Cause:
    """Who holds what a loop has kept, and what would free it."""
    if not growth.blocks:
        return Cause("unknown", "who holds it was not seen", _NO_GRAPH)
    try:
        return _cause_of(growth)
    except Exception as error:
        if not is_own(error):
            raise
        return Cause("unknown", "who holds it could not be seen", _NO_GRAPH)


def _cause_of(growth: Growth) -> Cause:
    with no_collection():
        found = search(with_results=False)  # what waits to be stored is of this iteration
        sizes = dict(growth.blocks)
        held: dict[int, int] = {}
        for address in sizes.keys() & found.categories.keys():
            number = found.owners[address]
            held[number] = held.get(number, 0) + sizes[address]
        lost = {address for address in sizes if address not in found.categories}
        lost_bytes = sum(sizes[address] for address in lost)
        number = max(held, key=lambda number: held[number], default=0)
        if lost_bytes > held.get(number, 0):
            return cycle_of(lost) or _unknown(2 * lost_bytes >= sum(sizes.values()), found)
        owner = NAMES.owner(number)
        if growth.is_longer and owner.variable is not None:
            return Cause("longer_tensor", f"{owner.variable.text} {_LONGER}", _SHORTER)
        return _held(found, owner, sizes)


def collection_of(growth: Growth) -> Cause | None:
    """The list or the like that took tensors through all of a stretch; ``None`` where none did.

    Nothing else shows a loop where no iterations are known: one forward keeps a graph, too.
    """
    with no_collection():
        found = search(with_results=False)
        order = {address: place for place, (address, _) in enumerate(growth.blocks)}
        held: dict[tuple[str, str, str], set[int]] = {}
        texts = {}
        for one in found.walk.reached:
            storage = owners.storage_of(one.tensor) if not one.through_graph else None
            place = order.get(storage.data_ptr()) if storage is not None else None
            if place is not None:
                key = (one.variable.file, one.variable.scope, one.variable.name)
                held.setdefault(key, set()).add(place * GROUPS // len(order))
                texts[key] = one.variable.text
        full = [key for key, groups in held.items() if len(groups) == GROUPS]
        if not full:
            return None
        graph_bytes = _graph_bytes(found, dict(growth.blocks))
        who = texts[full[0]]
        if 2 * graph_bytes < growth.bytes:
            return Cause("kept_tensors", f"{who} holds the tensors", _NO_GRAPH)
        advice = _GRAPH if BACKWARDS.runs else f"{_FORWARD}, or {_GRAPH}"
        return Cause("kept_graphs", f"{who} holds tensors with their autograd graphs", advice)


def _held(found: Look, owner: Owner, sizes: dict[int, int]) -> Cause:
    """The cause where a variable holds most."""
    if owner.variable is None:
        return Cause("kept_tensors", f"most of it is held by {owner.name}", _NO_GRAPH)
    who, kept_bytes = owner.variable.text, sum(sizes.values())
    of_model = _of_model(found, who, sizes)
    if of_model is not None:
        return of_model
    if 2 * _traceback_bytes(found, sizes) >= kept_bytes:
        return Cause("exceptions", f"{who} {_FRAMES}", _NO_FRAMES)
    if 2 * _graph_bytes(found, sizes) < kept_bytes:
        return Cause("kept_tensors", f"{who} holds the tensors", _NO_GRAPH)
    summed = _sum_in(found, owner, sizes)
    if summed is not None:
        return summed
    message = f"{who} keeps the autograd graphs of earlier iterations alive"
    return Cause("kept_graphs", message, _GRAPH if BACKWARDS.runs else f"{_FORWARD}, or {_GRAPH}")


def _of_model(found: Look, who: str, sizes: dict[int, int]) -> Cause | None:
    """The cause where a model or the state of an optimizer grows."""
    kept_bytes = sum(sizes.values())
    if _NEW_PARAMETERS * _bytes_of(owners.PARAMETER, found, sizes) >= kept_bytes:
        message = f"the loop makes new parameters, which {who} holds"
        return Cause("new_parameters", message, _PARAMETERS)
    if 2 * _bytes_of(owners.OPTIMIZER_STATE, found, sizes) >= kept_bytes:
        return Cause("optimizer_state", f"{who} keeps state for what it updates", _STATE)
    return None


def _bytes_of(category: str, found: Look, sizes: dict[int, int]) -> int:
    """How much of some blocks is of a category."""
    return sum(size for a, size in sizes.items() if found.categories.get(a) == category)


def _graph_bytes(found: Look, sizes: dict[int, int]) -> int:
    """How much of some blocks graphs alone hold."""
    in_graphs = {a for a in sizes if found.categories.get(a) == owners.ACTIVATION} - found.direct
    return sum(sizes[address] for address in in_graphs)


def _traceback_bytes(found: Look, sizes: dict[int, int]) -> int:
    """How much of some blocks exceptions hold."""
    storages = (owners.storage_of(one.tensor) for one in found.walk.in_tracebacks)
    held = {storage.data_ptr() for storage in storages if storage is not None}
    return sum(size for address, size in sizes.items() if address in held)


def _sum_in(found: Look, owner: Owner, sizes: dict[int, int]) -> Cause | None:
    """The cause where what a variable holds is one sum, whose graph holds most of some blocks."""
    held = _bytes_of_graphs(found, sizes)
    for one in found.walk.reached:
        if one.through_graph or owner.variable is None or graph_of(one.tensor) is None:
            continue
        if 2 * held[id(graph_of(one.tensor))] < sum(sizes.values()):
            continue
        if one.variable.name == owner.variable.name and one.variable.scope == owner.variable.scope:
            links = _links(one.tensor)
            if links >= TERMS:
                return _summed(found, one.tensor, links)
    return None


def _bytes_of_graphs(found: Look, sizes: dict[int, int]) -> Counter[int]:
    """How much of some blocks is held by each graph, by the number of its first node."""
    left, held = dict(sizes), Counter[int]()
    for one in found.walk.reached:
        storage = owners.storage_of(one.tensor) if one.through_graph else None
        if storage is not None:
            held[one.graph] += left.pop(storage.data_ptr(), 0)
    return held


def _summed(found: Look, tensor: Tensor, links: int) -> Cause:
    places = [one.variable.text for one in found.walk.reached if one.tensor is tensor]
    place = places[0] if places else "a tensor"
    node = graph_of(tensor)
    does, advice = "sums", "add `loss.item()` or `loss.detach()` instead of `loss`"
    if node is not None and node.name().startswith(_JOINS):
        does, advice = "joins", "join `tensor.detach()` there instead"
    return Cause(
        "summed_graph",
        f"{place} {does} {links} tensors with their autograd graphs, so the graph of every "
        "iteration stays alive",
        advice,
    )


def _unknown(is_most: bool, found: Look) -> Cause:  # noqa: FBT001
    text = "most of it" if is_most else "some of it"
    if found.walk.is_complete and found.walk.graphs.is_complete:
        message = f"no variable, and no autograd graph of one, was seen to hold {text}"
    else:
        message = f"who holds {text} was not seen: not every object could be looked at"
    return Cause(
        "unknown",
        message,
        "look for a library's cache, for objects of C that hold tensors, or for objects in a cycle "
        "that `gc.collect()` would free",
    )


def warn(name: str, watch: GrowthWatch, cause: Cause) -> None:
    """Warn about a loop that keeps growing, at the line of the user's that runs it."""
    if watch.growth is not None:
        grown = _native.bytes_text(watch.growth.bytes_per_iteration)
        times = f"{watch.growth.iterations} iterations"
        what = f"`{name}` keeps {grown} more after every iteration, on average of {times}"
    else:
        what = f"`{name}` keeps a longer autograd graph after every iteration"
    message = f"{what}: {cause.message}; {cause.advice}"
    warnings.warn(message, MemoryGrowthWarning, stacklevel=_user_level())


def _user_level() -> int:
    """The stack level of the nearest frame that is not memfit's, as seen from :func:`warn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and variables.is_memfit(frame):
        level, frame = level + 1, frame.f_back
    return level


def _sums_behind(tensor: Tensor, through: tuple[str, ...] = ()) -> Iterator[Any]:
    """The sums that lead to a tensor, one through the other: ``s += loss`` adds one each time.

    Args:
        tensor: The tensor.
        through: Names of nodes that may lie between two sums, as in a running average.
    """
    links, node = 0, graph_of(tensor)
    while node is not None and links < _CHAIN_LIMIT and node.name().startswith(_SUMS):
        yield node
        links += 1
        before = _before(node)
        between = [
            it
            for earlier in before
            if earlier.name().startswith(through)
            for it in _before(earlier)
        ]
        sums = [it for it in (*before, *between) if it.name().startswith(_SUMS)]
        node = sums[0] if sums else None


def _links(tensor: Tensor, through: tuple[str, ...] = ()) -> int:
    """How many sums lead to a tensor."""
    return sum(1 for _ in _sums_behind(tensor, through))


def _number(made: Any) -> int:
    """The number of a node, or of a tensor's, which no other one has that this thread made."""
    node = graph_of(made) if isinstance(made, Tensor) else made
    return int(node._sequence_nr())


def _before(node: Any) -> list[Any]:
    return [earlier for earlier, _ in node.next_functions if earlier is not None]

"""What the script holds and never writes, in mapped files instead of memory.

A data set, the best weights so far, a frozen teacher, a replay memory: they take room at the peak
of a step, and come back from a file as well. Responsible for finding such tensors and for
exchanging their memory. Not responsible for when a loop lacks room
(:mod:`memfit.run.script.loop`).

A tensor's memory becomes a private mapping of a file that has its bytes. So whoever reads it,
Python, an op, a child that was forked, finds what was there, and nobody has to notice. Who writes
it has pages of his own, which are memory again: what was written is brought back, and stays. All
tensors that see one memory go together, where they are known: no graph, no array of numpy sees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.apply.offload.mapped import (
    bytes_sampled,
    is_alone,
    may_exchange,
    may_go,
    others_wait,
)
from memfit.apply.offload.views import Memory, held_tensors, key_of, memories
from memfit.run.script.place import free_bytes, strays_to, takes_files
from memfit.run.script.rare_writes import Written
from memfit.run.script.request import FitRequest
from memfit.tensors.barrier import without_barrier
from memfit.tensors.optimizers import state_tensors
from memfit.tensors.storage import address, gradient_of, is_leaf, is_private_mapping
from memfit.track.live_objects import instances
from memfit.track.owners import storage_of
from memfit.track.references import held_by_python_alone

HELD_IN_FILES = "tensors that the script only reads are mapped from files and take no memory"
"""What is said at the end where that was done."""

MADE_IN_FILES = "models wait in mapped files while more is made than there is room for beside them"
"""Likewise, of what is made before the first step."""

LEAST_HELD_BYTES = 1 << 14
"""Smaller ones stay that would go once: of their last page in a mapping, much would be nobody's."""

MOST_MAPPINGS = 4096
"""Of which a process has 65530."""

MOST_LOOKS = 64
"""Times that the script's tensors are looked through."""

_CALLS = 64
"""Calls of models after which it is forgotten how much was live at most."""

_WORTH = 1 / 64
"""Part of the budget that is worth a look."""


@dataclass(slots=True)
class _Mapped:
    """Memory in a file, and what it was when it went there.

    Attributes:
        versions: The tensors that see it, and their versions. Of a base that no variable holds,
            its views' version tells.
        sample: A few of its bytes.
        goes_again: Whether it may go again at once; ``None`` while nobody has written it.
    """

    versions: list[tuple[weakref.ref[Tensor], int]]
    sample: bytes
    goes_again: bool | None = None

    @staticmethod
    def now(tensors: list[Tensor]) -> _Mapped:
        """What has just gone."""
        versions = [(weakref.ref(it), it._version) for it in tensors]
        return _Mapped(versions, bytes_sampled(tensors[0]))

    def alive(self) -> list[Tensor]:
        """Those of the tensors that are there still."""
        return [it for of, _ in self.versions if (it := of()) is not None]

    def tensors(self, key: int) -> list[Tensor]:
        """Those of the tensors that see it still, in its file.

        Args:
            key: What tells the memory from others.
        """
        return [it for it in self.alive() if key_of(it) == key and _is_mapped(it)]

    def has_newer(self) -> bool:
        """Whether a version tells of a write since."""
        known = ((it, version) for of, version in self.versions if (it := of()) is not None)
        return any(it._version != version for it, version in known)

    def is_written(self) -> bool:
        """Whether it has been written since, or there is none of the tensors any more."""
        alive = self.alive()
        return not alive or self.has_newer() or bytes_sampled(alive[0]) != self.sample


class HeldInFiles:
    """Tensors that the script holds and does not write.

    Attributes:
        count: How many have gone.
        is_said: Whether the place was told.
    """

    def __init__(self, request: FitRequest) -> None:
        """Move nothing yet.

        Args:
            request: Where tensors may go.
        """
        self._request = request
        self._is_over = "offload" in request.options.forbid
        self._mapped: dict[int, _Mapped] = {}
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._written = Written()
        self._looks = 0
        self._is_first = True
        self._looked_at_bytes = self._after_room_bytes = 0
        self._live_bytes: list[int] = []
        self._leaving: list[torch.UntypedStorage] = []
        self.count = 0
        self.is_said = False

    def place(
        self,
        budget_bytes: int,
        models: Iterable[nn.Module],
        inputs: Any,
        trained: Iterable[nn.Module] = (),
        *,
        is_pass: bool = True,
    ) -> str:
        """Have what nobody writes in files; a model is about to be called.

        Args:
            budget_bytes: The budget.
            models: Those that the script calls with gradients on, whose buffers are written.
            inputs: What the next of them is about to be called with.
            trained: Those among them whose parameters may be.
            is_pass: Whether a pass begins, and not a call without gradients.

        Returns:
            Where anything is; empty where all is in memory.
        """
        place = self._place()
        if not place:
            return ""
        self._leaving.clear()
        self._seen.update(self._written.rested())
        goes_for_passes = self._written.call_begins(is_pass=is_pass)
        worth = int(budget_bytes * _WORTH)
        try:
            leaves = [it for it in tree_leaves(inputs) if isinstance(it, Tensor)]
            self._look_at_writes(place, leaves)
            own = {id(buffer) for model in models for buffer in model.buffers()}
            own.update(id(it) for model in trained for it in model.parameters() if it.requires_grad)
            self._map(self._aged(own, leaves), worth, place)
            has_grown = self._has_grown(worth) or self._is_first
            if goes_for_passes:
                self._look_for_passes(own, leaves, worth, place)
            elif has_grown and self._looks < MOST_LOOKS:
                self._look(own, leaves, worth, place)
        except (OSError, RuntimeError):
            self._is_over = True  # what went is there, and the others stay
        return place if self._mapped else ""

    def make_room(self, budget_bytes: int) -> str:
        """Have parameters in files that nothing trains yet.

        What is written meanwhile goes again at once, as a model that is initialised.

        Args:
            budget_bytes: The budget.

        Returns:
            Where any are that went now; empty where none did.
        """
        place, worth = self._place(), int(budget_bytes * _WORTH)
        live = _native.counted_bytes() + self.written_bytes()
        has_grown = live > self._after_room_bytes + worth
        if not place or not has_grown or self._looks >= MOST_LOOKS:
            return ""
        self._looks += 1
        self._leaving.clear()
        count = self.count
        try:
            self._let_all_go_again()
            self._look_at_writes(place, ())
            self._map([it for it in self._found(set()) if _is_of_parameter(it)], worth, place)
            self._let_all_go_again()
        except (OSError, RuntimeError):
            self._is_over = True
        self._after_room_bytes = _native.counted_bytes()
        return place if self.count > count else ""

    def _let_all_go_again(self) -> None:
        for mapped in self._mapped.values():
            mapped.goes_again = True

    def written_bytes(self) -> int:
        """Bytes of what was written since it went, whose pages are memory."""
        written = (it.tensors(key) for key, it in self._mapped.items() if it.has_newer())
        return sum(tensors[0].untyped_storage().nbytes() for tensors in written if tensors)

    def unwritten_bytes(self) -> int:
        """Bytes of what is in files and takes no memory."""
        unwritten = (it.tensors(key) for key, it in self._mapped.items() if not it.has_newer())
        return sum(tensors[0].untyped_storage().nbytes() for tensors in unwritten if tensors)

    def _place(self) -> str:
        """Where tensors may go; empty for nowhere."""
        place = "" if self._is_over else strays_to(self._request, "cpu")
        return place if takes_files(place) else ""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Have in memory what it is going to write."""
        self._optimizers.append(weakref.ref(optimizer))
        listed = (it for group in optimizer.param_groups for it in group["params"])
        self._bring_back(_starts_in_files(listed))

    def loaded(self, starts: set[int]) -> None:
        """Know of what was loaded to files; what several tensors share is in memory again.

        Args:
            starts: Where in memory the files are.
        """
        for memory in _at(starts):
            tensors = memory.tensors
            if len(tensors) == 1 and may_go(tensors[0], is_mapped=True, untrained=True):
                self._mapped[key_of(tensors[0])] = _Mapped.now(tensors)
                self.count += 1
            else:
                memory.exchange("")
        for optimizer in instances(Optimizer) if starts else ():
            self.optimizer_made(optimizer)  # it was loaded with what it writes
            self.state_loaded(optimizer)

    def state_loaded(self, optimizer: Optimizer) -> None:
        """Have in memory what an optimizer has been given as its state, and is going to write."""
        state = (it for of in optimizer.state.values() for it in state_tensors(of))
        went = (it for it in state if storage_of(it) is not None and key_of(it) in self._mapped)
        self._bring_back(_starts_in_files(went))

    def shares(self, tensor: Tensor) -> None:
        """Have in memory what the script is about to share, with all tensors that have it too.

        Args:
            tensor: One in a mapped file.
        """
        for memory in _at({tensor.untyped_storage().data_ptr()}):
            if self._is_seen_by_arrays(memory, [tensor]):
                return  # they would go on to read the file
            key = key_of(tensor)
            if memory.exchange("") is not None:
                self._mapped.pop(key, None)

    def _bring_back(self, starts: set[int]) -> None:
        """Have in memory what is in files and nothing unknown sees.

        Args:
            starts: Where in memory the files are.
        """
        for memory in _at(starts):
            key = key_of(memory.tensors[0])
            is_free = memory.is_known_whole() and not self._is_seen_by_arrays(memory)
            if is_free and memory.exchange("") is not None:
                self._mapped.pop(key, None)

    def _is_seen_by_arrays(self, memory: Memory, known: Iterable[Tensor] = ()) -> bool:
        """Whether arrays of numpy may see memory that is in a file.

        Args:
            memory: It.
            known: Tensors that are no array's own.
        """
        key = key_of(memory.tensors[0])
        went = self._mapped[key].tensors(key) if key in self._mapped else []
        others = set(map(id, [*went, *known]))
        asked = [it for it in memory.may_be_of_arrays() if id(it) not in others]
        return bool(asked) and len(held_by_python_alone(asked)) < len(asked)

    def look_anew(self) -> None:
        """Map what is there now at once: another model's first pass begins, or one is not trained.

        What each step makes comes later.
        """
        self._is_first = True

    def _has_grown(self, worth: int) -> bool:
        """Whether more is live than at any look, so that there may be something new.

        What steps make and let go of rises and falls: the highest of it counts.

        Args:
            worth: How much more is worth a look.
        """
        live = _native.counted_bytes()
        self._live_bytes.append(live)
        has_grown = live > self._looked_at_bytes + worth
        if len(self._live_bytes) >= _CALLS:
            self._looked_at_bytes = max(self._live_bytes)
            self._live_bytes.clear()
        return has_grown

    def _look(self, own: set[int], inputs: list[Tensor], worth: int, place: str) -> None:
        """Find what the script holds; of a model's first pass, map it, else once it is still there.

        Raises:
            OSError: A tensor cannot be written.
            RuntimeError: One cannot be mapped.
        """
        is_first, self._is_first = self._is_first, False
        self._looks += 1
        found = self._found(own)
        passing = set(map(id, inputs))
        known = [it for it in found if is_first and not passing.issuperset(map(id, it.tensors))]
        before = _native.counted_bytes()
        self._map(known, worth, place)
        self._looked_at_bytes = (
            max(self._looked_at_bytes, before) - before + _native.counted_bytes()
        )
        left = (it for memory in found for it in memory.tensors if key_of(it) not in self._mapped)
        self._seen = {id(it): weakref.ref(it) for it in left}

    def _look_for_passes(self, own: set[int], inputs: list[Tensor], worth: int, place: str) -> None:
        """Map what passes are about to read, with views of it that were not there before.

        Such a look counts among those that are taken only where it was in vain.

        Raises:
            OSError: As :meth:`_look`.
            RuntimeError: As :meth:`_look`.
        """
        if self._looks < MOST_LOOKS:
            count = self.count
            self._is_first = True
            self._look(own, inputs, worth, place)
            self._looks -= self.count > count

    def _look_at_writes(self, place: str, inputs: Iterable[Tensor]) -> None:
        """Give other memory to what was written since it went.

        Args:
            place: Where tensors may go.
            inputs: What a model is about to be called with, which may be views of it.

        Raises:
            OSError: A tensor cannot be written.
            RuntimeError: One cannot be mapped.
        """
        passing = [it for it in inputs if _is_plain_view(it)] if self._mapped else []
        alone = is_alone()
        written = [(key, it) for key, it in self._mapped.items() if it.is_written()]
        for key, mapped in written:
            tensors = mapped.tensors(key)
            if not tensors:
                del self._mapped[key]
                continue
            if mapped.goes_again is None:
                have_rested = [self._written.note(it) for it in tensors]
                mapped.goes_again = all(have_rested)
            known = set(map(id, tensors))
            views = [it for it in passing if key_of(it) == key and id(it) not in known]
            memory = Memory(tensors + views)
            if not memory.is_known_whole():
                continue  # it may be once a graph is gone
            before = memory.exchange(place if mapped.goes_again else "")
            if before is None:
                continue  # it may be once no other thread writes
            del self._mapped[key]
            if mapped.goes_again:
                self._mapped[key_of(tensors[0])] = _Mapped.now(tensors)
            if not alone:
                self._leaving.append(before)  # another thread may be reading

    def _found(self, own: set[int]) -> list[Memory]:
        """What may go, largest first."""
        tensors = held_tensors(self._search)
        with without_barrier():
            gradients = {id(gradient_of(it)) for it in tensors if it.requires_grad and is_leaf(it)}
        found = self._free(tensors, own | gradients)
        # What `torch.load` has read cannot be resized either, so it is asked who refers to it.
        asked = [it for memory in found for it in memory.may_be_of_arrays()]
        alone = map(id, held_by_python_alone(asked)) if asked else ()
        of_arrays = set(map(id, asked)).difference(alone)
        return [it for it in found if of_arrays.isdisjoint(map(id, it.tensors))]

    def _search(self) -> list[Tensor]:
        """All tensors there are; optimizers are known from here on."""
        known = instances(Tensor, Optimizer)
        self._optimizers = [weakref.ref(it) for it in known if isinstance(it, Optimizer)]
        return [it for it in known if isinstance(it, Tensor)]

    def _aged(self, own: set[int], inputs: list[Tensor]) -> list[Memory]:
        """Those seen at the last look that are still there and may go, with what is passing."""
        alive = {key: tensor for key, of in self._seen.items() if (tensor := of()) is not None}
        if not alive:
            return []
        views = {id(it): it for it in inputs if _is_plain_view(it)}
        found = self._free(list((views | alive).values()), set(own))  # gradients are lent by now
        return [it for it in found if not alive.keys().isdisjoint(map(id, it.tensors))]

    def _free(self, tensors: list[Tensor], written: set[int]) -> list[Memory]:
        """Memory of some tensors that is not known to be written, largest first."""
        for optimizer in (it for ref in self._optimizers if (it := ref()) is not None):
            written.update(id(it) for group in optimizer.param_groups for it in group["params"])
            for state in optimizer.state.values():
                written.update(map(id, state_tensors(state)))
        written |= self._written.resting()
        plain = (
            it
            for it in tensors
            if id(it) not in written
            and may_exchange(it, untrained=True)
            and it.device.type == "cpu"
        )
        free = [it for it in memories(plain) if it.may_go(LEAST_HELD_BYTES)]
        free.sort(key=lambda it: it.size_bytes, reverse=True)
        return free

    def _map(self, found: list[Memory], worth: int, place: str) -> None:
        """Write memory to files and have it from there.

        Raises:
            OSError: It cannot be written.
            RuntimeError: It cannot be mapped.
        """
        found = found[: max(MOST_MAPPINGS - len(self._mapped), 0)]
        total = sum(it.size_bytes for it in found)
        if total < worth or total > free_bytes(place):
            return
        alone = is_alone()
        if not (alone or others_wait()):
            return  # one may be in the middle of an op
        for memory in found:
            before = memory.exchange(place)
            if before is None:
                continue
            self._mapped[key_of(memory.tensors[0])] = _Mapped.now(memory.tensors)
            for it in memory.tensors:
                self._seen.pop(id(it), None)
            self.count += 1
            if not alone:
                self._leaving.append(before)  # another thread may be reading


def _starts_in_files(tensors: Iterable[Tensor]) -> set[int]:
    """Where mapped files begin that some tensors see."""
    known = filter(None, map(storage_of, tensors))
    return {it.data_ptr() for it in known if is_private_mapping(it)}


def _at(starts: set[int]) -> list[Memory]:
    """What begins at some addresses, with those of Python's tensors that see it."""
    found: list[Tensor] = []
    for tensor in instances(Tensor) if starts else ():
        storage = storage_of(tensor)
        if storage is not None and storage.device.type == "cpu" and storage.data_ptr() in starts:
            found.append(tensor)
    return memories(found)


def _is_mapped(tensor: Tensor) -> bool:
    """Whether it has memory still that is not the allocator's."""
    start = address(tensor.untyped_storage())
    return start is not None and not _native.is_counted(start)


def _is_plain_view(tensor: Tensor) -> bool:
    """Whether a tensor that passes may be one of those that see what is in a file."""
    return may_exchange(tensor) and tensor._is_view()


def _is_of_parameter(memory: Memory) -> bool:
    return any(type(it) is nn.Parameter for it in memory.tensors)

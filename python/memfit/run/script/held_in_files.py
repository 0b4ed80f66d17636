"""What the script holds and never writes, in mapped files instead of memory.

A data set, the best weights so far, a frozen teacher, a replay memory: they take room at the peak
of a step, and come back from a file as well. Responsible for finding such tensors and for
exchanging their memory. Not responsible for when a loop lacks room
(:mod:`memfit.run.script.loop`).

A tensor's memory becomes a private mapping of a file that has its bytes. So whoever reads it,
Python, an op, a child that was forked, finds what was there, and nobody has to notice. Who writes
it has pages of his own, which are memory again: what was written is brought back, and stays. Only
what has one owner goes: no view, no array of numpy sees the memory.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.apply.offload.mapped import (
    Moves,
    bytes_sampled,
    exchange_memory,
    in_file,
    in_memory,
    is_alone,
    is_lent,
    may_go,
    to_file,
    to_memory,
)
from memfit.run.script.place import free_bytes, strays_to, takes_files
from memfit.run.script.request import FitRequest
from memfit.run.script.written import Written
from memfit.tensors.barrier import without_barrier
from memfit.tensors.optimizers import state_tensors
from memfit.tensors.storage import (
    address,
    gradient_of,
    has_others,
    is_leaf,
    is_private_mapping,
)
from memfit.track.owners import instances, storage_of
from memfit.track.references import held_by_python_alone

HELD_IN_FILES = "tensors that the script only reads are mapped from files and take no memory"
"""What is said at the end where that was done."""

MADE_IN_FILES = "models wait in mapped files while more is made than there is room for beside them"
"""Likewise, of what is made before the first step."""

LEAST_HELD_BYTES = 1 << 14
"""Smaller ones stay that would go once: of their last page in a mapping, much would be nobody's."""

MOST_TENSORS = 4096
"""Each takes a mapping, of which a process has 65530."""

MOST_LOOKS = 64
"""Times that the script's tensors are looked through."""

_CALLS = 64
"""Calls of models after which it is forgotten how much was live at most."""

_WORTH = 1 / 64
"""Part of the budget that is worth a look."""


@dataclass(slots=True)
class _Mapped:
    """A tensor in a file, and what it was when it went there.

    Attributes:
        tensor: It.
        version: Its version.
        sample: A few of its bytes.
        goes_again: Whether it may go again at once; ``None`` while nobody has written it.
    """

    tensor: weakref.ref[Tensor]
    version: int
    sample: bytes
    goes_again: bool | None = None

    @staticmethod
    def now(tensor: Tensor) -> _Mapped:
        """A tensor that has just gone."""
        return _Mapped(weakref.ref(tensor), tensor._version, bytes_sampled(tensor))

    def is_written(self, tensor: Tensor) -> bool:
        """Whether it has been written since."""
        return tensor._version != self.version or bytes_sampled(tensor) != self.sample


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
        self._stays: Counter[int] = Counter()
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
    ) -> str:
        """Have what nobody writes in files; a model is about to be called.

        Args:
            budget_bytes: The budget.
            models: Those that the script calls with gradients on, whose buffers are written.
            inputs: What the next of them is about to be called with.
            trained: Those among them whose parameters may be.

        Returns:
            Where anything is; empty where all is in memory.
        """
        place = self._place()
        if not place:
            return ""
        self._leaving.clear()
        self._seen.update(self._written.rested())
        worth = int(budget_bytes * _WORTH)
        try:
            self._look_at_writes(place)
            own = {id(buffer) for model in models for buffer in model.buffers()}
            own.update(id(it) for model in trained for it in model.parameters() if it.requires_grad)
            self._map(self._aged(own), worth, place)
            has_grown = self._has_grown(worth) or self._is_first
            if has_grown and self._looks < MOST_LOOKS:
                self._look(own, inputs, worth, place)
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
            self._look_at_writes(place)
            self._map([it for it in self._found(set()) if type(it) is nn.Parameter], worth, place)
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
        mapped = ((it.tensor(), it.version) for it in self._mapped.values())
        return sum(it.nbytes for it, version in mapped if it is not None and it._version != version)

    def _place(self) -> str:
        """Where tensors may go; empty for nowhere."""
        place = "" if self._is_over else strays_to(self._request, "cpu")
        return place if takes_files(place) else ""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Have in memory what it is going to write."""
        self._optimizers.append(weakref.ref(optimizer))
        listed = [it for group in optimizer.param_groups for it in group["params"]]
        mapped = (it for it in listed if self._mapped.pop(id(it), None) is not None)
        bring_back([it for it in mapped if _is_mapped(it)])
        # A parameter that was made of a loaded tensor shares its memory.
        known = [storage for it in listed if (storage := storage_of(it)) is not None]
        starts = {it.data_ptr() for it in known if is_private_mapping(it)}
        del listed, known
        _bring_back_together(starts)

    def loaded(self, starts: set[int]) -> None:
        """Know of what was loaded to files; what several tensors share is in memory again.

        Args:
            starts: Where in memory the files are.
        """
        for tensors in _tensors_at(starts):
            if len(tensors) == 1 and may_go(tensors[0], is_mapped=True, untrained=True):
                self._mapped[id(tensors[0])] = _Mapped.now(tensors[0])
                self.count += 1
            else:
                _to_memory_together(tensors)
        for optimizer in instances(Optimizer) if starts else ():
            self.optimizer_made(optimizer)  # it was loaded with what it writes
            self.state_loaded(optimizer)

    def state_loaded(self, optimizer: Optimizer) -> None:
        """Have in memory what an optimizer has been given as its state, and is going to write."""
        state = (it for of in optimizer.state.values() for it in state_tensors(of))
        mapped = (it for it in state if self._mapped.pop(id(it), None) is not None)
        bring_back([it for it in mapped if _is_mapped(it)])

    def shares(self, tensor: Tensor) -> None:
        """Have in memory what the script is about to share, with all tensors that have it too.

        Args:
            tensor: One in a mapped file.
        """
        for tensors in _tensors_at({tensor.untyped_storage().data_ptr()}):
            others = [it for it in tensors if it is not tensor]
            if len(held_by_python_alone(others)) < len(others):
                return  # an array of numpy would go on to read the file
            for it in tensors:
                self._mapped.pop(id(it), None)
            _to_memory_together(tensors)

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

    def _look(self, own: set[int], inputs: Any, worth: int, place: str) -> None:
        """Find what the script holds; of a model's first pass, map it, else once it is still there.

        Raises:
            OSError: A tensor cannot be written.
            RuntimeError: One cannot be mapped.
        """
        is_first, self._is_first = self._is_first, False
        self._looks += 1
        found = self._found(own)
        passing = set(map(id, tree_leaves(inputs)))
        known = [it for it in found if is_first and id(it) not in passing]
        before = _native.counted_bytes()
        self._map(known, worth, place)
        self._looked_at_bytes = (
            max(self._looked_at_bytes, before) - before + _native.counted_bytes()
        )
        self._seen = {id(it): weakref.ref(it) for it in found if id(it) not in self._mapped}

    def _look_at_writes(self, place: str) -> None:
        """Give other memory to what was written since it went.

        Raises:
            OSError: A tensor cannot be written.
            RuntimeError: One cannot be mapped.
        """
        changed: list[Tensor] = []
        for key, mapped in list(self._mapped.items()):
            tensor = mapped.tensor()
            if tensor is None:
                del self._mapped[key], self._stays[key]
            elif mapped.is_written(tensor):
                if mapped.goes_again is None:
                    mapped.goes_again = self._written.note(tensor)
                if not _is_mapped(tensor):
                    del self._mapped[key], self._stays[key]
                elif not is_lent(tensor) and self._is_due(key):  # else once its graph is gone
                    changed.append(tensor)
        alone = is_alone()
        for tensor in _mapped_alone(changed):
            storage, mapped = tensor.untyped_storage(), self._mapped.pop(id(tensor))
            if mapped.goes_again:
                to_file(tensor, place)
                self._mapped[id(tensor)] = _Mapped.now(tensor)
            else:
                to_memory(tensor)
            del self._stays[id(tensor)]
            if not alone:
                self._leaving.append(storage)  # another thread may be reading

    def _is_due(self, key: int) -> bool:
        """Whether to look for the owners of a tensor: seldom of one that never comes back.

        An input that each batch is copied to is held by the calls that it passes through, and
        the search takes as long as a small step.
        """
        self._stays[key] += 1
        return self._stays[key].bit_count() == 1

    def _found(self, own: set[int]) -> list[Tensor]:
        """Tensors that may go."""
        known = instances(Tensor, Optimizer)
        tensors = [it for it in known if isinstance(it, Tensor)]
        self._optimizers = [weakref.ref(it) for it in known if isinstance(it, Optimizer)]
        with without_barrier():
            gradients = {id(gradient_of(it)) for it in tensors if it.requires_grad and is_leaf(it)}
        return self._free(tensors, own | gradients)

    def _aged(self, own: set[int]) -> list[Tensor]:
        """Those seen at the last look that are still there and may go."""
        alive = [tensor for ref in self._seen.values() if (tensor := ref()) is not None]
        return self._free(alive, set(own)) if alive else []  # gradients are lent by now

    def _free(self, tensors: list[Tensor], written: set[int]) -> list[Tensor]:
        """Those of some tensors that are not known to be written, largest first."""
        for optimizer in (it for ref in self._optimizers if (it := ref()) is not None):
            written.update(id(it) for group in optimizer.param_groups for it in group["params"])
            for state in optimizer.state.values():
                written.update(map(id, state_tensors(state)))
        written |= self._written.resting()
        least = LEAST_HELD_BYTES
        free = [
            it
            for it in tensors
            if id(it) not in written
            and may_go(it, least_bytes=least, untrained=True)
            and not is_lent(it)
        ]
        free = _unseen_by_arrays(free)
        free.sort(key=_bytes_of, reverse=True)
        return free

    def _map(self, tensors: list[Tensor], worth: int, place: str) -> None:
        """Write tensors to files and have them from there.

        Raises:
            OSError: One cannot be written.
            RuntimeError: One cannot be mapped.
        """
        tensors = tensors[: max(MOST_TENSORS - len(self._mapped), 0)]
        total = sum(map(_bytes_of, tensors))
        if total < worth or total > free_bytes(place):
            return
        alone = is_alone()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            exchange_memory(tensor, in_file(storage, place))
            self._mapped[id(tensor)] = _Mapped.now(tensor)
            self._seen.pop(id(tensor), None)
            self.count += 1
            if not alone:
                self._leaving.append(storage)  # another thread may be reading


def _tensors_at(starts: set[int]) -> list[list[Tensor]]:
    """Those of Python's tensors whose memory begins at some addresses, by address."""
    found: dict[int, list[Tensor]] = {}
    for tensor in instances(Tensor) if starts else ():
        storage = storage_of(tensor)
        if storage is not None and storage.device.type == "cpu":
            start = storage.data_ptr()
            if start in starts:
                found.setdefault(start, []).append(tensor)
    return list(found.values())


def _bring_back_together(starts: set[int]) -> None:
    """Bring mapped files back to memory that several tensors share and nothing else reads."""
    for tensors in _tensors_at(starts):
        if not has_others(tensors[0].untyped_storage(), len(tensors)) and len(
            held_by_python_alone(tensors)
        ) == len(tensors):
            _to_memory_together(tensors)


def _to_memory_together(tensors: list[Tensor]) -> None:
    """Bring tensors that share a mapped file back to memory, which they share again."""
    with torch._C._DisableTorchDispatch():
        own = in_memory(tensors[0].untyped_storage())
    for tensor in tensors:
        exchange_memory(tensor, own)


def bring_back(tensors: list[Tensor], moves: Moves | None = None) -> None:
    """Have those of some tensors in memory again whose mapped file nobody else sees.

    Args:
        tensors: They.
        moves: As :func:`to_file`.
    """
    for tensor in _mapped_alone(tensors):
        to_memory(tensor, moves)


def _is_mapped(tensor: Tensor) -> bool:
    """Whether it has memory still that is not the allocator's."""
    start = address(tensor.untyped_storage())
    return start is not None and not _native.is_counted(start)


def _mapped_alone(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Those of some tensors whose mapped file nobody else sees."""
    for tensor in held_by_python_alone(tensors) if tensors else ():
        if not has_others(tensor.untyped_storage(), 1):
            yield tensor


def _unseen_by_arrays(tensors: list[Tensor]) -> list[Tensor]:
    """Those of some tensors that no array of numpy has made for itself.

    An array holds a tensor of its own, whose memory torch does not let anybody resize. That of
    what ``torch.load`` has read cannot be resized either, so it is asked who refers to each.
    """
    asked = [it for it in tensors if type(it) is Tensor and not it.untyped_storage().resizable()]
    if not asked:
        return tensors
    seen = set(map(id, asked)).difference(map(id, held_by_python_alone(asked)))
    return [it for it in tensors if id(it) not in seen]


def _bytes_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()

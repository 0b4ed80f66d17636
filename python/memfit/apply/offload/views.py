"""Tensors that see one memory: a data set and its parts, a weight and its ``detach()``.

They go to a file and come back together. A view whose base no variable holds is one of two:
``torch.rand(n).view(a, b)``. Responsible for finding them and for exchanging their memory. Not
responsible for what may be a file (:mod:`memfit.apply.offload.mapped`).
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memfit import _native
from memfit.apply.offload.mapped import (
    exchange_memory,
    in_file,
    in_memory,
    is_alone,
    is_lent,
    may_exchange,
    others_wait,
)
from memfit.tensors.storage import address, has_others, is_from_allocator


@dataclass(slots=True)
class Memory:
    """Memory, and the known tensors that see it.

    Attributes:
        tensors: Those that were given.
        bases: What they are views of, where that was not given.
    """

    tensors: list[Tensor]
    bases: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Find the bases."""
        key, known = key_of(self.tensors[0]), set(map(id, self.tensors))
        found = {id(base): base for it in self.tensors if (base := _base_of(it)) is not None}
        # Who has given a base other memory has parted it from its views.
        self.bases = [
            it for number, it in found.items() if number not in known and key_of(it) == key
        ]

    @property
    def storage(self) -> torch.UntypedStorage:
        """Torch's object for it."""
        return self.tensors[0].untyped_storage()

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self.storage.nbytes()

    def is_known_whole(self) -> bool:
        """Whether no other tensor sees it, and no graph or capsule holds one of those that do."""
        tensors = self.tensors + self.bases
        views = Counter(id(base) for it in tensors if (base := _base_of(it)) is not None)
        lent = any(is_lent(it, 1 + views[id(it)]) for it in tensors)
        storage = self.storage  # the one reference to it that is expected
        return not lent and not has_others(storage, len(tensors))

    def may_be_of_arrays(self) -> list[Tensor]:
        """Tensors that an array of numpy may have made for itself.

        Such a one is no view, none is a view of it, and torch lets nobody resize its memory.
        """
        if self.storage.resizable():
            return []
        viewed = set(map(id, map(_base_of, self.tensors)))
        others = (it for it in self.tensors if id(it) not in viewed)
        return [it for it in others if type(it) is Tensor and not it._is_view()]

    def may_go(self, least_bytes: int) -> bool:
        """Whether it is torch's own on the CPU, and known whole.

        Args:
            least_bytes: Smaller ones may not.
        """
        storage = self.storage
        place = address(storage)
        if place is None or storage.nbytes() < least_bytes or not _native.is_counted(place):
            return False
        if not (storage.resizable() or is_from_allocator(storage)):
            return False
        del storage  # it counts as an owner
        return all(may_exchange(it, untrained=True) for it in self.bases) and self.is_known_whole()

    def exchange(self, place: str) -> torch.UntypedStorage | None:
        """Have other memory with the same bytes behind all that see it.

        Args:
            place: Where the file is; empty for the allocator's memory.

        Returns:
            What they saw before; ``None`` where they see it still, as another thread writes to it.

        Raises:
            OSError: A file cannot be written.
            RuntimeError: It cannot be mapped.
        """
        before = self.storage
        with torch._C._DisableTorchDispatch():  # no op of the script's
            there = in_file(before, place) if place else in_memory(before)
            if not (is_alone() or (others_wait() and _are_equal(before, there))):
                return None
            self._see(there, before)
        return before

    def _see(self, there: torch.UntypedStorage, before: torch.UntypedStorage) -> None:
        """Have all tensors see other memory, or none."""
        seeing: list[Tensor] = []
        try:
            for tensor in self.tensors + self.bases:
                seeing.append(tensor)
                exchange_memory(tensor, there)
        except BaseException:  # an interrupt as well
            for tensor in seeing:
                exchange_memory(tensor, before)
            raise


def memories(tensors: Iterable[Tensor]) -> list[Memory]:
    """Strided tensors by the memory that they see.

    Args:
        tensors: They, each of them once.
    """
    found: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(key_of(tensor), []).append(tensor)
    return list(map(Memory, found.values()))


def held_tensors(search: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Those tensors that something of Python's refers to.

    Torch may keep the object of a base for its views, and a search finds it as if it were held. It
    has as many references as that of a base that is known to be held by its view alone.

    Args:
        search: Finds all tensors there are.
    """
    # No op of the script's, nor in its mode of inference, in which nothing is a view.
    with torch._C._DisableTorchDispatch(), torch.inference_mode(mode=False):
        view = torch.empty(1, device="cpu").view(1, 1)
    tensors = search()
    bases = {id(base): base for it in tensors if (base := _base_of(it)) is not None}
    base = None  # one reference too many
    references = {number: sys.getrefcount(it) for number, it in bases.items()}
    of_view = references[id(view._base)]
    return [it for it in tensors if references.get(id(it), of_view + 1) > of_view]


def key_of(tensor: Tensor) -> int:
    """What tells the memory of a strided tensor from that of others while it lives."""
    return int(tensor.untyped_storage()._cdata)


def _are_equal(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether two memories of one size have the same bytes; no other thread runs meanwhile."""
    compare = ctypes.PyDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return int(compare(one.data_ptr(), other.data_ptr(), one.nbytes())) == 0


def _base_of(tensor: Tensor) -> Tensor | None:
    is_plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)  # others may refuse anything
    return tensor._base if is_plain and tensor._is_view() else None

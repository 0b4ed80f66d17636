"""Pages of mapped files that optimizers write: the process's own from then on.

Responsible for counting them beside what torch's allocator hands out. Not responsible for the
count itself. What is only read stays the file's, whose pages the system may take back, and is not
counted: a frozen model that was read from a file takes nothing that is its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.tensors.barrier import without_barrier
from memfit.tensors.optimizers import in_memory
from memfit.tensors.storage import gradient_of, plain_tensors
from memfit.track.owners import OPTIMIZER_STATE, PARAMETER, storage_of

_MAPS = Path("/proc/self/maps")
_WITHIN = 1
"""Where in a block the count has it: at its beginning it would pass for the allocator's."""


_MOST_OTHERS = 1 << 14
"""So many tensors in other memory are remembered."""


@dataclass(slots=True, frozen=True)
class _Written:
    """A tensor in a mapped file that was counted: its storage, and where the count has it."""

    storage: StorageWeakRef
    address: int


class MappedFiles:
    """What optimizers write in mapped files."""

    def __init__(self) -> None:
        """Know of nothing yet."""
        self._counted: dict[int, _Written] = {}
        self._others: set[tuple[int, int]] = set()

    def step_begins(self, optimizer: Optimizer) -> None:
        """Count what an optimizer is about to write, and no more what is gone.

        Args:
            optimizer: The optimizer.
        """
        self.forget_gone()
        with without_barrier():  # a look is no use of a parameter, which would have to come for it
            self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        unknown = [
            (category, tensor, storage)
            for category, tensor in _written_by(optimizer)
            if (storage := storage_of(tensor)) is not None and self._is_unknown(tensor, storage)
        ]
        if not unknown:
            return
        ranges = _private_files()
        found: dict[str, list[int]] = {}
        for category, tensor, storage in unknown:
            start = tensor.data_ptr()
            if start + _WITHIN in self._counted:
                continue  # tied to another
            if not any(first <= start < end for first, end in ranges):
                if len(self._others) >= _MOST_OTHERS:  # most are gone: memfit maps state each step
                    self._others.clear()
                self._others.add((start, storage._cdata))
                continue
            address = start + _WITHIN
            self._counted[address] = _Written(StorageWeakRef(storage), address)  # type: ignore[no-untyped-call]
            _native.add_blocks([(address, tensor.numel() * tensor.element_size())])
            found.setdefault(category, []).append(address)
        for category, addresses in found.items():
            _native.label_blocks(addresses, category)

    def forget_gone(self) -> None:
        """Count no more what was let go of."""
        gone = [address for address, it in self._counted.items() if _is_gone(it.storage)]
        if gone:
            _native.remove_blocks(gone)
            for address in gone:
                del self._counted[address]

    def _is_unknown(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        start = tensor.data_ptr()
        return (
            storage.device.type == "cpu"
            and start != 0
            and start + _WITHIN not in self._counted
            and (start, storage._cdata) not in self._others
            and not _native.is_counted(storage.data_ptr())
        )


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _written_by(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Parameters and state that a step of an optimizer writes, with categories."""
    state = vars(optimizer).get("state", {})
    for group in list(vars(optimizer).get("param_groups", ())):
        for parameter in group["params"]:
            if gradient_of(parameter) is None:
                continue
            yield from _parts(PARAMETER, [parameter])
            held = state.get(parameter)
            if held:
                yield from _parts(OPTIMIZER_STATE, tree_leaves(dict(in_memory(held))))


def _parts(category: str, values: Iterable[object]) -> Iterator[tuple[str, Tensor]]:
    for value in values:
        if isinstance(value, Tensor):
            yield from ((category, part) for part in plain_tensors(value))


def _private_files() -> list[tuple[int, int]]:
    """Addresses at which files are mapped whose written pages are this process's alone.

    Without those that have no name any more: memfit's own, in which it puts what does not fit.
    """
    found = []
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        where, rights, _, _, inode, *name = line.split(maxsplit=5)
        is_file = inode != "0" and name and not name[0].endswith("(deleted)")
        if is_file and rights.startswith("rw") and rights.endswith("p"):
            first, _, end = where.partition("-")
            found.append((int(first, 16), int(end, 16)))
    return found


MAPPED_FILES = MappedFiles()
"""The mapped files of this process."""

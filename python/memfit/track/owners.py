"""Who owns a tensor: parameters, module buffers, gradients, optimizer state; words for the rest.

Responsible for finding modules and optimizers, for naming the blocks of their tensors to the count,
and for summing CUDA tensors by category, whose allocator cannot be told. Not responsible for the
count itself.

A search takes a while (:mod:`memfit.track.live_objects`), so it is made when something new is
likely (:meth:`Owners.search`), and the modules and optimizers found are remembered, weakly. Who has
what no module and no optimizer has is found by a look (:mod:`memfit.track.look`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.tensors.optimizers import in_memory
from memfit.tensors.storage import gradient_of, plain_tensors
from memfit.track.live_objects import instances

PARAMETER = "parameter"
MODULE_BUFFER = "module_buffer"
GRADIENT = "gradient"
OPTIMIZER_STATE = "optimizer_state"
ACTIVATION = "activation"
CAST_CACHE = "cast_cache"
KV_CACHE = "kv_cache"
DATASET = "dataset"
VARIABLE = "variable"
TEMPORARY = "temporary"
OTHER = "other"
CATEGORIES = (
    PARAMETER,
    MODULE_BUFFER,
    GRADIENT,
    OPTIMIZER_STATE,
    ACTIVATION,
    CAST_CACHE,
    KV_CACHE,
    DATASET,
    VARIABLE,
    TEMPORARY,
    OTHER,
)
"""The categories in the order reports have them."""

_PLAIN = (Tensor, torch.nn.Parameter)


def is_dataset(kind: type) -> bool:
    """Whether a class is one of datasets, loaders or what they are made of."""
    data = sys.modules.get("torch.utils.data")
    if data is None:
        return False
    families = (data.Dataset, data.DataLoader, data.Sampler, data.dataloader._BaseDataLoaderIter)
    return issubclass(kind, families)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage behind a tensor; ``None`` where there are no bytes of its own.

    Tensors on ``meta``, fake tensors, sparse ones and subclasses that hold others have none.
    """
    if type(tensor) not in _PLAIN:
        fakes = sys.modules.get("torch._subclasses.fake_tensor")  # importing it takes a second
        if fakes is not None and isinstance(tensor, fakes.FakeTensor):
            return None
    try:
        # Looking must not be seen by the program's own modes and tensor classes.
        with torch._C.DisableTorchFunction():
            if tensor.device.type == "meta" or tensor.layout is not torch.strided:
                return None
            storage = tensor.untyped_storage()
            return storage if storage.data_ptr() else None
    except Exception:  # noqa: BLE001 - a tensor class may refuse anything; it has no bytes to show
        return None


def live_blocks() -> list[tuple[int, int]]:
    """Address and bytes of what torch's CPU allocator handed out and Python can reach.

    Storages that share a file's, a process's or numpy's memory cannot be resized; that tells them.
    """
    blocks = {}
    for tensor in instances(Tensor):
        storage = storage_of(tensor)
        if storage is not None and storage.device.type == "cpu" and storage.resizable():
            blocks[storage.data_ptr()] = storage.nbytes()
    return sorted(blocks.items())


class Owners:
    """The modules and optimizers of this process, as far as they were found."""

    def __init__(self) -> None:
        """Know none yet."""
        self._known: dict[int, weakref.ref[Any]] = {}
        self._passes: dict[str, int] = {}

    def add(self, owner: Module | Optimizer) -> bool:
        """Remember an owner, weakly; whether it is new."""
        key = id(owner)
        known = self._known.get(key)
        if known is not None and known() is owner:
            return False
        self._known[key] = weakref.ref(owner)
        return True

    def search(self, occasion: str) -> None:
        """Look for new owners, at the first two passes of an occasion and then ever more rarely.

        Args:
            occasion: What is done again and again, such as the name of a track. Pass 1, 2, 4, 8 and
                so on search, so that a loop pays for a few searches however long it runs.
        """
        passes = self._passes[occasion] = self._passes.get(occasion, 0) + 1
        if passes & (passes - 1):
            return
        for owner in instances(Module, Optimizer):
            self.add(owner)

    def _live(self) -> list[Any]:
        found = {key: reference() for key, reference in self._known.items()}
        for key, owner in found.items():
            if owner is None:
                del self._known[key]
        return [owner for owner in found.values() if owner is not None]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every owned tensor with its category; of one that wraps others, those."""
        # An optimizer has most parameters and gradients of modules once more.
        seen: dict[tuple[str, int], Tensor] = {}
        for owner in self._live():
            of_owner = (
                optimizer_tensors(owner) if isinstance(owner, Optimizer) else _module_tensors(owner)
            )
            for category, tensor in of_owner:
                if (key := (category, id(tensor))) not in seen:
                    seen[key] = tensor
                    yield from ((category, part) for part in plain_tensors(tensor))

    def label(self) -> set[int]:
        """Name the blocks of all owned tensors on the CPU to the count; their addresses."""
        return label(self.tensors())

    def cuda_bytes(self) -> dict[int, dict[str, int]]:
        """Bytes of the owned tensors' storages, by CUDA device and category."""
        seen: set[int] = set()
        totals: dict[int, dict[str, int]] = {}
        for category, tensor in self.tensors():
            if tensor.device.type != "cuda":
                continue
            storage = storage_of(tensor)
            if storage is None or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            of_device = totals.setdefault(tensor.device.index or 0, {})
            of_device[category] = of_device.get(category, 0) + storage.nbytes()
        return totals


def _module_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    # A module whose `__init__` has not run, or failed, has no such dictionaries.
    for tensor in list(vars(module).get("_parameters", {}).values()):
        if tensor is not None:
            yield PARAMETER, tensor
            if (gradient := gradient_of(tensor)) is not None:
                yield GRADIENT, gradient
    for tensor in list(vars(module).get("_buffers", {}).values()):
        if tensor is not None:
            yield MODULE_BUFFER, tensor


def optimizer_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """What an optimizer updates, reads and keeps, with categories."""
    for group in list(vars(optimizer).get("param_groups", ())):
        for tensor in group["params"]:
            yield PARAMETER, tensor
            if (gradient := gradient_of(tensor)) is not None:
                yield GRADIENT, gradient
    state = vars(optimizer).get("state", {})
    for leaf in tree_leaves([dict(in_memory(entry)) for entry in list(state.values())]):
        if isinstance(leaf, Tensor):
            yield OPTIMIZER_STATE, leaf


def label(tensors: Iterable[tuple[str, Tensor]]) -> set[int]:
    """Name the blocks of tensors on the CPU to the count; their addresses."""
    addresses: dict[str, list[int]] = {}
    for category, tensor in tensors:
        if tensor.device.type == "cpu":
            storage = storage_of(tensor)
            if storage is not None:
                addresses.setdefault(category, []).append(storage.data_ptr())
    for category, found in addresses.items():
        _native.label_blocks(found, category)
    return {address for found in addresses.values() for address in found}


OWNERS = Owners()
"""The owners of this process: what one track has found, the next need not search for."""

"""Who holds the blocks that were live.

Responsible for names that a person recognises: the part of a model, what of it, and how much. Not
responsible for finding tensors (:mod:`memfit.track.owners`).

Parameters, their gradients, module buffers and optimizer state have names. The rest is activations,
inputs and temporaries, which nobody can be asked about: those blocks are listed by size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.errors import Holder
from memfit.tensors.optimizers import in_memory
from memfit.track.owners import OTHER, instances, storage_of

_DEPTH = 2
"""Parts of a module's path that name a holder: `layers.0` of `layers.0.attention`."""

_WORDS = {
    "parameter": "parameters",
    "module_buffer": "module buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
}


def largest_holders(blocks: Sequence[tuple[int, int, str]]) -> list[Holder]:
    """Holders of live blocks, the largest first.

    Args:
        blocks: Address, bytes and category of each, as the count has them.
    """
    if not blocks:
        return []
    names = _names()
    total: dict[str, list[int]] = {}
    for address, size, category in blocks:
        name, known_bytes = names.get(address, ("", size))
        if not name or known_bytes != size:
            name = _unnamed(category, size)
        entry = total.setdefault(name, [0, 0])
        entry[0] += size
        entry[1] += 1
    holders = [Holder(name, *entry) for name, entry in total.items()]
    return sorted(holders, key=lambda holder: (-holder.bytes, holder.name))


def _unnamed(category: str, size: int) -> str:
    if category != OTHER:
        return f"{_WORDS[category]} of a model that is gone"
    return f"unlabelled, {_native.bytes_text(size)} each"


def _names() -> dict[int, tuple[str, int]]:
    """Name and bytes of the blocks of all models and optimizers, by address."""
    found = instances(Module, Optimizer)
    modules = [owner for owner in found if isinstance(owner, Module)]
    children = {id(child) for module in modules for child in _children(module)}
    places: dict[int, str] = {}
    named: dict[int, tuple[str, int]] = {}
    for root in (module for module in modules if id(module) not in children):
        for place, category, tensor in _tensors(root):
            places.setdefault(id(tensor), place)
            _name(named, f"{_WORDS[category]} of {place}", tensor)
            if category == "parameter" and tensor.grad is not None:
                _name(named, f"gradients of {place}", tensor.grad)
    for optimizer in (owner for owner in found if isinstance(owner, Optimizer)):
        for parameter, state in list(vars(optimizer).get("state", {}).items()):
            place = places.get(id(parameter), "parameters outside any model")
            for leaf in tree_leaves(in_memory(state)):
                if isinstance(leaf, Tensor):
                    kind = type(optimizer).__name__
                    _name(named, f"optimizer state (`{kind}`) of {place}", leaf)
    return named


def _children(module: Module) -> list[Module]:
    # A module whose `__init__` has not run, or failed, has no such dictionaries.
    return [child for child in vars(module).get("_modules", {}).values() if child is not None]


def _tensors(root: Module) -> Iterator[tuple[str, str, Tensor]]:
    if "_modules" not in vars(root):
        return
    for path, module in root.named_modules():
        for category, kind in (("parameter", "_parameters"), ("module_buffer", "_buffers")):
            for tensor in list(vars(module).get(kind, {}).values()):
                if tensor is not None:
                    yield _place(root, path), category, tensor


def _place(root: Module, path: str) -> str:
    parts = path.split(".")[:_DEPTH] if path else []
    return f"`{'.'.join([type(root).__name__, *parts])}`"


def _name(named: dict[int, tuple[str, int]], name: str, tensor: Tensor) -> None:
    storage = storage_of(tensor)
    if storage is not None:
        named.setdefault(storage.data_ptr(), (name, storage.nbytes()))

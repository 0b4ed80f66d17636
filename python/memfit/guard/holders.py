"""Who holds the blocks that were live.

Responsible for names that a person recognises: the part of a model, what of it, and how much. Not
responsible for finding tensors (:mod:`memfit.track.owners`, :mod:`memfit.track.look`).

Parameters, their gradients, module buffers and optimizer state have the names of modules, the rest
those of the variables that hold it. What nothing of Python's or autograd's holds is listed by size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.errors import Holder
from memfit.tensors.garbage import no_collection
from memfit.tensors.optimizers import in_memory
from memfit.tensors.storage import gradient_of, plain_tensors
from memfit.track.live_objects import instances
from memfit.track.look import NAMES, Look, look
from memfit.track.owners import storage_of
from memfit.track.variables import Running

_DEPTH = 2
"""Parts of a module's path that name a holder: `layers.0` of `layers.0.attention`."""

_WORDS = {
    "parameter": "parameters",
    "module_buffer": "module buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
}


Block = tuple[int, int, str]
"""Address, bytes and category of a block."""


def holders_of(
    blocks: Sequence[Block], frames: Sequence[Running] = ()
) -> tuple[list[Holder], dict[str, int]]:
    """Holders of live blocks, the largest first, and the bytes of each category.

    Args:
        blocks: The blocks, as the count has them.
        frames: Those of the error that has ended the program's functions: what their variables
            hold was live.
    """
    if not blocks:
        return [], {}
    with no_collection():
        names, seen = _names(), look(frames)
    total: dict[str, list[int]] = {}
    by_category: dict[str, int] = {}
    for address, size, known in blocks:
        name, known_bytes = names.get(address, ("", size))
        category = known
        if seen.sizes.get(address) == size and known not in _WORDS:
            category = seen.categories[address]
        if not name or known_bytes != size:
            name = _name_of(seen, address, size, known)
        by_category[category] = by_category.get(category, 0) + size
        entry = total.setdefault(name, [0, 0])
        entry[0] += size
        entry[1] += 1
    holders = [Holder(name, *entry) for name, entry in total.items()]
    return sorted(holders, key=lambda holder: (-holder.bytes, holder.name)), by_category


def _name_of(seen: Look, address: int, size: int, category: str) -> str:
    """The name of a block that no module and no optimizer has."""
    if seen.sizes.get(address) == size:
        return NAMES.owner(seen.owners[address]).name
    if category in _WORDS:
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
            gradient = gradient_of(tensor) if category == "parameter" else None
            if gradient is not None:
                _name(named, f"gradients of {place}", gradient)
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
    for part in plain_tensors(tensor):
        storage = storage_of(part)
        if storage is not None:
            named.setdefault(storage.data_ptr(), (name, storage.nbytes()))
